"""How stored runs were obtained and where their prompts came from, in words for captions and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.dllm_serve.curve import DATASETS, Curve, dataset_title
from repro.store import StoredRun
from repro.workloads import load_card


def how_obtained(curves: Sequence[Curve]) -> list[str]:
    """Series by what they rest on, a sentence each."""
    by_basis: dict[str, list[str]] = {}
    for curve in curves:
        for basis in sorted({_basis(point.run) for point in curve.points}):
            labels = by_basis.setdefault(basis, [])
            if curve.series.label not in labels:
                labels.append(curve.series.label)
    if len(by_basis) == 1:
        return [f"All curves {next(iter(by_basis))}."]
    return [f"{', '.join(labels)}: {basis}." for basis, labels in by_basis.items()]


def _basis(run: StoredRun) -> str:
    if run.record.obtained == "simulated":
        calibration = run.record.manifest.get("calibration")
        return f"simulated, each step charged to the roofline of {calibration or 'a card without calibration'}"
    graphics = run.provenance.get("gpu")
    if str(run.cell.knob_values.get("device", "cpu")).startswith("cuda") and graphics:
        return f"measured on {graphics['name']}"
    cpu = run.provenance.get("cpu", {})
    return f"measured on {cpu.get('model') or 'an unnamed CPU'}, {cpu.get('usable') or 'unknown number of'} cores"


def prompt_sources(curves: Sequence[Curve]) -> list[str]:
    """Per panel: source and number of requests; several where its runs differ."""
    texts = []
    for dataset in DATASETS:
        runs = [point.run for curve in curves if curve.dataset == dataset for point in curve.points]
        sources = sorted({_prompt_source(run) for run in runs})
        if sources:
            texts.append(f"{dataset_title(dataset)} {' and '.join(sources)}")
    return texts


def _prompt_source(run: StoredRun) -> str:
    dataset: dict[str, Any] = run.record.manifest.get("dataset") or {}
    source = dataset.get("source")
    if source == "embedded":
        parts = [f"embedded generator, lengths {load_card(run.cell.dataset).embedded.basis}"]
    else:
        parts = [f"{source} {dataset.get('location')}" if source else "source not recorded"]
    if (scale := dataset.get("length_scale", 1.0)) != 1.0:
        parts.append(f"lengths x {scale:g}")
    return f"({', '.join([*parts, f'n = {run.record.num_requests}'])})"
