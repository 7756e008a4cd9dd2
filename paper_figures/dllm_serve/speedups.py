"""What Figure 3 and Table 4 both say of the claims: dLLM-Serve against the best baseline, by data set."""

from __future__ import annotations

from collections.abc import Mapping

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS
from repro.reports.claims import Finding
from repro.reports.figures import View

Throughputs = Mapping[tuple[str, str], float]
"""(data set, system) -> tok/s, saturated."""


def labels(view: View) -> dict[str, str]:
    """Data set -> what a finding calls it on this card."""
    return {dataset: f"{view.platform.name}/{dataset}" for dataset in DATASETS}


def gains_of(throughput: Throughputs) -> dict[str, float]:
    """dLLM-Serve's throughput over the best baseline's, by data set."""
    best = {dataset: max(throughput[dataset, system] for system in BASELINES) for dataset in DATASETS}
    return {dataset: throughput[dataset, OURS] / best[dataset] for dataset in DATASETS}


def ranks_of(throughput: Throughputs) -> dict[str, float]:
    """1 where no baseline is faster."""
    return {
        dataset: 1.0 + sum(throughput[dataset, system] > throughput[dataset, OURS] for system in BASELINES)
        for dataset in DATASETS
    }


def token_cap(runs: Runs) -> Finding:
    """Steps above the token budget make a run INVALID (docs/metrics.md, Validity)."""
    own = [run for run in runs.all if run.cell.system == OURS]
    over = sum(any("max_num_batched_tokens" in reason for reason in run.validity.reasons) for run in own)
    how = f"runs of dLLM-Serve with a step above its cap, of {len(own)}, whose every step is checked"
    return runs.finding("dllm-token-cap", float(over), how, of=(runs.view.platform.name,), holds=over == 0)
