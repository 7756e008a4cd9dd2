"""Memory plans of several cards side by side (dLLM-Serve §4.2, §4.3; Figure 2 in numbers)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from engines.dllm.config import EngineConfig, GenerationConfig, LogitRows
from engines.dllm.memory import MemoryPlan, concurrency, divide_memory, logit_rows_at_once
from engines.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """One memory size with its engine settings, planned with and without logit decomposition."""

    label: str
    memory_bytes: int
    config: EngineConfig


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A line of the comparison table; bytes are bytes, never rounded."""

    label: str
    logits: LogitRows
    logit_rows: int
    plan: MemoryPlan
    requests: int
    """Requests of the given size that fit at once."""
    verdict: str
    obtained: str = "simulated"
    """Computed from shapes, nothing was run."""


def compare_logit_budgets(
    shape: ModelShape, cases: Sequence[PlanCase], *, prompt_len: int = 300, generation: GenerationConfig | None = None
) -> list[PlanRow]:
    """Both logit budgets of every case (Figure 2 in numbers). A plan that does not fit is a row that says so."""
    generation = GenerationConfig() if generation is None else generation
    total_len = prompt_len + generation.gen_length
    rows = []
    for case in cases:
        for mode in get_args(LogitRows):
            plan = divide_memory(shape, case.memory_bytes, case.config, logit_rows=mode)
            requests = concurrency(plan, case.config, total_len, generation)
            if not plan.fits:
                verdict = f"does not fit: {-plan.kv_bytes} bytes short before any KV"
            elif requests == 0:
                verdict = f"KV too small for one request of {total_len} tokens"
            else:
                verdict = "fits"
            rows.append(
                PlanRow(
                    label=case.label,
                    logits=mode,
                    logit_rows=logit_rows_at_once(case.config, mode),
                    plan=plan,
                    requests=requests,
                    verdict=verdict,
                )
            )
    return rows
