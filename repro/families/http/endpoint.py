"""One OpenAI-compatible endpoint: how it describes itself, how we send a request to it, and how we read and time its answer.

A *piece* is an event of the answer's stream that brings tokens: text, ids, or a higher count of usage. The answer begins with its first
piece and ends with its last. An empty opening is no piece, and a late reason, usage or ``[DONE]`` is timed apart.
"""

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from baselines.servers.process import NoPage, ask, reason_not_read, redirect
from engines.data import DECODER
from engines.errors import UserError, require
from engines.knobs import Checked, Range
from repro.runs.clean import without_secrets
from repro.runs.http_driver import Clock, Reply, Send

if TYPE_CHECKING:
    from aiohttp import ClientSession, StreamReader


Api = Literal["completions", "chat"]
KEY_VARIABLE = "OPENAI_API_KEY"
"""The variable whose value we send as the bearer token, and never store."""
EXTRA_HEADERS = "extra_headers"
"""The field of a body that goes into the request's headers, named as in OpenAI's client."""
LONGEST_LINE = 1 << 20
"""The most bytes of one event."""
LONGEST_ANSWER = 1 << 26
"""The most bytes of all events of an answer."""
MOST_TOKENS = 1 << 24
"""The most tokens that an endpoint may report for an answer."""
_BROKEN = frozenset({"abort", "cancelled", "content_filter", "error"})
"""Finish reasons of an answer that is not whole."""
_BOM = b"\xef\xbb\xbf"
_FIRST_BYTES = 4096
"""How many bytes we keep of a body without events, to say what it is."""
_PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_LASTING = ("id", "root", "parent", "owned_by", "max_model_len", "fingerprint", "system")
"""The fields of a model's card that last while the same model is served. Some servers give a new time at each call."""


def require_client() -> None:
    """Raise UserError if aiohttp, which sends requests, is missing."""
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
            shown = "url" if "@" in self.url else f"url={without_secrets(self.url)!r}"
            raise UserError(f"{shown} is no address of a server ({error}): correct it") from None
        require(not parts.username and not parts.password, f"url holds a password: set {KEY_VARIABLE} instead")
        url = f"url={without_secrets(self.url)!r}"
        is_http = parts.scheme in ("http", "https") and bool(host[0])
        require(is_http, f"{url} is no address of a server: write it like http://127.0.0.1:8000")
        is_plain = self.url.isascii() and self.url.isprintable() and " " not in self.url
        require(is_plain, f"{url} holds what an address cannot: write it in ASCII, other characters as %XX or xn--")
        require(not parts.query and not parts.fragment, f"{url} has more than a path: leave the rest out")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> Mapping[str, str]:
        key = os.environ.get(KEY_VARIABLE)
        # Never show the key: it may be a real key with a line break after it.
        require(
            key is None or (key.isascii() and key.isprintable() and " " not in key),
            f"{KEY_VARIABLE} must be printable ASCII without blanks: correct it",
        )
        return {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}

    def card(self, model: str | None) -> Mapping[str, Any]:
        """The lasting fields of a model's card, or of the only model if none is named. Raises UserError if the endpoint does not answer."""
        headers = self.headers
        try:
            listed = DECODER.decode(ask(f"{self.base}/v1/models", headers).decode())["data"]
            json.dumps(listed, allow_nan=False, ensure_ascii=False).encode()  # what no file of a run could hold
            listed = [card for card in listed if isinstance(card["id"], str)]
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
        cards: dict[str, Mapping[str, Any]] = {}
        for card in listed:
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
    async def sending(self, *, needs_count: bool = True) -> AsyncIterator[Send]:
        """Yield a function that sends requests over kept connections. Without ``needs_count`` an answer may leave its tokens uncounted.

        A server may close a kept connection just as we use it again. So we send a request once more, on a fresh connection, if a kept one
        is cut off before a byte of the answer came."""
        import aiohttp

        from repro.families.http.connector import CountingConnector

        options: dict[str, Any] = {
            "timeout": aiohttp.ClientTimeout(total=self.timeout_s),
            "cookie_jar": aiohttp.DummyCookieJar(),
            "headers": {**self.headers, "Accept-Encoding": "identity"},
            "read_bufsize": LONGEST_LINE,
            "auto_decompress": False,
        }
        async with (
            aiohttp.ClientSession(connector=(connector := CountingConnector(limit=0)), **options) as session,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), **options) as fresh,
        ):

            async def send(body: Mapping[str, Any], clock: Clock) -> Reply:
                reply = Reply()
                with connector.watching() as is_unanswered:
                    was_cut = await self._send(session, body, clock, reply, needs_count)
                    if was_cut and is_unanswered():
                        reply = Reply(was_resent=True)
                        await self._send(fresh, body, clock, reply, needs_count)
                return reply

            yield send

    async def _send(
        self, session: "ClientSession", body: Mapping[str, Any], clock: Clock, reply: Reply, needs_count: bool
    ) -> bool:
        """Fill in the reply, and return whether its connection was lost."""
        import aiohttp

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
                    message = _sentence((await response.content.read(4096)).decode(errors="replace"))
                    reply.error = f"status {response.status}: {message}"
                elif problem := reason_not_read(lambda name: response.headers.getall(name, ())):
                    reply.error = problem
                else:
                    is_chat, limit = self.api == "chat", fields.get("max_tokens")
                    await _read(response.content, reply, clock, is_chat=is_chat, limit=limit, needs_count=needs_count)
        except TimeoutError:
            reply.error = f"no whole answer within timeout_s={self.timeout_s:g}"
        except (AttributeError, TypeError, RecursionError):
            reply.error = "an event of the stream is not as OpenAI's API has them"
        except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as error:
            reply.error = f"what it says is no HTTP: {_sentence(error.message)}"
        except Exception as error:
            reply.error = f"{type(error).__name__}: {_sentence(str(error))}"
            return isinstance(error, (aiohttp.ClientConnectionError, OSError))
        return False


