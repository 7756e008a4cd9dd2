"""Takes requests of an OpenAI frontend as rounds of sessions: the coordinator gets them, and the store has the answer's tokens.

It knows only the form of the frontend's requests, which is Dynamo's: token ids, stop conditions and sampling options. The header
``x-dynamo-session-id`` names a session, and ``x-dynamo-session-final`` marks its last request.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engines.ampd.live.coordinator import SETTLE_S, Coordinator
from engines.ampd.live.store import Store
from engines.errors import require
from engines.policies.routing import Binder, Estimator, Router

_NUM_NUMBERS = 10**9
"""A session's name that is a number below this is its id. The ids of a profile's sessions begin here."""
FIRST_NAMED = 2 * 10**9
"""Sessions with other names, or without a name, have ids from here on."""
LOOK_S = 0.25
"""How long to wait for news of new tokens before we look for them anyway."""


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """Everything that a coordinator is made of. It can be pickled."""

    url: str
    """The address of Redis."""
    prefix: str
    binder: Binder
    router: Router
    estimator: Estimator | None
    window_s: float
    lease_s: float

    def coordinator(self, store: Store | None = None) -> Coordinator:
        """Make a coordinator on ``store``, or on a connection of its own."""
        return Coordinator(
            store or Store.connect(self.url, self.prefix),
            binder=self.binder,
            router=self.router,
            estimator=self.estimator,
            window_s=self.window_s,
            lease_s=self.lease_s,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the requests that the workers can serve."""

    vocab_size: int
    max_len: int
    """Tokens of a session, including its answers."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Everything that a frontend's routing component needs to know."""

    deciding: Deciding
    limits: Limits
    model: str
    """Folder of the tokenizer."""
    served_name: str

    def write(self, path: Path) -> None:
        """Write it for the user alone to read, because it holds the password of Redis."""
        path.touch(mode=0o600)
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(path: Path) -> "RouterSpec":
        spec = pickle.loads(path.read_bytes())
        assert isinstance(spec, RouterSpec)
        return spec


