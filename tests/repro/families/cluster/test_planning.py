"""AMPD's planner as a system: what its runs hold, what it refuses, and that timing changes no plan."""

from typing import Any

from support.cells import a_cell

from repro.families.cluster.ampd import AMPD, PLANNER_SYSTEM, PLANNING
from repro.families.cluster.ampd_settings import resolve
from repro.families.cluster.deployments import best_plans
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare


def cell(rate: float | None = 0.6, seed: int = 0, trace: str = "toolbench", **knobs: Scalar) -> Cell:
    return a_cell(
        PLANNER_SYSTEM,
        dataset=trace,
        platform="h20x32",
        executor="roofline",
        rate=rate,
        seed=seed,
        **{"model": "Qwen3-32B", **knobs},
    )


def summary(asked: Cell) -> dict[str, Any]:
    experiment = prepare(asked)
    record = experiment.run()
    PLANNING.check_tables(record)
    assert PLANNING.assess(record).valid
    return PLANNING.summarize(record)


def test_it_plans_what_ampd_serves_on():
    """A run of ampd with ``deployment=planner`` is on the first plan of seed 0."""
    served = a_cell(
        "ampd", dataset="toolbench", platform="h20x32", executor="roofline", rate=0.6, seed=3, model="Qwen3-32B"
    )
    (best,) = best_plans(resolve(served, AMPD).ground, 0.6)
    plans = summary(cell())["plans"]
    assert len(plans) == 3
    assert plans[0]["deployment"] == str(best.deployment)
    assert plans[0]["worst_of_slo"] == best.value
    assert [plan["worst_of_slo"] for plan in plans] == sorted(plan["worst_of_slo"] for plan in plans)


def test_timed_runs_are_measured_and_plan_the_same():
    plain, timed = prepare(cell()), prepare(cell(timed=True))
    assert (plain.deployment.obtained, timed.deployment.obtained) == ("composed", "measured")
    assert plain.run() == plain.run()
    seconds = summary(cell(timed=True))
    assert all(seconds[name] >= 0 for name in ("coefficients_s", "solve_s", "routing_s", "ordering_s"))
    without = summary(cell())
    assert without["plans"] == seconds["plans"]
    assert without["coefficients_s"] is None


def test_a_cluster_larger_than_the_platform_can_be_planned():
    (plan, *_) = summary(cell(num_gpus=256, rate=19.2, num_prompts=300))["plans"]
    assert plan["worst_of_slo"] > 0
