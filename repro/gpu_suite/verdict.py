"""One page with the results on the card, each number beside its target. It also names what has not run yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from repro.families.dllm.record import STEPS
from repro.families.platforms import DllmPart, platform
from repro.files import replace_text
from repro.gpu_suite.calibration import (
    CALIBRATION,
    Fitted,
    benchmark_run,
    calibrated,
    card_of,
    measured_card,
    timed_steps,
)
from repro.gpu_suite.suite import OURS, SAME_ENGINE, Suite, title_of
from repro.reports.fitting import PROTOCOLS, medians_sentence
from repro.runs.store import StoredRun

VERDICT = "verdict.md"
LEAST_RATIO, LEAST_ROOFLINE = 2.5, 0.6
"""Targets: our throughput over that of the best static baseline, and our share of the roofline at saturation."""
MOST_HOST_MS, HOST_REQUESTS, MOST_LAUNCHES = 2.0, 64, 12
"""Targets: host time of a Reuse step of so many requests, and kernels that a layer launches."""
COMPARED_IN = ("throughput", "small-card", "shapes")
"""Stages in which all systems serve one load; the verdict compares these."""
SERVED_IN = (*COMPARED_IN, "paper-length", "burst")
"""Stages whose throughput is shown."""

Answer = Literal["met", "NOT met", "FAILED", "not run yet", "-"]
NOT_RUN: Answer = "not run yet"


@dataclass(frozen=True, kw_only=True)
class VerdictLine:
    what: str
    target: str
    found: str = "-"
    answer: Answer = NOT_RUN
    predicted: str = "-"
    """The simulator's expectation for this card (``expected.simulated``)."""

    @property
    def text(self) -> str:
        return f"| {self.what} | {self.found} | {self.predicted} | {self.target} | {self.answer} |"


@dataclass(frozen=True, kw_only=True)
class ServedAtOnce:
    """A system's run with all requests arriving at once. ``run`` is None if there is no valid one yet."""

    system: str
    model: str
    is_ours: bool
    is_packed: bool
    """Whether our engine packs its steps, as for a baseline's rule with ``stages.SAME_ENGINE``."""
    predicted: float | None
    """Tokens per second."""
    run: StoredRun | None

    @property
    def speed(self) -> float:
        return 0.0 if self.run is None else self.run.summary["throughput_tok_s"]

    @property
    def uses_graphs(self) -> bool:
        return self.run is not None and any(self.run.table(STEPS)["graph"])


def write_verdict(suite: Suite) -> str:
    """Return the verdict page, and write it beside the summary."""
    page = "\n".join(_page(suite, calibrated(suite)))
    replace_text(suite.root / VERDICT, page)
    return page


def _page(suite: Suite, fitted: Fitted | str) -> Iterator[str]:
    lines = [*_correctness_lines(suite), *_speed_lines(suite), *_host_lines(suite)]
    answers: tuple[Answer, ...] = ("met", "NOT met", "FAILED", NOT_RUN)
    counts = {answer: sum(line.answer == answer for line in lines) for answer in answers}
    totals = [f"{count} {answer}" for answer, count in counts.items() if count]
    yield f"# Verdict on {platform(suite.platform).title}"
    yield ""
    yield (
        f"{', '.join(totals)}. Every figure is measured, in one run each, unless it says predicted; commit and machine are in "
        "README.md."
    )
    if platform(suite.platform).gpu is None:
        yield "The targets are a card's; the sizes on this platform are those of a test, and saturate nothing."
    yield ""
    yield "| what | found | predicted | target | |"
    yield "|---|---|---|---|---|"
    yield from (line.text for line in lines)
    yield ""
    yield from _throughput_table(suite)
    yield from _block_table(suite)
    yield from _step_table(suite)
    yield from _calibration_table(suite, fitted)


# -- correct --------------------------------------------------------------------------------------------------


