"""A server from its socket to its end, and the signals it gets; it runs in the test's own thread, its client in another."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.http_client import ask, metrics, streaming
from support.served_echo import LONG_ANSWER, LONG_LEN, ByteCodec, EchoModel, answer_of

from engines.errors import RunError, UserError
from engines.server.run import _bind, run
from engines.server.settings import ServerSettings

LONG = {"model": "echo", "prompt": "a story", "max_tokens": 200, "seed": 0}
WAIT_S = 120.0


def run_with(
    client: Callable[[int], None],
    *,
    drain_timeout: float = 60.0,
    port: int = 0,
    on_ending: Callable[[], None] = lambda: None,
    **model: Any,
) -> list[str]:
    """What the server says until its end; ``client`` gets its port once requests are taken, and sends the signals."""
    said: list[str] = []
    is_ready = threading.Event()
    failures: list[BaseException] = []

    def hear(line: str) -> None:
        said.append(line)
        if line.startswith("ready: "):
            is_ready.set()
        if line.startswith("ending: "):
            on_ending()

    def use() -> None:
        try:
            assert is_ready.wait(WAIT_S), said
            client(int(said[-1].split()[1].removesuffix("/v1,").rpartition(":")[2]))
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    # A signal that comes too late is the test's failure, and not the end of all tests.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    try:
        settings = ServerSettings(port=port, drain_timeout=drain_timeout)
        run(EchoModel(step_s=0.02, **model), ByteCodec(), settings, hear)
    finally:
        thread.join(WAIT_S)
        for number, handler in before.items():
            signal.signal(number, handler)
        if failures:
            raise failures[0]
    return said


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_for(port: int, name: str, least: int) -> None:
    until = time.monotonic() + WAIT_S
    while metrics(port)[name] < least:
        assert time.monotonic() < until, f"{name} stays below {least}"


def test_sigterm_ends_what_was_taken_and_then_the_server(tmp_path):
    (held_by := tmp_path / "held").touch()
    got: list[Any] = []

    def client(port: int) -> None:
        whole: list[Any] = []
        other = threading.Thread(target=lambda: whole.append(ask(port, "/v1/completions", LONG)))
        with streaming(port, "/v1/completions", {**LONG, "stream": True}) as events:
            first = next(events)
            other.start()
            wait_for(port, "repro_requests_open", 2)
            send(signal.SIGTERM)
            *rest, done = events
        other.join(WAIT_S)
        got.append("".join(event["choices"][0]["text"] for event in (first, *rest)))
        got.extend((whole[0].status, whole[0].body["choices"][0]["text"], done))

    said = run_with(client, held_by=held_by, on_ending=held_by.unlink)
    assert said[-1] == "ending: 2 requests to finish"
    wanted = bytes(answer_of(b"a story", 200)).decode()
    assert got == [wanted, 200, wanted, "[DONE]"]


def test_bodies_that_have_not_come_are_not_waited_for():
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    ends: list[socket.socket] = []

    def client(port: int) -> None:
        for _ in range(20):
            end = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            end.sendall(head.encode())
            ends.append(end)
        wait_for(port, "repro_requests_receiving", 20)
        send(signal.SIGTERM)
        assert all(end.recv(12) == b"HTTP/1.1 503" for end in ends)

    said = run_with(client)
    assert said[-1] == "ending: 0 requests to finish"
    for end in ends:
        end.close()


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
def test_what_does_not_end_in_time_is_told_so(how):
    got: list[Any] = []

    def client(port: int) -> None:
        with streaming(port, "/v1/completions", {**LONG, "max_tokens": LONG_ANSWER, "stream": True}) as events:
            got.append(next(events))
            send(signal.SIGTERM)
            if how == "a second signal":
                send(signal.SIGINT)
            got.extend(events)

    with pytest.raises(RunError, match="1 requests were given up at the end"):
        run_with(client, drain_timeout=0.2 if how == "the time is over" else 60.0, max_model_len=LONG_LEN)
    *_, error, done = got
    assert (error["error"]["message"], done) == ("the server has ended before this request: send it again", "[DONE]")


def test_an_interrupt_that_was_ignored_at_the_start_stays_so():
    """As in a job in the background of a script."""
    code = (
        "import asyncio, signal\n"
        "from engines.server.run import _Signals\n"
        "async def main():\n"
        "    signals = _Signals()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    await asyncio.sleep(0.01)\n"
        "    print(signals.count)\n"
        "asyncio.run(main())\n"
    )
    for handler, count in ((signal.SIG_IGN, "1"), (signal.SIG_DFL, "2")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=partial(signal.signal, signal.SIGINT, handler),
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == count, done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_nobody_can_connect_before_the_machine_is_known_to_do():
    port = free_port()
    said = run_with(lambda _: send(signal.SIGTERM), port=port, closed_port=port)
    assert said[0] == f"listening on http://127.0.0.1:{port}, loading echo"


def test_what_the_machine_lacks_is_said_and_nothing_else():
    said: list[str] = []
    with pytest.raises(UserError, match="there is no such card"):
        run(EchoModel(lacks="there is no such card"), ByteCodec(), ServerSettings(port=0), said.append)
    assert said == []


def test_an_address_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port={port} cannot be listened on \(Address already in use\)"):
            run(EchoModel(), ByteCodec(), ServerSettings(port=port), lambda _: None)


def test_small_pieces_are_sent_at_once():
    """And not when the client has acknowledged those before, 40 ms later."""
    found: list[int] = []

    async def serve() -> None:
        has_come = asyncio.Event()

        def come(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            has_come.set()

        async with await asyncio.start_server(come, sock=_bind(ServerSettings(port=0))) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await has_come.wait()
            writer.close()

    asyncio.run(serve())
    assert found == [1]


def test_an_address_that_is_taken_meanwhile_too(monkeypatch):
    port = free_port()
    others: list[socket.socket] = []

    async def take(*_: object) -> None:
        others.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr("engines.server.run._until_able", take)
    said: list[str] = []
    with pytest.raises(UserError, match=rf"port={port} cannot be listened on \(Address already in use\)"):
        run(EchoModel(), ByteCodec(), ServerSettings(port=port), said.append)
    others[0].close()
    assert said == []
