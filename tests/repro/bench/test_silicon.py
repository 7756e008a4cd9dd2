"""Estimates of another tool are asked for in its own terms and held against ours by ratios; composed steps beside a card's run its schedule."""

import csv
import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from engines.cost.extract import SYSTEMS
from engines.cost.kernels import FRAMEWORKS
from engines.errors import UserError
from engines.models.shape import MIXTRAL_8X7B, QWEN2_5_7B, QWEN3_32B, model_shape
from repro.bench import silicon
from repro.bench.silicon import ESTIMATES, MODELS, VERSION, SiliconPoint
from repro.gpu_suite.suite import scale_of, stages, title_of
from repro.paths import RESULTS
from repro.runs.store import parts_of

PREFILL = SiliconPoint("h200", "Qwen3-32B", 2, "prefill", 1, 128, 4096)
DECODE = SiliconPoint("h200", "Mixtral-8x7B", 4, "decode", 16, 1, 1024)


class Engine:
    """Answers with what it was asked: 1 ms a token of the prompts, 1,000 ms a decoding sequence, by a framework's own factor."""

    asked: list[object] = []

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @classmethod
    def compile(cls, folder: str, system: str, framework: str, **degrees: int) -> "Engine":
        cls.asked.append((folder.rsplit("/", 1)[1], system, framework, degrees))
        return cls(1 + FRAMEWORKS.index(framework))

    def run_static(self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str) -> tuple[float, float, float]:
        assert osl == 2
        assert prefix < isl
        prefill = self.factor * batch_size * (isl - prefix) if mode == "static_ctx" else 0.0
        decode = self.factor * 1000.0 * batch_size + isl if mode == "static_gen" else 0.0
        return prefill, decode, prefill + decode


@pytest.fixture
def installed(monkeypatch):
    Engine.asked = []
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", SimpleNamespace(EngineHandle=Engine))
    monkeypatch.setattr(metadata, "version", lambda name: VERSION)


def test_a_history_is_part_of_their_prompt_and_none_of_its_work(installed):
    found = silicon.make_estimates([PREFILL, PREFILL._replace(tokens=256), DECODE])
    assert found[PREFILL] == {"vllm": 128, "sglang": 256, "trtllm": 384}
    assert found[PREFILL._replace(tokens=256)]["vllm"] == 256
    assert found[DECODE] == {"vllm": 17024, "sglang": 33024, "trtllm": 49024}
    # An engine is compiled once; experts are split as attention is.
    assert Engine.asked == [("Qwen3-32B", "h200_sxm", framework, {"tp_size": 2}) for framework in FRAMEWORKS] + [
        ("Mixtral-8x7B", "h200_sxm", framework, {"tp_size": 4, "moe_tp_size": 4, "moe_ep_size": 1})
        for framework in FRAMEWORKS
    ]


