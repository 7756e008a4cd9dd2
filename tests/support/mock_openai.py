"""An OpenAI-compatible server of known truth: the first piece of every answer after ``ttft_s``, the others ``gap_s`` apart.

A timer is late now and then: it says when it received each request and sent each piece, on the machine's monotonic clock, which a client in another
process shares. Run as a program it listens until its standard input ends, and then writes what it said as JSON.
"""

import asyncio
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class MockOpenAI:
    ttft_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_piece: int = 1
    cached_tokens: int | None = None
    fails_every: int = 0
    """Every n-th request is refused (0: none); the n + 1st stream breaks off."""
    has_ids: bool = True
    has_usage: bool = True
    prompt_tokens: int | None = None
    """That it says it got, and made; None for what is true."""
    completion_tokens: int | None = None
    word: str = "x "
    """Text of a token."""
    num_silent: int = 0
    """Last tokens of every answer that have no text, and no id."""
    model: str = "mock"
    """That somebody else seems to have had, a request."""
    health: Callable[[], Any] = dict
    """What /health says."""
    raw: Mapping[str, Callable[[], Iterable[bytes | float]]] = field(default_factory=dict)
    """By the beginning of a request's head: all it gets to hear, byte by byte as it stands, before the connection is closed. A number says
    when what follows is sent, in seconds from the request."""
    drops: frozenset[int] = frozenset()
    """Numbers of the posts whose connection is reset, the first being 0."""
    dropped: bytes = b""
    """What they hear before."""
    num_posts: int = 0
    heads: list[str] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    sent_s: list[list[float]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                head = self.heads[-1].lower()
                length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0)
                received_s = time.monotonic()
                content = await reader.readexactly(length)
                if (
                    says := next((says for start, says in self.raw.items() if head.startswith(start)), None)
                ) is not None:
                    for piece in says():
                        if isinstance(piece, float):
                            await asyncio.sleep(max(0.0, received_s + piece - time.monotonic()))
                            continue
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    break
                if head.startswith("get /v1/models"):
                    await self._say(
                        writer, 200, {"data": [{"id": self.model, "owned_by": "tests", "created": received_s}]}
                    )
                elif head.startswith(("get /health", "get /ready")):
                    await self._say(writer, 200, self.health())
                elif head.startswith("post /v1/") and self._next_post() in self.drops:
                    writer.write(self.dropped)
                    if self.dropped:
                        await asyncio.sleep(0.05)  # a reset overtakes what was not read
                    writer.transport.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    break
                elif head.startswith("post /v1/"):
                    await self._answer(
                        writer, json.loads(content), received_s, is_chat="/chat/" in head.split("\r\n")[0]
                    )
                else:
                    await self._say(writer, 404, {"error": {"message": "there is nothing here"}})
        writer.close()

    def _next_post(self) -> int:
        self.num_posts += 1
        return self.num_posts - 1

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], received_s: float, *, is_chat: bool
    ) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.received_s.append(received_s)
        stamps: list[float] = []
        self.sent_s.append(stamps)
        if self.fails_every and number % self.fails_every == self.fails_every - 1:
            await self._say(writer, 400, {"error": {"message": "refused by the mock"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        asked = body["max_tokens"]
        for k, start in enumerate(range(0, asked, self.tokens_per_piece)):
            if (left := received_s + self.ttft_s + k * self.gap_s - time.monotonic()) > 0:
                await asyncio.sleep(left)
            num = min(self.tokens_per_piece, asked - start)
            is_silent = start >= asked - self.num_silent
            text = "" if is_silent else self.word * num
            said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            if self.has_ids and not is_silent:
                said["token_ids"] = [100 + start + i for i in range(num)]
            stamps.append(time.monotonic())
            _write(writer, {"choices": [{"index": 0, **said, "finish_reason": None}]})
            if self.fails_every and number % self.fails_every == 0 and number:
                writer.close()
                return
        if self.has_usage:
            text = "".join(each["content"] for each in body.get("messages", ()))
            true = (len(body["prompt"]) if "prompt" in body else 8 + len(text) // 3, asked)
            told = (self.prompt_tokens, self.completion_tokens)
            said = [is_so if claim is None else claim for is_so, claim in zip(true, told, strict=True)]
            usage: dict[str, Any] = {"prompt_tokens": said[0], "completion_tokens": said[1]}
            if self.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            _write(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _say(self, writer: asyncio.StreamWriter, status: int, said: Any) -> None:
        await self._say_bytes(writer, status, json.dumps(said).encode())

    async def _say_bytes(self, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        await writer.drain()


def _write(writer: asyncio.StreamWriter, said: Any) -> None:
    _chunk(writer, b"data: " + json.dumps(said).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


@contextmanager
def mock_server(mock: MockOpenAI) -> Iterator[str]:
    """Its URL; it runs in a thread of this process."""
    urls: list[str] = []
    has_started = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(mock.handle, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        loops.append((asyncio.get_running_loop(), over))
        has_started.set()
        await over.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert has_started.wait(60)
    yield urls[0]
    loop, over = loops[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(60)


async def _program(ttft_s: float, gap_s: float) -> None:
    mock = MockOpenAI(ttft_s=ttft_s, gap_s=gap_s)
    server = await asyncio.start_server(mock.handle, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    said = {"seed": [body.get("seed") for body in mock.bodies], "received_s": mock.received_s, "sent_s": mock.sent_s}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(_program(float(sys.argv[1]), float(sys.argv[2])))
