"""vLLM's server and ours with one checkpoint: the same bodies get the same answers."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import VLLM, Served, serving
from support.tables import data_beside

pytest.importorskip("llama_models", reason="llama-models is not installed")

from support.beside import asked, compared, model_of
from support.client_bodies import BODIES
from support.llama_checkpoint import write_llama

pytestmark = pytest.mark.skipif(not VLLM.is_file(), reason="vLLM is not installed: repro install vllm")

START_S = 600
ON_PURPOSE = data_beside(__file__, "beside_vllm")["answered otherwise"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Served]:
    yield from serving(str(folder), folder)


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--host 127.0.0.1 --port {port} --max-model-len 1024 --dtype float32 --enforce-eager".split()
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    address = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [VLLM, "serve", folder, *options], env=os.environ | own, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            for _ in range(START_S):
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{address}/health").close()
                    break
                except urllib.error.URLError:
                    time.sleep(1)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=START_S)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_gets_the_same_answer(ours, theirs, name):
    route, body = BODIES[name]
    problems = compared(asked(ours.address, route, body, ours.model), asked(theirs, route, body, model_of(theirs)))
    if name in ON_PURPOSE:
        assert problems != [], "answered alike by now: take it off the list"
    else:
        assert problems == []
