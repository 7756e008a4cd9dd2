"""Commands about clusters: plan-cluster, bench of AMPD, and what they refuse."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.command import repro

PLAN = ("plan-cluster", "--model", "Llama-3.1-70B", "--trace", "dureader", "--gpus", "16")


def test_plan_cluster_shows_three_plans_their_latencies_and_its_time(tmp_path):
    answer = json.loads(repro(*PLAN, "--json").out)
    assert [plan["rank"] for plan in answer["plans"]] == [1, 2, 3]
    assert answer["rate"] == 0.6
    assert answer["slo"] == {"ttft_s": 5.0, "itl_s": 0.05}
    worst = [plan["worst_of_slo"] for plan in answer["plans"]]
    assert worst == sorted(worst)
    for plan in answer["plans"]:
        assert plan["ttft_p95_of_slo"] == pytest.approx(plan["ttft_p95_s"] / 5.0)
        assert plan["worst_of_slo"] == pytest.approx(max(plan["ttft_p95_of_slo"], plan["itl_p95_of_slo"]))
    assert answer["plan_seconds"] > 0
    assert answer["obtained"] == "composed"
    said = repro(*PLAN, "--top", "1").out
    assert "planned in" in said
    assert answer["plans"][0]["deployment"].split()[0] in said
    bench = ("bench", "--system", "ampd", "--platform", "h20", "--dataset-name", "dureader", "--request-rate", "0.6")
    options = (*shlex.split(answer["plans"][0]["ran"]), "--num-prompts", "4", "--result-dir", tmp_path, "--json")
    (run,) = json.loads(repro(*bench, *options).out)["runs"]
    assert run["facts"]["deployment"] == answer["plans"][0]["deployment"]


def test_a_plan_that_misses_its_objectives_says_so():
    done = repro(*PLAN, "--rate", "12", "--method", "closed")
    assert "no split meets both objectives" in done.out


def own_sessions(folder: Path, prefill_tokens: int) -> tuple[str, ...]:
    """Options for sessions of one long prompt and a short one."""
    path = folder / f"{prefill_tokens}.jsonl"
    path.write_text("".join(json.dumps({"rounds": [[prefill_tokens + n, 30], [200, 30]]}) + "\n" for n in range(30)))
    how = ("--rate", "0.01", "--method", "closed", "--json")
    return ("--trace-path", str(path), "--num-sessions", "30", *how)


def test_sessions_of_ones_own_are_planned_for_as_they_are(tmp_path):
    """Not scaled to the trace's means: a prefill of 8,000 tokens takes about ten times one of 800."""
    short, long = (json.loads(repro(*PLAN, *own_sessions(tmp_path, tokens)).out)["plans"] for tokens in (800, 8000))
    assert len(short) == len(long) == 3
    assert 7 < long[0]["ttft_p95_s"] / short[0]["ttft_p95_s"] < 15


def test_a_file_and_objectives_as_a_capacity_takes_them_are_planned_for(tmp_path):
    """As the same sessions by --trace-path."""
    asked = own_sessions(tmp_path, 800)
    plan = ("plan-cluster", "--model", "Llama-3.1-70B", "--gpus", "16")
    told = ("--trace", asked[1], "--slo", "ttft:p95:5000 itl-gap:p95:50", "--hardware", "h20x32", *asked[4:])
    found, same = (json.loads(repro(*plan, *each).out) for each in (told, ("--trace", "dureader", *asked)))
    assert (found["slo"], found["hardware"]) == (same["slo"], same["hardware"])
    assert [each["deployment"] for each in found["plans"]] == [each["deployment"] for each in same["plans"]]
    assert found["plans"][0]["ttft_p95_s"] == pytest.approx(same["plans"][0]["ttft_p95_s"], rel=0.05)
    for options in (("--slo", "ttft:p90:1 itl:p95:1"), ("--slo", "ttft:p95:1"), ()):
        refused = repro(*plan, "--trace", asked[1], *options, *(asked[4:6] if options else ()))
        assert (refused.code, ("slo=" if options else "--rate") in refused.err) == (2, True)


def test_a_session_that_no_worker_holds_is_refused(tmp_path):
    done = repro(*PLAN, *own_sessions(tmp_path, 20_000_000))
    assert done.code == 2
    assert re.search(r"with 2000\d\d\d\d tokens of K/V does not fit 8 x", done.err)


