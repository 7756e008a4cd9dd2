"""Runs of one family do not rest on the code of another: an edit of AMPD leaves stored runs of dLLM-Serve as they are."""

import pytest
from support.cells import a_cell

from repro.runs.code import place
from repro.runs.experiment import prepare
from repro.systems.cluster.planning import PLANNER_SYSTEM

FAMILIES = {
    "dllm": ("engines.dllm", "baselines.dllm", "repro.systems.dllm", "repro.tasks"),
    "laps": ("engines.laps", "repro.systems.cluster.laps", "repro.workloads.conversations"),
    "ar": (
        "engines.ar",
        "engines.cluster",
        "engines.ampd",
        "baselines.ar",
        "repro.systems.cluster.ampd",
        "repro.workloads.sessions",
    ),
}


def modules_of(system: str) -> set[str]:
    is_ar = system not in ("dllm-serve", "sparse-dllm")
    cell = a_cell(
        system,
        dataset="toolbench" if is_ar else "osc",
        platform="h20x32" if is_ar else "rtx4090",
        executor="roofline",
        rate=0.5,
    )
    return set(prepare(cell).code.modules)


@pytest.mark.parametrize(
    ("system", "family"),
    [("dllm-serve", "dllm"), ("sparse-dllm", "dllm"), ("ampd", "ar"), ("vllm-sim", "ar"), (PLANNER_SYSTEM, "ar")],
)
def test_code_of_another_family_decides_nothing(system, family):
    found = modules_of(system)
    assert "repro.systems.platforms" in found
    others = tuple(name for other, names in FAMILIES.items() if other != family for name in names)
    assert sorted(name for name in found if f"{name}.".startswith(tuple(f"{other}." for other in others))) == []


@pytest.mark.parametrize(
    ("system", "platform", "executor"),
    [
        ("dllm-serve", "rtx4090", "roofline"),
        ("dllm-serve", "cpu-tiny", "torch"),
        ("sparse-dllm", "cpu-tiny", "torch"),
        ("block-diffusion", "h200-sdar-8b", "roofline"),
        ("block-diffusion", "cpu-tiny", "torch"),
        ("ampd", "h20x32", "roofline"),
        ("laps", "h200", "roofline"),
    ],
)
def test_every_module_that_a_deployment_names_is_there(system, platform, executor):
    dataset = {"ampd": "toolbench", "laps": "lmsys-chat-1m"}.get(system, "osc")
    rate = None if system == "laps" else 0.5
    found = prepare(a_cell(system, platform=platform, executor=executor, dataset=dataset, rate=rate, num_prompts=64))
    assert [name for name in found.deployment.modules if place(name) is None] == []


def test_only_systems_that_plan_rest_on_the_planner():
    assert "repro.systems.cluster.planning" not in modules_of("ampd")
    assert "engines.ampd.planner" in modules_of("ampd")
