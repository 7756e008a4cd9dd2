"""Words for captions: how stored runs were obtained, where their prompts came from, and what is wrong with them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paper_figures.common.runs import Runs
from paper_figures.common.words import plural
from repro.families.cost import load_calibration
from repro.families.platforms import Platform
from repro.reports.fitting import predictions_note
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.workloads.dataset import load_card


def validity_text(runs: Sequence[StoredRun]) -> str:
    invalid = sum(not run.validity.valid for run in runs)
    contended = sum(bool(run.validity.warnings) for run in runs)
    text = "yes" if not invalid else f"{invalid} of {len(runs)} runs INVALID"
    return text if not contended else f"{text}, {contended} of {len(runs)} contended"


def obtained_text(runs: Sequence[StoredRun]) -> str:
    return "; ".join(sorted({run.obtained for run in runs}))


def basis_of(runs: Runs) -> str:
    """Tell whether a figure is simulated or measured, on which device and with which model."""
    view = runs.view
    if view.is_simulated:
        uncalibrated = any("uncalibrated" in run.obtained for run in runs.all)
        return f"{view.obtained}{', uncalibrated' if uncalibrated else ''}: {view.platform.title}"
    model = "embedded tiny LLaDA" if view.dllm.model == "tiny" else view.dllm.model
    devices = dict.fromkeys(device_text(run) for run in runs.all)
    return f"measured: {' and '.join(devices)}; {model}"


def how_obtained(runs: Sequence[StoredRun], labels: Sequence[str] | None = None) -> list[str]:
    """Write a sentence for each basis of the runs, with the labels (one per run) that share it. Without labels we say "runs"."""
    by_basis: dict[str, list[str]] = {}
    for run, label in zip(runs, labels or ["runs"] * len(runs), strict=True):
        names = by_basis.setdefault(basis(run), [])
        if label not in names:
            names.append(label)
    if len(by_basis) == 1:
        return [f"All runs {next(iter(by_basis))}."]
    return [f"{', '.join(names)}: {text}." for text, names in by_basis.items()]


def basis(run: StoredRun) -> str:
    code = ", by other code" if run.other_code else ""
    calibration = run.record.manifest.get("calibration")
    if run.record.obtained == "composed":
        return f"composed{code}, each step of measured kernels: {calibration}"
    if run.record.obtained == "simulated":
        return f"simulated{code}, each step charged to the roofline of {calibration or 'a card without calibration'}"
    return f"measured{code} on {device_text(run)}"


def device_text(run: StoredRun) -> str:
    """Name the device of a measured run, and random weights if it has them."""
    graphics, manifest = run.provenance.get("gpu"), run.record.manifest
    device = manifest.get("device") or run.cell.knob_values.get("device", "cpu")
    weights = ", random weights" if run.cell.knob_values.get("weights") == "random" else ""
    if str(device).startswith("cuda") and graphics:
        limit = manifest.get("facts", {}).get("enforced_memory_bytes")
        return f"{graphics['name']}{'' if limit is None else f' held to {limit / 1e9:g} GB'}{weights}"
    cpu = run.provenance.get("cpu", {})
    cores = plural(cpu["usable"], "core") if cpu.get("usable") else "unknown number of cores"
    return f"{cpu.get('model') or 'an unnamed CPU'}, {cores}{weights}"


def prompt_sources(runs: Sequence[StoredRun]) -> str:
    """Tell, for each data set, the source and number of its requests; several if its runs differ."""
    texts = []
    for dataset in dict.fromkeys(run.cell.dataset for run in runs):
        sources = sorted({_prompt_source(run) for run in runs if run.cell.dataset == dataset})
        if sources:
            texts.append(f"{dataset_title(dataset)} {' and '.join(sources)}")
    return f"Prompts: {'; '.join(texts)}."


def _prompt_source(run: StoredRun) -> str:
    dataset: dict[str, Any] = run.record.manifest.get("dataset") or {}
    source = dataset.get("source")
    if source == "embedded":
        parts = [f"embedded generator, lengths {load_card(run.cell.dataset).embedded.basis}"]
    else:
        parts = [f"{source} {dataset.get('location')}" if source else "source not recorded"]
    if (scale := dataset.get("length_scale", 1.0)) != 1.0:
        # Generated prompts are made to the length asked for. We cut the ends of a data set's own prompts.
        parts.append(f"{'lengths x' if source == 'embedded' else 'prompts cut to lengths x'} {scale:g}")
    return f"({', '.join([*parts, f'n = {run.num_requests}'])})"


def seeds_sentence(runs: Sequence[StoredRun]) -> str:
    """Tell the seeds, and how many runs something else on the machine disturbed."""
    seeds = sorted({run.cell.seed for run in runs})
    text = f"Seed {seeds[0]}."
    if len(seeds) > 1:
        text = f"Seeds {', '.join(map(str, seeds))}: mean, and bars for its 95 % interval (Student's t)."
    return " ".join([text, *contended_note(runs)])


def origin_of(runs: Runs) -> list[str]:
    """Tell the seeds, and how each of the runs was obtained."""
    return [seeds_sentence(runs.all), *how_obtained(runs.all)]


def repeats_line(runs: Sequence[StoredRun]) -> str:
    """The number of seeds in a few words; empty without runs."""
    num = len({run.cell.seed for run in runs})
    return f"Mean of {num} seeds with its 95 % interval." if num > 1 else "One seed." * num


def invalid_notes(runs: Sequence[StoredRun]) -> list[str]:
    return [
        *(
            f"INVALID: {run.cell.folder_name}: {'; '.join(run.validity.reasons)}"
            for run in runs
            if not run.validity.valid
        ),
        *contended_note(runs),
    ]


def contended_note(runs: Sequence[StoredRun]) -> list[str]:
    contended = sum(bool(run.validity.warnings) for run in runs)
    if not contended:
        return []
    return [f"CONTENDED: {contended} of {len(runs)} runs were made while the machine was busy with something else."]


def missing_note(runs: Runs, asked: Sequence[Cell]) -> list[str]:
    """Count the points that lack a repeat, and name some of them by the knobs that differ between points."""
    repeats = Counter(cell.with_seed(0) for cell in asked)
    missing = [cell for cell, num in repeats.items() if len(runs.of(cell)) < num]
    if not missing:
        return []
    names = dict.fromkeys(name for cell in repeats for name, _ in cell.knobs)
    varied = {name for name in names if len({cell.knob_values.get(name) for cell in repeats}) > 1}

    def told(cell: Cell) -> str:
        rate = [] if cell.rate is None else [f"at {cell.rate:g}/s"]
        knobs = [f"{name}={value}" for name, value in cell.knobs if name in varied]
        return " ".join([cell.system, cell.dataset, *rate, *knobs])

    more = ", ..." if len(missing) > 3 else ""
    return [f"{len(missing)} of {len(repeats)} points are missing: {', '.join(map(told, missing[:3]))}{more}"]


def on_a_cluster(runs: Runs) -> str:
    """Tell how runs of a simulated cluster were obtained, and what their steps are charged by."""
    calibration = str(runs.all[0].record.manifest["calibration"])
    return f"All runs simulated on a discrete-event cluster; {calibration.rstrip('.')}."


def held_out_note(platform: Platform) -> list[str]:
    """Tell how good a simulation of the card is, from ``repro calibrate``'s report."""
    card = platform.gpu
    if card is None or platform.executor != "roofline":
        return []
    if not load_calibration(card).fitted_on:
        return [
            f"Uncalibrated: {card} is simulated from datasheet peaks without overhead. Real steps are slower; compare shapes, not values."
        ]
    return [predictions_note(card)]


def dataset_title(dataset: str) -> str:
    return load_card(dataset).title
