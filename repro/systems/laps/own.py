"""Policies of one's own in LAPS's place: on its instances and pools, with its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baselines.ar.sglang import CHUNKED_PREFILL_SIZE
from engines.errors import require
from engines.knobs import knobs_of
from engines.laps.graphs import WithGraphs, graph_choice
from engines.laps.step_model import StepModel
from engines.laps.system import LapsConfig, PrefillSystem, laps
from engines.laps.temporal import TemporalConfig
from engines.laps.waiting import WaitConfig
from engines.policies.own import BATCHER, INSTANCE_ROUTER, OPEN_QUEUE, Own, check_beside, named_in
from engines.policies.task import NO_OBJECTIVE_S, OpenQueue, Slo
from repro.systems.laps.settings import Settings

POLICIES = (BATCHER, OPEN_QUEUE, INSTANCE_ROUTER)
_REPLACED = {"batcher": (*knobs_of(WaitConfig), *knobs_of(TemporalConfig))}
"""Knobs of what each stands in place of."""


@dataclass(frozen=True, kw_only=True)
class OwnPolicies:
    batcher: str | None = None
    """A batching policy of one's own as module:NAME, in place of the two queues and the waiting; made for every instance, with what it
    takes of max_num_batched_tokens, max_num_seqs, model and slo."""
    queue: str | None = None
    """An order of waiting prefills of one's own as module:NAME, an OpenQueue, beside a batcher of one's own; made likewise, with slo."""
    router: str | None = None
    """A router of one's own as module:NAME, which picks an instance; made for every run, with what it takes of model, slo and seed."""


def own_policies(settings: Settings, options: Mapping[str, Any]) -> dict[str, Own]:
    """By kind. Refuses what cannot be, knobs beside them of what they replace included."""
    found = named_in(options, POLICIES)
    check_beside(found, _REPLACED, options)
    for kind, own in found.items():
        require(
            kind != "queue" or "batcher" in found,
            f"queue={own.where!r} has no effect with the two queues of LAPS: give a batcher beside it",
        )
        require(
            kind != "router" or settings.num_instances > 1,
            f"router={own.where!r} has no effect on one instance: leave it out",
        )
        require(
            kind != "router" or options.get("pooling") != "global",
            f"router={own.where!r} has no effect with pooling='global', where instances pull: keep one",
        )
    return found


def with_own(settings: Settings, model: StepModel, config: LapsConfig, own: Mapping[str, Own]) -> PrefillSystem:
    """LAPS with these in place of its own."""
    system, part = laps(model, config), settings.part
    slo = Slo(ttft_s=settings.deadline_s or NO_OBJECTIVE_S, itl_s=NO_OBJECTIVE_S)
    told = {
        "max_num_batched_tokens": max(1, round(part.length_scale * CHUNKED_PREFILL_SIZE)),
        "max_num_seqs": part.max_num_seqs,
        "model": model,
        "slo": slo,
        "seed": settings.workload.streams[0].conversations.seed,
    }
    offered = {kind: {name: told[name] for name in each.kind.offered} for kind, each in own.items()}
    for kind, each in own.items():
        each.checked(**offered[kind])
    changes: dict[str, Any] = {}
    if (batcher := own.get("batcher")) is not None:
        choice = graph_choice(config.graphs, model, tuple(model.shapes))
        changes["make_batching"] = lambda: WithGraphs(batcher.made(**offered["batcher"]), choice)
        changes["make_queue"] = OpenQueue
    for kind in own.keys() - {"batcher"}:
        changes[f"make_{kind}"] = partial(own[kind].made, **offered[kind])
    return replace(system, **changes)
