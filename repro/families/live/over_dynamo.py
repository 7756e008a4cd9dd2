"""Sessions over HTTP, through NVIDIA Dynamo's own frontend. Behind it are the coordinator, as its router, and the live workers."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import engines
from baselines.servers.dynamo import frontend, variables
from baselines.servers.environment import ServerEnvironment, environments_of
from baselines.servers.launch import SERVED_NAME, Place, write_tiny
from baselines.servers.process import Address, Command, free_port, running
from engines.ampd.live.intake import Deciding, Limits, RouterSpec
from engines.ampd.live.store import Store
from engines.cluster.sessions import Session
from engines.errors import RunError
from repro.families.http.endpoint import EXTRA_HEADERS, Endpoint, require_client
from repro.families.http.system import log_folder
from repro.runs.family import distribution
from repro.runs.http_driver import Ask, Clock, Exchange, Reply, drive_http

if TYPE_CHECKING:
    from engines.ampd.live.coordinator import Prompts
    from engines.ampd.live.fleet import Fleet
    from engines.ampd.live.record import Mark
    from engines.cluster.record import ClusterRun

# -- sessions over HTTP -----------------------------------------------------------------------------------

_LOOK_S = 0.25
"""Seconds between checks that the workers are alive."""


@dataclass(frozen=True, kw_only=True)
class SessionConversation:
    """A ``Conversation`` whose turns repeat the ids of all before them, including answers. Each request names its session in a header."""

    session: Session
    prompts: "Prompts"

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def arrival_s(self) -> float:
        return self.session.arrival_s

    @property
    def delays_s(self) -> Sequence[float]:
        return [turn.delay_s for turn in self.session.rounds]

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        ids: list[int] = []
        for past_turn in range(turn):
            ids += self.prompts(self.session, past_turn).tolist()
            ids += replies[past_turn].token_ids or []
        ids += self.prompts(self.session, turn).tolist()
        limit = self.session.rounds[turn].decode_tokens
        headers = {"x-dynamo-session-id": str(self.session_id)}
        if turn == len(self.session.rounds) - 1:
            headers["x-dynamo-session-final"] = "true"
        return Ask(body={**body_of(ids, limit), EXTRA_HEADERS: headers}, prompt_len=len(ids), asked_tokens=limit)


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


async def _warm_up(endpoint: Endpoint, ids: Sequence[int], check: Callable[[], None]) -> None:
    """Send a request that belongs to no session, because a first request takes longer than any other."""
    async with endpoint.sending() as send:
        (reply,) = await _result_or_failure(asyncio.gather(send(body_of(ids, 2), time.monotonic)), check)
    if reply.error is not None:
        raise RunError(f"frontend='dynamo': the request that warms up failed: {reply.error}")


async def _drive(
    endpoint: Endpoint, conversations: Sequence[SessionConversation], check: Callable[[], None]
) -> tuple[list[Exchange], float]:
    """Send all requests. Return their exchanges, and when the run began (its time 0) on this machine's monotonic clock."""
    zeros_s: list[float] = []

    async with endpoint.sending() as send:

        async def sending(body: Mapping[str, Any], clock: Clock) -> Reply:
            zeros_s.append(time.monotonic() - clock())
            return await send(body, clock)

        exchanges = await _result_or_failure(asyncio.ensure_future(drive_http(conversations, sending)), check)
    errors = [exchange.error for exchange in exchanges if exchange.error is not None]
    if errors:
        raise RunError(f"{len(errors)} of {len(exchanges)} requests failed, the first with: {errors[0]}")
    return exchanges, zeros_s[0]


async def _result_or_failure(work: asyncio.Future[Any], check: Callable[[], None]) -> Any:
    """Return the result of ``work``. Raises the error of ``check`` if a worker fails before."""
    try:
        while not work.done():
            await asyncio.wait((work,), timeout=_LOOK_S)
            check()
        return work.result()
    finally:
        work.cancel()


