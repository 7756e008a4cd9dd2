"""The servers themselves, where they are installed ('repro install vllm', 'repro install dynamo'); minutes on a CPU."""

import pytest
from support.cells import a_cell

from baselines.servers.environment import ServerEnvironment, environments_of
from repro.runs.experiment import prepare

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

GSM8K = ("gsm8k", {"num_prompts": 12, "gen_length": 8})
SESSIONS = ("hotpotqa", {"num_prompts": 2, "length_scale": 0.05, "delay_mean_s": 0.1})


def needs(environment: ServerEnvironment) -> None:
    if environment.packages is None:
        pytest.skip(f"{environment.name} is not installed in {environment.folder}: 'repro install {environment.name}'")


@pytest.mark.parametrize(
    ("system", "settings", "workload"),
    [
        ("vllm", {}, GSM8K),
        ("vllm", {}, SESSIONS),
        ("vllm", {"policy": "laps"}, GSM8K),
        ("dynamo", {}, GSM8K),
        ("dynamo", {"workers": "python", "num_workers": 2}, SESSIONS),
    ],
    ids=["vllm requests", "vllm sessions", "vllm with laps", "dynamo requests", "dynamo sessions"],
)
def test_a_small_workload_is_completed(system, settings, workload):
    needs(environments_of(system)["cpu"])
    dataset, knobs = workload
    cell = a_cell(system, dataset=dataset, rate=5.0, **{**knobs, **settings})
    experiment = prepare(cell)
    record = experiment.run()
    assert len(record.requests["request_id"]) == sum(len(each.turns) for each in experiment.workload.conversations)
    assert set(record.requests["status"]) == {"ok"}
    assert record.requests["output_len"] == record.requests["asked_tokens"]
