"""Sessions over HTTP: NVIDIA Dynamo's own frontend, behind it the coordinator as its routing component, and the live workers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import engines
from baselines.servers.checkpoint import write_tiny
from baselines.servers.dynamo import ENVIRONMENTS, frontend, variables
from baselines.servers.environment import FOLDER_VARIABLE
from baselines.servers.launch import SERVED_NAME, Place
from baselines.servers.process import Address, Command, free_port, running
from engines.ampd.live.intake import Deciding, Limits, RouterSpec
from engines.ampd.live.store import Store
from engines.ar.session import Session
from engines.errors import RunError, UserError, require
from repro.runs.drivers.http import Clock, Exchange, Reply, Send, drive_http
from repro.systems.http.endpoint import EXTRA_HEADERS, Endpoint
from repro.systems.http.workload import Ask
from repro.systems.live.front import GIVEN_UP_S, Served
from repro.systems.servers.system import log_folder

if TYPE_CHECKING:
    from engines.ampd.live.fleet import Fleet
    from engines.ar.cluster.record import ClusterRun
    from engines.ar.torch.run import Prompts

logger = logging.getLogger(__name__)

ROUTER = "engines.ampd.live.dynamo_router"
START_S = 120.0
LOOK_S = 0.25
"""How often is looked whether the workers are well."""
PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")
_ENVIRONMENT = ENVIRONMENTS["cpu"]


@dataclass(frozen=True, kw_only=True)
class OverDynamo:
    """A ``Front``."""

    limits: Limits
    tokenizer: Path | None
    """A checkpoint's folder; None for ids without a text of their own."""

    modules = (__name__, ROUTER, "engines.ampd.live.intake", "repro.systems.http.endpoint")

    @property
    def basis(self) -> str:
        return hashlib.sha256(repr((_ENVIRONMENT.recipe, self._packages)).encode()).hexdigest()[:12]

    @property
    def _packages(self) -> Mapping[str, str]:
        installed = _ENVIRONMENT.packages or {}
        return {name: installed[name] for name in PACKAGES if name in installed}

    def check_machine(self) -> None:
        require(
            _ENVIRONMENT.packages is not None,
            f"frontend='dynamo': dynamo is not installed in {_ENVIRONMENT.folder} ({FOLDER_VARIABLE} names another "
            f"folder): run 'repro install dynamo --device cpu' ({_ENVIRONMENT.cost}), or leave frontend out",
        )
        if find_spec("aiohttp") is None:
            raise UserError("frontend='dynamo' is driven with aiohttp: pip install 'dllm-serve-repro[http]'")

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: Prompts, store: Store, fleet: Fleet
    ) -> Served:
        from engines.ampd.live.record import Mark

        with log_folder("ampd-dynamo") as folder, self._started(deciding, folder) as (url, startup_s):
            logger.info("Dynamo's frontend answers after %.1f s; logs are in %s", startup_s, folder)
            before = Mark.of(store, fleet.worker_ids)
            driving = _Driving(Endpoint(url=url, timeout_s=GIVEN_UP_S), sessions, prompts)
            asyncio.run(driving.warm_up(fleet.check))
            store.call("forget_windows")
            # Its decision drew from the router's random numbers as every other does.
            mark = replace(Mark.of(store, fleet.worker_ids), decision=before.decision)
            exchanges = asyncio.run(driving.run(fleet.check))
            end_s = time.monotonic() - driving.zero_s
            began = store.clock.now() - end_s
        first = {each.session_id: each for each in exchanges if each.turn == 0}
        return Served(
            began=began,
            end_s=end_s,
            mark=mark,
            lags_s=[_lag(first[each.session_id]) for each in sessions],
            losses=store.losses(),
            client=HttpClient(exchanges),
            facts={"name": "dynamo", "packages": dict(self._packages), "startup_s": round(startup_s, 1)},
        )

    @contextmanager
    def _started(self, deciding: Deciding, folder: Path) -> Iterator[tuple[str, float]]:
        model = write_tiny(folder / "model") if self.tokenizer is None else self.tokenizer
        place = Place(folder=folder, port=free_port(), model=str(model.absolute()), is_local=True)
        spec, path = folder / "router.pickle", folder / "path"
        told = RouterSpec(deciding=deciding, limits=self.limits, model=place.model, served_name=SERVED_NAME)
        told.write(spec)
        path.mkdir()
        # Of this project's packages nothing else: the rest of its environment would hide Dynamo's.
        (path / "engines").symlink_to(Path(engines.__path__[0]).absolute())
        router = Command(
            name="router",
            arguments=(str(_ENVIRONMENT.python), "-P", "-m", ROUTER, str(spec)),
            environment={**variables(place), "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        url = f"http://127.0.0.1:{place.port}"
        commands = (frontend(_ENVIRONMENT, place, router="round-robin"), router)
        address = Address(url=url, model=SERVED_NAME, paths=("/health",))
        with running("dynamo", commands, address, folder=folder, within_s=START_S) as startup_s:
            yield url, startup_s


# ---- the client -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SessionConversation:
    """A ``Conversation``: each turn repeats the ids of all before, answers included, and is asked in the session's name."""

    session: Session
    prompts: Prompts

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def arrival_s(self) -> float:
        return self.session.arrival_s

    @property
    def delays_s(self) -> Sequence[float]:
        return [each.delay_s for each in self.session.rounds]

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        ids: list[int] = []
        for past in range(turn):
            ids += self.prompts(self.session, past).tolist()
            ids += replies[past].token_ids or []
        ids += self.prompts(self.session, turn).tolist()
        asked = self.session.rounds[turn].decode_tokens
        headers = {"x-dynamo-session-id": str(self.session_id)}
        if turn == len(self.session.rounds) - 1:
            headers["x-dynamo-session-final"] = "true"
        return Ask(body={**body_of(ids, asked), EXTRA_HEADERS: headers}, prompt_len=len(ids), asked_tokens=asked)


def body_of(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["completion_token_ids"]},
    }


class _Driving:
    def __init__(self, endpoint: Endpoint, sessions: Sequence[Session], prompts: Prompts) -> None:
        self._endpoint, self._sessions, self._prompts = endpoint, sessions, prompts
        self.zero_s = 0.0
        """When the first session could have come, on this machine's monotonic clock."""

    async def warm_up(self, check: Callable[[], None]) -> None:
        """A request of no session: a first one takes longer than any other."""
        longest = max(self._sessions, key=lambda each: each.rounds[0].prefill_tokens)
        async with self._endpoint.sending() as send:
            ids = self._prompts(longest, 0).tolist()
            (reply,) = await _minding(asyncio.gather(send(body_of(ids, 2), time.monotonic)), check)
        if reply.error is not None:
            raise RunError(f"frontend='dynamo': the request that warms up failed: {reply.error}")

    async def run(self, check: Callable[[], None]) -> list[Exchange]:
        conversations = [SessionConversation(session=each, prompts=self._prompts) for each in self._sessions]
        async with self._endpoint.sending() as send:
            exchanges = await _minding(asyncio.ensure_future(drive_http(conversations, self._timed(send))), check)
        wrong = [each.error for each in exchanges if each.error is not None]
        if wrong:
            raise RunError(f"{len(wrong)} of {len(exchanges)} requests failed, the first with: {wrong[0]}")
        return exchanges

    def _timed(self, send: Send) -> Send:
        """Finds out where the driver's clock begins."""

        async def sending(body: Mapping[str, Any], clock: Clock) -> Reply:
            if not self.zero_s:
                self.zero_s = time.monotonic() - clock()
            return await send(body, clock)

        return sending


async def _minding(work: asyncio.Future[Any], check: Callable[[], None]) -> Any:
    """Its result, unless a worker fails before."""
    try:
        while not work.done():
            await asyncio.wait((work,), timeout=LOOK_S)
            check()
        return work.result()
    finally:
        work.cancel()


def _lag(exchange: Exchange) -> float:
    assert exchange.sent_s is not None
    return max(exchange.sent_s - exchange.due_s, 0.0)


# ---- what it saw ----------------------------------------------------------------------------------------------------


class HttpClient:
    """A ``Client``."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._by_round = {(each.session_id, each.turn): each for each in exchanges}

    def saw(self, run: ClusterRun, store: Store) -> tuple[ClusterRun, Mapping[str, Any]]:
        """RunError where it got other tokens than the workers made."""
        from engines.ar.metrics import observe

        replies = []
        for row, key in enumerate(self._keys(run)):
            reply, tokens = self._by_round[key].reply, run.rounds["decode_tokens"][row]
            assert reply is not None
            place = run.rounds["history"][row] + run.rounds["prefill_tokens"][row]
            ids = np.frombuffer(store.read("ids", key[0]), dtype=np.int32)[place : place + tokens].tolist()
            if reply.token_ids != ids:
                raise RunError(f"session {key[0]}, round {key[1]}: the client got other tokens than the workers made")
            replies.append(reply)
        at_client = _at(run, [self._by_round[key].due_s for key in self._keys(run)], replies)
        seen, inside = observe(at_client), observe(run)
        added = {"ttft_s": seen.ttft_s - inside.ttft_s, "itl_s": seen.round_itl_s["mean"] - inside.round_itl_s["mean"]}
        return at_client, {"added": {name: _spread(values) for name, values in added.items()}}

    @staticmethod
    def _keys(run: ClusterRun) -> Iterator[tuple[int, int]]:
        return zip(run.rounds["session_id"], run.rounds["round"], strict=True)


def _at(run: ClusterRun, due_s: Sequence[float], replies: Sequence[Reply]) -> ClusterRun:
    """The run at the times of the client."""
    from engines.ar.cluster.record import Gaps

    ends = [each.chunks_s[-1] for each in replies]
    rounds = {
        **run.rounds,
        "ready_s": list(due_s),
        "first_token_s": [each.chunks_s[0] for each in replies],
        "finished_s": ends,
    }
    last: dict[int, float] = {}
    for session, end_s in zip(run.rounds["session_id"], ends, strict=True):
        last[session] = max(end_s, last.get(session, 0.0))
    sessions = {**run.sessions, "finished_s": [last[each] for each in run.sessions["session_id"]]}
    gaps: list[tuple[int, float, int]] = []
    for row, reply in enumerate(replies):
        stamps, num_gaps = reply.chunks_s, (reply.completion_tokens or 0) - 1
        if len(stamps) == num_gaps + 1:
            gaps += [(row, gap, 1) for gap in np.diff(stamps).tolist()]
        elif num_gaps > 0:  # several tokens came as one piece
            gaps.append((row, (stamps[-1] - stamps[0]) / num_gaps, num_gaps))
    found = Gaps(
        np.array([row for row, _, _ in gaps], dtype=np.int64),
        np.array([gap for _, gap, _ in gaps], dtype=np.float64),
        np.array([count for _, _, count in gaps], dtype=np.int64),
    )
    return replace(run, rounds=rounds, sessions=sessions, gaps=found)


def _spread(values: Any) -> dict[str, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    return {
        "mean": float(known.mean()),
        "p50": float(np.median(known)),
        "p90": float(np.quantile(known, 0.9)),
        "max": float(known.max()),
    }
