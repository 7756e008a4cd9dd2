"""repro capacity: the table, the JSON, the plot, and what is refused before any run."""

import csv
import json
import math
import re
from unittest.mock import Mock

import pytest
from support.command import repro
from support.tables import data_beside

from repro.cli.plan import _decision_text

CASES = data_beside(__file__, "cases")
SLO = "ttft:p95:2000 itl:p95:50"
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
FAST = ("--num-prompts", "40", "--seeds", "1", "--resolution", "0.2")


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"rounds": [[800 + 50 * n, 60], [300, 40]]}) + "\n" for n in range(12)))
    return path


def asked(own, *options, slo=SLO, gpus="4", fast=FAST):
    result = repro("capacity", "--workload", own, "--slo", slo, "--gpus", gpus, *fast, *options)
    if result.code == 0:
        said = result.err.replace(",", "")
        most, runs = (int(re.search(told, said)[1]) for told in (r"at most (\d+)", r"in (\d+) run"))
        assert 1 <= runs <= most
    return result


def test_the_table_is_best_first_and_fits_a_terminal(own, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = asked(own, "--platform", "h200", "--platform", "h20", "--knob", "prefix_cache=true")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "sessions/s within 20 %, 1 seed (composed)" in " ".join(result.out.split())
    for said in ("rate", "met", "TTFT", "ITL", "longest", "binds", "P:TP2x1", "D:TP2x1", "TP2x2", "chunked"):
        assert said in result.out
    assert "recorded sessions, lengths as recorded" in result.err


def test_json_has_every_answer_and_the_cell_that_makes_it_again(own):
    found = json.loads(asked(own, "--json", gpus="2..8").out)
    assert found["slo"] == SLO
    assert (found["seeds"], found["resolution"], found["unit"]) == (1, 0.2, "sessions/s")
    rates = [row["rate"] for row in found["answers"]]
    assert rates == sorted(rates, reverse=True)
    sizes = [(row["system"], row["gpus"]) for row in found["answers"]]
    assert sorted(sizes) == [("Dynamo", 4), ("Dynamo", 8), ("vLLM", 2), ("vLLM", 4), ("vLLM", 8)]
    for row in found["answers"]:
        assert row["ttft_p95_s"] <= 2
        assert row["itl_p95_s"] <= 0.05
        assert 0 < row["attainment"] <= 1
        assert row["binds"] in ("ttft:p95:2000", "itl:p95:50", "load")
        assert row["cell"]["rate"] == row["rate"]
        assert dict(row["cell"]["knobs"])["deployment"] == row["plan"]
    (best, *_), decides = found["answers"], found["decides"]
    (note,) = [each for each in found["notes"] if f"with {decides['choices'][0]['instead']} it serves" in each]
    assert note.startswith(f"{best['system']} on 8 x h200 ")
    assert f"{decides['choices'][0]['rate']:.4g} /s" in note
    assert [each["rate"] for each in decides["choices"]] == sorted(each["rate"] for each in decides["choices"])


@pytest.mark.parametrize(("worth", "theirs", "said"), CASES["what decides"])
def test_the_choice_that_decides_is_said_in_a_sentence(worth, theirs, said):
    rival = theirs and Mock(site=Mock(title="Dynamo"), rate=theirs)
    assert _decision_text(23.0, [{"chosen": "a=1", "instead": "a=2", "rate": rate} for rate in worth], rival) == said


def test_sessions_that_miss_are_said_and_only_good_ones_are_paid_for(own):
    options = ("--json", "--gpu-price", "h200=3", "--system", "vllm-sim", "--knob", "scheduling=chunked")
    found = json.loads(asked("toolbench", *options, slo="itl-gap:p90:30").out)
    (row,) = found["answers"]
    assert 0 < row["session_attainment"] < row["attainment"] < 0.9
    assert row["goodput"] == row["rate"] * row["session_attainment"]
    assert row["dollars_per_1000_good"] == pytest.approx(3 * 4 * 1000 / 3600 / row["goodput"])
    (note,) = [each for each in found["notes"] if "keep every limit themselves" in each]
    assert f"{100 * row['session_attainment']:.3g} % of vLLM on 4 x h200" in note
    assert not any("keep every limit" in each for each in json.loads(asked(own, "--json").out)["notes"])


@pytest.fixture
def bursty(tmp_path):
    """A hundred seconds with one session a second, but ten a second in the middle fifth."""
    times = [*range(40), *(40 + n / 10 for n in range(200)), *range(60, 100)]
    path = tmp_path / "bursty.jsonl"
    path.write_text("".join(json.dumps({"arrival_s": at, "rounds": [[3000, 60]]}) + "\n" for at in times))
    return path


def of_times(workload, *options, gpus="2"):
    told = ("--system", "vllm-sim", "--json", *options)
    return json.loads(asked(workload, *told, slo="ttft:p95:2000 itl-request:p95:50", gpus=gpus, fast=FAST[-2:]).out)


def test_a_file_s_own_bursts_take_more_than_their_mean(bursty):
    held = ("--knob", "scheduling=prefill-first", "--knob", "prefix_cache=true")
    (own,) = of_times(bursty, "--arrivals", "trace", *held)["answers"]
    (poisson,) = of_times(bursty, "--num-prompts", "280", *held)["answers"]
    assert own["rate"] < 0.7 * poisson["rate"]
    assert own["num_prompts"] == 280


def test_steps_need_what_their_own_arrivals_do(bursty):
    found = of_times(bursty, "--arrivals", "trace", "--autoscale", str(20 / 3600), gpus="1..16")
    (row,) = found["answers"]
    assert row["rate"] == pytest.approx(279 / 99)
    steps = row["steps"]
    assert [each["sessions"] for each in steps] == [20, 20, 200, 20, 20]
    assert [each["rate"] for each in steps[:4]] == pytest.approx([1, 1, 10, 1])
    assert steps[2]["gpus"] == row["gpus"] > steps[0]["gpus"] == steps[4]["gpus"]
    assert row["fixed_gpu_hours"] == pytest.approx(row["gpus"] * 99 / 3600)
    assert row["stepped_gpu_hours"] == pytest.approx(sum(each["gpus"] * each["hours"] for each in steps))
    assert any("% fewer" in note for note in found["notes"])


def test_one_engine_replays_a_file_s_times(bursty):
    options = ("--arrivals", "trace", "--system", "dllm-serve", "--platform", "h200")
    for gpus, code in (("1", 0), ("2", 2)):
        result = asked(bursty, *options, slo="e2el:p95:60000", gpus=gpus)
        assert (result.code, "use --gpus 1" in result.err) == (code, code == 2), result.err


def test_a_rate_asks_for_the_fewest_gpus(own):
    found = json.loads(asked(own, "--json", "--rate", "4", gpus="1..16").out)["answers"]
    gpus = [row["gpus"] for row in found]
    assert gpus == sorted(gpus)
    assert all(row["rate"] == 4 and row["plan"] for row in found)
    result = asked(own, "--rate", "4000", "--system", "vllm-sim")
    assert "vLLM on 4 x h200: no plan serves 4000 sessions/s" in " ".join(result.out.split())


@pytest.mark.parametrize(("slo", "gpus", "said"), CASES["doubts"])
def test_what_is_doubtful_is_said(own, slo, gpus, said):
    result = asked(own, slo=slo, gpus=gpus)
    assert (result.code, said in " ".join(result.out.split())) == (0, True)


def test_prefill_systems_serve_turns():
    options, fast = ("--system", "laps", "--system", "sglang-pd", "--json"), ("--num-prompts", "300", *FAST[2:])
    found = json.loads(asked("lmsys-chat-1m", *options, slo="ttft:p95:400", gpus="1", fast=fast).out)
    assert found["unit"] == "turns/s"
    assert {row["system"] for row in found["answers"]} == {"LAPS", "SGLang PD"}
    assert all(row["rate"] > 10 for row in found["answers"])


def test_diffusion_systems_serve_requests_on_engines_that_share_them(own):
    options = ("--json", "--platform", "h200", "--system", "dllm-serve", "--knob", "gen_length=16")
    rows = [json.loads(asked("osc", *options, slo="e2el:p95:2000", gpus=gpus).out)["answers"][0] for gpus in ("1", "4")]
    for row in rows:
        assert row["e2el_p95_s"] <= 2
        assert row["cell"]["rate"] == row["rate"] / row["gpus"]
    assert 4 / 1.2 < rows[1]["rate"] / rows[0]["rate"] < 4 * 1.2


def test_changes_are_made_one_at_a_time_on_the_answers_own_plan(own, tmp_path):
    options = ("--system", "vllm-sim", "--knob", "max_num_seqs=100", "--audit", "--plot", tmp_path / "effects.png")
    vary = ("--vary", "platform=h20,h200", "--vary", "max_num_batched_tokens=16", "--vary", "kv_tokens=900000000")
    found = json.loads(asked(own, *options, *vary, "--json").out)
    (row,) = found["answers"]
    percent = {each["change"]: each["percent"] for each in found["effects"]}
    assert percent["platform=h20"] < 60
    assert percent["max_num_batched_tokens=16"] < 100
    same = ("as asked", "platform=h200", "kv_tokens=900000000", "without max_num_seqs")
    assert {name: percent[name] for name in same} == dict.fromkeys(same, 100)
    assert {each["plan"].split()[0] for each in found["effects"]} == {row["plan"]}
    assert {each["rate"] for each in found["effects"] if each["change"] in same} == {row["rate"]}
    told = [each.split()[3] for each in found["notes"] if "changed no number" in each]
    assert told == ["platform=h200", "kv_tokens=900000000", "max_num_seqs"]
    assert not any("scheduling" in each for each in found["notes"])
    assert "platform=h20" in (tmp_path / "effects.csv").read_text()


def test_answers_differ_by_a_margin_with_an_interval_over_the_seeds_given(own):
    found = json.loads(asked(own, "--seeds", "3", "--json", fast=(*FAST[:2], "--resolution", "0.05")).out)
    best, other = found["answers"]
    ratios = [mine / other["rate_by_seed"][seed] for seed, mine in best["rate_by_seed"].items()]
    assert len(ratios) == 3
    (note,) = [each for each in found["notes"] if "(95 %, 3 seeds)" in each]
    mean, low, high = map(
        float, re.match(rf"{best['system']} on 4 x h200 serves (\S+) \[(\S+), (\S+)\] times", note).groups()
    )
    assert mean == pytest.approx(math.prod(ratios) ** (1 / 3), rel=0.01)
    assert low < mean < high
    assert "rate_by_seed" not in json.loads(asked(own, "--json").out)["answers"][0]


def test_the_plot_has_a_csv_with_the_pareto_front(own, tmp_path):
    plot = tmp_path / "front.pdf"
    result = asked(own, "--plot", plot, "--knob", "prefix_cache=true", gpus="2..8")
    assert result.code == 0
    assert plot.read_bytes().startswith(b"%PDF")
    with plot.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    front = [row for row in rows if row["is_pareto"] == "True"]
    assert [int(row["gpus"]) for row in sorted(front, key=lambda row: int(row["gpus"]))] == [2, 4, 8]
    for row in rows:
        better = [each for each in front if int(each["gpus"]) <= int(row["gpus"])]
        assert any(float(each["rate"]) >= float(row["rate"]) for each in better)


@pytest.mark.parametrize("system", ["dynamo-sim", "vllm-sim", "ampd"])
def test_a_workload_of_one_session_is_served_again_and_again(system, own):
    own.write_text(json.dumps({"rounds": [[800, 60]]}) + "\n")
    done = asked(own, "--system", system, "--json")
    assert (done.code, json.loads(done.out)["answers"][0]["rate"] > 0) == (0, True), done.err


def test_colocated_steps_are_searched_but_for_what_is_asked(own):
    held = ("--knob", "balance=sessions", "--knob", "max_num_seqs=256", "--knob", "prefix_cache=true")

    worth = []

    def found(*options):
        told = json.loads(asked(own, "--system", "vllm-sim", "--json", *held, *options).out)
        worth.append({each["instead"]: each["rate"] for each in told["decides"]["choices"]})
        (row,) = told["answers"]
        return row

    best = found()
    knobs = dict(best["cell"]["knobs"])
    assert best["schedule"].split()[0] == knobs["scheduling"]
    fixed = [found("--knob", "scheduling=chunked", "--knob", f"max_num_batched_tokens={tokens}") for tokens in TOKENS]
    fixed.append(found("--knob", "scheduling=prefill-first"))
    assert {row["schedule"] for row in fixed} == {None}
    # Two choices made in another way are worth the same in either order.
    usual = worth[1 + TOKENS.index(8192)]
    assert worth[0]["max_num_batched_tokens=8192"] == usual[f"deployment={best['plan']}"] < fixed[4]["rate"]
    assert " ".join(found("--knob", "scheduling=chunked")["schedule"].split()[:2]) in {f"chunked {n}" for n in TOKENS}
    assert best["rate"] == max(row["rate"] for row in fixed)
    assert best["plans"] == sum(row["plans"] for row in fixed)
