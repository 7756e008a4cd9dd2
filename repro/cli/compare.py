"""``repro compare``, ``export``, ``import`` and ``trace-events``: compare stored runs with others, write them for other tools, and read other tools' results as
runs."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from engines.errors import require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import count_text, print_json, print_table, say
from repro.files import replace_text, writable_file, writable_folder
from repro.paths import LOCAL

if TYPE_CHECKING:
    from repro.runs.store import StoredRun
    from repro.workbench.comparison import Change, Comparison, Side


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Checked):
    panel: ClassVar[str] = opt.WHAT
    metric: list[str] | None = None
    """A metric as 'repro export' names it, such as e2el_s.mean; several times [default: throughput_tok_s]."""
    tolerance: Annotated[float, Range(0, 10)] = 0.02
    """The share by which a metric may differ."""
    result_dir: Path | None = None
    """Folder of runs [default: results/local]."""


def compare(
    *,
    a: Annotated[str, typer.Argument(help="A folder of runs, a run's name, or SYSTEM@NAME=VALUE,... in --result-dir.")],
    b: Annotated[str, typer.Argument(help="What is held against it, said likewise.")],
    options: CompareOptions,
    json: opt.Json = False,
) -> None:
    """Compare metrics of B with those of A: ratios of paired runs, with 95 % intervals. Two runs pair up if their seed and all other
    settings are equal. Exit code 1 if a metric differs by more than the tolerance outside noise."""
    from repro.workbench.comparison import compare_sides, holds_runs, sides_of

    result_dir = options.result_dir
    require(
        result_dir is None or not (holds_runs(a) and holds_runs(b)),
        f"result_dir={str(result_dir)!r} has no effect where both sides are folders: leave it out",
    )
    sides = sides_of(a, b, result_dir or LOCAL)
    metrics = dict.fromkeys(options.metric or ["throughput_tok_s"])
    comparisons = [compare_sides(*sides, metric, options.tolerance) for metric in metrics]
    is_changed = any(comparison.is_changed for comparison in comparisons)
    if json:
        facts = {side.name: _side_json(side) for side in sides} | {"unlike_machines": _machine_differences(sides)}
        print_json({**facts, "changed": is_changed, "comparisons": list(map(_comparison_json, comparisons))})
    else:
        _print(comparisons, sides)
    if is_changed or any(comparison.num_invalid for comparison in comparisons):
        raise typer.Exit(1)


def _print(comparisons: "Sequence[Comparison]", sides: "Sequence[Side]") -> None:
    for side in sides:
        facts = _side_json(side)
        commits = ", ".join(str(commit)[:8] for commit in facts["commits"])
        say(
            f"{side.name.upper()}: {side.said}: {count_text(len(side.runs), 'run')}, {'; '.join(facts['obtained'])}, commit {commits}"
        )
    for line in _notes(comparisons, sides):
        say(line)
    for comparison in comparisons:
        rows = [_row_texts(row) for row in comparison.rows]
        # A single setting needs no name.
        columns = slice(1 if len(rows) == 1 else 0, None if any(row[-1] for row in rows) else -1)
        if rows:
            print_table(f"{comparison.metric}: B over A", COLUMNS[columns], [row[columns] for row in rows])
    beyond = f"beyond {100 * comparisons[0].tolerance:g} % outside noise"
    changed = [comparison.metric for comparison in comparisons if comparison.is_changed]
    say(f"changed {beyond}: {', '.join(changed)}" if changed else f"no change {beyond}")


COLUMNS = ("setting", "A", "B", "B / A", "95 %", "pairs", "verdict", "what ran")


def _row_texts(row: "Change") -> list[str]:
    from repro.workbench.comparison import said_of

    setting = " ".join(f"{name}={said_of(name, value)}" for name, value in row.setting)
    ratio = row.ratio
    bounds = "-" if ratio.low is None or ratio.high is None else f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    mean = "-" if ratio.mean is None else f"{ratio.mean:.3f}"
    a, b = row.ran
    ran = a if a == b else f"A: {a}\nB: {b}"
    return [setting or "all", f"{row.a:.4g}", f"{row.b:.4g}", mean, bounds, str(ratio.n), row.verdict, ran]


def _notes(comparisons: "Sequence[Comparison]", sides: "Sequence[Side]") -> Iterator[str]:
    yield from dict.fromkeys(side.warning for side in sides if side.warning is not None)
    first, second = (
        {module for run in side.runs for module in run.manifest["code"]["modules"].items()} for side in sides
    )
    # Modules that both sides use in different versions.
    shared = {name for name, _ in first} & {name for name, _ in second}
    changed = sorted(shared & {name for name, _ in first ^ second})
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"code differs in {', '.join(changed[:3])}{more}"
    if machines := _machine_differences(sides):
        values = (f"{name} {', '.join(values)}" for name, values in machines.items())
        yield f"measured on unlike machines: {'; '.join(values)}"
    paired = comparisons[0]
    if paired.is_in_order:
        yield "no seed in common: paired in the order of seeds"
    if paired.num_unpaired:
        yield f"{count_text(paired.num_unpaired, 'run')} without a partner left out"
    if paired.num_invalid:
        yield f"{count_text(paired.num_invalid, 'pair')} left out, of which a run is INVALID"
    for comparison in comparisons:
        if comparison.num_undefined:
            yield f"{comparison.metric}: {count_text(comparison.num_undefined, 'pair')} left out without such a number"
        if any(row.ratio.n == 1 for row in comparison.rows):
            yield f"{comparison.metric}: one pair has no interval: make repeats ('repro sweep --repeats 5')"


def _machine_differences(sides: "Sequence[Side]") -> dict[str, list[str]]:
    """How the machines that measured the runs differ."""
    from repro.runs.provenance import differing_facts

    machines = [run.machine for side in sides for run in side.runs if run.machine is not None]
    return {name: sorted(set(values)) for name, values in differing_facts(machines).items()}


def _side_json(side: "Side") -> dict[str, Any]:
    from repro.workbench.comparison import commit_of, name_of

    return {
        "said": side.said,
        "runs": [name_of(run) for run in side.runs],
        "obtained": sorted({run.obtained for run in side.runs}),
        "commits": sorted({commit_of(run) or "unknown" for run in side.runs}),
        "codes": sorted({run.code_digest for run in side.runs}),
    }


def _comparison_json(comparison: "Comparison") -> dict[str, Any]:
    rows = [
        {
            **asdict(row),
            "setting": dict(row.setting),
            "ran": dict(zip(("a", "b"), row.ran, strict=True)),
            "ratio": {"mean": row.ratio.mean, "low": row.ratio.low, "high": row.ratio.high, "pairs": row.ratio.n},
            "verdict": row.verdict,
        }
        for row in comparison.rows
    ]
    fields = {name: value for name, value in asdict(comparison).items() if name not in ("changes", "overall")}
    return {**fields, "changed": comparison.is_changed, "rows": rows}


REPORT = "llmd-benchmark-report"


def _write_reports(runs: "Sequence[StoredRun]", out: Path) -> None:
    from repro.interchange.exported import report_of
    from repro.workbench.comparison import name_of

    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        replace_text(out / f"{name_of(run)}.json", json.dumps(report_of(run), indent=1))
    say(f"{count_text(len(runs), 'report')}: {out}", file=sys.stderr)


def export(
    *,
    folder: Annotated[Path, typer.Argument(help="Where runs are: a --result-dir.")],
    format: Annotated[
        Literal["csv", "parquet", "llmd-benchmark-report"],
        typer.Option(
            help="csv, parquet, or llmd-benchmark-report: JSON of llm-d, a file a run.", rich_help_panel=opt.RUNS
        ),
    ] = "csv",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write, or folder of reports [default: standard output].", rich_help_panel=opt.RUNS),
    ] = None,
) -> None:
    """Write one row per run: a column for each knob, commit and code, how it was obtained, and every metric."""
    from repro.workbench.comparison import folder_of, frame_of, write_frame

    require(out is not None or format == "csv", f"format={format!r} is no text: give a place with --out")
    if out is not None and format == REPORT:
        _write_reports(folder_of(folder).runs, writable_folder("out", out))
        return
    if out is not None:
        other = {".csv": "csv", ".parquet": "parquet"}.get(out.suffix.lower(), format)
        require(
            other == format,
            f"out={str(out)!r} is named as {other}, and format={format!r}: give --format {other}, or another name",
        )
        writable_file("out", out)
    stored = folder_of(folder)
    frame = frame_of(stored.runs)
    if out is None:
        sys.stdout.write(frame.to_csv(index=False))
    else:
        write_frame(frame, format, out)
        say(f"{count_text(len(frame), 'run')}: {out}", file=sys.stderr)
    if stored.warning is not None:
        say(stored.warning, file=sys.stderr)


SHOWN = ("ttft_s", "tpot_s", "itl_s", "e2el_s")


def import_(
    *,
    files: Annotated[
        list[Path], typer.Argument(metavar="ARGS", help="Result files with single requests; a repeat each.")
    ],
    dataset: Annotated[str, typer.Option(help="What was served, in your words.")] = "imported",
    where: Annotated[str, typer.Option(help="On which machine, in your words.")] = "elsewhere",
    result_dir: Annotated[Path | None, typer.Option(help="Where runs go [default: results/local].")] = None,
    json: opt.Json = False,
) -> None:
    """Read benchmark results of vLLM, SGLang, AIPerf, GuideLLM or inference-perf as runs that 'repro compare' takes."""
    from repro.interchange.imported import import_file, read_benchmarks
    from repro.runs.store import Store

    twice = next((path for n, path in enumerate(files) if path.resolve() in map(Path.resolve, files[:n])), None)
    require(twice is None, f"file={str(twice)!r} is given twice, and each file is a repeat of its own: keep one")
    store = Store(writable_folder("result_dir", result_dir or LOCAL))
    contents = [read_benchmarks(path) for path in files]
    runs = [
        run
        for seed, (path, found) in enumerate(zip(files, contents, strict=True))
        for run in import_file(path, store, dataset=dataset, platform=where, seed=seed, benchmarks=found)
    ]
    if json:
        print_json({"runs": [{"file": str(run.file), "summary": run.summary} for run in runs]})
        return
    rows = []
    for run in runs:
        means = [(run.summary[name] or {}).get("mean") for name in SHOWN]
        number = run.summary["throughput_tok_s"]
        texts = [f"{1e3 * mean:.2f}" if mean is not None else "-" for mean in means]
        rows.append(
            (
                str(run.cell.knob_values["tool"]),
                str(run.num_requests),
                "-" if number is None else f"{number:.1f}",
                *texts,
            )
        )
    print_table("Imported: means in ms", ("tool", "requests", "tok/s", "TTFT", "TPOT", "ITL", "E2E"), rows)
    for warning in dict.fromkeys(text for run in runs for text in (*run.validity.reasons, *run.validity.warnings)):
        say(warning, "  ")
    say(f"runs: {store.root}")


def trace_events(
    *,
    run: Annotated[Path, typer.Argument(help="File of a stored run.")],
    out: Annotated[Path, typer.Option(help="The trace to write.")] = Path("trace.json"),
    json: opt.Json = False,
) -> None:
    """Write a run as a trace of events, to open in ui.perfetto.dev or chrome://tracing."""
    from repro.interchange.exported import trace_of

    writable_file("out", out)
    text, count = trace_of(run)
    replace_text(out, text)
    if json:
        print_json({"file": str(out), "events": count})
    else:
        say(f"file: {out}, {count} events")