def _correctness_lines(suite: Suite) -> Iterator[VerdictLine]:
    for stage, subject, target in (
        ("tests", "tests marked gpu", "all pass"),
        ("goldens", "golden cases in float32", "all, token by token"),
    ):
        jobs = [job for job in suite.jobs if job.stage == stage]
        if not jobs:
            yield VerdictLine(what=subject, found="none on this platform", target=target, answer="-")
            continue
        entry, run = suite.entries[jobs[0].name], suite.stored(jobs[0])
        if entry.status == "failed":
            yield VerdictLine(what=subject, found=_cell(entry.note), target=target, answer="FAILED")
        elif run is None:
            yield VerdictLine(what=subject, target=target)
        else:
            # If all tests were skipped, they show nothing.
            note = str(run.summary["note"])
            is_shown = stage != "tests" or "passed" in note
            yield VerdictLine(what=subject, found=_cell(note), target=target, answer="met" if is_shown else NOT_RUN)


# -- fast -----------------------------------------------------------------------------------------------------


def _speed_lines(suite: Suite) -> Iterator[VerdictLine]:
    for (_, setup), served in _by_load(suite, COMPARED_IN).items():
        static, packed = ([one for one in served if not one.is_ours and one.is_packed is on] for on in (False, True))
        for ours in (entry for entry in served if entry.is_ours):
            yield _ratio_line(f"{setup}: {ours.system} over the best static baseline", ours, static, LEAST_RATIO)
            if packed:
                yield _ratio_line(f"{setup}: {ours.system} over {packed[0].system}", ours, packed, None)
    yield _roofline_line(suite)


def _by_load(suite: Suite, stages: Sequence[str]) -> dict[tuple[str, str], list[ServedAtOnce]]:
    """(stage, model and memory) -> the runs of the systems that serve the load."""
    default_model = platform(suite.platform).part(DllmPart).model
    groups: dict[tuple[str, str], list[ServedAtOnce]] = {}
    for job in suite.jobs:
        if job.stage not in stages:
            continue
        cell = job.experiment.cell
        model, limit = str(cell.knob_values.get("model", default_model)), cell.knob_values.get("memory_limit")
        memory = "whole card" if limit is None else f"{float(limit) / 1e9:.3g} GB"
        length = cell.knob_values.get("gen_length")
        setup = f"{model}, {memory}" + ("" if length is None else f", {length} tokens each")
        run = suite.stored(job)
        is_usable = run is not None and run.validity.valid and run.summary["throughput_tok_s"]
        served = ServedAtOnce(
            system=title_of(cell),
            model=model,
            is_ours=cell.system == OURS,
            is_packed=cell.system == OURS or SAME_ENGINE.items() <= cell.knob_values.items(),
            predicted=job.predicted_tok_s,
            run=run if is_usable else None,
        )
        groups.setdefault((job.stage, setup), []).append(served)
    return groups


def _ratio_line(subject: str, ours: ServedAtOnce, others: list[ServedAtOnce], least: float | None) -> VerdictLine:
    """``least`` is the target ratio; None if there is no target and the card only reports."""
    target = "-" if least is None else f"at least {least:g} x"
    predicted = "-"
    if ours.predicted is not None and (rivals := [other for other in others if other.predicted is not None]):
        fastest = max(rivals, key=lambda one: one.predicted or 0.0)
        assert fastest.predicted is not None
        predicted = f"{ours.predicted / fastest.predicted:.2f} x {fastest.system}"
    best = max((other for other in others if other.run is not None), key=lambda one: one.speed, default=None)
    if ours.run is None or best is None:
        return VerdictLine(what=subject, predicted=predicted, target=target)
    ratio = ours.speed / best.speed
    text = f"{ratio:.2f} x {best.system} ({ours.speed:.1f} against {best.speed:.1f} tok/s; {_graphs_text(ours, best)})"
    answer: Answer = "-" if least is None else _answer(ratio >= least)
    if missing := [other.system for other in others if other.run is None]:
        text, answer = f"{text}, without {', '.join(missing)}", NOT_RUN
    return VerdictLine(what=subject, found=text, predicted=predicted, target=target, answer=answer)


