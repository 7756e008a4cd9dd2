"""Simulated servers beside measured ones: rows of a folder, errors, and the load that inference-perf makes."""

import csv
import json
from dataclasses import replace
from random import Random

import pandas as pd
import pytest
import yaml
from support.command import refused, repro
from support.refusals import refuses

from repro import truth
from repro.files import csv_text
from repro.paths import REPO
from repro.truth import SharedPrefix

LOAD = {
    "workload": "chat",
    "question_tokens": 200,
    "system_prompt_tokens": 100,
    "system_prompts": 3,
    "users_per_system_prompt": 2,
    "output_tokens": 40,
    "stages_rate_x_seconds": "4x80+8x5",
}
ROW = {
    "exp": "a",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu": "H100",
    "precision": "FP16",
    "tp": 1,
    "max_num_batched_tokens": 2048,
    "kv_blocks_of_16": "",
    "workload": "chat",
    "scope": "all",
    "ttft_mean_ms": 20.0,
    "itl_mean_ms": 8.0,
    "e2e_mean_ms": 300.0,
}


def folder(tmp_path, *rows, load=LOAD):
    for name, given in (("experiments.csv", rows), ("workloads.csv", [load])):
        (tmp_path / name).write_text(csv_text(given[0], (row.values() for row in given)))
    return tmp_path


def test_errors_are_of_what_was_measured(tmp_path):
    committed = next(row for row in truth._rows(truth.MEASURED, "experiments.csv") if row["exp"] == "16")
    # One of that name elsewhere is a prediction.
    own = {**dict.fromkeys(committed, ""), **ROW, "exp": "16", "workload": committed["workload"]}
    measured = folder(tmp_path, own, committed, load={**LOAD, "workload": committed["workload"]})
    shown = json.loads(repro("reproduce truth --json --measured", measured, "--out-dir", tmp_path / "out").out)
    first, second = shown["experiments"]
    for name in truth.METRICS:
        expected = 100 * (first["predicted_ms"][name] / first["measured_ms"][name] - 1)
        assert first["error_pct"][name] == pytest.approx(expected)
        assert abs(expected) < 60
    assert first["measured_ms"] == {"ttft_mean": 20.0, "itl_mean": 8.0, "e2e_mean": 300.0}
    # Of tokens: the first with the prefill, each other a gap later.
    predicted = first["predicted_ms"]
    gap = predicted["itl_mean"] / truth.Checkpoint.of(ROW["model"]).tokens_per_text
    assert predicted["e2e_mean"] == pytest.approx(predicted["ttft_mean"] + 39 * gap, rel=1e-6)
    assert [first["is_fitted"], second["is_fitted"]] == [False, True]
    assert shown["errors"]["ours, predicted"]["e2e_mean"]["median"] == pytest.approx(
        abs(first["error_pct"]["e2e_mean"])
    )
    assert shown["errors"]["ours, all"]["ttft_mean"]["num"] == 2
    assert set(shown["errors"]) == {"ours, all", "ours, predicted", "ours, fitted"}
    stored = list(csv.DictReader((tmp_path / "out" / "truth.csv").read_text().splitlines()))
    assert [row["e2e_mean_error_pct"] for row in stored] == [
        f"{each['error_pct']['e2e_mean']:.1f}" for each in shown["experiments"]
    ]


@pytest.mark.parametrize("scope", ["all", "first 300"])
def test_a_client_divides_by_the_tokens_of_the_text(tmp_path, scope):
    row = {**ROW, "scope": scope}
    listed, other = truth.simulate_all(folder(tmp_path, row, {**row, "model": "Llama-3.1-8B"}))
    gap = listed.predicted["itl_mean"] / truth.Checkpoint.of(ROW["model"]).tokens_per_text
    assert gap < listed.predicted["itl_mean"]
    for each, between in ((listed, gap), (other, other.predicted["itl_mean"])):
        assert each.predicted["e2e_mean"] == pytest.approx(each.predicted["ttft_mean"] + 39 * between, rel=1e-6)
    # Its draws by top_p sort logits.
    assert gap > other.predicted["itl_mean"]


