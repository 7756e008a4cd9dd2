"""``repro reproduce``, ``figure``, ``claims`` and ``report``: run and draw a figure, only redraw it, judge every claim of a paper, or write all as one
page."""

import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from engines.errors import UserError, require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import print_json, print_table, progress_bar, say
from repro.cli.sweep import outcome_lines, require_alike, require_folders, require_runs, run_sweep, sweep_of
from repro.files import readable_folder, replace_text, writable_file, writable_folder
from repro.paths import IS_INSTALLED, RESULTS, figures_beside
from repro.reports.claims import (
    ROLES,
    Claim,
    Flips,
    Judged,
    count,
    count_by_role,
    count_facts,
    facts,
    judge_all,
    read_claims,
)
from repro.reports.claims_file import as_row, our_text, read, read_flips, rejudged, save, value_text
from repro.reports.figures import Accuracy
from repro.runs.cell import COMPARISON, Cell
from repro.runs.system import SYSTEMS

if TYPE_CHECKING:
    from repro.reports.figures import Figure, Paper, Rendered, View
    from repro.runs.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class FigureOptions(opt.Reused, opt.Charged, Checked):
    panel: ClassVar[str] = opt.WHAT
    platform: list[str] | None = None
    """Platform of the runs; several times [default: the figure's own]."""
    reading: list[str] | None = None
    """Reading of the baselines: published, efficient or policy; several times [default: published if simulated, else efficient]."""
    accuracy: Accuracy = "usual"
    """usual: each system at its usual retention. dense: at the least retention that answers as well as the model without a cache ('repro
    figure accuracy')."""
    num_runs: Annotated[int, Range(1, 1000)] | None = None
    """Repeats, with seeds 0, 1, ...; figures show 95 % intervals [default: 3 where times are measured, else 1 to 10, as the figure's
    claims need]."""
    executor: Literal["torch", "roofline"] | None = None
    """torch (measured) or roofline (simulated) [default: the platform's]."""
    request_rate: list[str] | None = None
    """Requests/s in place of the platform's rates; several times."""
    num_prompts: Annotated[int, Range(most=10**5)] | None = None
    """Requests per run, if the figure does not fix them."""
    weights: str | None = None
    """checkpoint, or random to run a shape without a download."""
    plain: bool = False
    """Leave title and caption out of pictures, to use them in a paper; both are in NAME.txt."""
    out_dir: Annotated[Path | None, typer.Option(rich_help_panel=opt.RUNS)] = None
    """Folder for figures [default: results/figures/PAPER, or figures/PAPER in --result-dir]."""

    def views(self, name: str) -> "list[View]":
        from repro.families.platforms import DllmPart
        from repro.families.platforms import platform as platform_of
        from repro.reports.figures import View, default_reading
        from repro.reports.figures import figure as figure_of

        parsed = [opt.parse_rate(rate) for rate in self.request_rate or []]
        if None in parsed:
            raise UserError("request_rate='inf' has no place on an axis of rates: give numbers of requests/s")
        rates = tuple(sorted({rate for rate in parsed if rate is not None}))
        figure = figure_of(name).load()
        names = self.platform or figure.platforms
        targets = [replace(platform_of(each), **opt.given_options(executor=self.executor)) for each in names]
        for target in targets:
            # Readings exist only for baselines of diffusion LLMs.
            if self.reading and target.parts and not any(isinstance(part, DllmPart) for part in target.parts):
                raise UserError(f"reading={self.reading[0]!r} has no effect on platform={target.name!r}: leave it out")
        knobs = opt.given_options(num_prompts=self.num_prompts, weights=self.weights) | self.charged
        return [
            View(
                platform=target,
                reading=reading,  # type: ignore[arg-type]
                num_runs=figure.default_num_runs(target) if self.num_runs is None else self.num_runs,
                knobs=tuple(knobs.items()),
                rates=rates,
                accuracy=self.accuracy,
            )
            for target in targets
            for reading in self.reading or [default_reading(target)]
        ]

    def command(self, name: str) -> str:
        """The command that makes all runs of these views."""
        words = ["repro", "reproduce", name]
        for field in fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value is True:
                words.append(option)
            elif value not in (None, False, "usual"):
                words += [
                    word for item in (value if isinstance(value, list) else [value]) for word in (option, str(item))
                ]
        return shlex.join(words)

    def out_folder(self, name: str) -> Path:
        """The folder for the figure ``PAPER/NAME``. Papers get folders of their own, since figures of two papers can share a name."""
        return self.out_dir or figures_beside(self.result_dir) / name.rpartition("/")[0]


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(FigureOptions):
    measured: Path | None = None
    """With truth: a folder with experiments.csv and workloads.csv [default: results/truth]."""
    aisimulate: Path | None = None
    """With truth: a Python with ai-dynamo-runtime, to compare its simulator with ours (docs/truth.md). Nothing is stored."""
    tier: Literal["kick-tires", "short", "all"] | None = None
    """In place of a figure: run the commands of ARTIFACT.md that take about 30 seconds or 10 minutes, or all. Then show your verdicts
    beside the committed ones."""


