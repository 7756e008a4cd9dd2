"""``repro import`` and ``repro trace-events``: read other tools' results as runs, and write a run as a trace for viewers."""

from pathlib import Path
from typing import Annotated

import typer

from engines.errors import require
from repro.cli import options as opt
from repro.cli.output import print_json, print_table, say
from repro.files import replace_text, writable_file, writable_folder
from repro.paths import LOCAL

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
    from repro.interchange.imported import import_file, read_answers
    from repro.runs.store import Store

    twice = next((path for n, path in enumerate(files) if path.resolve() in map(Path.resolve, files[:n])), None)
    require(twice is None, f"file={str(twice)!r} is given twice, and each file is a repeat of its own: keep one")
    store = Store(writable_folder("result_dir", result_dir or LOCAL))
    contents = [read_answers(path) for path in files]
    runs = [
        import_file(path, store, dataset=dataset, platform=where, seed=seed, content=content)
        for seed, (path, content) in enumerate(zip(files, contents, strict=True))
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
