"""dLLM-Serve Figure 2: standard against logit-aware profiling.

The paper draws a diagram. For a simulated card we compute it from the model's shape. If the model runs, we measure the peak of a real
worst-case step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engines.cost.roofline import GB
from engines.dllm.config import SparsityConfig
from engines.dllm.memory import MemoryPlan, concurrency, divide_memory
from engines.dllm.sequence import cache_rows
from paper_figures.common.caption import basis, basis_of
from paper_figures.common.figure import Columns, Page, Picture, table
from paper_figures.common.panel import Axis, Guide, Layer, Panel, Stack
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.layout import PAPER, dllm_figure, shape_of
from repro.families.platforms import DllmPart
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell

CARD = "rtx4090"
MODES = {"monolithic": "standard profiling\n(full logits)", "decomposed": "logit-aware profiling"}
PROMPT_LEN = 300
"""Prompt length of the requests that we count."""


@dataclass(frozen=True, kw_only=True)
class Split:
    mode: str
    plan: MemoryPlan
    requests: int
    obtained: str


PARTS: Mapping[str, tuple[str, Callable[[MemoryPlan], int]]] = {
    "weights": ("#8A8A8A", lambda plan: plan.weights_bytes),
    "activations": ("#E69F00", lambda plan: plan.activation_bytes),
    "logits": ("#D55E00", lambda plan: plan.logits_bytes),
    "guard band": ("#CCCCCC", lambda plan: plan.guard_bytes),
    "KV pool": ("#0072B2", lambda plan: plan.kv_bytes),
}


def cells(view: View) -> list[Cell]:
    """Runs whose start-up profiles are measured; a simulated card needs none."""
    if view.platform.executor == "roofline":
        return []
    return [
        view.cell(
            None,
            "dllm-serve",
            "burst",
            rate=max(view.dllm.rates),
            knobs=() if mode == "decomposed" else (("logit_rows", mode),),
        )
        for mode in MODES
    ]


def page(runs: Runs) -> Page:
    platform, splits = runs.view.platform, splits_of(runs)
    caption = caption_of(splits, runs)
    scale, unit = (GB, "GB") if platform.part(DllmPart).memory_bytes >= GB else (10**6, "MB")

    columns: Columns[Split] = {
        "platform": lambda split: platform.name,
        "logits": lambda split: split.mode,
        "weights_bytes": lambda split: split.plan.weights_bytes,
        "activation_bytes": lambda split: split.plan.activation_bytes,
        "logits_bytes": lambda split: split.plan.logits_bytes,
        "guard_bytes": lambda split: split.plan.guard_bytes,
        "kv_bytes": lambda split: split.plan.kv_bytes,
        "total_bytes": lambda split: split.plan.total_bytes,
        "requests": lambda split: split.requests,
        "obtained": lambda split: split.obtained,
    }
    return Page(
        table=table(splits, columns),
        picture=Picture(panels=[panel(splits, scale, unit)], caption=caption, repeats=""),
        notes=caption,
    )


def panel(splits: Sequence[Split], scale: int, unit: str) -> Panel:
    layers: list[Layer] = []
    left = [0.0] * len(splits)
    for name, (color, part) in PARTS.items():
        widths = [max(0, part(split.plan)) / scale for split in splits]
        layers.append(Stack(label=name, starts=left, widths=widths, color=color))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    memory = splits[0].plan.total_bytes / scale
    names = [f"{MODES[split.mode]}\n{split.requests} requests at once" for split in splits]
    return Panel(
        title="",
        layers=[*layers, Guide(value=memory, label="memory", is_upright=True, color="black")],
        x=Axis(label=f"memory ({unit})", limits=(0, 1.02 * max(*left, memory))),
        y=Axis(ticks=range(len(splits)), names=names, is_inverted=True),
    )


def findings(runs: Runs) -> list[Finding]:
    platform, shape = runs.view.platform, shape_of(runs.view.platform)
    standard, aware = (split.plan for split in splits_of(runs))
    generation, logits = platform.part(DllmPart).generation, shape.logits_bytes_per_row
    total_len = PROMPT_LEN + generation.gen_length
    half, quarter = (
        aware.kv_rows // cache_rows(total_len, generation, SparsityConfig(retention_ratio=ratio))
        for ratio in (0.5, 0.25)
    )
    per_position = "logit rows of a 2048-token request: one per position here, one in an autoregressive step"
    fit = f"requests of {total_len} tokens that fit the KV pool at r = 0.25 over r = 0.5; the block's own rows are not halved"
    rows: tuple[tuple[str, float, str, bool | None], ...] = (
        ("dllm-logit-8p3gb", 16 * 2048 * logits, "16 x 2048 rows of the model's vocabulary, 2 bytes each", None),
        ("dllm-logit-chunk", platform.part(DllmPart).max_num_logits * logits, "max_num_logits rows, one buffer", None),
        ("dllm-logit-ar-shape", 2048.0, per_position, standard.logits_bytes > aware.logits_bytes),
        ("dllm-weights-17gb", shape.weight_bytes / GB, "parameters of the shape, 2 bytes each", None),
        ("dllm-headroom-4090", (24 * GB - shape.weight_bytes) / GB, "24 GB less weights", None),
        ("dllm-headroom-l40s", (48 * GB - shape.weight_bytes) / GB, "48 GB less weights", None),
        ("dllm-t4-oom", float(shape.weight_bytes > 16 * GB), "1: the weights alone exceed 16 GB", None),
        ("dllm-2x-requests", quarter / half, fit, None),
    )
    return [runs.finding(claim, value, how, holds=holds, obtained="computed") for claim, value, how, holds in rows]


def splits_of(runs: Runs) -> list[Split]:
    """Return standard profiling first, then logit-aware profiling."""
    platform = runs.view.platform
    plans: dict[str, MemoryPlan] = {}
    for run in runs.all:
        plans[str(run.cell.knob_values.get("logit_rows", "decomposed"))] = MemoryPlan(**run.facts["memory_plan"])
    part = platform.part(DllmPart)
    config, generation = part.engine, part.generation
    is_computed = platform.executor == "roofline"
    prompt_len, splits = max(1, round(PROMPT_LEN * part.length_scale)), []
    for mode in MODES:
        if is_computed:
            plans[mode] = divide_memory(shape_of(platform), part.memory_bytes, config, logit_rows=mode)  # type: ignore[arg-type]
        if (plan := plans.get(mode)) is not None:
            requests = concurrency(plan, config, prompt_len + generation.gen_length, generation) if plan.fits else 0
            obtained = "computed" if is_computed else "measured"
            splits.append(Split(mode=mode, plan=plan, requests=requests, obtained=obtained))
    return splits


def caption_of(splits: Sequence[Split], runs: Runs) -> list[str]:
    platform, part = runs.view.platform, runs.view.dllm
    if platform.executor == "roofline":
        how = "Computed from the model's shape and the settings of the paper's Table 3; nothing was run."
    else:
        how = f"All runs {basis(runs.all[0])}: peak of a real worst-case step, KV pool from what it leaves."
    length = round(PROMPT_LEN * part.length_scale) + part.gen_length
    capped = f" {part.max_num_seqs} is the scheduler's cap (max_num_seqs), not the memory's."
    return [
        f"Requests at once: of {length} tokens, retention 0.5."
        + (capped if any(split.requests == part.max_num_seqs for split in splits) else ""),
        f"max_num_batched_tokens {part.max_num_batched_tokens}, max_num_logits {part.max_num_logits}.",
        how,
        *(
            f"With {split.mode} logits the worst step misses {-split.plan.kv_bytes / GB:.2f} GB before any KV row."
            for split in splits
            if not split.plan.fits
        ),
    ]


FIGURE = dllm_figure(
    "fig2",
    f"{PAPER}, Figure 2, §4.2",
    platforms=("cpu-tiny", CARD, "l40s"),
    page=page,
    cells=cells,
    findings=findings,
    card=CARD,
    is_timed=False,
    origin=lambda runs: (),
    under_title=lambda runs: basis_of(runs) if runs.all else f"computed: {runs.view.platform.title}",
)
