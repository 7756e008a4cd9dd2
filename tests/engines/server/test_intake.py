"""What comes in over a socket and is no plain request: slow, cut, endless, misaddressed, of another form, or too much."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from support.http_client import ask, metrics
from support.http_server import Running, running_server
from support.served_echo import LONG_ANSWER, LONG_LEN, ByteCodec, EchoModel
from support.tables import data_beside

from engines.server import connection
from engines.server.completion import LARGE_TEXT
from engines.server.connection import LARGE_BODY
from engines.server.settings import ServerSettings

WAIT_S = 60.0
CONTENT = json.dumps({"model": "echo", "prompt": "hello", "seed": 0}).encode()
LENGTH = len(CONTENT)
MOST = 1 << 17
"""Less than all bodies may have together, so that it is what is said of one that is too long, in whatever pieces it comes."""
SETTINGS = ServerSettings(max_body_bytes=MOST, max_bytes_in_flight=3 * LARGE_BODY, max_connections=18)
HASTY = replace(SETTINGS, body_timeout_s=0.3, max_connections=100)
"""A client that a busy machine keeps waiting is too slow for it: it stands still until what is to come in time is sent."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(EchoModel(), ByteCodec(), SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with running_server(EchoModel(), ByteCodec(), HASTY) as found:
        yield found


