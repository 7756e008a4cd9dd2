"""Simulated autoregressive systems on every card with kernel tables, of models that a config.json describes."""

import json
import shutil
from pathlib import Path

import pytest
from support.cells import a_cell, ran
from support.command import refused, repro
from support.refusals import refuses
from support.tables import data_beside

from engines.cost.kernels import cards
from repro.runs.family import Family
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS

CONFIGS = data_beside(Path(__file__).parents[3] / "engines" / "models" / "x.py", "hub_configs")["read"]
DEPLOYMENTS = data_beside(__file__, "any_card")["deployments"]
OWN = {"workload": "support.own:Dialogues", "num_prompts": 12}


def folder(place: Path, name: str) -> str:
    (place / name).mkdir()
    (place / name / "config.json").write_text(json.dumps(CONFIGS[name]["config"]))
    return str(place / name)


def run(system: str, card: str, model: str, **knobs: object) -> RunRecord:
    deployment = {"deployment": DEPLOYMENTS[system]} if system in DEPLOYMENTS else {}
    asked = a_cell(system, "Dialogues", card, "roofline", rate=2.0, **{"model": model, **OWN, **deployment, **knobs})
    _, record = ran(asked)
    family: Family = SYSTEMS.get(system).family
    assert family.assess(record).reasons == ()
    return record


@pytest.mark.parametrize("system", [*DEPLOYMENTS, "laps"])
def test_every_system_runs_on_every_card_with_tables(system, tmp_path):
    model, sums = folder(tmp_path, "Llama-3.1-8B-Instruct"), {}
    for card in cards():
        record = run(system, card, model)
        assert record.manifest["model"] == "Llama-3.1-8B"
        assert f"{card}, composed of" in record.manifest["calibration"]
        assert 0.2 < record.facts["estimated_share"] < 1.0
        assert record.facts["extrapolated"] == []
        sums[card] = sum(record.tables["requests"]["first_output_s"])
    assert sums["l40s"] > sums["a100"] > sums["h100"] > sums["b200"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_of_models_is_served(name, tmp_path):
    """The largest mixture does not fit two cards, and experts of 1,408 are in no table."""
    model, knobs = folder(tmp_path, name), {"deployment": "TP4x1" if "8x22B" in name else "TP1x1"}
    if "A2.7B" in name:
        with refuses("hidden=1408"):
            run("vllm-sim", "h200", model, **knobs)
        knobs["cost"] = "roofline"
    record = run("vllm-sim", "h200", model, **knobs)
    many = [each for each in record.facts.get("extrapolated", ()) if "32 K/V heads" in each]
    assert bool(many) == (name == "Llama-2-7b-hf")


@pytest.mark.parametrize(("decode", "num"), [("none", 0), ("apart", 1)])
def test_instances_that_only_prefill_have_no_decodes_that_are_in_no_table(decode, num):
    knobs = {**OWN, "model": "Llama-2-7B", "kernels": "vllm", "decode": decode, "clients": 4}
    _, record = ran(a_cell("laps", "Dialogues", "h200", "roofline", **knobs))
    assert len(record.facts["extrapolated"]) == num


def test_commands_take_a_card_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path, "Yi-6B")
    rows = ({"arrival_s": 0.3 * n, "rounds": [[500 + n, 20, 0]]} for n in range(8))
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = "--system vllm-sim --platform l40s --model Yi-6B --workload mine.jsonl --knob num_gpus=2 --result-dir runs --json"
    (made,) = json.loads(repro(f"bench {options}").out)["runs"]
    assert made["facts"]["num_gpus"] == 2
    assert made["facts"]["slo"] == {"ttft_s": None, "itl_s": None}
    shutil.rmtree("runs")
    (usual,) = json.loads(
        repro("bench --system vllm-sim --platform h100 --workload mine.jsonl --json --result-dir runs").out
    )["runs"]
    assert usual["facts"]["num_gpus"] == 8
    refused(repro("bench --system vllm-sim --platform h100 --model ./nosuch --workload mine.jsonl"), "model='./nosuch'")


@pytest.mark.parametrize("system", ["vllm-sim", "laps"])
def test_fp8_leaves_room_and_serves_sooner(system):
    plain, fp8 = (run(system, "h200", "Qwen2.5-14B", precision=precision) for precision in ("bf16", "fp8"))
    assert "layers in fp8" in fp8.manifest["calibration"]
    assert sum(fp8.tables["requests"]["first_output_s"]) < sum(plain.tables["requests"]["first_output_s"])
    with refuses("precision='fp8'"):
        run(system, "h200", "Qwen2.5-14B", precision="fp8", cost="roofline")
    with refuses("precision='int4'"):
        run(system, "h200", "Qwen2.5-14B", precision="int4")


def test_weights_that_leave_no_memory_hold_no_tokens():
    """69 GB in FP8, of the 68 that are used of a card's 80."""
    with refuses("a GPU beside Llama-2-70B holds 0: "):
        run("laps", "h100", "Llama-2-70B", precision="fp8")
