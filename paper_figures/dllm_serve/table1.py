"""dLLM-Serve Table 1: what is cached, and its footprint."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from baselines.dllm.dllm_cache.method import memory_bytes_per_token
from engines.dllm.config import SparsityConfig
from engines.dllm.plan import Request
from engines.dllm.sequence import cache_rows
from engines.models.shape import ModelShape
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.layout import PAPER, dllm_figure, shape_of
from repro.families.platforms import DllmPart, Platform
from repro.reports.claims import Finding, load_table

PROMPT_LEN = 300
PRINTED = {
    "work": "work",
    "system_scope": "scope (paper)",
    "batching_strategy": "batching (paper)",
    "kv_cache_scope": "cache (paper)",
    "cache_footprint_per_layer": "footprint (paper)",
}
"""Column of the printed table -> our column."""


def page(runs: Runs) -> Page:
    shape, request = shape_of(runs.view.platform), _request(runs.view.platform)
    rows = []
    for row in load_table("dllm_serve/table1.csv"):
        name, footprint = IMPLEMENTED.get(str(row["work"]).replace(" (Ours)", ""), ("not implemented", None))
        size = "-" if footprint is None else f"{footprint(shape, request) / 1e6:.1f}"
        rows.append((*(str(row[column]) for column in PRINTED), name, size))
    return Page(
        table=Table(columns=(*PRINTED.values(), "implemented as", "MB per request"), rows=rows),
        notes=[
            f"Footprint of one request of {request.total_len} tokens on {shape.name}, all layers, 2 bytes per value: computed from "
            "the implementations' own row counts.",
            "Columns marked (paper) are the paper's words.",
        ],
    )


def findings(runs: Runs) -> list[Finding]:
    """Each head has r * L rows: the retained context r * (L - block), plus the block's own rows."""
    request, sparsity = _request(runs.view.platform), SparsityConfig()
    generation = request.generation
    rows = cache_rows(request.total_len, generation, sparsity)
    retained = rows - generation.block_length
    return [
        runs.finding(
            "dllm-kv-footprint",
            float(rows),
            f"rows per head of a request of {request.total_len} tokens at r = {sparsity.retention_ratio}: "
            f"{retained} retained, floor(r (L - block)), and {generation.block_length} of the block",
            obtained="computed",
            holds=retained == int((request.total_len - generation.block_length) * sparsity.retention_ratio),
        )
    ]


def _sparse(shape: ModelShape, request: Request) -> int:
    return cache_rows(request.total_len, request.generation, SparsityConfig()) * shape.kv_bytes_per_token


Footprint = Callable[[ModelShape, Request], int]
IMPLEMENTED: Mapping[str, tuple[str, Footprint | None]] = MappingProxyType(
    {
        "dLLM-Cache": ("dllm-cache", lambda shape, request: request.total_len * memory_bytes_per_token(shape)),
        "Fast-dLLM": ("fast-dllm (dual)", lambda shape, request: request.total_len * shape.kv_bytes_per_token),
        "Sparse-dLLM": ("sparse-dllm", _sparse),
        "dLLM-Serve": ("dllm-serve", _sparse),
    }
)
"""The paper's name of a work -> our system, and the bytes that one request holds."""


def _request(where: Platform) -> Request:
    return Request(request_id=0, prompt_len=PROMPT_LEN, generation=where.part(DllmPart).generation)


FIGURE = dllm_figure("table1", f"{PAPER}, Table 1, §3", platforms=("rtx4090",), page=page, findings=findings)
