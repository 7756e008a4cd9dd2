"""``repro plan``: how a card's memory is split (dLLM-Serve §4.2-4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from engines.errors import UserError
from engines.knobs import Checked, Memory
from repro.cli import options as opt
from repro.cli.dllm_knobs import of_platform
from repro.cli.output import number, print_json, print_table
from repro.cli.spread import Given, Knobs, Some

if TYPE_CHECKING:
    from repro.reports.memory import PlanCase, PlanRow
    from repro.systems.platforms import Platform

COLUMNS = (
    *("card", "logits", "rows at once", "weights GB", "activations GB", "logits GB", "guard GB"),
    *("KV GB", "KV rows", "requests", "verdict"),
)


@dataclass(frozen=True, kw_only=True)
class Asked(Checked):
    panel: ClassVar[str] = opt.WHAT
    platform: list[str] | None = None
    """Several times, also a card's YAML file [default: rtx4090 and l40s]."""
    memory_limit: Memory | None = None
    """Another memory size, e.g. 80GB."""
    input_len: int = 300
    """Prompt length of the request counted."""


def _planned() -> dict[str, Sequence[type | Some]]:
    from engines.dllm.config import EngineConfig, SparsityConfig

    return {
        opt.ENGINE: (
            Some(EngineConfig, ("max_num_batched_tokens", "max_num_logits")),
            Some(SparsityConfig, ("retention_ratio",)),
        )
    }


KNOBS = Knobs(_planned, usual=of_platform)


def _case(where: Platform, memory_limit: int | None, given: Mapping[str, Any]) -> PlanCase:
    from engines.dllm.config import EngineConfig, SparsityConfig
    from engines.knobs import given_to
    from repro.reports.memory import PlanCase
    from repro.systems.platforms import DllmPart

    part = where.part(DllmPart)
    config = EngineConfig(
        max_num_batched_tokens=part.max_num_batched_tokens,
        max_num_logits=part.max_num_logits,
        max_num_seqs=part.max_num_seqs,
        max_model_len=part.max_model_len,
        sparsity=given_to(SparsityConfig(), given),
    )
    memory = memory_limit or part.memory_bytes
    label = f"{where.name} {memory / 1e9:g} GB"
    return PlanCase(label=label, memory_bytes=memory, config=given_to(config, given))


def plan(*, asked: Asked, given: Annotated[Given, KNOBS], json: opt.Json = False) -> None:
    """The memory plan (dLLM-Serve §4.2-4.3) with and without logit decomposition. Simulated: shapes only."""
    from dataclasses import asdict

    from engines.dllm.config import GenerationConfig
    from engines.models.shape import LLADA_8B
    from repro.reports.memory import compare_logit_budgets
    from repro.systems.platforms import DllmPart
    from repro.systems.platforms import platform as platform_of

    places = [platform_of(name) for name in asked.platform or ["rtx4090", "l40s"]]
    cases = [_case(where, asked.memory_limit, given) for where in places]
    part = places[0].part(DllmPart)
    generation = GenerationConfig(gen_length=part.gen_length, block_length=part.block_length, steps=part.steps)
    longest, input_len = min(case.config.max_model_len for case in cases) - part.gen_length, asked.input_len
    if not 1 <= input_len <= longest:
        raise UserError(f"input_len={input_len} must be between 1 and {longest}: the model and the token budget set it")
    rows = compare_logit_budgets(LLADA_8B, cases, prompt_len=input_len, generation=generation)
    if json:
        print_json({"plans": [asdict(row) for row in rows]})
        return
    print_table(
        f"Memory plan of LLaDA-8B, requests of {input_len} + {part.gen_length} tokens (simulated: from shapes)",
        COLUMNS,
        [_as_text(row) for row in rows],
    )


def _as_text(row: PlanRow) -> tuple[str, ...]:
    plan = row.plan
    sizes = (plan.weights_bytes, plan.activation_bytes, plan.logits_bytes, plan.guard_bytes, plan.kv_bytes)
    said = (number(size / 1e9, 2) for size in sizes)
    return (row.label, row.logits, f"{row.logit_rows:,}", *said, f"{plan.kv_rows:,}", str(row.requests), row.verdict)