# -- the stream of an answer ---------------------------------------------------------------------------------------


class Event(NamedTuple):
    kind: bytes
    """Empty if the event names none."""
    data: bytes
    arrived_s: float
    """When its last line of data arrived."""
    read: int
    """The number of the network read that brought this line."""


class Events:
    """Server-sent events of a body, divided as in the standard. Lines end with CR, LF or both. LF joins the data lines of an event, and an
    event without data does not count. The last event needs no empty line after it."""

    def __init__(self, content: "StreamReader", clock: Clock) -> None:
        self._content, self._clock = content, clock
        self.first = b""
        """The beginning of the body, as long as no event has come."""

        self._kind = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        """Bytes of data of the event that is being read."""
        self._came = 0.0, 0
        """When its last line of data arrived, and the number of the read that brought it."""
        self._has_begun, self._is_first = False, True

    async def __aiter__(self) -> AsyncIterator[Event]:
        buffer, num_bytes, is_split, stamp = bytearray(), 0, False, (0.0, 0)
        async for chunk in self._content.iter_any():
            stamp = self._clock(), stamp[1] + 1
            num_bytes += len(chunk)
            if is_split and chunk.startswith(b"\n"):
                chunk = chunk[1:]
            is_split = chunk.endswith(b"\r")
            if not self._has_begun and len(self.first) < _FIRST_BYTES:
                self.first += chunk[:_FIRST_BYTES]
            buffer += chunk
            if b"\n" in chunk or b"\r" in chunk:
                lines = buffer.splitlines()
                buffer = bytearray() if chunk.endswith((b"\r", b"\n")) else lines.pop()
                for line in lines:
                    if event := self._add(line, stamp):
                        yield event
            if len(buffer) + self._num_bytes > LONGEST_LINE:
                raise ValueError(f"an event of more than {LONGEST_LINE} bytes")
            if num_bytes > LONGEST_ANSWER:
                raise ValueError(f"the answer is longer than {LONGEST_ANSWER} bytes")
        for line in (buffer, bytearray()):
            if event := self._add(line, stamp):
                yield event

    def _add(self, line: bytes | bytearray, stamp: tuple[float, int]) -> Event | None:
        """Add a line, and return the event that it ends, if it ends one."""
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line.strip():
            data, kind = b"\n".join(self._data).strip(), self._kind
            self._data, self._kind, self._num_bytes = [], b"", 0
            return Event(kind, data, *self._came) if data else None
        name, _, value = bytes(line).partition(b":")
        if name == b"data":
            self._has_begun = True
            self._data.append(value.removeprefix(b" "))
            self._num_bytes += len(value)
            self._came = stamp
        elif name == b"event":
            self._kind = value.strip()
        return None


