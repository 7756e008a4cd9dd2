"""One OpenAI-compatible endpoint: what it says of itself, and how a request is sent to it and timed."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from baselines.servers.asking import NoPage, ask, redirect, unread
from engines.errors import UserError, require
from engines.knobs import Checked, Range
from engines.strict_json import DECODER
from repro.runs.drivers.http import Clock, Reply, Send

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, StreamReader

Api = Literal["completions", "chat"]
KEY_VARIABLE = "OPENAI_API_KEY"
"""Sent as the bearer token, and never stored."""
EXTRA_HEADERS = "extra_headers"
"""A field of a body that goes into the request's headers, as OpenAI's client calls it."""
LONGEST_LINE = 1 << 20
"""Bytes of an event."""
LONGEST_ANSWER = 1 << 26
"""Bytes of all of them."""
MOST_TOKENS = 1 << 24
"""That an endpoint may say an answer has."""
_PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_BROKEN = frozenset({"abort", "cancelled", "content_filter", "error"})
"""Reasons for which an answer ends that is not whole."""
_BOM = b"\xef\xbb\xbf"
_LASTING = ("id", "root", "parent", "owned_by", "max_model_len", "fingerprint", "system")
"""What of a model's card stays as it is while the same thing is served: some servers say another time at every call."""


def require_client() -> None:
    """What requests are sent with."""
    if find_spec("aiohttp") is None:
        raise UserError("driving a server needs aiohttp, which is missing: pip install 'dllm-serve-repro[http]'")


