"""The engine's loop without its process, and the process without a server."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ends
from support.served_echo import RAISE, EchoEngine, EchoGeneration, EchoModel
from support.tables import data_beside

from engines.errors import RunError
from engines.server.process import MOST_FAILURES, serve
from engines.server.protocol import Event, Submission
from engines.server.service import _spawn
from repro.paths import REPO


def test_an_engine_that_fails_again_and_again_is_ended(capfd):
    class Stuck(EchoEngine):
        def give_up(self, sentence: str) -> list[Event]:
            return []

    left = [[Submission(1, (RAISE,), EchoGeneration(8, 0), False)]]
    with pytest.raises(RunError, match=f"{MOST_FAILURES} steps in a row failed"):
        serve(Stuck(EchoModel()), lambda wait: left.pop() if left else [], lambda report: None)
    assert capfd.readouterr().err.count("RuntimeError: ") == MOST_FAILURES


PARENT = """
import asyncio, sys
from support.served_echo import EchoModel, EchoGeneration
from engines.server.service import EngineProcess

async def main():
    service = EngineProcess(EchoModel(step_s=0.05), max_waiting=8)
    service.start()
    while not service.is_ready:
        await asyncio.sleep(0.01)
    service.reserve(1)
    service.submit((5,), EchoGeneration(400, 0), lambda event: None, wants_tokens=False)
    print(service._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_its_parent_however_that_ends(tmp_path, number):
    """In the middle of a request."""
    path = os.pathsep.join((str(REPO), str(REPO / "tests")))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.send_signal(number)
    parent.wait()
    assert ends(pid)


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    data_beside(__file__, "process")["the_engine_has_its_environment_unless_its_user_says_otherwise"],
)
def test_the_engine_has_its_environment_unless_its_user_says_otherwise(monkeypatch, name, own, wanted):
    found: dict[str, str] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: found.update(env))
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    here, there = socket.socketpair()
    with here, there:
        _spawn(there)
    assert found[name] == wanted
