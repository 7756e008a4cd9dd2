"""AMPD on live workers: from a cell to processes and their sessions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.ampd.live.intake import Limits
from engines.ampd.system import AmpdConfig
from engines.errors import require
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.systems.live.deployment import MAX_LEN, LiveDeployment
from repro.systems.live.family import LIVE
from repro.systems.live.front import Direct, Front
from repro.systems.live.settings import TINY, LiveKnobs, Settings, resolve
from repro.workloads.sessions import SessionWorkload, build_sessions

_MODULES = (
    "engines.ampd.live.prefill",
    "engines.ampd.live.decode",
    "engines.ampd.live.twin",
    "repro.systems.live.system",
)


@dataclass(frozen=True, kw_only=True)
class LiveSystem:
    name: str
    title: str
    summary: str

    @property
    def family(self) -> Family:
        return LIVE

    @property
    def knobs(self) -> tuple[type, ...]:
        return LiveKnobs, AmpdConfig

    def prepare(self, cell: Cell) -> tuple[LiveDeployment, SessionWorkload]:
        settings = resolve(cell, self.name)
        workload = build_sessions(settings.workload)
        longest = max(session.context_tokens for session in workload.sessions)
        most = min(MAX_LEN, settings.knobs.kv_tokens)
        require(
            longest < most,
            f"dataset={workload.name!r} has a session of {longest} tokens and a live worker holds {most}: shorten it",
        )
        front = _front(settings)
        deployment = LiveDeployment(
            system=self.name,
            title=self.title,
            settings=settings,
            seed=cell.seed,
            front=front,
            modules=(*_MODULES, *front.modules),
        )
        return deployment, workload


def _front(settings: Settings) -> Front:
    if settings.knobs.frontend is None:
        return Direct()
    from repro.systems.live.over_dynamo import OverDynamo

    return OverDynamo(
        limits=Limits(vocab_size=settings.vocab_size, max_len=min(MAX_LEN, settings.knobs.kv_tokens)),
        tokenizer=None if settings.knobs.model == TINY else Path(settings.knobs.model),
    )


AMPD_LIVE = LiveSystem(
    name="ampd-live",
    title="AMPD live",
    summary="AMPD's policies over Redis on prefill and decode processes of this machine, measured",
)
