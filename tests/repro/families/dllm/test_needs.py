"""A policy that decides by what only a model gives is not simulated as something else."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.cells import a_cell
from support.tables import data_beside

from engines.dllm.config import DelayedCache, Phase, Window
from engines.dllm.method import DllmServe, Options, Sampler
from engines.dllm.plan import Request
from engines.dllm.scheduling import PhaseScheduler
from engines.errors import RunError, UserError
from repro.families.dllm.record import DLLM
from repro.families.dllm.system import DllmSystem
from repro.runs.cell import Cell


class Doubtful:
    """Refreshes where the last step was unsure; only a model changes what it knows."""

    caches, window = True, "block"

    def __init__(self) -> None:
        self.confidence = 1.0

    def phase(self, step_in_block: int) -> Phase:
        if step_in_block == 0:
            return Phase.BUILD
        return Phase.REUSE if self.confidence > 0.5 else Phase.BUILD


class Honest(Doubtful):
    needs = frozenset({"confidences"})


class Both(Doubtful):
    needs = frozenset({"ids", "confidences"})


class Odd(Doubtful):
    needs = frozenset({"weather"})


class Word(Doubtful):
    needs = "confidences"


class Counts(Doubtful):
    """State of its own, which no model decides."""

    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Holding:
    caches: bool = True
    window: Window = "block"
    seen: dict[int, float] = field(default_factory=dict)

    def phase(self, step_in_block: int) -> Phase:
        return Phase.BUILD if self.seen.get(step_in_block, 1.0) < 0.5 or step_in_block == 0 else Phase.REUSE


class ByIds(PhaseScheduler):
    needs = frozenset({"ids"})


class Reads(PhaseScheduler):
    """Says nothing of it."""

    def submit(self, request: Request) -> None:
        self.num_ids = len(request.prompt_ids)
        super().submit(request)


class Looks(PhaseScheduler):
    def charge(self, sequence: Any) -> int:
        return int(sequence.query_tokens * sequence.confidence)


def cell(executor: str = "roofline", **knobs: Any) -> Cell:
    platform = "rtx4090" if executor == "roofline" else "cpu-tiny"
    return a_cell(platform=platform, executor=executor, **{"num_prompts": 2, **knobs})


def with_rule(rule: Any, **own: Any) -> DllmSystem:
    class Mine(DllmServe):
        def _sampler(self, family: str, own: Any, options: Options) -> Sampler:
            return replace(super()._sampler(family, own, options), rule=rule)

    for name, value in own.items():
        setattr(Mine, name, value)
    return DllmSystem(Mine())


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Honest(), "refresh rule Honest needs confidences, which a simulation does not know, they depend on the model"),
        (Both(), "refresh rule Both needs confidences and ids, which a simulation does not know"),
        (
            Doubtful(),
            "refresh rule Doubtful may change while it runs, and a simulation has no data that it could change by",
        ),
        (Holding(), "refresh rule Holding may change while it runs"),
        (Odd(), "refresh rule Odd has needs=frozenset({'weather'}): give a set of confidences and ids"),
        (Word(), "refresh rule Word has needs='confidences': give a set of confidences and ids"),
    ],
)
def test_a_rule_on_data_is_refused_before_a_simulation(rule, said):
    with pytest.raises(UserError, match=re.escape(said)):
        with_rule(rule).prepare(cell())


@dataclass(frozen=True)
class Reuses:
    caches: bool = True
    window: Window = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.REUSE


@pytest.mark.parametrize("executor", ["roofline", "torch"])
def test_a_cache_that_was_never_built_is_not_reused(executor):
    with pytest.raises(
        UserError, match="refresh rule Reuses reuses a cache in step 0 of a block, before one was built"
    ):
        with_rule(Reuses()).prepare(cell(executor))


def test_a_method_and_a_scheduler_are_asked_too():
    with pytest.raises(UserError, match="method Mine needs ids, which a simulation does not know"):
        with_rule(DelayedCache(), needs=frozenset({"ids"})).prepare(cell())
    with pytest.raises(UserError, match="scheduler ByIds needs ids, which a simulation does not know"):
        with_rule(DelayedCache()).prepare(cell(scheduler=f"{__name__}:ByIds"))


def test_where_the_model_runs_they_are_prepared():
    deployment, _ = with_rule(Honest()).prepare(cell("torch", scheduler=f"{__name__}:ByIds"))
    assert isinstance(deployment.sampler.rule, Honest)


def test_state_that_no_model_decides_is_simulated():
    deployment, workload = with_rule(Counts()).prepare(cell())
    assert DLLM.assess(deployment.run(workload)).valid


@pytest.mark.parametrize(
    ("name", "said"), data_beside(__file__, "needs")["what_a_simulation_lacks_is_absent_and_no_stand_in"]
)
def test_what_a_simulation_lacks_is_absent_and_no_stand_in(name, said):
    deployment, workload = with_rule(DelayedCache()).prepare(cell(scheduler=f"{__name__}:{name}"))
    with pytest.raises(RunError, match=re.escape(said)):
        deployment.run(workload)