Name = Annotated[
    str, typer.Argument(help="Name of the figure ('repro list' shows them), or a module of your own and a colon.")
]


Force = Annotated[bool, typer.Option("--force", help="Run again what is already stored.", rich_help_panel=opt.RUNS)]


def reproduce(
    *,
    name: Annotated[
        str | None, typer.Argument(help="Name of the figure, as in 'repro list', or a module of your own and a colon.")
    ] = None,
    options: ReproduceOptions,
    placement: opt.Placement,
    force: Force = False,
    json: opt.Json = False,
) -> None:
    """Run what is missing of the runs behind a figure, and draw it: PNG, PDF, CSV and a table of the runs. 'truth' compares simulated
    servers with latencies that others measured (docs/truth.md)."""
    if options.tier is not None:
        from repro.cli.tier import run_tier

        require(name is None, f"figure={name!r} has no effect beside a tier: leave one out")
        check_without_effect(
            f"tier {options.tier}", options, placement, {"force": force}, ("tier", "result_dir", "jobs", "force")
        )
        run_tier(options.tier, options.result_dir, placement.jobs, force=force, json=json)
        return
    if name is None:
        raise UserError("Missing argument 'NAME': give the name of a figure ('repro list' shows them), or a --tier")
    if name == TRUTH:
        heeded = ("measured", "out_dir", "result_dir") if options.aisimulate is None else ("aisimulate",)
        check_without_effect(f"{TRUTH} here", options, placement, {"force": force}, heeded)
        if options.aisimulate is None:
            _compare_with_measured(options.measured, options.out_folder("truth/truth"), json=json)
        else:
            _serve_both(options.aisimulate, json=json)
        return
    for option, value in (("measured", options.measured), ("aisimulate", options.aisimulate)):
        require(value is None, f"{option}={str(value)!r} has no effect on {name}: leave it out, or reproduce {TRUTH}")
    _make_figure(name, options, placement, force=force, draw_only=False, json=json)


def figure(*, name: Name, options: FigureOptions, json: opt.Json = False) -> None:
    """Redraw a figure from stored runs, without running anything."""
    _make_figure(name, options, opt.Placement(), force=False, draw_only=True, json=json)


def check_without_effect(
    name: str, options: ReproduceOptions, placement: opt.Placement, others: Mapping[str, object], heeded: Sequence[str]
) -> None:
    """Refuse options that are given but not ``heeded``."""
    requested = {
        field.name: getattr(group, field.name)
        for group in (options, placement)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    }
    for option, value in (requested | {option: value for option, value in others.items() if value}).items():
        require(option in heeded, f"{option}={value!r} has no effect on {name}: leave it out")