def _graphs_text(ours: ServedAtOnce, other: ServedAtOnce) -> str:
    if ours.uses_graphs == other.uses_graphs:
        return "both with CUDA graphs" if ours.uses_graphs else "neither with CUDA graphs"
    return "the baseline without CUDA graphs" if ours.uses_graphs else "the baseline with CUDA graphs, ours without"


def _roofline_line(suite: Suite) -> VerdictLine:
    """The roofline line of a saturated run on the platform's own model, or of a profiled run if only that knows its card's peaks."""
    subject, target = "dLLM-Serve's share of the roofline at saturation", f"at least {100 * LEAST_ROOFLINE:.0f} %"
    runs = [
        run
        for job in suite.jobs
        if job.stage in ("throughput", "profile") and job.experiment.cell.system == OURS
        if (run := suite.stored(job)) is not None and run.validity.valid and run.summary["roofline_share"] is not None
    ]
    if not runs:
        return VerdictLine(what=subject, target=target)
    share, bound, measured = runs[0].summary["roofline_share"], runs[0].facts["bound"], measured_card(suite)
    peaks = "measured" if "measured" in bound["card"] else "datasheet"
    text = f"{100 * share:.0f} % at {peaks} peaks"
    if measured is not None and peaks == "datasheet":
        # A step's bound is the larger of two times, and each has a datasheet peak and a measured peak.
        factors = (bound["flops_per_s"] / measured.peak_flops, bound["bytes_per_s"] / measured.bandwidth)
        low, high = share * min(factors), share * max(factors)
        text += f"; {100 * low:.0f} to {100 * high:.0f} % at measured peaks"
        share = low
    return VerdictLine(what=subject, found=text, target=target, answer=_answer(share >= LEAST_ROOFLINE))


def _host_lines(suite: Suite) -> Iterator[VerdictLine]:
    subject, target = f"host time of a Reuse step of {HOST_REQUESTS} requests", f"at most {MOST_HOST_MS:g} ms"
    run = benchmark_run(suite, "host")
    rows = {"rows": [], "launches": []} if run is None else run.facts["rows"]
    row = next((row for row in rows["rows"] if row["requests"] == HOST_REQUESTS), None)
    if row is None:
        yield VerdictLine(what=subject, target=target)
    else:
        text = f"{row['reuse_ms']:.2f} ms, 95 % below {row['reuse_p95_ms']:.2f} ms, on this machine's CPU"
        yield VerdictLine(what=subject, found=text, target=target, answer=_answer(row["reuse_ms"] <= MOST_HOST_MS))
    subject, target = "kernels that a layer launches", f"at most {MOST_LAUNCHES}"
    fused = [(row["name"], row["a_layer"]) for row in rows["launches"] if row["name"].endswith("fused")]
    if not fused:
        yield VerdictLine(what=subject, target=target)
    else:
        text = ", ".join(f"{count} ({name.partition(',')[0]})" for name, count in fused)
        largest = max(count for _, count in fused)
        yield VerdictLine(what=subject, found=text, target=target, answer=_answer(largest <= MOST_LAUNCHES))


def _answer(is_met: bool) -> Answer:
    return "met" if is_met else "NOT met"


# -- tables ---------------------------------------------------------------------------------------------------


def _throughput_table(suite: Suite) -> Iterator[str]:
    yield "## Throughput, all requests there at once"
    yield ""
    groups = [
        (stage, served) for (stage, _), served in _by_load(suite, SERVED_IN).items() if any(one.run for one in served)
    ]
    if not groups:
        yield from ("Not run yet.", "")
        return
    yield "| stage | model | system | requests | tok/s | predicted | dLLM-Serve over it | CUDA graphs | roofline | outside forward |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for stage, served in groups:
        ours = next((one for one in served if one.is_ours and one.run is not None), None)
        for one in served:
            if one.run is None:
                continue
            ratio = "-" if ours is None or one is ours else f"{ours.speed / one.speed:.2f} x, {_graphs_text(ours, one)}"
            shares = (one.run.summary[name] for name in ("graph_hit_rate", "roofline_share", "outside_forward_share"))
            predicted = "-" if one.predicted is None else f"{one.predicted:.1f}"
            yield (
                f"| {stage} | {one.model} | {one.system} | {one.run.num_requests} | {one.speed:.1f} | {predicted} | "
                f"{ratio} | {' | '.join('-' if share is None else f'{100 * share:.0f} %' for share in shares)} |"
            )
    yield ""


