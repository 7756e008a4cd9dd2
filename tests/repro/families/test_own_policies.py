"""Policies of a user's own, of every kind, by module:NAME or by an installed package's name, with their own knobs."""

import itertools
from importlib import invalidate_caches
from pathlib import Path

import pytest
from support.cells import a_cell, ran
from support.exact_instance import ExactInstance
from support.own import Gather, Stay
from support.refusals import refuses
from support.tables import data_beside

from engines.data import installed
from engines.policies.own import BATCHER, Plugin, knobs_of_policy
from repro.families.cluster import on_torch
from repro.families.platforms import platform
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord
from repro.workbench.grid import Grid


def ampd(**knobs: str | int | float) -> Cell:
    own = {"num_prompts": 12, "deployment": "P:TP2x2 D:TP2x2", **knobs}
    return a_cell("ampd", "toolbench", "h20x32", "roofline", rate=2.0, **own)


def laps(*, executor: str = "roofline", **knobs: str | int | float) -> Cell:
    where = "h200" if executor == "roofline" else "cpu-tiny"
    return a_cell("laps", "lmsys-chat-1m", where, executor, rate=20.0, **{"num_prompts": 60, **knobs})


# ---- a batcher ------------------------------------------------------------------------------------------------


def test_a_batcher_runs_simulated_and_measured_with_its_own_knobs(monkeypatch):
    """The longer it waits for company, the more prompts a step has and the fewer steps there are."""
    monkeypatch.setattr(on_torch, "instance", lambda max_len: ExactInstance())
    for executor in ("roofline", "torch"):
        steps = []
        for window_s in (0.0, 0.2):
            experiment, record = ran(laps(executor=executor, batcher="support.own:Gather", window_s=window_s))
            assert record.obtained == ("measured" if executor == "torch" else experiment.deployment.obtained)
            assert set(record.tables["requests"]["status"]) == {"ok"}
            assert "support" in experiment.code.modules
            steps.append(len(record.tables["steps"]["start_s"]))
        assert steps[1] < 0.8 * steps[0]


def test_both_executors_ask_the_same_batcher_the_same():
    """It is made of the same class and knobs, and told the platform's sizes."""
    made = Plugin(kind=BATCHER, where="support.own:Gather", given=(("window_s", 0.25), ("num_prompts", 3))).make(
        max_num_batched_tokens=64, max_num_seqs=2, model=None, slo=None
    )
    assert made == Gather(64, 2, 0.25)
    assert [*knobs_of_policy(Gather)] == ["window_s"]
    assert [*knobs_of_policy(Stay)] == ["longest"]


def test_a_batcher_keeps_the_graphs_and_the_pools_of_laps():
    (_, record), (_, pools) = (ran(laps(batcher="support.own:Gather", **more)) for more in ({}, {"num_instances": 4}))
    assert any(kind.startswith("graph") for kind in record.tables["steps"]["mode"])
    assert {*pools.tables["instances"]["pool"]} == {"short", "long"}
    assert ran(laps(batcher="support.own:Gather", graphs="none"))[1].tables["steps"]["mode"][0] == "eager"


def test_a_queue_orders_what_a_batcher_takes():
    _, first = ran(laps(batcher="engines.policies.batching:PrefillFirst", max_num_seqs=1))
    _, last = ran(laps(batcher="engines.policies.batching:PrefillFirst", max_num_seqs=1, queue="support.own:Newest"))

    def overtaken(record: RunRecord) -> int:
        started = [*record.tables["requests"]["admitted_s"]]
        return sum(a > b for a, b in itertools.pairwise(started))

    assert overtaken(first) == 0 < overtaken(last)


# ---- of AMPD ---------------------------------------------------------------------------------------------------


def test_a_router_has_knobs_of_its_own():
    local = [
        sum(ran(ampd(router="support.own:Stay", **knobs))[1].tables["tasks"]["is_local"])
        for knobs in ({"longest": 1}, {}, {"longest": 2**20})
    ]
    assert local == sorted(set(local))


def test_a_binder_says_where_sessions_live():
    for worker in (0, 1):
        _, record = ran(ampd(binder="support.own:Only", worker=worker))
        assert {*record.tables["requests"]["worker_id"]} == {worker}


def test_a_queue_orders_waiting_prefills():
    slow = {"deployment": "P:TP4x1 D:TP4x1", "adaptive_routing": False, "num_prompts": 40}
    (_, newest), (_, oldest) = (ran(ampd(**slow, queue=f"support.own:{name}")) for name in ("Newest", "plain"))
    assert newest.tables["tasks"]["started_s"] != oldest.tables["tasks"]["started_s"]
    _, fcfs = ran(ampd(**slow, prefill_reordering=False))
    assert oldest.tables["tasks"] == fcfs.tables["tasks"]


# ---- installed packages ------------------------------------------------------------------------------------------


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a policy of each kind, and names that others have already."""
    (tmp_path / "shelf-1.0.dist-info").mkdir()
    for name, text in data_beside(__file__, "shelf").items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()


def dllm(**knobs: str | int | float) -> Cell:
    return a_cell(platform="rtx4090", executor="roofline", **{"num_prompts": 4, **knobs})


@pytest.mark.usefixtures("installed_package")
def test_a_name_of_an_installed_package_is_the_same_run_as_its_place():
    for make, kind, name, where in (
        (dllm, "scheduler", "shelf", "shelf:Shelf"),
        (dllm, "refresh_rule", "builds", "shelf:Builds"),
        (ampd, "router", "stay", "support.own:Stay"),
        (ampd, "binder", "only", "support.own:Only"),
        (ampd, "queue", "newest", "support.own:Newest"),
        (laps, "batcher", "gather", "support.own:Gather"),
    ):
        assert installed(kind)[name] == where
        named, placed = prepare(make(**{kind: name})), prepare(make(**{kind: where}))
        assert named.cell == placed.cell
        assert named.code == placed.code
        assert where.partition(":")[0].partition(".")[0] in named.code.modules
        assert named.cell.policies == (where.partition(":")[2],)


@pytest.mark.usefixtures("installed_package")
def test_a_workload_of_an_installed_package_is_the_same_run_too():
    """It is named after what it is called in its module, whatever the package calls it."""
    for system in ("dllm-serve", "ampd", "laps"):
        grid = {"system": system, "platform": {"dllm-serve": "l40s", "ampd": "h20x32", "laps": "h200"}[system]}
        named, placed = (
            prepare(*Grid.from_dict({**grid, "knobs": {"workload": name, "arrivals": "trace", "most": 1}}).cells())
            for name in ("dialogues", "support.own:Dialogues")
        )
        assert named.cell == placed.cell
        assert (named.cell.dataset, named.code) == ("Dialogues", placed.code)


@pytest.mark.usefixtures("installed_package")
def test_systems_platforms_and_cards_have_names_too():
    own = platform("shelf-card")
    assert (own.name, own.title) == ("shelf:CARD", "a shelf")
    assert platform(own.name) == own
    from engines.cost.roofline import gpu

    assert gpu("shelf-gpu").name == "shelf-gpu"
    cell = Cell(system="thick", dataset="osc", platform="cpu-tiny", executor="torch")
    assert "shelf" in prepare(cell).code.modules


@pytest.mark.usefixtures("installed_package")
def test_an_installed_name_takes_none_away_and_is_told():
    assert prepare(dllm(scheduler="phase")).cell.policies == ()
    with refuses("scheduler='none'"):
        prepare(dllm(scheduler="none"))
    with refuses("batcher='none'"):
        prepare(laps(batcher="none"))