def check_rates(name: str, views: "Sequence[View]", cells: Sequence[Cell]) -> None:
    """Refuse requested rates if the figure has its own, or none."""
    requested = {rate for view in views for rate in view.rates}
    used = {cell.rate for cell in cells if cell.rate is not None}
    if requested and not (used and used <= requested):
        axis = f"its own rates ({', '.join(f'{rate:g}' for rate in sorted(used))})" if used else "no axis of rates"
        raise UserError(f"request_rate has no effect on {name}, which has {axis}: leave it out")


def check_knobs(name: str, views: "Sequence[View]", cells: Sequence[Cell]) -> None:
    """Refuse requested settings if every run of the figure has its own, or the figure has no runs."""
    for option, value in {knob for view in views for knob in view.knobs}:
        if all(cell.knob_values[option] != value for cell in cells):
            reason = "has its own" if cells else "has no runs behind it"
            raise UserError(f"{option}={value!r} has no effect on {name}, which {reason}: leave it out")


def check_accuracy(name: str, drawing: "Figure", views: "Sequence[View]", grids: Sequence[Sequence[Cell]]) -> None:
    """Refuse a requested accuracy if every run of the figure has its own retention."""
    for view, cells in zip(views, grids, strict=True):
        if view.accuracy != "usual" and _run_keys(cells) == _run_keys(_cells(drawing, replace(view, accuracy="usual"))):
            raise UserError(
                f"accuracy={view.accuracy!r} has no effect on {name}, whose runs keep the same at either: leave it out"
            )


def check_baselines(
    name: str, options: FigureOptions, drawing: "Figure", views: "Sequence[View]", cells: Sequence[Cell]
) -> None:
    """Refuse requested readings if no run of the figure is of a baseline with readings, or each run has its own reading."""
    from repro.families.dllm.settings import READINGS

    if not options.reading:
        return
    families = {SYSTEMS.get(system).family.name for system in {cell.system for cell in cells}}
    ignored = f"reading={options.reading[0]!r} has no effect on {name}, "
    require("dllm" in families, f"{ignored}which has no runs of such baselines: leave it out")
    grids = [[_run_keys(_cells(drawing, replace(view, reading=reading))) for reading in READINGS] for view in views]
    is_heeded = any(grid != other for grid, *others in grids for other in others)
    require(is_heeded, f"{ignored}whose runs have their own: leave it out")


def _cells(drawing: "Figure", view: "View") -> list[Cell]:
    return [view.applied(cell) for cell in drawing.cells(view)]


def _run_keys(cells: Sequence[Cell]) -> set[str]:
    """The keys of a figure's runs, without the comparison that they are measured in."""
    return {cell.without(COMPARISON).key for cell in cells}


def _make_figure(
    name: str, options: FigureOptions, placement: opt.Placement, *, force: bool, draw_only: bool, json: bool
) -> None:
    from repro.cli.run_table import lengths_json
    from repro.reports.figures import figure as figure_of
    from repro.reports.figures import pictures
    from repro.reports.run_table import draw
    from repro.runs.store import Store

    opened = placement.opened()
    entry = figure_of(name)
    drawing, views = entry.load(), options.views(name)
    out_dir = options.out_folder(entry.name)
    store = Store(options.root, accept_other_code=options.accept_other_code, accept_other_machine=draw_only)
    if draw_only:
        readable_folder("result_dir", store.root)
    # One sweep for all views, as readings share the runs of dLLM-Serve.
    grids = [_cells(drawing, view) for view in views]
    cells = [cell for grid in grids for cell in grid]
    check_rates(name, views, cells)
    check_knobs(name, views, cells)
    check_baselines(name, options, drawing, views, cells)
    check_accuracy(name, drawing, views, grids)
    if not cells and options.num_runs is not None:
        raise UserError(
            f"num_runs={options.num_runs} has no effect on {name}, which has no runs behind it: leave it out"
        )
    if draw_only:
        require_folders(cells, store, name, options.command(name))
    with opened as pool:
        sweep = sweep_of(cells, store, force=force, will_run=not draw_only, pool=pool)
        outcomes = [] if draw_only else run_sweep(sweep, out_dir=out_dir, jobs=placement.jobs)
    require_runs(sweep, name, options.command(name))
    writable_folder("out_dir", out_dir)
    pages = []
    for view, runs in zip(views, sweep.by_grid(grids), strict=True):
        assert runs is not None
        require_alike(runs, name)
        with pictures("plain" if options.plain else "whole"):
            rendered = draw(entry, view, runs, out_dir)
        page = {"figure": entry.name, "platform": view.platform.name, "reading": view.reading}
        files = [str(file) for file in rendered.files]
        table = {"files": files, "columns": rendered.columns, "rows": rendered.rows, "notes": rendered.notes}
        pages.append({**page, "accuracy": view.accuracy, "lengths": lengths_json(runs), **table})
        if not json:
            _show(f"{drawing.title} - {drawing.place(view.platform)}", runs, rendered)
    if json:
        print_json({"figures": pages})
    lines = [*outcome_lines(outcomes, store.root)] if outcomes else []
    if outcomes and all(outcome.status == "reused" for outcome in outcomes):
        lines.append("nothing new to run: every run behind this figure is stored; the figure was drawn from them")
    for line in lines:
        say(line, file=sys.stderr)