def test_bench_takes_clusters_by_name_and_their_own_trace(tmp_path):
    systems = [part for name in ("ampd", "dynamo-sim", "vllm-sim", "continuum-sim") for part in ("--system", name)]
    knobs = ("--num-prompts", "6", "--request-rate", "0.5", "--result-dir", str(tmp_path), "--json")
    runs = json.loads(repro("bench", *systems, "--platform", "h20x32", *knobs).out)["runs"]
    assert [each["cell"]["dataset"] for each in runs] == ["dureader"] * 4
    assert all(each["valid"] and each["obtained"] == "composed" for each in runs)
    assert {each["facts"]["attainment_reading"] for each in runs} == {"round/every/p95"}
    assert all(0 <= each["summary"]["slo_attainment"] <= 1 for each in runs)


def test_an_audit_tells_the_options_that_changed_no_number_and_why(tmp_path):
    knobs = ("precision=bf16", "num_gpus=8", "deployment=TP4x2", "slo_scope=session", "max_num_batched_tokens=256")
    asked = [part for each in (*knobs, "scheduling=chunked") for part in ("--knob", each)]
    asked += ["--system", "vllm-sim", "--platform", "h20", "--num-prompts", "12", "--request-rate", "2"]
    found = json.loads(repro("bench", *asked, "--result-dir", str(tmp_path), "--audit", "--json").out)
    assert len(found["runs"]) == 1
    assert {each["option"]: each["why"] for each in found["audit"]} == {
        "precision": "equal to the default",
        "num_gpus": "same numbers without it",
        "scheduling": "same numbers without it",
    }
    measured = repro("bench", "--audit", "--executor", "torch", "--num-prompts", "2", "--result-dir", str(tmp_path))
    assert (measured.code, "audit" in measured.err) == (2, True)


def test_a_table_of_a_knob_is_of_one_search_and_says_what_ran(tmp_path):
    """Options of a row are those of a run with the same numbers."""
    own = tmp_path / "mine.jsonl"
    own.write_text("".join(json.dumps({"rounds": [[800 + 50 * n, 60]]}) + "\n" for n in range(12)))
    bench = ("bench", "--system", "vllm-sim", "--platform", "h100", "--workload", own, "--request-rate", "9")
    asked = (*bench, "--model", "Qwen3-32B", "--knob", "num_gpus=4", "--result-dir", tmp_path / "runs")
    tokens = ("--knob", "max_num_batched_tokens=512", "--knob", "max_num_batched_tokens=8192")
    done = repro(*asked, *tokens, "--json")
    assert "a search of" in done.err
    assert "once for all values of max_num_batched_tokens" in " ".join(done.err.split())
    runs = json.loads(done.out)["runs"]
    held = [{**run["facts"]["ran"], "max_num_batched_tokens": 0} for run in runs]
    assert held[0] == held[1]
    assert [run["facts"]["ran"]["max_num_batched_tokens"] for run in runs] == [512, 8192]
    table = " ".join(repro(*asked, *tokens).out.split())
    assert "--knob scheduling=" in table
    words = shlex.split(runs[0]["ran"])
    (again,) = json.loads(repro(*bench, "--result-dir", tmp_path / "b", *words, "--json").out)["runs"]
    assert again["summary"] == runs[0]["summary"]
    assert again["ran"] == runs[0]["ran"]
    assert runs[0]["ran"] in repro("export", tmp_path / "runs").out.replace('""', '"')
    sides = [f"vllm-sim@max_num_batched_tokens={num}" for num in (512, 8192)]
    compared = json.loads(repro("compare", *sides, "--result-dir", tmp_path / "runs", "--json").out)
    assert compared["comparisons"][0]["rows"][0]["ran"] == {"a": runs[0]["ran"], "b": runs[1]["ran"]}
    searched = repro(*asked, "--json")
    assert "a search of" in searched.err
    told = json.loads(searched.out)["runs"][0]["facts"]["tuned"]
    assert told["next_best"]["setting"] != told["chosen"]
    assert len(told["next_best"]["scores"]) == 2
    assert f"{told['candidates']} settings tried in {told['trials']} trials, best deployment=" in searched.err
