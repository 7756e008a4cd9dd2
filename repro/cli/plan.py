"""``repro plan``: how a card's memory is split (dLLM-Serve §4.2-4.3)."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table


def plan(
    platform: Annotated[list[str] | None, typer.Option(help="Several times [default: rtx4090 and l40s].")] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Another memory size, e.g. 80GB.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Query tokens per packed step.")] = None,
    max_num_logits: Annotated[int | None, typer.Option(help="Logit rows alive at once.")] = None,
    retention_ratio: opt.RetentionRatio = None,
    input_len: Annotated[int, typer.Option(help="Prompt length of the request counted.")] = 300,
    json: opt.Json = False,
) -> None:
    """The memory plan (dLLM-Serve §4.2-4.3) with and without logit decomposition. Simulated: shapes only."""
    from dataclasses import asdict

    from engines.dllm.config import EngineConfig, GenerationConfig, SparsityConfig
    from engines.models.shape import LLADA_8B
    from repro.reports.memory import PlanCase, compare_logit_budgets
    from repro.systems.dllm.part import DllmPart
    from repro.systems.platforms import platform as platform_of

    places = [platform_of(name) for name in platform or ["rtx4090", "l40s"]]
    limit = opt.parse_memory_limit(memory_limit)
    if limit is not None and limit < 1:
        raise UserError(f"memory_limit={memory_limit!r} is less than a byte: write it like 24GB or 64MiB")
    cases = []
    for where in places:
        part = where.part(DllmPart)
        memory = part.memory_bytes if limit is None else limit
        sizes = {
            "max_num_batched_tokens": part.max_num_batched_tokens,
            "max_num_logits": part.max_num_logits,
            **opt.given(max_num_batched_tokens=max_num_batched_tokens, max_num_logits=max_num_logits),
        }
        config = EngineConfig(
            **sizes,
            max_num_seqs=part.max_num_seqs,
            max_model_len=part.max_model_len,
            sparsity=SparsityConfig(**opt.given(retention_ratio=retention_ratio)),
        )
        cases.append(PlanCase(label=f"{where.name} {memory / 1e9:g} GB", memory_bytes=memory, config=config))
    part = places[0].part(DllmPart)
    generation = GenerationConfig(gen_length=part.gen_length, block_length=part.block_length, steps=part.steps)
    longest = min(case.config.max_model_len for case in cases) - part.gen_length
    if not 1 <= input_len <= longest:
        raise UserError(f"input_len={input_len} must be between 1 and {longest}: the model and the token budget set it")
    rows = compare_logit_budgets(LLADA_8B, cases, prompt_len=input_len, generation=generation)
    if json:
        print_json({"plans": [asdict(row) for row in rows]})
        return
    print_table(
        f"Memory plan of LLaDA-8B, requests of {input_len} + {part.gen_length} tokens (simulated: from shapes)",
        (
            "card",
            "logits",
            "rows at once",
            "weights GB",
            "activations GB",
            "logits GB",
            "guard GB",
            "KV GB",
            "KV rows",
            "requests",
            "verdict",
        ),
        [
            (
                row.label,
                row.logits,
                f"{row.logit_rows:,}",
                *(
                    number(part / 1e9, 2)
                    for part in (
                        row.plan.weights_bytes,
                        row.plan.activation_bytes,
                        row.plan.logits_bytes,
                        row.plan.guard_bytes,
                        row.plan.kv_bytes,
                    )
                ),
                f"{row.plan.kv_rows:,}",
                str(row.requests),
                row.verdict,
            )
            for row in rows
        ],
    )
