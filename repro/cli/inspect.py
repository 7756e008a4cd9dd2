"""``repro list``, ``repro doctor`` and ``repro plan``: look, run nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table


def list_command(json: opt.Json = False) -> None:
    """Systems, datasets, tasks, platforms and figures."""
    from repro.reports.figures import FIGURES
    from repro.systems import SYSTEMS
    from repro.systems.platforms import PLATFORMS
    from repro.tasks.registry import TASKS
    from repro.workloads import known_datasets, load_card

    rows = [("system", s.name, s.summary) for s in SYSTEMS.values()]
    rows += [("dataset", name, load_card(name).title) for name in known_datasets()]
    rows += [("task", t.name, f"{t.title}, {t.criterion}: 'repro eval'") for t in TASKS.values()]
    rows += [
        ("platform", p.name, f"{p.title} ({'measured' if p.executor == 'torch' else 'simulated'} by default)")
        for p in PLATFORMS.values()
    ]
    rows += [("figure", f.name, f.title) for f in FIGURES.values()]
    if json:
        print_json([{"kind": kind, "name": name, "what": what} for kind, name, what in rows])
    else:
        print_table("What there is", ("kind", "name", "what it is"), rows)


def doctor(json: opt.Json = False) -> None:
    """What this machine can run, and why not."""
    from repro.checks.doctor import examine, to_json

    report = examine()
    if json:
        print_json(to_json(report))
    else:
        print_table("This machine", ("item", "status", "detail"), [(r.item, r.status, r.detail) for r in report])


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
    from engines.dllm.memory.budget import PlanCase, compare_logit_budgets
    from engines.models.shape import LLADA_8B
    from repro.systems.platforms import platform as platform_of

    places = [platform_of(name) for name in platform or ["rtx4090", "l40s"]]
    limit = opt.parse_memory_limit(memory_limit)
    if limit is not None and limit < 1:
        raise UserError(f"memory_limit={memory_limit!r} is less than a byte: write it like 24GB or 64MiB")
    cases = []
    for where in places:
        memory = where.memory_bytes if limit is None else limit
        sizes = {
            "max_num_batched_tokens": where.max_num_batched_tokens,
            "max_num_logits": where.max_num_logits,
            **opt.given(max_num_batched_tokens=max_num_batched_tokens, max_num_logits=max_num_logits),
        }
        config = EngineConfig(
            **sizes,
            max_num_seqs=where.max_num_seqs,
            max_model_len=where.max_model_len,
            sparsity=SparsityConfig(**opt.given(retention_ratio=retention_ratio)),
        )
        cases.append(PlanCase(label=f"{where.name} {memory / 1e9:g} GB", memory_bytes=memory, config=config))
    where = places[0]
    generation = GenerationConfig(gen_length=where.gen_length, block_length=where.block_length, steps=where.steps)
    longest = min(case.config.max_model_len for case in cases) - where.gen_length
    if not 1 <= input_len <= longest:
        raise UserError(f"input_len={input_len} must be between 1 and {longest}: the model and the token budget set it")
    rows = compare_logit_budgets(LLADA_8B, cases, prompt_len=input_len, generation=generation)
    if json:
        print_json([asdict(row) for row in rows])
        return
    print_table(
        f"Memory plan of LLaDA-8B, requests of {input_len} + {where.gen_length} tokens (simulated: from shapes)",
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
                str(row.logit_rows),
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