def _block_table(suite: Suite) -> Iterator[str]:
    """The table of block-diffusion runs; empty if there is none."""
    runs = [run for job in suite.jobs if job.stage == "block" and (run := suite.stored(job)) and run.validity.valid]
    if not runs:
        return
    yield "## Block diffusion, all requests there at once"
    yield ""
    yield "| system | requests | tok/s | tokens a forward | rows a step | attention |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        summary = run.summary
        yield (
            f"| {title_of(run.cell)} | {run.num_requests} | {summary['throughput_tok_s']:.1f} | {summary['tokens_per_forward']:.2f} | "
            f"{summary['rows_per_step']:.0f} | {run.record.manifest['attention']} |"
        )
    yield ""


def _step_table(suite: Suite) -> Iterator[str]:
    yield "## Steps of dLLM-Serve"
    yield ""
    run = benchmark_run(suite, "step")
    if run is None:
        yield from ("Not run yet.", "")
        return
    if not run.validity.valid:
        yield from (f"It was cut off, these are the rows by then: {'; '.join(run.validity.reasons)}", "")
    card, measured = card_of(suite, run), measured_card(suite)
    yield f"| step | requests | tokens each | ms | of the roofline, {card.name} | at measured peaks | host | CUDA graphs |"
    yield "|---|---|---|---|---|---|---|---|"
    for row, stored in zip(timed_steps(run), run.facts["rows"]["rows"], strict=True):
        shares = [
            "-" if peaks is None else f"{100 * row.lower_bound_s(peaks) / row.seconds:.0f} %"
            for peaks in (card, measured)
        ]
        yield (
            f"| {row.kind} | {row.batch_size} | {row.total_len} | {1e3 * row.seconds:.2f} | {shares[0]} | {shares[1]} | "
            f"{100 * stored['host']:.0f} % | {100 * stored['graph']:.0f} % |"
        )
    yield ""


def _calibration_table(suite: Suite, fitted: Fitted | str) -> Iterator[str]:
    yield "## Calibration of the card"
    yield ""
    if isinstance(fitted, str):
        yield from (f"{fitted[0].upper()}{fitted[1:]}.", "")
        return
    constants, worst = fitted.calibration, max(abs(e.error_percent) for e in fitted.comparisons if e.role == "fitted")
    yield (
        f"{100 * constants.matmul_efficiency:.1f} % of the matrix peak, {1e3 * constants.step_overhead_s:.2f} ms a step, bandwidth share "
        f"{constants.bandwidth_efficiency:.2f}, fitted to {len(constants.fitted_on)} rows, off by at most "
        f"{worst:.1f} %. Median absolute error of predictions: {medians_sentence(fitted.medians)}. All of it is in {CALIBRATION}."
    )
    if platform(suite.platform).gpu is not None and suite.platform not in PROTOCOLS:
        yield f"`repro calibrate --platform {suite.platform} --write` makes it that of every simulation."
    yield ""
    yield "| what | role | measured | predicted | error |"
    yield "|---|---|---|---|---|"
    for row in fitted.comparisons:
        yield (
            f"| {row.name} | {row.role} | {row.measured:.4g} {row.unit} | {row.predicted:.4g} {row.unit} | "
            f"{row.error_percent:+.1f} % |"
        )
    yield ""


def _cell(text: Any) -> str:
    """The text on one line, for a cell of a table."""
    return " ".join(str(text).replace("|", "/").split())
