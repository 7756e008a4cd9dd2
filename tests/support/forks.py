"""Processes forked from a server that has imported once what they need. A fork of the test's own process might hold the
locks of its threads; one that is spawned imports torch anew, which takes longer than most tests."""

import os
import sys
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from unittest import mock

from engines.ampd.live.fleet import start_server

IMPORTED = (
    "pytest",
    "support.suite_cases",
    "support.graph_recorders",
    "support.tiny_models",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # a model that is moved off the meta device imports it
    *("engines.dllm.executor.compose", "engines.dllm.executor.ranks", "engines.models.loader"),
    *("engines.models.tokenizer", "engines.parallel.launch", "engines.parallel.shard"),
)


def forks() -> ForkServerContext:
    """One server for each worker, since there is one in a process: begun as a live fleet begins it, which may come later."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        start_server()
    return context
