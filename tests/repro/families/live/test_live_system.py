"""AMPD on live workers, as a system of the harness."""

import importlib
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from support.cells import a_cell
from support.command import table_of
from support.live import needs_redis
from support.own import Newest
from support.tables import data_beside

from engines.ampd.live.profile import FIRST_ID
from engines.errors import RunError, UserError
from engines.models.qwen2_config import tiny_causal
from engines.policies.views import PrefillTask
from repro.cli.run_table import print_runs
from repro.families.live.system import LIVE
from repro.runs.cell import Cell
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS

DATA = data_beside(__file__, "live_system")


def cell(**changes: Any) -> Cell:
    return a_cell(**{"system": "ampd-live", "dataset": "toolbench", "rate": 1.0, **changes})


def prepared(asked: Cell) -> tuple[Any, Any]:
    return SYSTEMS.get(asked.system).prepare(asked)


def test_a_machine_without_redis_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    deployment, _ = prepared(cell(num_prompts=2))
    missing = "redis-server" if find_spec("redis") is not None else "redis client"
    with pytest.raises(UserError, match=f"{missing} is not installed"):
        deployment.check_machine()


@pytest.mark.skipif(find_spec("redis") is None, reason="needs the extra redis: the client is not installed")
@pytest.mark.parametrize(("address", "said"), DATA["a_redis_that_is_not_there_is_seen_before_work"])
def test_a_redis_that_is_not_there_is_seen_before_work(address, said):
    deployment, _ = prepared(cell(num_prompts=2, redis=address))
    with pytest.raises(UserError, match=said) as caught:
        deployment.check_machine()
    assert "secret" not in str(caught.value)


class Nearby:
    """A router as in a simulation: called with what was measured."""

    def __init__(self, *, model: object, slo: object, seed: int) -> None:
        self.told = model, slo, seed

    def route(self, task: object, home: object, prefills: object, now: float) -> None:
        raise NotImplementedError


def test_a_router_of_one_s_own_decides_as_in_a_simulation(monkeypatch):
    where = f"{__name__}:Nearby"
    deployment, _ = prepared(cell(num_prompts=2, router=where))
    made = deployment._policies(SimpleNamespace(performance="measured"))["router"]
    assert isinstance(made, Nearby)
    assert made.told == ("measured", deployment.settings.slo, 0)


class Latest(Newest):
    """Numbers what it takes, by a count that it keeps, and lets the first prompts gather, so that there is an order to choose."""

    num_taken = 0

    def take(self, now: float) -> PrefillTask:
        first = self.peek(now)
        if first.session_id < FIRST_ID and first.round_index == 0:
            time.sleep(0.1)
        task = super().take(now)
        self.num_taken += 1
        task.postponed = self.num_taken
        return task


class Sulks(Newest):
    """Takes what a profile asks, and no more."""

    def take(self, now: float) -> PrefillTask:
        if self.peek(now).session_id < FIRST_ID:
            raise LookupError("enough")
        return super().take(now)


@pytest.fixture
def small(monkeypatch):
    """A model and a profile of a test's size."""
    profile = importlib.import_module("engines.ampd.live.profile")
    grid = profile.ProfileGrid(
        tokens=(8, 32, 64, 128, 256), histories=(0, 64), batches=(1, 2), contexts=(32, 64), steps=3, repeats=1
    )
    monkeypatch.setattr(profile, "profile_live", partial(profile.profile_live, grid=grid))
    monkeypatch.setattr("repro.families.live.system._TINY_CONFIG", tiny_causal(d_model=32, n_layers=2))


def own_cell(**knobs: Any) -> Cell:
    own = {"workload": "support.own:Dialogues", "num_prompts": 6, "most": 3, "every_s": 0.0, "arrivals": "trace"}
    where = {"deployment": "P:TP1x1 D:TP1x2", "adaptive_routing": False}
    return cell(dataset="Dialogues", rate=None, **own, **where, **knobs)


def ran(asked: Cell) -> tuple[RunRecord, int]:
    """A run of six sessions, which end well, and how many rounds they have."""
    deployment, workload = prepared(asked)
    found = deployment.run(workload)
    assert found.requests["status"] == ["ok"] * 6
    return found, sum(len(each.rounds) for each in workload.sessions)


@needs_redis
def test_a_binder_and_a_queue_of_one_s_own_decide_in_real_processes(small, monkeypatch):
    """Each decision is in the run, is the class's, and is made again by others of it from what the log says was asked."""
    logs: list[list[str]] = []
    decisions = importlib.import_module("engines.ampd.live.decisions")
    again = decisions.replay
    monkeypatch.setattr(decisions, "replay", lambda lines, **how: logs.append(lines) or again(lines, **how))
    found, num_rounds = ran(own_cell(binder="support.own:Turns", every=3, queue=f"{__name__}:Latest"))
    assert found.requests["worker_id"] == [0, 0, 1, 0, 0, 1]
    # What the profile took is forgotten.
    assert sorted(found.tables["tasks"]["postponed"]) == [*range(1, num_rounds + 1)]
    assert found.facts["decisions"] == {"bind": 6, "route": num_rounds, "order": num_rounds, "not_made_again": 0}
    (lines,) = logs
    orders = [each for each in (json.loads(line[1:]) for line in lines) if each["kind"] == "order"]
    assert max(len(each["queue"]) for each in orders) > 1
    for number, each in enumerate(orders, 1):
        assert each["outcome"][0] == [each["queue"][-1]["task_id"], number]


@needs_redis
def test_on_time_decides_in_real_processes(small):
    """Also by what its queues keep: the log's decisions are made again by others that keep it."""
    found, num_rounds = ran(own_cell(queue_order="on-time", share=0.4, patience=1.0, slo_ttft_s=0.02))
    assert found.facts["decisions"] == {"bind": 6, "route": num_rounds, "order": num_rounds, "not_made_again": 0}


@needs_redis
def test_a_queue_that_fails_in_a_worker_ends_the_run_with_its_sentence(small):
    deployment, workload = prepared(own_cell(queue=f"{__name__}:Sulks"))
    with pytest.raises(RunError, match=r"^policy Sulks\.take fails \(LookupError: enough\): correct it \(worker 2\)$"):
        deployment.run(workload)


def test_redis_scripts_are_part_of_what_is_behind_the_numbers(monkeypatch):
    deployment, _ = prepared(cell(num_prompts=2))
    other, _ = prepared(cell(num_prompts=2, slo_ttft_s=0.1))
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
    deployment, workload = prepared(cell(num_prompts=2))
    with pytest.raises(RunError, match=r"no decode worker is left \(worker 0 ended with exit code 0\)"):
        deployment.run(workload)
    assert [process.exitcode is not None for process in left] == [True]


def record(**facts: Any) -> RunRecord:
    """A simulated run in a live one's place."""
    deployment, workload = prepared(cell(system="ampd", platform="h20x32", executor="roofline", num_prompts=8))
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
    run = SimpleNamespace(family=LIVE, title="AMPD live", cell=cell(), obtained="measured", record=found, ran=None)
    run.facts, run.summary, run.validity = found.facts, summary, LIVE.assess(found)
    run.manifest, run.sum_of = {"facts": found.manifest}, lambda column: (1, 1)
    print_runs([[run]])
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