async def _read(
    content: "StreamReader", reply: Reply, clock: Clock, *, is_chat: bool, limit: int | None, needs_count: bool
) -> None:
    """Fill in the reply. ``limit`` is the number of tokens asked for, and so of pieces: a longer answer is an error, because it may never
    end. With ``needs_count`` an answer is an error if the endpoint does not count its tokens."""
    events, answer = Events(content, clock), _Answer(reply=reply, is_chat=is_chat)
    try:
        async for event in events:
            if event.data == b"[DONE]":
                answer.is_done = True
                continue
            payload = {} if event.kind == b"error" else _parsed(event)
            if event.kind == b"error" or payload.get("error") or payload.get("object") == "error":
                reply.error = f"in the stream: {_sentence(event.data.decode(errors='replace'))}"
                return
            if answer.is_done and payload.get("choices"):
                reply.error = "the stream goes on behind its end, [DONE]"
                return
            answer.take(payload, event)
            if limit is not None and max(len(reply.chunks_s), len(reply.token_ids or ())) > limit:
                reply.error = f"the answer goes on behind the {limit} tokens that were asked for"
                return
        reply.closed_s = clock()
    finally:
        reply.text, reply.aside = "".join(answer.texts), "".join(answer.asides)
    reply.error = answer.end(events.first, needs_count=needs_count)


def _parsed(event: Event) -> Any:
    """The JSON of an event. Empty for an event of another kind that is no JSON, such as a heartbeat."""
    try:
        return DECODER.decode(event.data.decode())
    except json.JSONDecodeError:
        if event.kind not in (b"", b"message") and event.data[:1] != b"{":
            return {}
        if b"\n" in event.data:
            raise ValueError(
                "an event of several lines of data is no JSON: end each event with an empty line"
            ) from None
        raise


