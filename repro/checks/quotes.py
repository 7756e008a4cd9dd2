"""What documents say of results, made again from the committed CSV files: a sentence's part is there word for word, or is
not what the results say."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean

from repro.checks.stated import statements
from repro.reports.facts import committed_facts, facts_table
from repro.reports.fitting import PROTOCOLS
from repro.reports.predictions import medians_sentence, read_report

DATASETS = ("livebench", "burst", "osc")
CARDS = {"l40s": "L40S", "rtx4090": "RTX 4090"}
PUBLISHED, SINGLE = "dLLM-Serve, two refreshes per block (as published)", "dLLM-Serve, one refresh per block"
MEASURED = "cpu-tiny"

Row = dict[str, str]


def quotes(root: Path) -> Iterator[tuple[str, str]]:
    """Document and what it has to say, of the results below ``root``."""
    for text in (*_readings(root), *_ladders(root), *_measured(root), *_predicted(), *_verdicts(root, "dllm-serve")):
        yield "docs/dllm-serve.md", text
    yield from statements(root)
    yield from (("docs/ampd.md", text) for text in _verdicts(root, "ampd"))
    yield from (("docs/laps.md", text) for text in _verdicts(root, "laps"))


def _rows(root: Path, name: str, platform: str) -> list[Row]:
    with (root / platform / f"{name}-{platform}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _ends(values: Iterable[float], decimals: int = 0) -> str:
    """Least and largest, one of them where they are written alike."""
    kept = list(values)
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}" for end in (min(kept), max(kept))))


def _readings(root: Path) -> Iterator[str]:
    """dLLM-Serve over the best baseline."""
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for card in CARDS:
        for row in _rows(root, "readings", card):
            speeds.setdefault((card, row["dataset"], row["setting"]), []).append(float(row["throughput_tok_s"]))

    def gains(card: str, setting: str, engine: str) -> list[float]:
        return [max(speeds[card, name, engine]) / max(speeds[card, name, setting]) for name in DATASETS]

    for reading in ("published, for the workload", "efficient, for the workload", "policy, packed"):
        own = [gains(card, reading, engine) for card in CARDS for engine in (PUBLISHED, SINGLE)]
        cells = [" / ".join(f"{gain:.2f}" for gain in each) for each in own]
        yield f"| `{reading.partition(',')[0]}` | {' | '.join(cells)} |"
    largest, fitted = (
        _ends(gains("l40s", setting, PUBLISHED), 2)
        for setting in ("published, for the workload", "published, for max_model_len")
    )
    yield f"On the L40S dLLM-Serve is {largest} times as fast as the best published baseline"
    yield f"{fitted} times where it has to fit `max_model_len`"
    alike, single = (
        [gain for card in CARDS for gain in gains(card, "policy, packed", engine)] for engine in (PUBLISHED, SINGLE)
    )
    yield f"in all six cells (card and data set), by {_ends(100 * (1 / gain - 1) for gain in alike)} %."
    yield f"dLLM-Serve is the fastest in all six, by {_ends(100 * (gain - 1) for gain in single)} %."


def _ladders(root: Path) -> Iterator[str]:
    """The engine's share of the paper's three steps, in logarithms, and what the other two add."""
    ladders: dict[str, list[list[float]]] = {}
    for card in CARDS:
        rungs: dict[str, list[float]] = {}
        for row in _rows(root, "fig8", card):
            rungs.setdefault(row["dataset"], []).append(float(row["throughput_tok_s"]))
        ladders[card] = list(rungs.values())

    def engine(card: str) -> str:
        return _ends(100 * math.log(one / base) / math.log(whole / base) for base, one, _, whole, *_ in ladders[card])

    def added(step: int, *cards: str) -> str:
        return _ends(100 * (ladder[step] / ladder[step - 1] - 1) for card in cards for ladder in ladders[card])

    yield f"{engine('l40s')} % of it on the L40S and {engine('rtx4090')} % on the RTX 4090"
    yield f"The scheduler adds {added(2, 'l40s')} % and {added(2, 'rtx4090')} % to throughput"
    yield f"logit-aware budgeting {added(3, *CARDS)} %"


def _measured(root: Path) -> Iterator[str]:
    rows = [row for row in _rows(root, "fig3", MEASURED) if row["obtained"] != "paper"]
    highest = max(float(row["rate_req_s"]) for row in rows)

    def means(column: str, system: str) -> dict[str, float]:
        own = [row for row in rows if row["system"] == system and float(row["rate_req_s"]) == highest]
        return {name: mean(float(row[column]) for row in own if row["dataset"] == name) for name in DATASETS}

    ours, fast = (means("throughput_tok_s", system) for system in ("dllm-serve", "fast-dllm"))
    pair = {name: f"{ours[name]:.0f} and {fast[name]:.0f}" for name in DATASETS}
    yield f"{pair['livebench']} on LiveBench, {pair['burst']} on Burst"
    contended = sum("contended" in row["obtained"] for row in rows)
    yield f"something else kept the machine busy during {contended} of the {len(rows)} runs"
    shares = [means("outside_forward_share", system).values() for system in ("dllm-serve", "fast-dllm")]
    ours_share, fast_share = (_ends(100 * share for share in own) for own in shares)
    yield f"dLLM-Serve spends {ours_share} % of its step time at that rate, Fast-dLLM {fast_share} %"

    speeds: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in _rows(root, "fig7", MEASURED):
        point = speeds.setdefault((row["axis"], row["input_len"], row["output_len"]), {})
        point.setdefault(row["system"], []).append(float(row["throughput_tok_s"]))
    relative = [mean(point["dllm-serve"]) / mean(point["sparse-dllm"]) for point in speeds.values()]
    yield f"dLLM-Serve makes {_ends(relative, 2)} of Sparse-dLLM's throughput"
    (engine,) = (
        float(row["relative_throughput"])
        for row in _rows(root, "fig8", MEASURED)
        if (row["dataset"], row["rung"]) == ("osc", "+ inference engine")
    )
    yield f"in Figure 8 the engine alone makes {engine:.2f} of it on OSC"


def _predicted() -> Iterator[str]:
    """Numbers that the calibration reports predict, as documents quote them."""
    reports = {card: read_report(card) for card in PROTOCOLS}
    for card, report in reports.items():
        if report is not None:
            yield f"- {CARDS[card]}: {medians_sentence(report['medians'])}"
    throughputs = [
        report["medians"]["throughputs"]["median_percent"] for report in reports.values() if report is not None
    ]
    yield f"misses the paper's throughputs of baselines by {_ends(throughputs)} % in the median"


def _verdicts(root: Path, paper: str) -> Iterator[str]:
    with (root / f"claims-{paper}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def number(role: str, *verdicts: str) -> int:
        return sum(row["role"] == role and row["verdict"] in verdicts for row in rows)

    met, missed = number("prediction", "reproduced"), number("prediction", "not reproduced")
    if paper == "ampd":
        yield f"Of its comparisons {met + missed} are predictions of this simulator: {met} hold and {missed} do not."
    if paper == "laps":
        waiting = sum(row["verdict"] in ("not testable here", "not run") for row in rows)
        odd = sum(row["verdict"] == "paper's inconsistency" for row in rows)
        certain, failed = number("by construction", "by construction"), number("by construction", "not reproduced")
        words = {1: "one fails by it"}
        yield (
            f"Of {met + missed} predictions {met} hold and {missed} do not; {certain} claims hold by construction and "
            f"{words.get(failed, f'{failed} fail by it')}, {waiting} wait for a card or cannot be tested, and {odd} entries are"
        )


def plain(text: str) -> str:
    """As quotes are looked for: without ends of lines and marks of emphasis."""
    return " ".join(text.replace("*", "").split())


def missing(root: Path, documents: Path) -> Sequence[tuple[str, str]]:
    """Quotes that are not in their documents."""
    texts: dict[str, str] = {}
    for name, _ in (found := list(quotes(root))):
        texts.setdefault(name, plain((documents / name).read_text(encoding="utf-8")))
    header = plain(facts_table({}).splitlines()[0])
    if with_table := [name for name, text in texts.items() if header in text]:
        rows = facts_table(committed_facts(root)).splitlines()[2:]
        found += [(name, row) for name in with_table for row in rows]
    return [(name, text) for name, text in found if not _stands(plain(text), texts[name])]


def _stands(quote: str, text: str) -> bool:
    """Whole: no number at its ends goes on."""
    return re.search(rf"(?<![\d.]){re.escape(quote)}(?!\d|[.,]\d)", text) is not None