def seen_by_client(
    exchanges: Sequence[Exchange], run: "ClusterRun", store: Store
) -> "tuple[ClusterRun, Mapping[str, Any]]":
    """The run at the client's times, and facts about the time between client and workers. Raises RunError if the client got other tokens
    than the workers made."""
    from engines.cluster.record import observe

    by_round = {(exchange.session_id, exchange.turn): exchange for exchange in exchanges}
    due_s, replies = [], []
    for row, key in enumerate(zip(run.rounds["session_id"], run.rounds["round"], strict=True)):
        reply, tokens = by_round[key].reply, run.rounds["decode_tokens"][row]
        assert reply is not None
        offset = run.rounds["history"][row] + run.rounds["prefill_tokens"][row]
        if reply.token_ids != store.ids(key[0], offset, offset + tokens):
            raise RunError(f"session {key[0]}, round {key[1]}: the client got other tokens than the workers made")
        due_s.append(by_round[key].due_s)
        replies.append(reply)
    at_client = _at_client_times(run, due_s, replies)
    client, worker = observe(at_client), observe(run)
    added = {"ttft_s": client.ttft_s - worker.ttft_s, "itl_s": client.round_itl_s["mean"] - worker.round_itl_s["mean"]}
    return at_client, {"added": {name: distribution(values[np.isfinite(values)]) for name, values in added.items()}}


def _at_client_times(run: "ClusterRun", due_s: Sequence[float], replies: Sequence[Reply]) -> "ClusterRun":
    """The run with the client's times."""
    from engines.cluster.record import Gaps

    ends_s = [reply.chunks_s[-1] for reply in replies]
    rounds = {
        **run.rounds,
        "ready_s": list(due_s),
        "first_token_s": [reply.chunks_s[0] for reply in replies],
        "finished_s": ends_s,
    }
    last_s: dict[int, float] = {}
    for session, end_s in zip(run.rounds["session_id"], ends_s, strict=True):
        last_s[session] = max(end_s, last_s.get(session, 0.0))
    sessions = {**run.sessions, "finished_s": [last_s[session] for session in run.sessions["session_id"]]}
    gaps: list[tuple[int, float, int]] = []
    for row, reply in enumerate(replies):
        stamps, num_gaps = reply.chunks_s, (reply.completion_tokens or 0) - 1
        if len(stamps) == num_gaps + 1:
            gaps += [(row, gap, 1) for gap in np.diff(stamps).tolist()]
        elif num_gaps > 0:  # several tokens came as one piece
            gaps.append((row, (stamps[-1] - stamps[0]) / num_gaps, num_gaps))
    all_gaps = Gaps(
        np.array([row for row, _, _ in gaps], dtype=np.int64),
        np.array([gap for _, gap, _ in gaps], dtype=np.float64),
        np.array([count for _, _, count in gaps], dtype=np.int64),
    )
    return replace(run, rounds=rounds, sessions=sessions, gaps=all_gaps)


# -- the servers ------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_ROUTER = "engines.ampd.live.dynamo_router"
START_S = 120.0
_PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")