TRUTH = "truth"


def _compare_with_measured(folder: Path | None, out: Path, *, json: bool) -> None:
    from repro.truth import METRICS, by_group, peers, save, simulate_all, stated_claims

    writable_folder("out_dir", out)
    peer_groups = peers(folder)
    with progress_bar("simulating measured experiments:") as advance:
        experiments = simulate_all(folder, advance)
    groups = {**by_group(experiments), **peer_groups}
    claims = stated_claims() if folder is None else []
    files = save(experiments, groups, claims, out)
    if json:
        rows = [
            {
                "exp": experiment.row["exp"],
                "is_fitted": experiment.is_fitted,
                "measured_ms": experiment.measured,
                "predicted_ms": experiment.predicted,
                "error_pct": experiment.error_pct,
            }
            for experiment in experiments
        ]
        errors = {name: {metric: error._asdict() for metric, error in group.items()} for name, group in groups.items()}
        report = {"experiments": rows, "errors": errors, "stated": [claim.shown for claim in claims]}
        print_json({**report, "files": [str(file) for file in files]})
        return
    print_table(
        "Simulated latencies beside measured ones: errors of means, %",
        ("exp", "model", "TP", "load", *METRICS.values(), "role"),
        [
            (
                experiment.row["exp"],
                experiment.row["model"].rpartition("/")[2][:22],
                experiment.row["tp"],
                experiment.row["workload"],
                *(f"{error:+.0f}" for error in experiment.error_pct.values()),
                "fitted" if experiment.is_fitted else "predicted",
            )
            for experiment in experiments
        ],
    )
    print_table(
        "Absolute errors, %: median [90th percentile]",
        ("simulator", "rows", *METRICS.values()),
        [
            (
                name,
                str(max(error.num for error in group.values())),
                *(f"{group[key].median:.1f} [{group[key].p90:.0f}]" if key in group else "-" for key in METRICS),
            )
            for name, group in groups.items()
        ],
    )
    if claims:
        columns = ("claim", "value", "unit", "datasheet", "vllm", "trtllm", "of_kernels", "role", "verdict")
        rows_of = [tuple(str(claim.shown[name]) for name in columns) for claim in claims]
        print_table("Numbers that others state, beside ours", columns, rows_of)
    say(f"files: {', '.join(map(str, files))}", "  ")