@pytest.mark.parametrize(
    ("scope", "stages", "served"),
    [
        ("all", "4x80+8x5", "4x80+8x5"),
        ("first 300", "4x80", "4x135"),
        # 320 of its 360 requests are the first stage's: 267 of 300.
        ("first 300", "4x80+8x5", "4x126.75"),
    ],
)
def test_first_requests_are_of_all_stages_by_their_shares(tmp_path, scope, stages, served):
    load = {**LOAD, "stages_rate_x_seconds": stages}
    knobs = truth._cell({**ROW, "scope": scope}, {"chat": load}, tmp_path).knob_values
    assert (knobs["stages"], knobs["num_questions"]) == (served, 100)
    # Text of random tokens has more of them.
    assert (knobs["question_tokens"], knobs["system_prompt_tokens"]) == (209, 104)


def test_published_errors_of_other_simulators_are_beside_ours():
    found = truth.peers()
    assert {name: round(each.median) for name, each in found["blis-trained"].items()} == {
        "e2e_mean": 22,
        "itl_mean": 23,
        "ttft_mean": 32,
    }
    assert found["llmservingsim"]["ttft_mean"].num == 22


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "Llama-2-70B"),
        ("Qwen/Qwen2.5-14B-Instruct", "Qwen2.5-14B"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "Qwen3-32B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("Llama-3.1-8B", "Llama-3.1-8B"),
    ],
)
def test_checkpoints_are_of_shapes(tmp_path, checkpoint, model):
    row = {**ROW, "model": checkpoint, "tp": 4, "precision": "FP8"}
    knobs = truth._cell(row, {"chat": LOAD}, tmp_path).knob_values
    assert (knobs["model"], knobs["precision"]) == (model, "fp8-dynamic" if "Mixtral" in model else "fp8")


def test_a_checkpoint_says_whether_its_draws_are_cut(tmp_path):
    for checkpoint, expected in ((ROW["model"], "vllm-0.15-top-p"), ("mistralai/Mixtral-8x7B-v0.1", "vllm-0.15")):
        cell = truth._cell({**ROW, "model": checkpoint, "tp": 4}, {"chat": LOAD}, tmp_path)
        assert cell.knob_values["constants"] == expected


def test_precision_follows_from_the_shape_in_a_folder(tmp_path):
    configs = yaml.safe_load((REPO / "tests/engines/models/hub_configs.yaml").read_text())["read"]
    for name, expected in (("Qwen3-30B-A3B", "fp8-dynamic"), ("Llama-3.1-8B-Instruct", "fp8")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(configs[name]["config"]))
        row = {**ROW, "model": str(tmp_path / name), "precision": "FP8"}
        assert truth._cell(row, {"chat": LOAD}, tmp_path).knob_values["precision"] == expected


