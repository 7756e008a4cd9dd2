"""The engine's loop without its process, and the process without a server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes import ends
from support.served_echo import RAISE, REFUSE, EchoEngine, EchoGeneration, EchoModel, answer_of

from engines.errors import RunError
from engines.server.process import MOST_FAILURES, serve
from engines.server.protocol import (
    Accepted,
    Admitted,
    Cancel,
    Event,
    Failed,
    Finished,
    Refused,
    Report,
    Stop,
    Submission,
    Tokens,
)
from engines.server.service import _spawn
from repro.paths import REPO


def submit(request_id: int, prompt_ids: tuple[int, ...], length: int = 8, *, wants_tokens: bool = False) -> Submission:
    return Submission(request_id, prompt_ids, EchoGeneration(length, 0), wants_tokens)


def told(batches: Sequence[Sequence[Any]], engine: Any = None) -> list[Event]:
    """What the loop says of commands that come batch by batch, one batch a turn."""
    left = [*map(list, batches)]
    reports: list[Report] = []

    def take(*, wait: bool) -> list[Any]:
        if left:
            return left.pop(0)
        return [Stop()] if wait else []

    serve(engine or EchoEngine(EchoModel(max_running=2)), take, reports.append)
    return [event for report in reports for event in report.events]


def test_requests_are_taken_run_and_told():
    events = told([[submit(1, (5, 6)), submit(2, (REFUSE, 1)), submit(3, (7,), wants_tokens=True)]])
    assert events[:3] == [Accepted(1), Refused(2, f"prompt_ids begin with {REFUSE}: begin with another"), Accepted(3)]
    assert Finished(1, answer_of((5, 6), 8)) in events
    parts = [event.token_ids for event in events if isinstance(event, Tokens | Finished) and event.request_id == 3]
    assert [len(part) for part in parts] == [4, 4]
    assert [event for event in events if isinstance(event, Admitted)] == [Admitted(1), Admitted(3)]


def test_a_cancelled_request_is_not_heard_of_again():
    events = told([[submit(1, (5,), 40), submit(2, (6,), 8)], [Cancel(1)], [Cancel(77)]])
    assert [event.request_id for event in events if isinstance(event, Finished)] == [2]


def test_a_step_that_raises_fails_its_batch_and_the_others_go_on(capfd):
    events = told([[submit(1, (RAISE,)), submit(2, (5,)), submit(3, (6,))]])
    failed = [event.request_id for event in events if isinstance(event, Failed)]
    finished = [event.request_id for event in events if isinstance(event, Finished)]
    assert (failed, finished) == ([1, 2], [3])
    assert "RuntimeError: the step of such a prompt raises" in capfd.readouterr().err


def test_an_engine_that_fails_again_and_again_is_ended(capfd):
    class Stuck(EchoEngine):
        def give_up(self, sentence: str) -> list[Event]:
            return []

    with pytest.raises(RunError, match=f"{MOST_FAILURES} steps in a row failed"):
        told([[submit(1, (RAISE,))]], Stuck(EchoModel()))
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
    print(service.pid, flush=True)
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
    ("own", "wanted"), [(None, "glibc.malloc.hugetlb=1"), ("glibc.malloc.check=0", "glibc.malloc.check=0")]
)
def test_the_engine_asks_for_huge_pages_unless_its_user_tunes_malloc(monkeypatch, own, wanted):
    found: dict[str, str] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: found.update(env))
    if own is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    here, there = socket.socketpair()
    with here, there:
        _spawn(there)
    assert found["GLIBC_TUNABLES"] == wanted


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux: there is no /proc")
def test_the_engine_s_caches_of_products_are_bounded_unless_the_user_bounds_them(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    here, there = socket.socketpair()
    process = _spawn(there)
    there.close()
    try:
        while not (environment := Path(f"/proc/{process.pid}/environ").read_text()):
            time.sleep(0.01)  # the kernel fills it in a moment after the program began
        given = dict(each.split("=", 1) for each in environment.split("\0") if each)
        assert int(given["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
        assert given["LRU_CACHE_CAPACITY"] == "7"
    finally:
        here.close()
        process.wait(60)
