"""dLLM-Serve Table 1 (§3): what each system caches, with the footprint of this project's implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baselines.dllm.dllm_cache.memory import memory_bytes_per_token
from engines.dllm.config import GenerationConfig, SparsityConfig
from engines.dllm.request import Request
from engines.dllm.sequence import cache_rows
from engines.models.checkpoint import config_of
from engines.models.shape import ModelShape
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import Platform

NAME = "table1"
TITLE = "dLLM-Serve Table 1: what is cached, and its footprint"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Table 1, §3"
PLATFORMS = ("rtx4090",)
PROMPT_LEN = 300

COLUMNS = (
    "work",
    "scope (paper)",
    "batching (paper)",
    "cache (paper)",
    "footprint (paper)",
    "implemented as",
    "MB per request",
)


def cells(view: View) -> list[Cell]:
    return []


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    shape, request = _shape(view.platform), _request(view.platform)
    rows = []
    for row in load_table("dllm_serve/table1.csv"):
        work = str(row["work"]).replace(" (Ours)", "")
        name, footprint = IMPLEMENTED.get(work, ("not implemented", None))
        size = "-" if footprint is None else f"{footprint(shape, request) / 1e6:.1f}"
        rows.append(
            (
                str(row["work"]),
                str(row["system_scope"]),
                str(row["batching_strategy"]),
                str(row["kv_cache_scope"]),
                str(row["cache_footprint_per_layer"]),
                name,
                size,
            )
        )
    notes = [
        f"Footprint of one request of {request.total_len} tokens on {shape.name}, all layers, 2 bytes per value: computed from "
        "the implementations' own row counts.",
        "Columns marked (paper) are the paper's words.",
    ]
    stem = f"{NAME}-{view.stem}"
    return save_table(out, stem, title=TITLE, columns=COLUMNS, rows=rows, notes=notes)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """r * L rows per head: the retained context r * (L - block), plus the block's own rows."""
    request, sparsity = _request(view.platform), SparsityConfig()
    rows = cache_rows(request, sparsity)
    generation = request.generation
    retained = rows - generation.block_length
    return [
        Finding(
            claim="dllm-kv-footprint",
            value=float(rows),
            obtained="computed",
            how=f"rows per head of a request of {request.total_len} tokens at r = {sparsity.retention_ratio}: "
            f"{retained} retained, floor(r (L - block)), and {generation.block_length} of the block",
            holds=retained == int((request.total_len - generation.block_length) * sparsity.retention_ratio),
        )
    ]


def _dense(shape: ModelShape, request: Request) -> int:
    return request.total_len * shape.kv_bytes_per_token


def _sparse(shape: ModelShape, request: Request) -> int:
    return cache_rows(request, SparsityConfig()) * shape.kv_bytes_per_token


def _features(shape: ModelShape, request: Request) -> int:
    return request.total_len * memory_bytes_per_token(shape)


Footprint = Callable[[ModelShape, Request], int]
IMPLEMENTED: Mapping[str, tuple[str, Footprint | None]] = MappingProxyType(
    {
        "dLLM-Cache": ("dllm-cache", _features),
        "Fast-dLLM": ("fast-dllm (dual)", _dense),
        "Sparse-dLLM": ("sparse-dllm", _sparse),
        "dLLM-Serve": ("dllm-serve", _sparse),
    }
)
"""Work as the paper names it -> system here and the bytes one request holds."""


def _request(where: Platform) -> Request:
    part = where.part(DllmPart)
    generation = GenerationConfig(gen_length=part.gen_length, block_length=part.block_length, steps=part.steps)
    return Request(request_id=0, prompt_len=PROMPT_LEN, generation=generation)


def _shape(where: Platform) -> ModelShape:
    part = where.part(DllmPart)
    return ModelShape.from_config(config_of(part.model), name=part.model)
