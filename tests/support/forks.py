"""Processes forked from a server that has imported once what they need. A fork of the test's own process might hold the
locks of its threads; one that is spawned imports torch anew, which takes longer than most tests."""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from support.command import Result

from engines.ampd.live.fleet import start_server

IMPORTED = (
    "pytest",
    "support.suite_cases",
    "support.graph_recorders",
    "support.tiny_models",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # a model that is moved off the meta device imports it
    *("engines.dllm.executor.compose", "engines.dllm.executor.torch", "engines.models.loader"),
    *("engines.models.tokenizer", "engines.parallel.group", "engines.parallel.shard"),
)


def forks() -> ForkServerContext:
    """One server for each worker, since there is one in a process: begun as a live fleet begins it, which may come later."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        start_server()
    return context


def repro_in_a_process(folder: Path, *words: object, **environment: str) -> Result:
    """``python -m repro`` called in ``folder``, by a process that knows nothing of this one."""
    with TemporaryDirectory() as streams:
        said = [Path(streams, name) for name in ("out", "err")]
        process = forks().Process(target=_command, args=(folder, said, [str(word) for word in words], environment))
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = (path.read_text(encoding="utf-8") for path in said)
    return Result(code=process.exitcode, out=out, err=err)


def _command(folder: Path, said: Sequence[Path], words: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["repro", *words]
    runpy.run_module("repro", run_name="__main__", alter_sys=True)