@dataclass
class _Answer:
    reply: Reply
    is_chat: bool
    is_done: bool = False
    silent: list[Event] = field(default_factory=list)
    """Events that may be a token without text: neither a piece nor an opening, a reason or usage."""
    counted: int | None = None
    """Tokens of the answer by the usage that came with or after the last piece; None without such usage."""
    texts: list[str] = field(default_factory=list)
    """The text of each piece. We join them once at the end of the stream, because joining at each piece would copy all before it."""
    asides: list[str] = field(default_factory=list)

    def take(self, content: Mapping[str, Any], event: Event) -> None:
        reply, choices = self.reply, content.get("choices") or ()
        if len(choices) > 1 or any(choice.get("index") for choice in choices):
            raise ValueError("more than one answer, though one was asked for")
        gained = self._usage(content.get("usage"), event)
        for choice in choices:
            reason = choice.get("finish_reason") or None
            if reason is not None and not isinstance(reason, str):
                raise ValueError("finish_reason is no text")
            delta = choice.get("delta") or {}
            text = (delta.get("content") if self.is_chat else choice.get("text")) or ""
            aside = _other_text(delta) if delta else ""
            # ``nvext`` is Dynamo's field, for requests with one answer.
            ids = choice.get("token_ids") or (content.get("nvext") or {}).get("completion_token_ids")
            if text or aside or ids or (gained and reason is None):
                self._piece(text, aside, ids, gained, event)
                self.counted = self.counted if content.get("usage") else None
            elif reason is None and not delta.get("role") and not content.get("usage"):
                self.silent.append(event)
            if reason is not None:
                reply.finish_reason = reason
                reply.finish_s = event.arrived_s if reply.finish_s is None else reply.finish_s

    def _piece(self, text: str, aside: str, ids: Any, gained: int | None, event: Event) -> None:
        reply = self.reply
        (text + aside).encode()  # half a character is none
        if ids:
            reply.token_ids = reply.token_ids or []
            reply.token_ids += [_count("token_ids", token_id) for token_id in ids]
        if not reply.chunks_s:
            reply.first_text = aside + text
        self.texts.append(text)
        self.asides.append(aside)
        reply.chunks_s.append(event.arrived_s)
        reply.chunk_reads.append(event.read)
        reply.chunk_tokens.append(len(ids) if ids else gained or None)
        reply.ended_s, reply.finish_s = event.arrived_s, None

    def _usage(self, usage: Any, event: Event) -> int | None:
        """Tokens since the previous piece, if usage comes with every piece. Usage itself counts from the beginning."""
        if not usage:
            return None
        reply, previous = self.reply, self.counted if self.reply.chunks_s else self.counted or 0
        reply.usage_s = event.arrived_s
        for name in ("prompt_tokens", "completion_tokens"):
            if (count := _count(name, usage.get(name))) is not None:
                setattr(reply, name, count)
        cached = _count("cached_tokens", (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        reply.cached_tokens = reply.cached_tokens if cached is None else cached
        self.counted = reply.completion_tokens
        return None if previous is None or self.counted is None else max(0, self.counted - previous)

    def end(self, first: bytes, *, needs_count: bool) -> str | None:
        """Finish the reply, and return what is wrong with the answer, if anything."""
        reply = self.reply
        reply.completion_tokens = self.counted
        if reply.completion_tokens is not None:
            reply.counted_by = "usage"
        elif reply.token_ids is not None:
            reply.completion_tokens, reply.counted_by = len(reply.token_ids), "token_ids"
        self._place_silent()
        if not self.is_done and reply.finish_reason is None:
            return _body_error(first) or "the stream broke off before its end"
        if reply.finish_reason in _BROKEN:
            return f"the endpoint gave the answer up: finish_reason={reply.finish_reason!r}"
        if not reply.chunks_s:
            return "the answer is empty"
        if reply.counted_by is None and (needs_count or not reply.text + reply.aside):
            return (
                "the endpoint does not say how many tokens the answer has (usage): let it tell their ids, as with "
                "--knob extra='{\"return_token_ids\": true}', or give --knob tokenizer=FOLDER, the model's, to count by"
            )
        return None

    def _place_silent(self) -> None:
        """Count tokens without text, such as ignored ends of text, as part of the answer. We do so if it has no other piece, or if events
        without text and pieces of one token add up to the counted tokens."""
        reply, num_tokens = self.reply, self.reply.completion_tokens or 0
        if not reply.chunks_s:
            pieces = self.silent[-num_tokens:] if num_tokens else self.silent
            reply.chunks_s = [piece.arrived_s for piece in pieces]
            reply.chunk_reads = [piece.read for piece in pieces]
            if not pieces and num_tokens and reply.finish_s is not None:
                reply.chunks_s, reply.chunk_reads = [reply.finish_s], [0]
            reply.chunk_tokens = [None] * len(reply.chunks_s)
            reply.ended_s = reply.chunks_s[-1] if reply.chunks_s else None
            return
        num_shown = len(reply.chunks_s if reply.token_ids is None else reply.token_ids)
        if self.silent and num_tokens - (reply.finish_reason == "stop") <= num_shown + len(self.silent) <= num_tokens:
            reply.ended_s = max(reply.ended_s or 0.0, self.silent[-1].arrived_s)


def _other_text(delta: Mapping[str, Any]) -> str:
    """The text of a chat event besides the answer: reasoning, a refusal, or a tool call. Some servers send reasoning under both of its
    names, so we take it once."""
    texts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("refusal")]
    calls = [tool_call.get("function") for tool_call in delta.get("tool_calls") or ()]
    for call in (*calls, delta.get("function_call")):
        if call:
            texts += [call.get("name"), call.get("arguments")]
    return "".join(filter(None, texts))


def _body_error(first: bytes) -> str | None:
    """Say what a body is that holds no event of a stream; None if it is no JSON object."""
    text = first.decode(errors="replace").lstrip("\ufeff \r\n\t")
    if not text.startswith("{"):
        return None
    if '"error"' in text:
        return f"in place of a stream: {_sentence(text)}"
    return "the endpoint answered with one JSON object, not with the stream that was asked for (stream: true)"


def count_tokens(reply: Reply, encode: Callable[[str], list[int]] | None = None) -> None:
    """Fill in the tokens of a whole answer, if the endpoint did not count them, and of its first piece, with how we counted each. An
    ``encode`` that is given is the model's tokenizer."""
    text = reply.aside + reply.text
    if reply.completion_tokens is None and encode is not None:
        reply.completion_tokens, reply.counted_by = len(encode(text)), "tokenizer"
    total, num = reply.completion_tokens, len(reply.chunks_s)
    first = next(iter(reply.chunk_tokens), None)
    if total is None or not num:
        return
    if first is not None:
        counted = first, "usage" if reply.token_ids is None else "token_ids"
    elif num == 1:
        counted = total, "one piece"
    elif reply.are_single or not text:
        counted = 1, "one each"
    elif encode is not None:
        counted = len(encode(reply.first_text)), "tokenizer"
    else:
        counted = round(total * len(reply.first_text.encode()) / len(text.encode())), "text"
    reply.first_tokens, reply.first_by = max(1, min(counted[0], total - num + 1)), counted[1]


def _count(name: str, value: object) -> Any:
    if value is not None and (type(value) is not int or not 0 <= value <= MOST_TOKENS):
        raise ValueError(f"{name} is not a whole number of 0 to {MOST_TOKENS}")
    return value


def _sentence(text: str) -> str:
    """The message of an error in OpenAI's form, else the beginning of the text."""
    try:
        body = json.loads(text)
        text = body.get("error", body)["message"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return "".join(char if char.isprintable() else "?" for char in " ".join(str(text).split())[:300])