@dataclass(frozen=True, kw_only=True)
class Endpoint(Checked):
    url: str
    """Base URL of an OpenAI-compatible server, with or without /v1 at its end."""
    api: Api = "completions"
    """completions sends token ids, which makes lengths exact; chat sends text."""
    timeout_s: Annotated[float, Range(above=0, most=1e6)] = 600.0
    """Seconds for a whole answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urlsplit(self.url)
            host = parts.hostname, parts.port
        except ValueError as error:  # half an IPv6 address, a port that is none
            shown = "url" if "@" in self.url else f"url={self.url!r}"
            raise UserError(f"{shown} is no address of a server ({error}): correct it") from None
        require(not parts.username and not parts.password, f"url holds a password: set {KEY_VARIABLE} instead")
        require(
            parts.scheme in ("http", "https") and bool(host[0]),
            f"url={self.url!r} is no address of a server: write it like http://127.0.0.1:8000",
        )
        require(
            self.url.isascii() and self.url.isprintable() and " " not in self.url,
            f"url={self.url!r} holds what an address cannot: write it in ASCII, other characters as %XX or xn--",
        )
        require(not parts.query and not parts.fragment, f"url={self.url!r} has more than a path: leave the rest out")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> Mapping[str, str]:
        key = os.environ.get(KEY_VARIABLE)
        # Never shown: it may be a real one with a line break behind it.
        require(
            key is None or (key.isascii() and key.isprintable() and " " not in key),
            f"{KEY_VARIABLE} must be printable ASCII without blanks: correct it",
        )
        return {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}

    def models(self) -> list[Mapping[str, Any]]:
        """Cards of what it serves. Raise UserError where it does not answer."""
        headers = self.headers
        try:
            cards = DECODER.decode(ask(f"{self.base}/v1/models", headers).decode())["data"]
            json.dumps(cards, allow_nan=False, ensure_ascii=False).encode()  # what no file of a run could hold
            return [card for card in cards if isinstance(card["id"], str)]
        except NoPage as error:
            if error.status is None:
                raise UserError(
                    f"url={self.url!r} does not answer ({error}): start the server, or check the url"
                ) from None
            fix = f"set {KEY_VARIABLE} to its key" if error.status == 401 else "check the url"
            raise UserError(f"url={self.url!r} answers /v1/models with {error}: {fix}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"url={self.url!r} does not answer /v1/models as OpenAI's API does: check the url"
            ) from None

    def card(self, model: str | None) -> Mapping[str, Any]:
        """What of the model's card is lasting; of the only one where none is named."""
        cards: dict[str, Mapping[str, Any]] = {}
        for card in self.models():
            lasting = {name: card[name] for name in _LASTING if name in card}
            require(
                cards.setdefault(card["id"], lasting) == lasting,
                f"url={self.url!r} lists model {card['id']!r} twice and otherwise: correct the server",
            )
        if model is None:
            require(len(cards) == 1, f"model: url={self.url!r} serves {', '.join(cards) or 'none'}: name one of them")
            (model,) = cards
        require(model in cards, f"model={model!r} is not served at {self.url!r}: use {', '.join(cards)}")
        return cards[model]

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Send]:
        """What sends requests, over connections that are kept."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            headers={**self.headers, "Accept-Encoding": "identity"},
            read_bufsize=LONGEST_LINE,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:

            async def send(body: Mapping[str, Any], clock: Clock) -> Reply:
                return await self._send(session, body, clock)

            yield send

    async def _send(self, session: ClientSession, body: Mapping[str, Any], clock: Clock) -> Reply:
        import aiohttp

        reply = Reply()
        fields = dict(body)
        headers = fields.pop(EXTRA_HEADERS, None)
        content = json.dumps(fields).encode()
        try:
            async with session.post(
                f"{self.base}{_PATHS[self.api]}", data=content, headers=headers, allow_redirects=False
            ) as response:
                if 300 <= response.status < 400:
                    reply.error = redirect(response.status, response.headers.get("Location"))
                elif response.status != 200:
                    said = _sentence((await response.content.read(4096)).decode(errors="replace"))
                    reply.error = f"status {response.status}: {said}"
                elif wrong := unread(lambda name: response.headers.getall(name, ())):
                    reply.error = wrong
                else:
                    await _read(response, reply, clock, is_chat=self.api == "chat", most=fields.get("max_tokens"))
        except TimeoutError:
            reply.error = f"no whole answer within timeout_s={self.timeout_s:g}"
        except (AttributeError, TypeError, RecursionError):
            reply.error = "an event of the stream is not as OpenAI's API has them"
        except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as error:
            reply.error = f"what it says is no HTTP: {_sentence(error.message)}"
        except Exception as error:
            reply.error = f"{type(error).__name__}: {_sentence(str(error))}"
        return reply


async def _read(response: ClientResponse, reply: Reply, clock: Clock, *, is_chat: bool, most: int | None) -> None:
    """``most`` is how many tokens were asked for, and so pieces: an answer that goes on behind them may have no end."""
    is_done = False
    silent_s: list[float] = []
    async for kind, content in _events(response.content):
        arrived_s = clock()
        if content == b"[DONE]":
            is_done = True
            continue
        said = DECODER.decode(content.decode())
        if kind == b"error" or said.get("error") is not None:
            reply.error = f"in the stream: {_sentence(json.dumps(said.get('error') or said))}"
            return
        if is_done and said.get("choices"):
            reply.error = "the stream goes on behind its end, [DONE]"
            return
        _take(said, reply, arrived_s, silent_s, is_chat=is_chat)
        if most is not None and max(len(reply.chunks_s), len(reply.token_ids or ())) > most:
            reply.error = f"the answer goes on behind the {most} tokens that were asked for"
            return
    # Ends of text that are ignored are tokens without text: an answer of nothing else came when they did.
    reply.chunks_s = reply.chunks_s or silent_s
    if not is_done:
        reply.error = "the stream broke off before its end"
    elif reply.completion_tokens is None:
        reply.error = "the endpoint does not say how many tokens the answer has (usage)"
    elif reply.finish_reason in _BROKEN:
        reply.error = f"the endpoint gave the answer up: finish_reason={reply.finish_reason!r}"
    elif not reply.chunks_s:
        reply.error = "the answer is empty"


async def _events(content: StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    """What lines of data say, each behind the kind of its event, which is empty where none is named."""
    held, num_bytes, kind, is_first = bytearray(), 0, b"", True
    async for data in content.iter_any():
        num_bytes += len(data)
        held += data
        lines: list[bytearray] = []
        if b"\n" in data:
            *lines, held = held.split(b"\n")
        for line in lines:
            if is_first:
                line, is_first = line.removeprefix(_BOM), False
            if line.startswith(b"data:"):
                yield kind, bytes(line[5:].strip())
            elif line.startswith(b"event:"):
                kind = bytes(line[6:].strip())
            elif not line.strip():
                kind = b""
        if len(held) > LONGEST_LINE:
            raise ValueError(f"an event of more than {LONGEST_LINE} bytes")
        if num_bytes > LONGEST_ANSWER:
            raise ValueError(f"the answer is longer than {LONGEST_ANSWER} bytes")
    if held.startswith(b"data:"):
        yield kind, bytes(held[5:].strip())


def _take(said: Mapping[str, Any], reply: Reply, arrived_s: float, silent_s: list[float], *, is_chat: bool) -> None:
    """``silent_s`` are the stamps of pieces without content, but for the one that opens a turn."""
    choices = said.get("choices") or ()
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        raise ValueError("more than one answer, though one was asked for")
    for choice in choices:
        text = (choice.get("delta") or {}).get("content") if is_chat else choice.get("text")
        # The latter is Dynamo's word, of requests of one answer.
        ids = choice.get("token_ids") or (said.get("nvext") or {}).get("completion_token_ids")
        if text or ids:
            (text or "").encode()  # half a character is none
            reply.text += text or ""
            reply.chunks_s.append(arrived_s)
            reply.ended_s = arrived_s
        elif not (choice.get("delta") or {}).get("role"):
            silent_s.append(arrived_s)
            reply.ended_s = arrived_s
        if ids:
            reply.token_ids = reply.token_ids or []
            reply.token_ids += [_count("token_ids", each) for each in ids]
        reason = choice.get("finish_reason") or reply.finish_reason
        if reason is not None and not isinstance(reason, str):
            raise ValueError("finish_reason is no text")
        reply.finish_reason = reason
    usage = said.get("usage")
    if usage:
        reply.prompt_tokens = _count("prompt_tokens", usage.get("prompt_tokens"))
        reply.completion_tokens = _count("completion_tokens", usage.get("completion_tokens"))
        reply.cached_tokens = _count("cached_tokens", (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


def _count(name: str, told: object) -> Any:
    if told is not None and (type(told) is not int or not 0 <= told <= MOST_TOKENS):
        raise ValueError(f"{name} is not a whole number of 0 to {MOST_TOKENS}")
    return told


def _sentence(text: str) -> str:
    """The message of an error in OpenAI's form, else the beginning of what was said."""
    try:
        found = json.loads(text)
        text = found.get("error", found)["message"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return "".join(each if each.isprintable() else "?" for each in " ".join(str(text).split())[:300])
