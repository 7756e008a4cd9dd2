"""The table of memory plans: the paper's two cards, and plans that do not fit."""

from support.cells import L40S, RTX4090

from engines.cost.roofline import GB
from engines.dllm.config import EngineConfig, GenerationConfig
from repro.cli.plan import PlanRow, _case, plan_rows


def rows_of(label: str, memory_bytes: int, config: EngineConfig) -> list[PlanRow]:
    return [*plan_rows(label, memory_bytes, config, 300, GenerationConfig())]


def test_paper_cases():
    rows = [row for where in (RTX4090, L40S) for row in rows_of(*_case(where, None, {}))]
    table = [(r.label, r.logits, r.logit_rows, r.plan.kv_rows, r.requests, r.verdict) for r in rows]
    assert table == [
        ("rtx4090 24 GB", "decomposed", 2048, 10_059, 34, "fits"),
        ("rtx4090 24 GB", "monolithic", 4000, 8_176, 27, "fits"),
        ("l40s 48 GB", "decomposed", 2048, 50_838, 172, "fits"),
        ("l40s 48 GB", "monolithic", 16_384, 37_006, 125, "fits"),
    ]
    # The L40S batch in one piece is the paper's 8.3 GB: 16384 rows, logits and their softmax.
    assert rows[3].plan.logits_bytes == 8_287_944_704
    assert {r.obtained for r in rows} == {"simulated"}


def test_comparison_says_what_does_not_fit():
    config = EngineConfig(max_num_batched_tokens=16384)
    rows = rows_of("small", 24 * GB, config)
    assert rows[0].verdict == "fits"
    assert rows[1].verdict == "does not fit: 3398155264 bytes short before any KV"
    assert (rows[1].plan.kv_bytes, rows[1].plan.kv_rows, rows[1].requests) == (-3_398_155_264, 0, 0)
    tight = rows_of("tight", 24 * GB - rows[0].plan.kv_bytes * 100 // 95, config)
    assert tight[0].verdict == "KV too small for one request of 556 tokens"