@dataclass(frozen=True, kw_only=True)
class OverDynamo:
    limits: Limits
    tokenizer: Path | None
    """A checkpoint's folder; None for the embedded tokenizer, which has a text for every id of the tiny model."""

    @property
    def _environment(self) -> ServerEnvironment:
        return environments_of("dynamo")["cpu"]

    @property
    def basis(self) -> str:
        return hashlib.sha256(repr((self._environment.recipe, self._packages)).encode()).hexdigest()[:12]

    @property
    def _packages(self) -> Mapping[str, str]:
        installed = self._environment.packages or {}
        return {name: installed[name] for name in _PACKAGES if name in installed}

    def check_machine(self) -> None:
        self._environment.require_installed(otherwise="leave frontend out")
        require_client()

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: "Prompts", store: Store, fleet: "Fleet"
    ) -> "FrontRun":
        from engines.ampd.live.record import Mark

        with log_folder("ampd-dynamo") as folder, self._started(deciding, folder) as (url, startup_s):
            logger.info("Dynamo's frontend answers after %.1f s; logs are in %s", startup_s, folder)
            first_mark = Mark.of(store, fleet.worker_ids)
            endpoint = Endpoint(url=url, timeout_s=GIVEN_UP_S)
            conversations = [SessionConversation(session=session, prompts=prompts) for session in sessions]
            longest = max(sessions, key=lambda each: each.rounds[0].prefill_tokens)
            try:
                asyncio.run(_warm_up(endpoint, prompts(longest, 0).tolist(), fleet.check))
                store.call("forget")
                # Keep the warm-up's decision in the log, because it drew from the router's random numbers like every other.
                mark = replace(Mark.of(store, fleet.worker_ids), decision=first_mark.decision)
                exchanges, zero_s = asyncio.run(_drive(endpoint, conversations, fleet.check))
            except RunError as error:
                raise RunError(f"{error}; all that Dynamo said: {folder}") from error
            end_s = time.monotonic() - zero_s
            started_s = store.clock.now() - end_s
        lags_s = {}
        for exchange in exchanges:
            if exchange.turn == 0 and exchange.sent_s is not None:
                lags_s[exchange.session_id] = max(exchange.sent_s - exchange.due_s, 0.0)
        return FrontRun(
            began=started_s,
            end_s=end_s,
            mark=mark,
            lags_s=[lags_s[session.session_id] for session in sessions],
            exchanges=exchanges,
            facts={"name": "dynamo", "packages": dict(self._packages), "startup_s": round(startup_s, 1)},
        )

    @contextmanager
    def _started(self, deciding: Deciding, folder: Path) -> Iterator[tuple[str, float]]:
        model = write_tiny(folder / "model") if self.tokenizer is None else self.tokenizer
        place = Place(folder=folder, port=free_port(), model=str(model.absolute()), is_local=True)
        spec, path = folder / "router.pickle", folder / "path"
        router_spec = RouterSpec(deciding=deciding, limits=self.limits, model=place.model, served_name=SERVED_NAME)
        router_spec.write(spec)
        path.mkdir()
        # Link only this package: the rest of the project's environment would hide Dynamo's packages.
        (path / "engines").symlink_to(Path(engines.__path__[0]).absolute())
        router = Command(
            name="router",
            arguments=(str(self._environment.python), "-P", "-m", _ROUTER, str(spec)),
            environment={**variables(place), "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        url = f"http://127.0.0.1:{place.port}"
        commands = (frontend(self._environment, place, router="round-robin"), router)
        address = Address(url=url, model=SERVED_NAME, paths=("/health",))
        with running("dynamo", commands, address, folder=folder, within_s=START_S) as startup_s:
            yield url, startup_s


GIVEN_UP_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class FrontRun:
    began: float
    """The begin of the run, on the store's clock."""
    end_s: float
    mark: "Mark"
    """The state of the store before the run."""
    lags_s: list[float]
    """How many seconds after its due time each session's first round was asked."""
    exchanges: Sequence[Exchange] | None = None
    """The exchanges of a client; None if only the store times rounds."""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Direct:
    """Calls the coordinator directly, in this process."""

    basis = ""

    def check_machine(self) -> None:
        pass

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: "Prompts", store: Store, fleet: "Fleet"
    ) -> FrontRun:
        from engines.ampd.live.coordinator import serve
        from engines.ampd.live.record import Mark

        coordinator = deciding.coordinator(store)
        mark = Mark.of(store, fleet.worker_ids)
        began = serve(coordinator, sessions, prompts, until_s=GIVEN_UP_S, on_turn=lambda ended: fleet.check())
        end_s = store.clock.now() - began
        arrived = [float(store.fields("session", session.session_id)["arrived_s"]) - began for session in sessions]
        return FrontRun(
            began=began,
            end_s=end_s,
            mark=mark,
            lags_s=[max(time_s - session.arrival_s, 0.0) for time_s, session in zip(arrived, sessions, strict=True)],
        )


Front = OverDynamo | Direct
"""How sessions reach the workers. ``basis`` identifies the software that it uses besides this repository's code."""
