"""dLLM-Serve Figure 2 (§4.2): where a card's memory goes under standard and under logit-aware profiling.

The paper draws it as a diagram. Here it is arithmetic on the model's shape for a simulated card, and the measured
peak of a real worst-case step where the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.dllm.config import EngineConfig, GenerationConfig, SparsityConfig
from engines.dllm.memory.budget import MemoryPlan, concurrency, divide_memory, rows_for_request
from engines.hardware.catalogue import GB
from engines.models.checkpoint import config_of
from engines.models.shape import ModelShape
from paper_figures.common import style
from paper_figures.common.caption import basis, figure_title
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import Platform

NAME = "fig2"
TITLE = "dLLM-Serve Figure 2: standard against logit-aware profiling"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 2, §4.2"
PLATFORMS = ("cpu-tiny", "rtx4090", "l40s")
PAPER_PLATFORM = "rtx4090"
DECIDES_ON = (PAPER_PLATFORM,)

IS_TIMED = False
MODES = (("monolithic", "standard profiling\n(full logits)"), ("decomposed", "logit-aware profiling"))
PARTS = (
    ("weights", "#8A8A8A"),
    ("activations", "#E69F00"),
    ("logits", "#D55E00"),
    ("guard band", "#CCCCCC"),
    ("KV pool", "#0072B2"),
)
PROMPT_LEN = 300
"""Prompt of the request whose copies are counted."""

CSV_COLUMNS = (
    "platform",
    "logits",
    "weights_bytes",
    "activation_bytes",
    "logits_bytes",
    "guard_bytes",
    "kv_bytes",
    "total_bytes",
    "requests",
    "obtained",
)


@dataclass(frozen=True, kw_only=True)
class Split:
    mode: str
    plan: MemoryPlan
    requests: int
    obtained: str

    @property
    def parts(self) -> tuple[int, ...]:
        plan = self.plan
        return (plan.weights_bytes, plan.activation_bytes, plan.logits_bytes, plan.guard_bytes, max(0, plan.kv_bytes))


def cells(view: View) -> list[Cell]:
    """Runs whose start-up profiles are measured; a simulated card needs none."""
    if view.platform.executor == "roofline":
        return []
    return [
        view.cell(
            NAME,
            "dllm-serve",
            "burst",
            rate=max(view.dllm.rates),
            knobs=() if mode == "decomposed" else (("logit_rows", mode),),
        )
        for mode, _ in MODES
    ]


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    splits = splits_of(runs, view)
    stem = f"{NAME}-{view.stem}"
    caption = _caption(splits, runs, view)
    files = _draw(splits, runs, view, caption, out, stem)
    rows = [
        (
            view.platform.name,
            split.mode,
            *split.parts[:4],
            split.plan.kv_bytes,
            split.plan.total_bytes,
            split.requests,
            split.obtained,
        )
        for split in splits
    ]
    scale, unit = _unit(view.platform)
    table = [
        (
            split.mode,
            *(f"{part / scale:.2f}" for part in split.parts[:4]),
            f"{split.plan.kv_bytes / scale:.2f}",
            str(split.requests),
            split.obtained,
        )
        for split in splits
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("logits", *(f"{name} {unit}" for name, _ in PARTS), "requests at once", "obtained"),
        rows=tuple(table),
        notes=tuple(caption),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name != PAPER_PLATFORM:
        return []
    where, shape = view.platform, _shape(view.platform)
    standard, aware = (split.plan for split in splits_of(runs, view))
    half, quarter = SparsityConfig(retention_ratio=0.5), SparsityConfig(retention_ratio=0.25)
    generation = _generation(where)
    total_len = PROMPT_LEN + generation.gen_length
    requests = [aware.kv_rows // rows_for_request(total_len, generation, sparsity) for sparsity in (half, quarter)]

    def found(claim: str, value: float, how: str, holds: bool | None = None) -> Finding:
        return Finding(claim=claim, value=value, obtained="computed", how=how, holds=holds)

    return [
        found(
            "dllm-logit-8p3gb",
            16 * 2048 * shape.logits_bytes_per_row(),
            "16 x 2048 rows of the model's vocabulary, 2 bytes each",
        ),
        found(
            "dllm-logit-chunk",
            where.part(DllmPart).max_num_logits * shape.logits_bytes_per_row(),
            "max_num_logits rows, one buffer",
        ),
        found(
            "dllm-logit-ar-shape",
            2048.0,
            "logit rows of a 2048-token request: one per position here, one in an autoregressive step",
            holds=standard.logits_bytes > aware.logits_bytes,
        ),
        found("dllm-weights-17gb", shape.weight_bytes / GB, "parameters of the shape, 2 bytes each"),
        found("dllm-headroom-4090", (24 * GB - shape.weight_bytes) / GB, "24 GB less weights"),
        found("dllm-headroom-l40s", (48 * GB - shape.weight_bytes) / GB, "48 GB less weights"),
        found("dllm-t4-oom", float(shape.weight_bytes > 16 * GB), "1: the weights alone exceed 16 GB"),
        found(
            "dllm-2x-requests",
            requests[1] / requests[0],
            f"requests of {total_len} tokens that fit the KV pool at r = 0.25 over r = 0.5; the block's own rows are not halved",
        ),
    ]


def splits_of(runs: Sequence[StoredRun], view: View) -> list[Split]:
    """Standard profiling first."""
    if view.platform.executor == "roofline":
        return [_computed(view.platform, mode) for mode, _ in MODES]
    by_mode = {str(run.cell.knob_values.get("logit_rows", "decomposed")): run for run in runs}
    return [
        _split(view.platform, mode, _measured_plan(by_mode[mode]), "measured") for mode, _ in MODES if mode in by_mode
    ]


def _computed(where: Platform, mode: str) -> Split:
    plan = divide_memory(_shape(where), where.part(DllmPart).memory_bytes, _config(where), logit_rows=mode)  # type: ignore[arg-type]
    return _split(where, mode, plan, "simulated")


def _measured_plan(run: StoredRun) -> MemoryPlan:
    return MemoryPlan(**run.facts["memory_plan"])


def _split(where: Platform, mode: str, plan: MemoryPlan, obtained: str) -> Split:
    generation = _generation(where)
    prompt_len = max(1, round(PROMPT_LEN * where.part(DllmPart).length_scale))
    requests = concurrency(plan, _config(where), prompt_len + generation.gen_length, generation) if plan.fits else 0
    return Split(mode=mode, plan=plan, requests=requests, obtained=obtained)


def _config(where: Platform) -> EngineConfig:
    part = where.part(DllmPart)
    return EngineConfig(
        max_num_batched_tokens=part.max_num_batched_tokens,
        max_num_logits=part.max_num_logits,
        max_num_seqs=part.max_num_seqs,
        max_model_len=part.max_model_len,
    )


def _generation(where: Platform) -> GenerationConfig:
    part = where.part(DllmPart)
    return GenerationConfig(gen_length=part.gen_length, block_length=part.block_length, steps=part.steps)


def _shape(where: Platform) -> ModelShape:
    part = where.part(DllmPart)
    return ModelShape.from_config(config_of(part.model), name=part.model)


def _unit(where: Platform) -> tuple[int, str]:
    return (GB, "GB") if where.part(DllmPart).memory_bytes >= GB else (10**6, "MB")


def _caption(splits: Sequence[Split], runs: Sequence[StoredRun], view: View) -> list[str]:
    where, part = view.platform, view.dllm
    if where.executor == "roofline":
        how = "Computed from the model's shape and the settings of the paper's Table 3; nothing was run."
    else:
        how = f"All runs {basis(runs[0])}: peak of a real worst-case step, KV pool from what it leaves."
    length = round(PROMPT_LEN * part.length_scale) + part.gen_length
    sentences = [f"Requests at once: of {length} tokens, retention 0.5."]
    if any(split.requests == part.max_num_seqs for split in splits):
        sentences[0] += f" {part.max_num_seqs} is the scheduler's cap (max_num_seqs), not the memory's."
    sentences += [f"max_num_batched_tokens {part.max_num_batched_tokens}, max_num_logits {part.max_num_logits}.", how]
    sentences += [
        f"With {split.mode} logits the worst step misses {-split.plan.kv_bytes / GB:.2f} GB before any KV row."
        for split in splits
        if not split.plan.fits
    ]
    return sentences


def _draw(
    splits: Sequence[Split], runs: Sequence[StoredRun], view: View, caption: Sequence[str], out: Path, stem: str
) -> tuple[Path, Path, Path]:
    scale, unit = _unit(view.platform)
    labels = dict(MODES)
    with style.drawing():
        figure, (axes,) = style.row_of_panels([""])
        left = [0.0] * len(splits)
        for i, (name, color) in enumerate(PARTS):
            widths = [split.parts[i] / scale for split in splits]
            axes.barh(range(len(splits)), widths, left=left, color=color, edgecolor="white", height=0.55, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(splits[0].plan.total_bytes / scale, linestyle="--", linewidth=1, color="black", label="memory")
        names = [f"{labels[split.mode]}\n{split.requests} requests at once" for split in splits]
        axes.set_yticks(range(len(splits)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"memory ({unit})")
        axes.set_xlim(0, 1.02 * max(*left, splits[0].plan.total_bytes / scale))
        title = figure_title(TITLE, runs, view)
        return style.publish(figure, [axes], out, stem, title=title, caption=caption, width_inches=style.WIDE_INCHES)
