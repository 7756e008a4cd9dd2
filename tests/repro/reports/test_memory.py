"""The table of memory plans: the paper's two cards, and plans that do not fit."""

from support.cells import L40S, RTX4090

from engines.cost.roofline import GB
from engines.dllm.config import EngineConfig
from engines.models.shape import LLADA_8B
from repro.families.platforms import DllmPart, Platform
from repro.reports.memory import PlanCase, compare_logit_budgets


def case_of(where: Platform) -> PlanCase:
    part = where.part(DllmPart)
    config = EngineConfig(max_num_batched_tokens=part.max_num_batched_tokens, max_num_logits=part.max_num_logits)
    return PlanCase(label=where.name, memory_bytes=part.memory_bytes, config=config)


def test_paper_cases():
    rows = compare_logit_budgets(LLADA_8B, [case_of(RTX4090), case_of(L40S)])
    table = [(r.label, r.logits, r.logit_rows, r.plan.kv_rows, r.requests, r.verdict) for r in rows]
    assert table == [
        ("rtx4090", "decomposed", 2048, 10_059, 34, "fits"),
        ("rtx4090", "monolithic", 4000, 8_176, 27, "fits"),
        ("l40s", "decomposed", 2048, 50_838, 172, "fits"),
        ("l40s", "monolithic", 16_384, 37_006, 125, "fits"),
    ]
    # The L40S batch in one piece is the paper's 8.3 GB: 16384 rows, logits and their softmax.
    assert rows[3].plan.logits_bytes == 8_287_944_704
    assert {r.obtained for r in rows} == {"simulated"}


def test_comparison_says_what_does_not_fit():
    config = EngineConfig(max_num_batched_tokens=16384)
    rows = compare_logit_budgets(LLADA_8B, [PlanCase(label="small", memory_bytes=24 * GB, config=config)])
    assert rows[0].verdict == "fits"
    assert rows[1].verdict == "does not fit: 3398155264 bytes short before any KV"
    assert (rows[1].plan.kv_bytes, rows[1].plan.kv_rows, rows[1].requests) == (-3_398_155_264, 0, 0)
    tight = PlanCase(label="tight", memory_bytes=24 * GB - rows[0].plan.kv_bytes * 100 // 95, config=config)
    assert compare_logit_budgets(LLADA_8B, [tight])[0].verdict == "KV too small for one request of 556 tokens"