def head(
    *lines: str,
    method: str = "POST",
    path: str = "/v1/completions",
    version: str = "1.1",
    host: str | None = "localhost",
    kind: str | None = "application/json",
    length: Any = LENGTH,
) -> bytes:
    named = (("Host", host), ("Content-Type", kind), ("Content-Length", length))
    own = [f"{name}: {value}" for name, value in named if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/{version}", *own, *lines, "", ""]).encode()


CHUNKED = head("Transfer-Encoding: chunked", length=None)


class Answers(NamedTuple):
    statuses: list[int]
    sentences: list[str]


def talk(port: int, *parts: bytes, gap_s: float = 0.0, on_first: Callable[[], object] = lambda: None) -> Answers:
    """Send ``parts`` and read until the server closes: it must. ``on_first`` is called once the first is sent, if any."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        try:
            for part in parts[:1]:
                client.sendall(part)
            on_first()
            for part in parts[1:]:
                time.sleep(gap_s)
                client.sendall(part)
        except ConnectionError:
            pass  # it has closed; what it said before must be readable nonetheless
        return rest_of(client)


def rest_of(client: socket.socket) -> Answers:
    said = b"".join(iter(partial(client.recv, 1 << 16), b""))
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", said)]
    sentences = [text.decode() for text in re.findall(rb'"message": ?"(.*?)","?', said.replace(b'", "', b'","'))]
    return Answers(statuses, sentences)


ENDLESS = (b"a",) * 12
LAST = "Connection: close"
SLOW_BODY = "the body was not complete after 0.3 s: send it at once"
LONG = f"the body has more than {MOST} bytes, the most that is taken: send less"
CODED = "send the body as it is"
NO_HTTP = "what came is no request in HTTP/1.1"
REQUESTS = data_beside(__file__, "requests")


SLOW = {
    "a body withheld": ((head(),), [408], SLOW_BODY),
    "a body byte by byte": ((head(length=100), *ENDLESS), [408], SLOW_BODY),
    "a body cut": ((head(length=len(CONTENT) + 9) + CONTENT,), [408], SLOW_BODY),
    "a chunk cut": ((CHUNKED + b"5\r\nab",), [408], SLOW_BODY),
    "trailers withheld": ((CHUNKED + b"2\r\n{}\r\n0\r\nA: b\r\n",), [408], SLOW_BODY),
    "a large body cut": ((head(length=MOST) + b"a" * LARGE_BODY,), [408], SLOW_BODY),
    "asked, and not sent": ((head("Expect: 100-continue"),), [100, 408], SLOW_BODY),
    "too long, withheld": ((head(LAST, length=MOST + 1),), [413], LONG),
    "absurdly long": ((head(LAST, length="9" * 19),), [413], LONG),
}  # fmt: skip
"""What -> parts, statuses, sentence."""


def test_what_does_not_come_in_time_ends_in_a_sentence(hasty, caplog, monkeypatch):
    """A sentence, a closed connection, nothing held, and not a line in the log. All wait at once."""
    monkeypatch.setattr(connection, "_LINGER_S", 0.3)
    have_begun = threading.Barrier(len(SLOW) + 1, timeout=WAIT_S)

    def say(parts: tuple[bytes, ...]) -> Answers:
        gap_s = 0.04 if parts[1:] == ENDLESS else 0.0
        return talk(hasty.port, *parts, gap_s=gap_s, on_first=have_begun.wait)

    with ThreadPoolExecutor(len(SLOW)) as pool:
        with hasty.standing_still():
            saying = pool.map(say, [parts for parts, *_ in SLOW.values()])
            have_begun.wait()
        answers = list(saying)
    for (what, (_, statuses, sentence)), said in zip(SLOW.items(), answers, strict=True):
        assert said.statuses == statuses, what
        assert len(said.sentences) == sum(status >= 400 for status in statuses), what
        assert sentence in " | ".join(said.sentences), what
    hasty.wait_until(lambda: hasty.server._intake.num_reading == hasty.server._intake._held == 0)
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S) as client:
        with hasty.standing_still():
            client.sendall(head(LAST) + CONTENT)
        assert rest_of(client).statuses == [200]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("parts", "statuses", "sentence"),
    [
        pytest.param((head(LAST, length=8 * MOST), b"a" * 8 * MOST), [413], LONG, id="too long, by who then leaves"),
        pytest.param((head(LAST, "Transfer-Encoding: chunked", length=None) + b"%x\r\n" % (2 * MOST), b"a" * 2 * MOST), [413], LONG, id="one long chunk"),
        pytest.param((head("Expect: 100-continue", LAST, length=MOST + 1),), [413], LONG, id="asked before it is sent"),
        pytest.param((head("Expect: 100-continue", LAST) + CONTENT,), [100, 200], "", id="asked and sent"),
        pytest.param((head("Transfer-Encoding: chunked"),), [400], "are two lengths of one body", id="two lengths"),
        pytest.param((head("Content-Length: 5"),), [400], "conflicting Content-Length", id="two other lengths"),
        pytest.param((head(length=-1),), [400], NO_HTTP, id="a negative length"),
        pytest.param((head(length="9" * 5000),), [400], NO_HTTP, id="a length of thousands of digits"),
        pytest.param((head("Transfer-Encoding: gzip", length=None),), [501], "Only Transfer-Encoding", id="gzip coding"),
        pytest.param((head(LAST, "Content-Encoding: gzip") + CONTENT,), [415], CODED, id="a coded body"),
        pytest.param((head(LAST, "Content-Encoding: br") + CONTENT,), [415], CODED, id="otherwise coded"),
        pytest.param((head(LAST, "Content-Encoding: identity, gzip") + CONTENT,), [415], CODED, id="coded twice"),
        pytest.param((CHUNKED + b"zz\r\n",), [400], "illegal chunk header", id="a chunk of no length"),
        pytest.param((b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",), [400], NO_HTTP, id="TLS"),
        pytest.param((head(host=None),), [400], "Missing mandatory Host", id="no host"),
        pytest.param((b"GET / HTTP/1.1\r\nA: " + b"a" * (1 << 15),), [431], "the head of the request is too long", id="a long head"),
        pytest.param((head() + CONTENT + b"nonsense\r\n\r\n",), [200, 400], NO_HTTP, id="nonsense behind a request"),
        pytest.param(((head() + CONTENT) * 3 + head(LAST) + CONTENT,), [200] * 4, "", id="requests one behind the other"),
        pytest.param((head("Connection: close, Upgrade", "Upgrade: websocket") + CONTENT,), [200], "", id="an upgrade"),
    ],
)  # fmt: skip
def test_what_does_not_come_as_it_should_ends_in_a_sentence(server, parts, statuses, sentence, caplog):
    said = talk(server.port, *parts)
    assert said.statuses == statuses
    assert len(said.sentences) == sum(status >= 400 for status in statuses)
    assert sentence in " | ".join(said.sentences)
    server.wait_until(lambda: server.server._intake.num_reading == server.server._intake._held == 0)
    assert ask(server.port, "/v1/completions", CONTENT).status == 200
    assert caplog.records == []


@pytest.mark.parametrize(("given", "status", "sentence"), REQUESTS["pages of another origin"])
def test_a_page_of_another_origin_is_refused(server, given, status, sentence):
    """By the forms that a browser sends without asking, and by the name that it was sent to."""
    said = talk(server.port, head(LAST, **given) + CONTENT)
    assert said.statuses == [status]
    assert sentence in "".join(said.sentences)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(head(length=9), id="it may still send the body"),
        pytest.param(head("Expect: 100-continue", length=MOST + 1), id="it may send the body or the next request"),
    ],
)
def test_a_connection_whose_next_bytes_mean_nothing_is_said_to_close(hasty, parts):
    with ExitStack() as stack:
        with hasty.standing_still():
            client = stack.enter_context(socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S))
            client.sendall(parts)
        assert b"\r\nconnection: close\r\n" in client.recv(1 << 16)


def test_others_may_call_a_server_what_they_like_where_others_reach_it():
    with running_server(EchoModel(), ByteCodec(), ServerSettings(host="0.0.0.0")) as server:
        assert talk(server.port, head(LAST, host="evil.com") + CONTENT).statuses == [200]


def test_bodies_under_way_are_bounded_together_and_small_ones_go_on(server):
    """Of five that are large the first ones are refused as more comes of them, until the others fit."""
    intake = server.server._intake
    with ExitStack() as stack:
        clients = []
        for _ in range(5):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))
            client.sendall(head(length=MOST) + b"a" * LARGE_BODY)
            clients.append(client)
        server.wait_until(lambda: intake._held == 5 * LARGE_BODY)
        assert ask(server.port, "/v1/completions", CONTENT).status == 200
        for client in clients[:3]:
            client.sendall(b"a" * 9)
            assert client.recv(1 << 16).split()[1] == b"503"
        for client in clients[3:]:
            client.sendall(b"a" * 9)
        server.wait_until(lambda: intake._held == 2 * (LARGE_BODY + 9))
    server.wait_until(lambda: intake._held == 0)


def test_requests_of_more_connections_are_refused():
    model = EchoModel(step_s=0.02, max_model_len=LONG_LEN)
    with running_server(model, ByteCodec(), ServerSettings(max_connections=2)) as server:
        with ExitStack() as stack:
            busy = json.dumps({"model": "echo", "prompt": "hi", "max_tokens": LONG_ANSWER}).encode()
            for _ in range(2):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))
                client.sendall(head(length=len(busy)) + busy)
            server.wait_until(lambda: server.service.status.running == 2)
            assert talk(server.port, head() + CONTENT).statuses == [503]
        server.wait_until_idle()


def test_a_draining_server_waits_for_no_body_that_has_not_come(server):
    with running_server(EchoModel(), ByteCodec()) as server, ExitStack() as stack:
        clients = []
        for _ in range(30):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))
            client.sendall(head())
            clients.append(client)
        server.wait_until(lambda: server.server._intake.num_reading == 30)
        assert server.server.num_answering == 0
        server.call(server.server.drain)
        for client in clients:
            assert rest_of(client) == ([503], ["the server is ending: come again later"])


def test_a_client_that_leaves_in_the_middle_of_its_body_is_counted_and_no_fault(caplog):
    with running_server(EchoModel(), ByteCodec()) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head() + CONTENT[:8])
            server.wait_until(lambda: server.server._intake.num_reading == 1)
        server.wait_until(lambda: server.server._intake.num_reading == 0)
        assert metrics(server.port)["repro_disconnects_total"] == 1
    assert caplog.records == []


class Watched(ByteCodec):
    """Knows which texts came so far as to be tokenized; a large one takes until ``go_on``."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.go_on = threading.Event()

    def encode(self, text: str, **how: Any) -> tuple[int, ...]:
        self.seen.append(len(text))
        if len(text) >= LARGE_TEXT:
            assert self.go_on.wait(WAIT_S)
        return super().encode(text, **how)


def test_a_text_that_cannot_fit_is_not_tokenized():
    """The model takes 512 tokens, the codec's longest has 4 bytes."""
    codec = Watched()
    with running_server(EchoModel(), codec) as server:

        def refusal(path: str, **asked: Any) -> str:
            said = ask(server.port, path, {"model": "echo", "seed": 0, **asked})
            assert said.status == 400
            return str(said.body["error"]["message"])

        sentence = "bytes is more than the 4 bytes of the longest token times max_model_len=512: shorten it"
        turns = [{"role": "user", "content": "é" * 600}, {"role": "user", "content": "é" * 600}]
        assert refusal("/v1/completions", prompt="a" * 2049) == f"prompt of 2049 {sentence}"
        assert refusal("/v1/completions", prompt=["hi", "\ud800" * 300_000]) == f"prompt of 900000 {sentence}"
        assert refusal("/v1/chat/completions", messages=turns) == f"prompt of 2400 {sentence}"
        assert codec.seen == []
        assert "prompt of 2048 tokens" in refusal("/v1/completions", prompt="a" * 2048)
        assert codec.seen == [2048]


def test_a_long_text_keeps_no_short_one_waiting():
    codec = Watched()
    with running_server(EchoModel(max_model_len=1 << 16), codec) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(
            ask, server.port, "/v1/completions", {"model": "echo", "prompt": "a" * LARGE_TEXT, "max_tokens": 4}
        )
        server.wait_until(lambda: codec.seen == [LARGE_TEXT])
        assert ask(server.port, "/v1/completions", CONTENT).status == 200
        codec.go_on.set()
        assert long.result().status == 200


def test_a_request_whose_engine_is_lost_while_it_is_tokenized_is_refused():
    codec = Watched()
    with ThreadPoolExecutor() as pool, running_server(EchoModel(max_model_len=1 << 20), codec) as server:
        long = {"model": "echo", "prompt": "a" * LARGE_TEXT, "max_tokens": 8}
        asked = pool.submit(ask, server.port, "/v1/completions", json.dumps(long).encode())
        server.wait_until(lambda: codec.seen == [LARGE_TEXT])
        server.call(lambda: server.service._process.kill())
        server.wait_until(lambda: not server.service.is_ready)
        server.call(lambda: server.service._watch.cancel())  # no other engine comes in between
        codec.go_on.set()
        assert asked.result().status == 503
        assert server.call(lambda: (server.service.num_open, server.service.num_waiting)) == (0, 0)