def _serve_both(python: Path, *, json: bool) -> None:
    from repro.aisimulate import CASES, Means, compare

    cases = []
    with TemporaryDirectory() as folder, progress_bar("cases, by both:") as advance:
        for case in compare(python, Path(folder)):
            cases.append(case)
            advance()
    if absent := len(CASES) - len(cases):
        say(f"{absent} cases left out, which need REPRO_DATA_DIR/mooncake/conversation_trace.jsonl.gz", file=sys.stderr)
    if json:
        print_json({"cases": cases})
        return

    sides = [name for name in cases[0] if name != "case"]
    rows = [
        (case["case"], *(" / ".join(f"{case[side][name]:,.2f}" for side in sides) for name in Means._fields))
        for case in cases
    ]
    print_table(f"Simulated here and by AISimulate: {' / '.join(sides)}", ("case", *Means._fields), rows)


def _show(title: str, runs: "Sequence[StoredRun]", rendered: "Rendered") -> None:
    """Print one drawn figure on the terminal: its table, its notes and its files."""
    from repro.cli.run_table import lengths_line

    print_table(title, rendered.columns, rendered.rows)
    for note in (*([lengths_line(runs)] if runs else ()), *rendered.notes):
        say(note, "  ")
    cwd = Path.cwd()
    files = (file.relative_to(cwd) if file.is_relative_to(cwd) else file for file in rendered.files)
    say(f"files: {', '.join(map(str, files))}", "  ")


ROLE_TITLES = {
    "prediction": "predictions",
    "implied by the fit": "implied by the fit (no evidence for it)",
    "fitted": "fitted (no evidence)",
    "by construction": "by construction (no run can change them)",
    None: "nothing compared",
}
"""Headings of the counts, by role."""


def claims(
    *,
    paper: Annotated[str, typer.Option(help="dllm-serve, ampd, laps or block, or module:NAME.")] = "dllm-serve",
    reused: opt.Reused,
    out_dir: Annotated[
        Path | None, typer.Option(help="Where the CSV goes [default: results/figures, or figures in --result-dir].")
    ] = None,
    pricing: opt.Charged,
    json: opt.Json = False,
) -> None:
    """Judge every claim of a paper by stored runs; runs nothing ('repro reproduce' does). Claims without stored runs are shown with their
    committed verdict, and marked. The CSV holds only your own runs."""
    from repro.reports.evidence import stored_findings
    from repro.reports.figures import paper as paper_of
    from repro.runs.store import Store

    chosen_paper = paper_of(paper)
    all_claims = read_claims(chosen_paper.claims, chosen_paper.name)
    root = readable_folder("result_dir", reused.root)
    folder = writable_folder("out_dir", out_dir or figures_beside(reused.result_dir))
    store = Store(root, accept_other_code=reused.accept_other_code, accept_other_machine=True)
    with progress_bar("looking at stored runs, figures:") as advance:
        charged = tuple(pricing.charged.items())
        findings = stored_findings(chosen_paper.entries, store, advance, charged)
    flips = {} if charged else read_flips(chosen_paper.name)
    judged = judge_all(all_claims, findings, flips)
    # Committed verdicts assume the default costs of steps.
    committed = {} if charged else _committed_verdicts(chosen_paper, all_claims, flips)
    shown = [committed.get(result.claim.id, result) if result.verdict == "not run" else result for result in judged]
    borrowed = frozenset(result.claim.id for result, own in zip(shown, judged, strict=True) if result is not own)
    name = "-".join([f"claims-{chosen_paper.name}", *(str(value) for _, value in charged)])
    path = save(folder / f"{name}.csv", judged)
    if json:
        counts = {"verdicts": count(shown), "roles": count_by_role(shown), "facts": count_facts(shown)}
        rows = [{**as_row(result), "committed": result.claim.id in borrowed} for result in shown]
        print_json({"paper": chosen_paper.name, **counts, "claims": rows})
        return
    _print_claims(chosen_paper.name, shown, borrowed)
    say(f"file: {path}")
    if borrowed:
        say(
            f"committed: {len(borrowed)} verdicts of no run here, from results/{path.name}; 'make reproduce-all' makes your own"
        )
    if any(result.verdict == "not run" for result in shown):
        say("claims that were not run become answerable with 'make reproduce-all'")