def test_a_package_that_is_not_there_is_refused_in_a_sentence(installed, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.11.0")
    with pytest.raises(UserError, match=r"needs aiconfigurator-core 0\.12\.0, and 0\.11\.0 is installed: pip install "):
        silicon.make_estimates([PREFILL])
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(UserError, match=r"^--again needs aiconfigurator-core, which is not installed: pip install "):
        silicon.make_estimates([PREFILL])


def test_the_real_package_takes_a_prefix_as_a_part_of_the_prompt(tmp_path):
    """It also takes two tokens as one step."""
    engine = pytest.importorskip("aiconfigurator_core.sdk.engine")
    (tmp_path / "config.json").write_text(json.dumps(silicon.config_of(QWEN3_32B)))
    worker = engine.EngineHandle.compile(str(tmp_path), "h200_sxm", "vllm", tp_size=1)

    def taken(mode: str, isl: int, osl: int = 2, prefix: int = 0) -> float:
        return sum(worker.run_static(batch_size=1, isl=isl, osl=osl, prefix=prefix, mode=mode)[:2])

    assert taken("static_ctx", 1000) < taken("static_ctx", 2000, prefix=1000) < 0.7 * taken("static_ctx", 2000)
    assert taken("static_gen", 2000, osl=5) == pytest.approx(4 * taken("static_gen", 2000), rel=0.01)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "estimates.csv"
    estimates = {PREFILL: dict.fromkeys(FRAMEWORKS, 12.34), DECODE: {"vllm": 1.0, "sglang": 0.5, "trtllm": 1234.0}}
    silicon.write(path, estimates)
    assert silicon.read(path) == estimates
    path.write_text(path.read_text().replace("sglang", "sgl"))
    with pytest.raises(UserError, match=r"columns are .*: write them with --again"):
        silicon.read(path)


def test_the_committed_estimates_are_of_all_points_and_say_whose_they_are():
    head = ESTIMATES.read_text()[:400]
    assert f"aiconfigurator-core {VERSION}" in head
    assert "Apache-2.0" in head
    found = silicon.read(ESTIMATES)
    assert list(found) == [
        point for card in SYSTEMS for name in MODELS for point in silicon.points_of(card, model_shape(name))
    ]
    # As their command line prints them.
    assert found[SiliconPoint("h200", "Qwen3-32B", 1, "prefill", 1, 2048, 0)]["sglang"] == 196.6
    refresh = found[SiliconPoint("l40s", "LLaDA-8B", 1, "refresh", 1, 512, 0)]
    assert refresh == pytest.approx({"vllm": 40.1, "sglang": 43.9, "trtllm": 42.7}, abs=0.05)


def test_models_are_held_at_degrees_at_which_they_fit():
    degrees = {point.degree for point in silicon.points_of("l40s", QWEN3_32B)}  # 65.5 GB of weights, 48 a card
    assert degrees == {2, 4, 8}
    assert {point.degree for point in silicon.points_of("l40s", QWEN2_5_7B)} == {1, 2, 4}  # 4 K/V heads


def test_a_checkpoint_is_told_in_the_words_of_its_family():
    mixtral, qwen3 = silicon.config_of(MIXTRAL_8X7B), silicon.config_of(QWEN3_32B)
    experts = (mixtral["num_local_experts"], mixtral["num_experts_per_tok"])
    assert (mixtral["architectures"], *experts) == (["MixtralForCausalLM"], 8, 2)
    assert (qwen3["architectures"], qwen3["num_attention_heads"] * qwen3["head_dim"]) == (["Qwen3ForCausalLM"], 8192)
    assert "num_local_experts" not in qwen3
    assert silicon.config_of(QWEN2_5_7B)["architectures"] == ["Qwen2ForCausalLM"]


def test_a_refresh_attends_both_ways():
    work = silicon.refresh_work(SiliconPoint("l40s", "LLaDA-8B", 1, "refresh", 8, 512, 0))
    assert (work.query_rows, work.attention_pairs, work.logit_rows) == (4096, 8 * 512**2, 8)


def test_a_group_tells_its_middle_its_spread_and_its_ends():
    ratios = {128: 0.79, 256: 1.04, 512: 1.1, 1024: 1.21, 2048: 1.0}
    rows = [PREFILL._replace(tokens=each)._asdict() | {"framework": "vllm", "ratio": ratios[each]} for each in ratios]
    found = pd.DataFrame(rows)
    (group,) = silicon.summary_rows(found)
    assert (group["points"], group["median"], group["beyond"]) == (5, 1.04, 2)
    assert group["off"] == pytest.approx(0.1)
    assert (group["lowest"], group["lowest_at"]) == (0.79, "Qwen3-32B/vllm/tp2/1x128+4096")
    assert (group["highest"], group["highest_at"]) == (1.21, "Qwen3-32B/vllm/tp2/1x1024+4096")


def test_composed_steps_are_theirs_where_both_count_the_same_kernels():
    asked = {point: times for point, times in silicon.read(ESTIMATES).items() if point.card in ("l40s", "h200")}
    found = silicon.ratios(asked)
    off = {(each["card"], each["phase"]): each["off"] for each in silicon.summary_rows(found)}
    # A refresh attends both ways, with twice the arithmetic of a prefill.
    assert all(value < (0.065 if phase == "refresh" else 0.05) for (_, phase), value in off.items()), off
    assert len(off) == 6
    # Of a prompt as short as that, norms of queries and keys alone are a quarter of their estimate.
    beyond = found[(found.ratio - 1).abs() > 0.2]
    assert set(zip(beyond.model, beyond.degree, beyond.tokens, strict=True)) <= {("Qwen3-32B", 8, 128)}


def test_the_page_prints_the_ratios_of_today():
    """Each row of the page's table is what the script finds, as it rounds it."""
    page = (Path(__file__).parents[3] / "results" / "README.md").read_text(encoding="utf-8")
    section = page.split("## Held against AIConfigurator's own estimates", 1)[1]
    lines = [line for line in section.split("Medians on the H200")[0].splitlines() if line.startswith("|")][2:]
    printed, card = {}, ""
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        card = cells[0].lower() or card
        printed[card, cells[1].lower()] = cells[2:]
    groups = silicon.summary_rows(silicon.ratios(silicon.read(ESTIMATES)))
    assert printed == {
        (each["card"], each["phase"]): [
            f"{each['points']:,}",
            f"{each['median']:.2f}",
            f"{100 * each['off']:.1f} %",
            str(each["beyond"]),
            f"{each['lowest']:.2f}",
            f"{each['highest']:.2f}",
        ]
        for each in groups
    }


# -- beside a card's own runs ------------------------------------------------------------------------------

RUNS, TABLE = RESULTS / "h200" / "runs", RESULTS / "h200" / "composed-h200.csv"


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as opened:
        return {(row["system"], row["requests"]): row for row in csv.DictReader(opened)}


@pytest.mark.parametrize("file", sorted(RUNS.glob("*_osc_*.gz")), ids=lambda file: file.name.rpartition("_")[2][:6])
def test_a_measured_run_is_simulated_on_its_own_schedule(committed, file, monkeypatch):
    monkeypatch.setattr(silicon, "FRAMEWORKS", ("vllm",))
    again, asked = silicon.simulate_again, []

    def counted(cell, facts):
        asked.append(cell)
        return again(cell, facts)

    monkeypatch.setattr(silicon, "simulate_again", counted)
    parts = parts_of(file.read_bytes())
    row = silicon.row_of(parts)
    if row is None:  # failed, or taken apart
        assert not asked
        return
    stored = committed[row["system"], str(row["requests"])]
    assert row["steps"] == row["simulated_steps"] == int(stored["steps"])
    for name in ("measured_tok_s", "vllm_tok_s", "datasheet_tok_s", "of_card"):
        assert row[name] == pytest.approx(float(stored[name]), rel=1e-3), name
    assert row["measured_tok_s"] < row["datasheet_tok_s"]


def test_every_system_served_is_in_the_table(committed):
    assert len(committed) == 14
    assert all(0 < float(row["of_card"]) < 1 for row in committed.values())


def test_block_diffusion_is_simulated_on_the_platform_of_its_card_and_model():
    (cell,) = [
        each.cell
        for each in stages(scale_of("h200"))
        if each.stage == "block" and title_of(each.cell) == "block-diffusion, sdar-8b"
    ]
    small = replace(cell, knobs=tuple({**cell.knob_values, "num_prompts": 8, "gen_length": 32}.items()))
    facts = {"model": "sdar-8b", "num_tokens": 50_000, "dataset": {"lengths": {"n": 8}}}
    row = silicon.block_row_of(small, facts, 1000.0, 17)
    # What is left of a prompt opens a block: an answer has nine, of two forwards each.
    assert row["simulated_steps"] == 18
    assert row["datasheet_tok_s"] > row["vllm_tok_s"] == pytest.approx(1000.0 / row["of_card"])
    assert silicon.block_row_of(replace(small, platform="l40s"), facts, 1000.0, 17) is None
