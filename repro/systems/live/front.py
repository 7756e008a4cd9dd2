"""How sessions reach the coordinator: a front serves them all and says what it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engines.ampd.live.intake import Deciding
from engines.ampd.live.store import Store
from engines.cluster.sessions import Session

if TYPE_CHECKING:
    from engines.ampd.live.fleet import Fleet
    from engines.ampd.live.record import Mark
    from engines.ar.torch.run import Prompts
    from repro.systems.live.http_client import HttpClient

GIVEN_UP_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Served:
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


class Front(Protocol):
    @property
    def basis(self) -> str:
        """What it consists of besides this repository's code."""
        ...

    @property
    def modules(self) -> tuple[str, ...]: ...

    def check_machine(self) -> None: ...

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: Prompts, store: Store, fleet: Fleet
    ) -> Served: ...


class Direct:
    """The coordinator in this process, asked by call."""

    basis = ""
    modules: tuple[str, ...] = ()

    def check_machine(self) -> None:
        pass

    def serve(
        self, deciding: Deciding, sessions: Sequence[Session], prompts: Prompts, store: Store, fleet: Fleet
    ) -> Served:
        from engines.ampd.live.coordinator import serve
        from engines.ampd.live.record import Mark

        coordinator = deciding.coordinator(store)
        mark = Mark.of(store, fleet.worker_ids)
        began = serve(coordinator, sessions, prompts, until_s=GIVEN_UP_S, on_turn=lambda ended: fleet.check())
        end_s = store.clock.now() - began
        arrived = [float(store.fields("session", each.session_id)["arrived_s"]) - began for each in sessions]
        return Served(
            began=began,
            end_s=end_s,
            mark=mark,
            lags_s=[max(at - session.arrival_s, 0.0) for at, session in zip(arrived, sessions, strict=True)],
        )