def _committed_verdicts(paper: "Paper", stated: Sequence[Claim], flips: Flips) -> dict[str, Judged]:
    """Return the repository's verdicts by claim; nothing in an installed package, or for your own paper."""
    path = RESULTS / f"claims-{paper.name}.csv"
    if IS_INSTALLED or not path.is_file():
        return {}
    try:
        rows = read(path)
    except UserError as error:
        say(f"committed verdicts are not shown: {error}", file=sys.stderr)
        return {}
    ids = {row["id"] for row in rows}
    return {each.claim.id: each for each in rejudged([claim for claim in stated if claim.id in ids], rows, flips)}


def _print_claims(paper: str, judged: Sequence[Judged], borrowed: Set[str]) -> None:
    for role in (*reversed(ROLES), None):
        results = [result for result in judged if result.role == role and result.claim.kind != "inconsistency"]
        rows = []
        for result in results:
            claim_id, expected = result.claim.id, result.claim.expected
            verdict = f"{result.verdict} (committed)" if claim_id in borrowed else result.verdict
            rows.append((claim_id, value_text(expected.value, expected.unit), our_text(result), verdict))
        if rows:
            print_table(f"Claims of {paper}: {ROLE_TITLES[role]}", ("claim", "states", "ours", "verdict"), rows)
    reasoned = ("not reproduced", "undecided by reading", "not testable here")
    if reasons := [result for result in judged if result.verdict in reasoned]:
        print_table(
            "Why not reproduced, undecided by reading, or not testable here",
            ("claim", "reason"),
            [(result.claim.id, result.reason or "-") for result in reasons],
        )
    if inconsistent := [result.claim for result in judged if result.claim.kind == "inconsistency"]:
        # Files write verdicts like ``cannot_check``.
        verdicts = [claim.recomputed.verdict.replace("_", " ") if claim.recomputed else "-" for claim in inconsistent]
        print_table(
            "The paper's own inconsistencies",
            ("claim", "what does not agree", "recomputed"),
            [(claim.id, claim.statement, verdict) for claim, verdict in zip(inconsistent, verdicts, strict=True)],
        )
    num_facts = sum(result.role is not None for result in facts(judged))
    say(
        f"{num_facts} facts in {sum(result.role is not None for result in judged)} comparisons: what follows from one number counts once"
    )
    for role, counts in count_facts(judged).items():
        say(f"{role}: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}")
    others = {v: n for v, n in count(judged).items() if v in ("not testable here", "not run", "paper's inconsistency")}
    say("; ".join(f"{verdict}: {number}" for verdict, number in others.items()))


def report(
    *,
    out: Annotated[
        Path | None, typer.Option(help="The page to write [default: report.html, with --guide ARTIFACT.md].")
    ] = None,
    guide: Annotated[
        bool,
        typer.Option(
            "--guide", help="Write the guide of an artifact committee instead: every claim's command and cost."
        ),
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of figures by platform, as results/figures is of your own [default: results]."),
    ] = None,
    result_dir: Annotated[
        Path | None, typer.Option(help="Also look up here which versions made the runs behind the figures.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Write all figures beside their claims, as one page that needs no network and no other files."""
    from repro.reports.artifact import guide as guide_of
    from repro.reports.page import contents, html

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    store = None if result_dir is None else readable_folder("result_dir", result_dir)
    require(not (guide and result_dir), f"result_dir={str(result_dir)!r} has no effect on a guide: leave it out")
    out = out or Path("ARTIFACT.md" if guide else "report.html")
    writable_file("out", out)
    papers: dict[str, list[str]] = {}
    if guide:
        text = guide_of(root)
    else:
        with progress_bar("pictures:") as advance:
            page = contents(root, store, advance)
        text = html(page)
        papers = {paper.name: [section.name for section in sections] for paper, sections in page["papers"]}
    size = len(text.encode())
    replace_text(out, text)
    if json:
        print_json({"file": str(out), "bytes": size, "papers": papers})
        return
    say(f"file: {out}, {size / 1e6:.1f} MB")
