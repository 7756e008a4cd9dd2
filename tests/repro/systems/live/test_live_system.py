"""AMPD on live workers, as a system of the harness."""

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import table_of
from support.live import needs_redis

from engines.errors import RunError, UserError
from repro.cli.run_table import print_runs
from repro.runs.cell import Cell
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS
from repro.systems.live.family import LIVE


def cell(**changes: Any) -> Cell:
    given = {"dataset": "toolbench", "platform": "cpu-tiny", "executor": "torch", "rate": 1.0} | {
        name: changes.pop(name) for name in ("dataset", "platform", "executor") if name in changes
    }
    return Cell(system="ampd-live", seed=0, knobs=tuple(changes.items()), **given)


def test_a_machine_without_redis_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    missing = "redis-server" if find_spec("redis") is not None else "redis client"
    with pytest.raises(UserError, match=f"{missing} is not installed"):
        deployment.check_machine()


@pytest.mark.skipif(find_spec("redis") is None, reason="needs the extra redis: the client is not installed")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("x", r"redis='x' is no address \(Redis URL must specify"),
        ("redis://127.0.0.1:1", r"redis='redis://127.0.0.1:1' does not answer \(.*refused"),
        ("redis://:secret@127.0.0.1:1", r"redis='redis://\*\*\*@127.0.0.1:1' does not answer"),
        ("unix:///nonexistent", r"redis='unix:///nonexistent' does not answer"),
    ],
)
def test_a_redis_that_is_not_there_is_seen_before_work(address, said):
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, redis=address))
    with pytest.raises(UserError, match=said) as caught:
        deployment.check_machine()
    assert "secret" not in str(caught.value)


class Nearby:
    """A router as in a simulation: called with what was measured."""

    def __init__(self, *, model: object, slo: object, seed: int) -> None:
        self.told = model, slo, seed


def test_a_router_of_one_s_own_decides_as_in_a_simulation(monkeypatch):
    where = f"{__name__}:Nearby"
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, router=where))
    made = deployment._router(SimpleNamespace(performance="measured"))
    assert isinstance(made, Nearby)
    assert made.told == ("measured", deployment.settings.slo, 0)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"router": "support.live:needs_redis_not"}, "has no 'needs_redis_not'"),
        ({"router": "repro.systems.live.settings:MAX_WORKERS"}, "cannot be called: name a class, or a function"),
        ({"router": "support.cells:Cell", "alpha": 0.8}, "alpha=0.8 has no effect with router="),
    ],
)
def test_what_is_no_router_is_refused_before_work(knobs, said):
    with pytest.raises(UserError, match=said):
        SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, **knobs))


def test_redis_scripts_are_part_of_what_is_behind_the_numbers(monkeypatch):
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    other, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, slo_ttft_s=0.1))
    assert deployment.basis != other.basis
    assert deployment.obtained == "measured"


@needs_redis
def test_the_last_worker_of_a_role_ends_the_run_in_its_profile(monkeypatch):
    from engines.ampd.live import fleet

    class Doomed(fleet.Fleet):
        """Its home is killed once the profile asks how it is, and the processes that it had are kept."""

        def check(self) -> None:
            processes = self._processes
            if (home := processes[0]).exitcode is None:
                left.append(processes[1])
                os.kill(self.pid(0), signal.SIGTERM)  # of which it ends with code 0
                home.join()
            super().check()

    left: list[Any] = []
    monkeypatch.setattr(fleet, "Fleet", Doomed)
    deployment, workload = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    with pytest.raises(
        RunError, match=r"no decode worker is left \(worker 0 ended with exit code 0\): see whether memory ran out"
    ):
        deployment.run(workload)
    assert [process.exitcode is not None for process in left] == [True]


def record(**facts: Any) -> RunRecord:
    """A simulated run in a live one's place."""
    asked = replace(cell(platform="h20x32", executor="roofline", num_prompts=8), system="ampd")
    deployment, workload = SYSTEMS.get("ampd").prepare(asked)
    found = deployment.run(workload)
    facts = {"lost_workers": [], "roles": {"0": "decode", "1": "prefill"}, "simulated": {}} | facts
    return replace(found, manifest={**found.manifest, "facts": {**found.facts, **facts}})


def test_lost_workers_are_in_verdict_and_table():
    assert LIVE.assess(record()).valid
    lost = record(lost_workers=[1, 1])
    (reason,) = LIVE.assess(lost).reasons
    assert reason.startswith("prefill worker 1, prefill worker 1 died or fell silent: what was measured is less than ")
    assert LIVE.summarize(lost)["lost_workers"] == 2


def test_the_table_has_a_clients_metrics_and_the_simulators_prediction(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    found = record(simulated={"ttft_s mean": {"measured": 0.2, "predicted": 0.15, "error": -0.25}})
    summary, rounds = LIVE.summarize(found), found.tables["rounds"]
    count = len(rounds["round"])
    waits = [first - ready for first, ready in zip(rounds["first_token_s"], rounds["ready_s"], strict=True)]
    span_s = max(found.requests["finished_s"]) - min(found.requests["arrival_s"])
    print_runs(
        [
            [
                SimpleNamespace(
                    family=LIVE,
                    manifest={"facts": found.manifest},
                    sum_of=lambda column: (1, 1),
                    title="AMPD live",
                    cell=cell(),
                    summary=summary,
                    facts=found.facts,
                    record=found,
                    obtained="measured",
                    validity=LIVE.assess(found),
                )
            ]
        ]
    )
    (shown,) = table_of(capsys.readouterr().out)
    assert len({each.title for each in LIVE.shown}) == len(LIVE.shown)
    assert shown["in tok"] == f"{sum(rounds['prefill_tokens']) / count:.1f}"
    assert shown["out tok"] == f"{sum(rounds['decode_tokens']) / count:.1f}"
    assert shown["ttft ms"] == f"{1000 * sum(waits) / count:.1f}"
    assert shown["sim ttft"] == "150.0 (-25 %)"
    assert shown["sim tpot"] == "-"
    assert shown["tpot ms"] == f"{1000 * summary['itl_s']['mean']:.1f}"
    assert shown["itl p95 ms"] == f"{1000 * summary['itl_p95_s']['mean']:.1f}"
    assert shown["goodput/s"] == f"{summary['slo_attainment'] * count / span_s:.1f}"
    assert shown["lost"] == "0"
