"""Systems on the simulated cluster through the harness: what a cell becomes, what its record holds, what is refused."""

import json
import pickle
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.cells import a_cell, ran
from support.tables import data_beside

from engines.cluster import record as cluster_record
from engines.cluster.record import READINGS, attainments, observe
from engines.cluster.sessions import OpenLoop
from engines.errors import UserError
from engines.policies.batching import Chunked, PrefillFirst
from repro.families.cluster.ampd import ClusterDeployment
from repro.families.cluster.ampd_record import AR, observed_of
from repro.families.cluster.ampd_settings import profiled_context
from repro.families.cluster.deployments import parse_deployment, splits
from repro.families.platforms import paper_objectives
from repro.paths import PAPER
from repro.runs import tuning
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare, prepare_all
from repro.runs.system import SYSTEMS as SYSTEM_BY_NAME
from repro.runs.system import free_of
from repro.runs.tuning import TRIALS

DATA = data_beside(__file__, "ar_systems")

SYSTEMS = ("ampd", "dynamo-sim", "vllm-sim", "continuum-sim")
SPLIT, BOTH = "P:TP4x2 D:TP4x2", "TP8x2"


def cell(
    system: str = "ampd", *, rate: float | None = 0.8, dataset: str = "dureader", seed: int = 1, **knobs: Scalar
) -> Cell:
    given = {"deployment": SPLIT if system in ("ampd", "dynamo-sim") else BOTH, "num_prompts": 20, **knobs}
    return a_cell(system, dataset=dataset, platform="h20x32", executor="roofline", rate=rate, seed=seed, **given)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_is_whole_valid_and_read_as_the_cluster_reads_it(system):
    experiment, record = ran(cell(system))
    AR.check_tables(record)
    assert AR.assess(record).reasons == ()
    deployment = experiment.deployment
    assert isinstance(deployment, ClusterDeployment)
    run = deployment.cluster().simulate(OpenLoop(sessions=experiment.workload.sessions), seed=1)
    truth = attainments(observe(run), deployment.settings.ground.slo)
    summary = AR.summarize(record)
    assert summary["attainment_by_reading"] == {str(reading): truth[reading] for reading in READINGS}
    assert summary["slo_attainment"] == truth[deployment.settings.ground.reading]
    assert observed_of(record).ttft_s.tolist() == observe(run).ttft_s.tolist()
    assert summary["num_requests"] == {"ok": 20, "failed": 0, "unfinished": 0}
    assert record.obtained == "composed"
    assert "constants physical (assumed)" in record.manifest["calibration"]


def test_the_reading_and_the_objectives_are_the_cells():
    _, strict = ran(cell(rate=2.0, transient=True, slo_ttft_s=0.2))
    _, loose = ran(cell(rate=2.0, transient=True, slo_ttft_s=60, slo_itl_s=60, slo_scope="session", itl_stat="max"))
    assert strict.facts["slo"]["ttft_s"] == 0.2
    assert loose.facts["attainment_reading"] == "session/every/max"
    assert AR.summarize(loose)["slo_attainment"] == 1.0
    assert AR.summarize(strict)["slo_attainment"] < 0.6