class Context(Protocol):
    """Dynamo's context of a request."""

    def is_stopped(self) -> bool:
        """Whether its client has left."""

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Returns a future that is done once the client has left."""


@dataclass(frozen=True, kw_only=True)
class LiveRequest:
    """A request. Its ``prompt`` holds all tokens of its session so far, and those that it adds."""

    prompt: npt.NDArray[np.int64]
    max_tokens: int
    session: str | None
    is_last: bool

    @staticmethod
    def of(request: Mapping[str, Any], limits: Limits) -> "LiveRequest":
        """Raises UserError if the workers cannot serve the request: they take the likeliest token, ``max_tokens`` times."""
        ids = np.asarray(request["token_ids"], dtype=np.int64)
        stop, sampling, output = (
            request.get(name) or {} for name in ("stop_conditions", "sampling_options", "output_options")
        )
        require(ids.size >= 1, "prompt is empty: give at least one token")
        require(
            int(ids.min()) >= 0 and int(ids.max()) < limits.vocab_size,
            f"prompt has a token id outside 0 to {limits.vocab_size - 1}: use ids of the model",
        )
        count = int(stop.get("max_tokens") or 0)
        require(count >= 1, f"max_tokens={stop.get('max_tokens')} must be at least 1: say how many tokens")
        require(
            ids.size + count <= limits.max_len,
            f"prompt of {ids.size} tokens and max_tokens={count} are more than the {limits.max_len} a worker holds: "
            "shorten one",
        )
        require(stop.get("ignore_eos") is True, "ignore_eos must be true: answers have exactly max_tokens tokens")
        for fields, names in ((stop, ("stop", "stop_token_ids")), (output, ("logprobs", "prompt_logprobs"))):
            for name in names:
                require(fields.get(name) in (None, []), f"{name}={fields.get(name)!r} has no effect here: leave it out")
        temperature, answers = sampling.get("temperature"), sampling.get("n")
        require(not temperature, f"temperature={temperature} has no effect here, the likeliest token is taken: use 0")
        require(answers in (None, 1), f"n={answers} must be 1: ask again for another answer")
        agent = request.get("agent_context") or {}
        session = agent.get("session_id")
        is_last = session is None or bool(agent.get("session_final"))
        return LiveRequest(prompt=ids, max_tokens=count, session=session, is_last=is_last)


class SessionIntake:
    """Serves requests on one event loop. Calls of the coordinator wait for Redis, so one thread of their own runs them all."""

    def __init__(self, coordinator: Coordinator, limits: Limits) -> None:
        self.coordinator, self.limits = coordinator, limits
        self._store = coordinator.store
        self._coordinating = ThreadPoolExecutor(1, thread_name_prefix="coordinator")
        self._hearing = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._under_way: dict[int, asyncio.Event] = {}
        """For each session with a round under way, the event that is set when it has new tokens."""

    async def keep(self) -> None:
        """Run for ever beside the requests: settle overdue work, and listen for new tokens. Raises the store's errors."""
        await asyncio.gather(self._settle(), self._hear())

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer token by token. Raises UserError for an impossible round. If its client leaves, the round is given up."""
        asked = LiveRequest.of(request, self.limits)
        loop = asyncio.get_running_loop()
        session_id = await loop.run_in_executor(self._coordinating, self._id_of, asked.session)
        require(session_id not in self._under_way, f"session {asked.session!r} waits for an answer: ask after it")
        news = self._under_way[session_id] = asyncio.Event()
        client_left = asyncio.ensure_future(context.async_killed_or_stopped())
        client_left.add_done_callback(lambda _: news.set())
        begun = self._coordinating.submit(self._begin, session_id, asked)
        num_sent = 0
        try:
            await asyncio.wrap_future(begun)
            offset = asked.prompt.size
            while num_sent < asked.max_tokens and not context.is_stopped():
                # In Python 3.11 ``wait_for`` forgets that it was cancelled if the news comes at the same moment.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await news.wait()
                news.clear()
                end = offset + asked.max_tokens
                for token in await loop.run_in_executor(None, self._store.ids, session_id, offset + num_sent, end):
                    num_sent += 1
                    yield {"token_ids": [token], "finish_reason": "length" if num_sent == asked.max_tokens else None}
        finally:
            client_left.cancel()
            if num_sent < asked.max_tokens:
                await asyncio.shield(loop.run_in_executor(self._coordinating, self._leave, session_id, begun))
            del self._under_way[session_id]

    # ---- in threads ---------------------------------------------------------------------------------------------

    def _id_of(self, session: str | None) -> int:
        """Return the session's id. A number is its own id; the ids of other names are in the store, for an intake after this one."""
        if session is not None and session.isascii() and session.isdigit() and int(session) < _NUM_NUMBERS:
            return int(session)
        store = self._store
        number = None if session is None else store.fields("names").get(session)
        if number is None:
            number = store.retry(lambda: store.client.incr(store.key("num_names")))
            if session is not None:
                store.retry(lambda: store.client.hset(store.key("names"), session, number))
        return FIRST_NAMED + int(number)

    def _begin(self, session_id: int, request: LiveRequest) -> int:
        """Begin the request's round, and return the session's rank by arrival."""
        name = f"session {request.session!r}"
        fields = self._store.fields("session", session_id)
        state = fields.get("state", "waiting")
        require(state != "done", f"{name} has ended: give another its own name")
        require(state in ("waiting", "left"), f"{name} has an answer under way: ask after it")
        history = self._store.ids(session_id)
        added = request.prompt[len(history) :]
        require(
            added.size >= 1 and request.prompt[: len(history)].tolist() == history,
            f"{name}: the prompt must begin with the session's {len(history)} tokens, answers included, and add some",
        )
        order = self.coordinator.open(session_id)
        number = 0 if state == "left" else int(fields.get("round", -1)) + 1
        self.coordinator.begin(session_id, number, added, decode_tokens=request.max_tokens, is_last=request.is_last)
        return order

    def _leave(self, session_id: int, begun: Future[int]) -> None:
        """Give up the round, unless it never began."""
        if not begun.cancelled() and begun.exception() is None:
            self.coordinator.leave(session_id, begun.result())

    async def _settle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SETTLE_S)
            await loop.run_in_executor(self._coordinating, self.coordinator.settle)

    async def _hear(self) -> None:
        loop, next_entries = asyncio.get_running_loop(), self._store.follow("news")
        while True:
            for entry in await loop.run_in_executor(self._hearing, next_entries, LOOK_S):
                if (news := self._under_way.get(int(entry["session"]))) is not None:
                    news.set()
