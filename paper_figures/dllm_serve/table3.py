"""dLLM-Serve Table 3: hyper-parameters."""

from collections.abc import Mapping
from typing import Any

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.dllm.config import DelayedCache, SparsityConfig
from paper_figures.common.figure import Columns, Page, table
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.layout import PAPER, dllm_figure
from repro.families.dllm.system import method
from repro.families.platforms import DllmPart, platform
from repro.reports.claims import Finding, TableValue, load_table


def page(runs: Runs) -> Page:
    ours = defaults()
    columns: Columns[Mapping[str, TableValue]] = {
        "category": lambda row: row["category"],
        "parameter": lambda row: row["parameter"],
        "paper": lambda row: row["value"],
        "here": lambda row: ours[str(row["parameter"])],
        "agrees": lambda row: "yes" if ours[str(row["parameter"])] == row["value"] else "NO",
    }
    note = "'here' is read from the defaults that simulated runs on the paper's cards use."
    return Page(table=table(load_table("dllm_serve/table3.csv"), columns), notes=[note])


def findings(runs: Runs) -> list[Finding]:
    part = runs.view.platform.part(DllmPart)
    per_block, ratio = part.steps / (part.gen_length // part.block_length), SparsityConfig().retention_ratio
    default = "default of dLLM-Serve and Sparse-dLLM here"
    return [
        runs.finding("dllm-steps-per-block", per_block, "steps over blocks, as run here", obtained="computed"),
        runs.finding("dllm-retention-fixed", ratio, default, obtained="computed"),
    ]


def defaults() -> dict[str, Any]:
    """Return parameter as the table names it -> its value in our runs."""
    fast = method("fast-dllm").sampler("llada", {})
    dual = isinstance(fast.rule, DelayedCache) and fast.rule.window == "block"
    cache = FeatureCacheConfig()
    sparsity = SparsityConfig()
    small, large = (platform(name).part(DllmPart) for name in ("rtx4090", "l40s"))
    return {
        "Generation Length": small.gen_length,
        "Total Decoding Steps": small.steps,
        "KV Block Size": small.block_length,
        "Retention Ratio": sparsity.retention_ratio,
        "Kernel Size": sparsity.pool_kernel,
        "Fast-dLLM Mode": "Dual-Cache, no parallel decoding" if dual else "another",
        "dLLM-Cache Prompt Interval": cache.prompt_interval,
        "dLLM-Cache Gen Interval": cache.gen_interval,
        "Max Batched Tokens (4090)": small.max_num_batched_tokens,
        "Max Batched Tokens (L40S)": large.max_num_batched_tokens,
        "Max Materialized Logits": small.max_num_logits,
    }


FIGURE = dllm_figure("table3", f"{PAPER}, Table 3, §6.1", platforms=("rtx4090",), page=page, findings=findings)
