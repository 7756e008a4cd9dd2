"""The papers' numbers: complete, consistent with each other, and every stated recomputation redone."""

from collections import Counter

import pytest

from engines.cost.roofline import L40S, RTX4090
from engines.errors import UserError
from engines.models.shape import LLADA_8B
from repro.paths import PAPER
from repro.reports.claims import load_claims, load_figures, load_table

CLAIMS = load_claims()
RECOMPUTED = [claim for claim in CLAIMS if claim.recomputed is not None and claim.recomputed.expr is not None]

CALLS = {"round": round, "max": max, "min": min, "sum": sum, "abs": abs}


def evaluate(expr: str):
    """Arithmetic of our own claims, with these functions alone."""
    return eval(expr, {"__builtins__": {}, **CALLS})


def same(computed, stored) -> bool:
    """Equal to the digits the stored value has."""
    if isinstance(stored, tuple):
        return isinstance(computed, list) and len(computed) == len(stored) and all(map(same, computed, stored))
    if isinstance(stored, bool) or isinstance(computed, bool):
        return computed is stored
    if isinstance(stored, int):
        return computed == stored
    digits = len(repr(stored).partition(".")[2])
    return abs(computed - stored) <= 0.5 * 10**-digits + 1e-12


def test_values_are_the_same_to_the_digits_that_are_stored():
    assert same(1.80660, 1.8066)
    assert not same(1.8067, 1.8066)
    assert not same(1, True)


@pytest.mark.parametrize("claim", RECOMPUTED, ids=lambda claim: claim.id)
def test_recomputed_value_follows_from_its_expression(claim):
    assert same(evaluate(claim.recomputed.expr), claim.recomputed.value)


def test_counts():
    assert Counter(claim.paper for claim in CLAIMS) == {"dllm-serve": 118, "ampd": 85, "laps": 63, "block": 23}
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert len(RECOMPUTED) == 96
    assert len(load_figures()) == 35
    assert Counter(entry["paper"] for entry in load_figures().values())["dllm-serve"] == 12


def test_claims_are_well_formed():
    for claim in CLAIMS:
        assert (claim.severity is not None) == (claim.kind == "inconsistency"), claim.id
        if isinstance(claim.expected.value, tuple) and len(claim.expected.value) == 2:
            low, high = claim.expected.value
            assert low <= high, claim.id
        if claim.tolerance.type in ("relative", "absolute"):
            assert claim.tolerance.value is not None, claim.id
            assert claim.tolerance.value >= 0, claim.id


def test_every_claim_names_an_existing_figure_and_every_file_exists():
    figures = load_figures()
    assert {claim.figure for claim in CLAIMS} - {None} <= figures.keys()
    for name, figure in figures.items():
        assert name.startswith(figure["paper"] + "/")
        if "values_file" in figure:
            assert load_table(figure["values_file"])


def test_table4_columns_follow_from_each_other():
    rows = load_table("dllm_serve/table4.csv")
    assert len(rows) == 12
    by_cell = {(row["dataset"], row["system"]): row for row in rows}
    for row in rows:
        base, fast = (by_cell[row["dataset"], system] for system in ("Sparse-dLLM", "Fast-dLLM"))
        tput, latency = row["throughput_tok_s"], row["avg_latency_s"]
        assert round(tput / base["throughput_tok_s"], 4) == row["recomputed_throughput_vs_sparse_dllm"]
        assert round(tput / fast["throughput_tok_s"], 4) == row["recomputed_throughput_vs_fast_dllm"]
        assert round(base["avg_latency_s"] / latency, 4) == row["recomputed_latency_gain_vs_sparse_dllm"]
        assert round(fast["avg_latency_s"] / latency, 4) == row["recomputed_latency_gain_vs_fast_dllm"]
        # Printed speedups are truncated or rounded to two digits.
        assert abs(row["speedup_vs_base_printed"] - tput / base["throughput_tok_s"]) < 0.01
        assert round(tput / 256, 4) == row["derived_req_s_at_256_tok"]


def test_stated_values_agree_with_table4():
    by_cell = {(row["dataset"], row["system"]): row for row in load_table("dllm_serve/table4.csv")}
    claim = next(claim for claim in CLAIMS if claim.id == "dllm-l40s-burst")
    assert claim.expected.value == by_cell["Burst", "dLLM-Serve (Ours)"]["throughput_tok_s"] == 106.95


def test_the_papers_settings_are_the_ones_used_here():
    by_parameter = {row["parameter"]: row["value"] for row in load_table("dllm_serve/table3.csv")}
    from engines.dllm.config import GenerationConfig, SparsityConfig
    from repro.families.platforms import DllmPart, platform

    generation, sparsity = GenerationConfig(), SparsityConfig()
    assert by_parameter["Generation Length"] == generation.gen_length
    assert by_parameter["Total Decoding Steps"] == generation.steps
    assert by_parameter["KV Block Size"] == generation.block_length
    assert by_parameter["Retention Ratio"] == sparsity.retention_ratio
    assert by_parameter["Kernel Size"] == sparsity.pool_kernel
    small, large = (platform(name).part(DllmPart) for name in ("rtx4090", "l40s"))
    assert by_parameter["Max Batched Tokens (4090)"] == small.max_num_batched_tokens
    assert by_parameter["Max Batched Tokens (L40S)"] == large.max_num_batched_tokens
    assert by_parameter["Max Materialized Logits"] == small.max_num_logits == large.max_num_logits
    memory = {row["platform"]: row["gpu_mem_gb_from_text"] * 10**9 for row in load_table("dllm_serve/table2.csv")}
    assert memory == {"rtx4090": RTX4090.memory_bytes, "l40s": L40S.memory_bytes}


def test_stated_logit_bytes_agree_with_the_shape():
    by_id = {claim.id: claim for claim in CLAIMS}
    assert by_id["dllm-logit-chunk"].expected.value == 2048 * LLADA_8B.logits_bytes_per_row
    assert by_id["dllm-logit-8p3gb"].recomputed.value == 16 * 2048 * LLADA_8B.logits_bytes_per_row


def test_cells_are_numbers_text_or_nothing():
    rows = load_table("ampd/fig4_improvements.csv")
    assert len(rows) == 60
    missing = [row for row in rows if row["gain_vs_continuum_pct"] is None]
    assert [(row["model"], row["trace"], row["rate"]) for row in missing] == [("Qwen3-32B", "DuReader", 2.4)]
    assert all(isinstance(row["gain_vs_dynamo_pct"], int | float) for row in rows)
    assert load_table("dllm_serve/table1.csv")[0]["citation"] == "[14]"


def test_bad_input_is_refused(tmp_path):
    folder = tmp_path / "laps"
    folder.mkdir()
    text = (PAPER / "laps" / "claims.yaml").read_text(encoding="utf-8")
    for old, new, message in (
        ("  direction: ", "  directoin: ", "directoin"),
        ("  kind: stated", "  kind: guessed", "kind='guessed'"),
        ("  paper: laps", "  paper: ampd", "belongs to 'ampd'"),
    ):
        (folder / "claims.yaml").write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            load_claims("laps", tmp_path)