def test_what_a_router_is_made_with_is_its_own(tmp_path, monkeypatch):
    """Neither the verdict on it nor other systems' runs rest on what it has made of that."""
    (tmp_path / "spoils.py").write_text(
        "from engines.policies.routing import Decision\n\n\nclass Home:\n"
        "    def __init__(self, *, model, slo, seed):\n"
        "        for owner in (model, slo):\n            for name in vars(owner):\n"
        "                object.__setattr__(owner, name, 1e9)\n\n"
        "    def route(self, task, home, prefills, now):\n        return Decision(prefills[0].worker_id, False, 'mine')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = AR.summarize(ran(cell())[1])
    assert AR.summarize(ran(cell(router="spoils:Home", slo_ttft_s=1e-6))[1])["slo_attainment"] == 0.0
    assert AR.summarize(ran(cell())[1]) == own


@pytest.mark.parametrize(("route", "sentence"), DATA["no_routers"])
def test_what_is_no_router_is_refused_before_it_runs(route, sentence, tmp_path, monkeypatch):
    name = f"mine_{zlib.crc32(route.encode())}"
    (tmp_path / f"{name}.py").write_text(
        f"class Mine:\n    def __init__(self, *, model, slo, seed): ...\n\n    {route}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=re.escape(sentence)) as refused:
        prepare(cell(router=f"{name}:Mine"))
    assert "\n" not in str(refused.value)


def own_sessions(folder: Path, prefill_tokens: int) -> str:
    path = folder / f"{prefill_tokens}.jsonl"
    path.write_text("".join(json.dumps({"rounds": [[prefill_tokens + n, 30], [200, 30]]}) + "\n" for n in range(20)))
    return str(path)


def test_policies_know_the_speed_at_the_context_of_ones_own_sessions(tmp_path):
    config = prepare(cell(dataset="gaia", dataset_path=own_sessions(tmp_path, 8000))).deployment.settings.workload
    assert profiled_context(config) == round((8000 + 9.5 + 200 + 60) / 2)
    gaia = prepare(cell(dataset="gaia")).deployment.settings.workload
    assert profiled_context(gaia) == round((6161.02 + 528.76) / 2)


@pytest.mark.parametrize(
    ("file", "knobs"),
    [
        (None, {}),
        (None, {"deployment": "search"}),
        (None, {"tune": "search"}),
        (None, {"deployment": "planner", "delay_mean_s": 0.5}),
        ("dataset_path", {"slo_scope": "session"}),
        ("workload", {"slo_ttft_s": 1.0}),
    ],
)
def test_seeds_that_are_prepared_together_are_those_prepared_apart(file, knobs, tmp_path):
    if file is not None:
        knobs = {**knobs, file: own_sessions(tmp_path, 8000)}
    dataset = {None: "dureader", "dataset_path": "gaia", "workload": "8000"}[file]
    cells = [cell(**knobs, dataset=dataset, seed=seed, num_prompts=8) for seed in (3, 0, 1)]
    together, apart = prepare_all(cells), [prepare(each) for each in cells]
    assert together == apart
    assert len({each.workload.provenance.checksum for each in together}) == 3
    ran, ran_apart = (each[2].run() for each in (together, apart))
    assert ran.facts == ran_apart.facts
    assert AR.summarize(ran) == AR.summarize(ran_apart)


def test_statistics_of_gaps_are_computed_once_they_are_read(monkeypatch):
    scopes = []
    made = cluster_record.grouped_stats
    monkeypatch.setattr(cluster_record, "grouped_stats", lambda *own: scopes.append(own[-1]) or made(*own))
    _, record = ran(cell(slo_scope="session"))
    assert scopes == []
    AR.score(record)
    assert scopes == [20]
    rounds = record.tables["rounds"]
    assert len(rounds["itl_p95_s"]) == len(rounds["round"]) > 20
    assert len(scopes) == 1
    again = pickle.loads(pickle.dumps(rounds["itl_p95_s"]))
    assert list(again) == list(rounds["itl_p95_s"])
    assert scopes == [20, len(rounds["round"])]


def test_a_session_that_no_worker_holds_is_refused(tmp_path):
    path = own_sessions(tmp_path, 20_000_000)
    with pytest.raises(UserError, match=r"has a session of 200002[67]9 tokens and a worker of"):
        prepare(cell(dataset="gaia", dataset_path=path))
    with pytest.raises(UserError, match="holds 100: shorten it, or raise kv_tokens"):
        prepare(cell(kv_tokens=100))


def test_a_search_chooses_a_deployment_and_what_else_is_free():
    _, record = ran(cell("vllm-sim", deployment="search", rate=2.0, scheduling="chunked"))
    told = record.facts["tuned"]
    assert (told["candidates"], told["trials"]) == (8, TRIALS)
    assert record.facts["deployment"] == told["chosen"]["deployment"] in {"TP2x8", "TP4x4", "TP8x2"}
    assert set(told["chosen"]) <= {"deployment", "balance"}
    asked = cell("vllm-sim", deployment="search", rate=2.0, scheduling="chunked", tune="search")
    assert ran(asked)[1].facts["tuned"] == told
    for other in ("TP2x8", "TP8x2"):
        _, plain = ran(cell("vllm-sim", deployment=other, rate=2.0, scheduling="chunked"))
        assert AR.summarize(record)["slo_attainment"] >= AR.summarize(plain)["slo_attainment"], "a better one"


@pytest.mark.parametrize("affinity", ["prefix", "cost", "none"])
def test_prefill_workers_with_a_cache_of_their_own_make_a_valid_run(affinity):
    """It sends back what its home lacks; what a run of another kind would have sent is a fault."""
    _, record = ran(cell("dynamo-sim", history_read="own-cache", affinity=affinity, rate=2.0, transient=True))
    assert AR.assess(record).reasons == ()
    assert sum(record.tables["tasks"]["computed_tokens"]) > sum(record.tables["tasks"]["tokens"])
    record.tables["transfers"]["tokens"][0] -= 1
    assert AR.assess(record).reasons == ("1 remote prefills sent back other K/V than they computed",)


@pytest.mark.parametrize("system", SYSTEMS)
def test_searches_of_all_systems_are_of_one_size(system):
    """Where there are GPUs to split; the even split is among what may be drawn."""
    asked = cell(system, dataset="gaia", model="Qwen3-32B", rate=0.8).without("deployment")
    found = [dict(each) for each in tuning.candidates(asked)]
    assert len({str(each) for each in found}) == tuning.CANDIDATES
    assert all(parse_deployment(each["deployment"]).gpus == 32 for each in found)
    free = free_of(system)[0].among(asked)
    assert SYSTEM_BY_NAME.get(system).is_disaggregated == ((("deployment", "P:TP8x2 D:TP8x2"),) in free)


def test_the_likeliest_splits_hold_the_best_of_all():
    """By closed forms the first of any number; simulated, the best of all is among them."""

    def on(deployment: str) -> Cell:
        return cell("dynamo-sim", num_gpus=8, rate=2.0, num_prompts=60, deployment=deployment, transient=True)

    ground = prepare(on("P:TP4x1 D:TP4x1")).deployment.settings.ground
    every, few = splits(ground, 99), splits(ground, 4)
    assert len(every) == 6
    assert every[:3] == few[:3]
    shares = {each: AR.summarize(ran(on(str(each)))[1])["slo_attainment"] for each in every}
    assert min(shares.values()) < 0.9
    assert max(shares[each] for each in few) == pytest.approx(max(shares.values()), abs=0.02)


@pytest.mark.parametrize(
    ("platform", "knobs", "steps"),
    [
        ("h100", {}, Chunked(max_num_batched_tokens=8192, max_num_seqs=1024)),
        ("a100", {}, Chunked(max_num_batched_tokens=2048, max_num_seqs=256)),
        ("l40s", {"max_num_batched_tokens": 512}, Chunked(max_num_batched_tokens=512, max_num_seqs=256)),
        ("h100", {"scheduling": "prefill-first"}, PrefillFirst(max_num_batched_tokens=8192, max_num_seqs=256)),
        ("h20x32", {}, PrefillFirst(max_num_batched_tokens=8192, max_num_seqs=256)),
        ("h200x32", {"scheduling": "chunked"}, Chunked(max_num_batched_tokens=2048, max_num_seqs=256)),
    ],
)
def test_steps_are_those_of_vllm_on_a_card_and_of_the_paper_on_its_cluster(platform, knobs, steps):
    asked = replace(cell("vllm-sim", num_gpus=8, model="Qwen3-32B", deployment="TP4x2", **knobs), platform=platform)
    assert prepare(asked).deployment.cluster().policies.local_batching == steps
    asked = replace(cell("dynamo-sim", num_gpus=16, model="Qwen3-32B"), platform=platform)
    found = prepare(asked).deployment.cluster().policies.prefill_batching
    assert isinstance(found, Chunked) is ("x32" not in platform)


def test_a_search_is_for_the_rate_that_it_is_told():
    """At 2.4/s GAIA wants three prefill GPUs to one, at 0.4/s an even split; the run's own rate does not matter then."""

    def chosen(rate: float, **knobs: Scalar) -> object:
        own = {"dataset": "gaia", "model": "Llama-3.1-70B", "num_prompts": 8, **knobs}
        return ran(cell("dynamo-sim", deployment="search", rate=rate, **own))[1].facts["tuned"]

    assert chosen(0.4) == chosen(2.4, planning_rate=0.4) != chosen(2.4) == chosen(0.4, planning_rate=2.4)


def test_a_search_simulates_the_order_that_is_asked_and_the_planner_knows_none():
    own = {"model": "Qwen3-32B", "rate": 1.2, "num_gpus": 8, "num_prompts": 40, "adaptive_routing": False}

    def chosen(how: str, **knobs: Scalar) -> object:
        return ran(cell("ampd", dataset="hotpotqa", deployment=how, **own, **knobs))[1].facts["deployment"]

    assert chosen("search") != chosen("search", queue_order="on-time")
    assert chosen("planner") == chosen("planner", queue_order="on-time")


def test_the_planner_plans_for_the_rate_of_the_cell():
    _, low = ran(cell(deployment="planner", rate=0.4))
    _, high = ran(cell(deployment="planner", rate=1.6))
    _, told = ran(cell(deployment="planner", rate=1.6, planning_rate=0.4))
    assert low.facts["deployment"] == told.facts["deployment"] != high.facts["deployment"]


def test_a_rate_that_never_drains_is_invalid_unless_asked_for():
    _, record = ran(cell(rate=20.0))
    (reason,) = AR.assess(record).reasons
    assert reason.startswith("the rate never drains: prefills take")
    _, record = ran(cell(rate=20.0, transient=True))
    assert AR.assess(record).valid
    assert record.facts["overload_reason"] is not None


def test_lost_rounds_and_kv_are_noticed():
    _, record = ran(cell())
    table = dict(record.tables["rounds"])
    table["decode_tokens"] = [table["decode_tokens"][0] + 1, *table["decode_tokens"][1:]]
    broken = replace(record, tables={**record.tables, "rounds": table})
    assert AR.assess(broken).reasons == ("1 finished sessions do not have the decode they asked for",)
    transfers = {name: values[1:] for name, values in record.tables["transfers"].items()}
    broken = replace(record, tables={**record.tables, "transfers": transfers})
    assert "sent back other K/V" in " ".join(AR.assess(broken).reasons)


def test_objectives_are_the_papers():
    printed = yaml.safe_load((PAPER / "ampd" / "protocol.yaml").read_text(encoding="utf-8"))["slo_ms"]
    own = {
        (model, trace.lower()): (slo["ttft_ms"], slo["itl_ms"])
        for model, traces in printed.items()
        for trace, slo in traces.items()
    }
    assert {key: tuple(value) for key, value in paper_objectives().items()} == own