REFUSED = {
    "no file": (ROW, LOAD, "experiments.csv"),
    "workload": ({**ROW, "workload": "gone"}, LOAD, "workload='gone'"),
    "scope": ({**ROW, "scope": "last 9"}, LOAD, "scope"),
    "a number": ({**ROW, "ttft_mean_ms": "fast"}, LOAD, "ttft_mean_ms='fast'"),
    "a model": ({**ROW, "model": "who/knows"}, LOAD, "exp='a': model"),
    "half a GPU": ({**ROW, "tp": 1.6}, LOAD, "tp='1.6'"),
    "a column": ({name: value for name, value in ROW.items() if name != "exp"}, LOAD, "exp"),
    "one token": (ROW, {**LOAD, "output_tokens": 1}, "output_tokens=1"),
    "too few": ({**ROW, "scope": "first 300"}, {**LOAD, "stages_rate_x_seconds": "4x70+8x60"}, "first stage"),
    "too many": (ROW, {**LOAD, "stages_rate_x_seconds": "4x9999999"}, "stages"),
    "stages": (ROW, {**LOAD, "stages_rate_x_seconds": "soon"}, "stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_held_are_refused(tmp_path, case):
    row, load, field = REFUSED[case]
    measured = folder(tmp_path, row, load=load)
    if case == "no file":
        (measured / "experiments.csv").unlink()
    with refuses(field):
        truth.simulate_all(measured)


def test_committed_errors_are_those_of_today(tmp_path):
    with (truth.MEASURED / "truth.csv").open(newline="") as file:
        stored = {row["exp"]: row for row in csv.DictReader(file)}
    few = [row for row in truth._rows(truth.MEASURED, "experiments.csv") if row["exp"] in ("62", "26", "56")]
    assert set(stored) == {row["exp"] for row in truth._rows(truth.MEASURED, "experiments.csv")}
    loads = {row["workload"]: row for row in truth._rows(truth.MEASURED, "workloads.csv")}
    for row in few:
        load = loads[row["workload"]]
        (held,) = truth.simulate_all(folder(tmp_path, row, load=load))
        assert {name: f"{held.predicted[name]:.5g}" for name in truth.METRICS} == {
            name: stored[row["exp"]][f"{name}_predicted_ms"] for name in truth.METRICS
        }


@pytest.mark.parametrize("text", [b"exp\n", b"\xff\xfe"])
def test_files_without_rows_are_refused(tmp_path, text):
    (folder(tmp_path, ROW) / "experiments.csv").write_bytes(text)
    with refuses("experiments.csv"):
        truth.simulate_all(tmp_path)


def test_rows_are_refused_before_any_is_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr(truth, "_simulate", None)
    with refuses("exp='b': model"):
        truth.simulate_all(folder(tmp_path, ROW, {**ROW, "exp": "b", "model": "who/knows"}))


def test_errors_of_other_simulators_are_numbers(tmp_path):
    (tmp_path / "peers.csv").write_text("simulator,metric,error_pct\nother,e2e_mean,large\n")
    with refuses("error_pct='large'"):
        truth.peers(tmp_path)


def test_committed_claims_are_judged_as_today():
    stored = (truth.MEASURED / "stated.csv").read_text()
    assert pd.DataFrame([each.shown for each in truth.stated_claims()]).to_csv(index=False) == stored


def test_claims_are_held_with_the_committed_experiments_alone(tmp_path, monkeypatch):
    held = truth.simulate_all(folder(tmp_path, ROW))
    monkeypatch.setattr(truth, "simulate_all", lambda *_: held)
    own, usual = tmp_path / "own", tmp_path / "usual"
    shown = json.loads(repro("reproduce truth --json --measured", tmp_path, "--out-dir", own).out)
    assert shown["stated"] == []
    assert not (own / "stated.csv").exists()
    printed = repro("reproduce truth", "--out-dir", usual).out
    assert (usual / "stated.csv").read_text() == (truth.MEASURED / "stated.csv").read_text()
    assert "DiffusionGemma, 4,096 in, decode alone" in printed


def claim(name):
    return next(row for row in truth._rows(truth.MEASURED, "claims.csv") if row["claim"] == name)


@pytest.mark.parametrize(("name", "faster"), [("DiffusionGemma on H100", 1), ("LLaDA on GSM8K, 256 steps", -1)])
def test_a_claim_cannot_be_faster_than_the_card(name, faster):
    """Times are faster where they are shorter."""
    row = claim(name)
    found = truth._parse_stated(row)
    kernels = max(found.kernels.values()) if faster > 0 else min(found.kernels.values())
    for value, verdict in (
        (found.datasheet * 1.01**faster, "cannot be"),
        (found.datasheet * 0.99**faster, "not by these kernels"),
        (kernels * 1.16**faster, "not by these kernels"),
        (kernels * 1.14**faster, "can be"),
        (kernels * 0.5**faster, "can be"),
    ):
        assert truth._parse_stated({**row, "value": str(value)}).verdict == verdict


def test_a_claim_on_llada_takes_the_steps_of_the_plain_sampler(tmp_path):
    run = json.loads(
        repro(
            "bench --system llada --platform a100 --dataset-name gsm8k --num-prompts 1 --json --result-dir", tmp_path
        ).out
    )["runs"][0]
    row = {**claim("LLaDA on GSM8K, 256 steps"), "gpus": "1", "answers": "1", "unit": "ms"}
    found = truth._parse_stated({**row, "prompt": f"{run['mean_prompt_tokens']:.0f}"})
    # The sampler also copies logits.
    assert found.kernels["vllm"] == pytest.approx(1e3 * run["summary"]["busy_s"], rel=0.01)


def test_diffusion_gemma_has_its_published_parameters():
    layers = [shape for _, shape in truth._gemma("fp8")]
    embedding = layers[0].vocab_rows * layers[0].d_model
    stored = sum(shape.streamed_weight_bytes_layers() for shape in layers) + embedding
    active = sum(shape.linear_flops_per_token for shape in layers) / 2 + embedding
    assert (stored, active) == (pytest.approx(25.2e9, rel=0.005), pytest.approx(3.8e9, rel=0.01))
    # K/V of a token: 204,800 bytes on sliding layers, 20,480 on full ones.
    assert [shape.kv_bytes_per_token for shape in layers] == [204_800, 20_480]


def test_each_canvas_is_stored_and_reads_what_came_before():
    row = {**claim("DiffusionGemma on H100"), "canvases": "2"}
    full = [work for _, shape, work in truth._forwards(row) if shape.n_layers == 5]
    assert [work.query_rows for work in full] == [1024, 256, 256, 256, 256]
    assert [work.kv_read_rows for work in full] == [1024, 1280, 1280, 1536, 1536]
    assert all(work.logit_rows == 0 for work in full)
    sliding = [(num, work) for num, shape, work in truth._forwards(row) if shape.n_layers == 25]
    assert [(num, work.logit_rows) for num, work in sliding] == [(1, 0), (16, 512), (1, 0), (16, 512), (1, 0)]
    assert {work.kv_read_rows for _, work in sliding[1:]} == {1023 + 256}


def test_a_folder_is_of_truth_alone():
    refused(repro("reproduce fig3 --measured somewhere"), "measured='somewhere'", "fig3")


@pytest.mark.parametrize("option", ["platform h100", "num-runs 2", "jobs 2", "force", "plain", "accept-other-code"])
def test_truth_has_no_stored_runs(tmp_path, option):
    field = option.split()[0].replace("-", "_")
    refused(repro(f"reproduce truth --{option} --measured", tmp_path), field, "truth")


@pytest.mark.parametrize(("system", "question"), [(100, 200), (16, 5), (7, 30)])
def test_requests_share_their_system_prompts_alone(system, question):
    load = SharedPrefix(stages="4x10+8x5", system_prompt_tokens=system, question_tokens=question, num_system_prompts=3)
    sessions = list(load.sessions(1))
    assert len(sessions) == 80
    times = [each.arrival_s for each in sessions]
    assert times == sorted(times)
    assert sum(time < 10 for time in times) == 40
    assert max(times) < 15
    seen: dict[int, set[int]] = {}
    for index, each in enumerate(sessions):
        (names,) = each.prefix.rounds
        assert each.prefix.fits(each.rounds)
        for place, name in enumerate(names):
            seen.setdefault(name, set()).add(index % 3 if place < system // 16 else -index - 1)
    assert all(len(users) == 1 for users in seen.values())
    again = list(replace(load, num_questions=5).sessions(1))
    assert [each.prefix for each in again[:5]] == [each.prefix for each in sessions[:5]]
    assert [each.prefix for each in again[5:]] == [each.prefix for each in again[:-5]]
    assert list(load.sessions(1)) == sessions
    assert [each.arrival_s for each in load.sessions(2)] != times
    assert Random(1).random() * 10 in times
