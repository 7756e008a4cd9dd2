"""A server in a process of its own, and the signals it gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra server: fastapi is not installed")
pytest.importorskip("uvicorn", reason="needs the extra server: uvicorn is not installed")
pytest.importorskip("prometheus_client", reason="needs the extra server: prometheus_client is not installed")

from support.http_client import ask, streaming
from support.served_echo import answer_of

from repro.paths import REPO

PROGRAM = """
import sys
from engines.server.run import run
from engines.server.settings import ServerSettings
from support.served_echo import ByteCodec, EchoModel

run(EchoModel(step_s=0.02), ByteCodec(), ServerSettings(port=0, drain_timeout_s=float(sys.argv[1])), lambda line: print(line, flush=True))
"""
LONG = {"model": "echo", "prompt": "a story", "max_tokens": 200, "seed": 0}


@contextmanager
def server(drain_timeout_s: float = 60.0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_timeout_s)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("ready: "))
    try:
        yield process, int(line.split()[1].removesuffix("/v1,").rpartition(":")[2])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_sigterm_ends_what_was_taken_and_then_the_server() -> None:
    whole: list[Any] = []
    with server() as (process, port):
        other = threading.Thread(target=lambda: whole.append(ask(port, "/v1/completions", LONG)))
        with streaming(port, "/v1/completions", {**LONG, "stream": True}) as events:
            first = next(events)
            other.start()
            while ask(port, "/status").body["open"] < 2:
                pass
            process.send_signal(signal.SIGTERM)
            *rest, done = events
        other.join()
        said, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    assert "ending: 2 requests to finish" in said
    wanted = bytes(answer_of(b"a story", 200)).decode()
    assert "".join(event["choices"][0]["text"] for event in (first, *rest)) == wanted
    assert (whole[0].status, whole[0].body["choices"][0]["text"], done) == (200, wanted, "[DONE]")


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
def test_what_does_not_end_in_time_is_told_so(how: str) -> None:
    with server(0.2 if how == "the time is over" else 60.0) as (process, port):
        with streaming(port, "/v1/completions", {**LONG, "stream": True}) as events:
            next(events)
            process.send_signal(signal.SIGTERM)
            if how == "a second signal":
                process.send_signal(signal.SIGINT)
            *_, error, done = events
        _, errors = process.communicate(timeout=120)
    assert (error["error"]["message"], done) == ("the server has ended before this request: send it again", "[DONE]")
    assert process.returncode == 1
    assert "RunError: 1 requests were given up at the end" in errors
