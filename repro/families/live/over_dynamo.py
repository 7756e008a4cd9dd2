"""Sessions over HTTP: NVIDIA Dynamo's own frontend, behind it the coordinator as its routing component, and the live workers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engines
from baselines.servers.checkpoint import write_tiny
from baselines.servers.dynamo import frontend, variables
from baselines.servers.environment import ServerEnvironment, environments_of
from baselines.servers.launch import SERVED_NAME, Place
from baselines.servers.process import Address, Command, free_port, running
from engines.ampd.live.intake import Deciding, Limits, RouterSpec
from engines.ampd.live.store import Store
from engines.cluster.sessions import Session
from engines.errors import RunError
from repro.families.http.endpoint import Endpoint, require_client
from repro.families.live.http_client import Driving, HttpClient
from repro.families.servers import log_folder

if TYPE_CHECKING:
    from engines.ampd.live.coordinator import Prompts
    from engines.ampd.live.fleet import Fleet
    from engines.ampd.live.record import Mark


logger = logging.getLogger(__name__)

_ROUTER = "engines.ampd.live.dynamo_router"
START_S = 120.0
_PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")


@dataclass(frozen=True, kw_only=True)
class OverDynamo:
    limits: Limits
    tokenizer: Path | None
    """A checkpoint's folder; None for the embedded one, which has a text for every id of the tiny model."""

    modules = (__name__, _ROUTER)

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
        self, deciding: Deciding, sessions: Sequence[Session], prompts: Prompts, store: Store, fleet: Fleet
    ) -> FrontRun:
        from engines.ampd.live.record import Mark

        with log_folder("ampd-dynamo") as folder, self._started(deciding, folder) as (url, startup_s):
            logger.info("Dynamo's frontend answers after %.1f s; logs are in %s", startup_s, folder)
            before = Mark.of(store, fleet.worker_ids)
            driving = Driving(Endpoint(url=url, timeout_s=GIVEN_UP_S), sessions, prompts)
            try:
                asyncio.run(driving.warm_up(fleet.check))
                store.call("forget")
                # That request's decision drew from the router's random numbers as every other does.
                mark = replace(Mark.of(store, fleet.worker_ids), decision=before.decision)
                exchanges = asyncio.run(driving.run(fleet.check))
            except RunError as error:
                raise RunError(f"{error}; all that Dynamo said: {folder}") from error
            end_s = time.monotonic() - driving.zero_s
            began = store.clock.now() - end_s
        lags_s = {}
        for each in (each for each in exchanges if each.turn == 0):
            assert each.sent_s is not None
            lags_s[each.session_id] = max(each.sent_s - each.due_s, 0.0)
        return FrontRun(
            began=began,
            end_s=end_s,
            mark=mark,
            lags_s=[lags_s[each.session_id] for each in sessions],
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
    """On the store's clock."""
    end_s: float
    mark: Mark
    """What the store held before."""
    lags_s: list[float]
    """How much later than due each session's first round was asked for."""
    client: HttpClient | None = None
    """None where rounds are timed in the store alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Direct:
    """The coordinator in this process, asked by call."""

    basis = ""
    modules: tuple[str, ...] = ()

    def check_machine(self) -> None:
        pass

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: Prompts, store: Store, fleet: Fleet
    ) -> FrontRun:
        from engines.ampd.live.coordinator import serve
        from engines.ampd.live.record import Mark

        coordinator = deciding.coordinator(store)
        mark = Mark.of(store, fleet.worker_ids)
        began = serve(coordinator, sessions, prompts, until_s=GIVEN_UP_S, on_turn=lambda ended: fleet.check())
        end_s = store.clock.now() - began
        arrived = [float(store.fields("session", each.session_id)["arrived_s"]) - began for each in sessions]
        return FrontRun(
            began=began,
            end_s=end_s,
            mark=mark,
            lags_s=[max(at - session.arrival_s, 0.0) for at, session in zip(arrived, sessions, strict=True)],
        )


Front = OverDynamo | Direct
"""How sessions reach the workers: ``basis`` says what it consists of besides this repository's code."""
