"""Commands that check: ``verify-baselines``, ``check-results``, ``gpu-suite`` and ``train-tiny``, which makes embedded checkpoints."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines.errors import UserError, require
from engines.knobs import with_knobs
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some
from repro.cli.output import count_text, print_json, print_table, progress_bar, say
from repro.families.platforms import DllmPart
from repro.families.platforms import platform as find_platform
from repro.files import readable_folder, writable_folder
from repro.paths import IS_INSTALLED, LOCAL, REPO, RESULTS
from repro.training.config import TrainConfig

if TYPE_CHECKING:
    from repro.checks.blocks import BlockResult
    from repro.checks.canvases import CanvasResult
    from repro.checks.doctor import FoundGpu
    from repro.checks.goldens import CaseResult
    from repro.checks.results import Checked
    from repro.gpu_suite.suite import JobOutcome, Scale, Suite


def check_results(
    results: Annotated[
        Path | None, typer.Option(help="Folder of reference figures by platform [default: results].")
    ] = None,
    again: Annotated[
        int | None,
        typer.Option(
            help="Instead: make this many simulated runs of the tables again, and compare their numbers.", min=1
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the runs of --again [default: 0].", min=0)] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Instead: write the verdicts on all claims as the tables give them.")
    ] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Instead: write pictures and captions again where numbers are as they were.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Draw every committed figure from its table of runs, judge every claim, and compare each byte of numbers and words. It also compares
    tables in documents with the results. It takes under a minute of processor time, and makes no run without --again. Exit code 1 if
    anything differs."""
    from repro.checks.documents import COMMAND, stale_tables
    from repro.checks.results import Checked, check_reports, redraw, remake_sample
    from repro.checks.results import check_results as check_figures
    from repro.checks.results import judge as judge_claims
    from repro.reports.run_table import read_table, tables_in

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    require(root.is_dir(), f"results={str(root)!r} does not exist: check the path")
    require(seed is None or again is not None, f"seed={seed} has no effect without --again: add it, or leave this out")
    require(sum((judge, draw, again is not None)) <= 1, "judge, draw and again: give one of them")
    num_tables = len(tables_in(root))
    require(
        num_tables > 0, f"results={str(root)!r} holds no table of runs: give a folder like the repository's results"
    )
    if judge:
        for path in judge_claims(root):
            say(f"file: {path}")
        return
    if draw:
        for path in [path for table in tables_in(root) for path in redraw(read_table(table))]:
            say(f"file: {path}")
        return
    subject = f"{count_text(num_tables, 'figure')} and the claims" if again is None else count_text(again, "run")
    say(f"comparing {subject}", file=sys.stderr)
    with progress_bar("compared:") as advance:
        checked = check_figures(root, advance) if again is None else remake_sample(root, again, seed or 0, advance)
        if again is None and root == RESULTS:
            checked += check_reports()
            checked += [
                Checked(figure="documents", path=table.document, status="differs", reason=table.reason, command=COMMAND)
                for table in stale_tables(REPO, root)
            ]
    _print_checked(checked, root, json=json)
    if any(check.is_fault for check in checked):
        raise typer.Exit(1)


def _print_checked(checked: "Sequence[Checked]", root: Path, *, json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "figure": check.figure,
            "file": _relative_name(check.path, root),
            "status": check.status,
            "fault": check.is_fault,
            "reason": check.reason,
            "command": check.command,
        }
        for check in checked
    ]
    if json:
        print_json({"results": rows})
        return
    cells = [tuple(row[name] for name in ("figure", "file", "status", "reason")) for row in rows]
    print_table("Committed results", ("figure", "file", "status", "why"), cells)
    num_same, num_faults = (sum(check.status == status for check in checked) for status in ("same", "differs"))
    say(f"{num_same} the same, {num_faults} different; {process_time():.0f} s of processor time")
    for command in dict.fromkeys(check.command for check in checked if check.is_fault and check.command != "-"):
        say(command, "  ")


def _relative_name(path: Path, root: Path) -> str:
    parent = next((folder for folder in (root, root.parent) if path.is_relative_to(folder)), None)
    return str(path if parent is None else path.relative_to(parent))


def verify_baselines(
    golden: Annotated[
        Path | None,
        typer.Option(help="Folder with cases.json and the checkpoints it names; by default the one that is embedded."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: opt.Json = False,
) -> None:
    """Replay recorded cases of every sampler, and for block diffusion those of a plain loop. Exit code 1 if a case fails.

    REPRO_BLOCK_GOLDENS can name the folder of cases from the authors of block diffusion, which then replace the loop's.
    REPRO_GEMMA_GOLDENS does the same for DiffusionGemma.
    """
    from repro.checks.goldens import GOLDEN_DIR, one_thread, read_cases, verify

    folder = GOLDEN_DIR if golden is None else golden
    cases = read_cases(folder)
    results: list[CaseResult | BlockResult | CanvasResult] = []
    source = str(folder)
    with one_thread(), progress_bar("replaying", len(cases)) as advance:
        results += verify(cases, advance, device=device)
        if golden is None:
            from repro.checks.blocks import block_cases, verify_blocks
            from repro.checks.canvases import canvas_cases, verify_canvases

            blocks_source, blocks = block_cases()
            canvas_source, canvases = canvas_cases()
            source = ", and ".join(part for part in (source, blocks_source, canvas_source) if part)
            results += [*verify_blocks(blocks, device=device), *verify_canvases(canvases, device=device)]
    rows = [
        _method_row(method, [result for result in results if result.case.method == method])
        for method in sorted({result.case.method for result in results})
    ]
    if json:
        print_json({"methods": rows})
    else:
        cells = []
        for row in rows:
            num_cases = row["tie_sensitive_cases"]
            ties = f"{row['tie_sensitive_passed']} of {num_cases}" if num_cases else "-"
            cells.append((row["method"], row["verdict"], f"{row['passed']} of {row['cases']}", ties))
        print_table(f"Golden cases of {source}", ("method", "verdict", "passed", "tie-sensitive passed"), cells)
        _print_notes(results)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _method_row(method: str, results: "Sequence[CaseResult | BlockResult | CanvasResult]") -> dict[str, Any]:
    strict = [result for result in results if result.case.required and not result.case.tie_sensitive]
    tie_sensitive = [result for result in results if result.case.tie_sensitive]
    failed = {result.case.id: result.difference for result in results if result.case.required and not result.passed}
    return {
        "method": method,
        "verdict": "FAIL" if failed else "pass",
        "passed": sum(result.passed for result in strict),
        "cases": len(strict),
        "tie_sensitive_passed": sum(result.passed for result in tie_sensitive),
        "tie_sensitive_cases": len(tie_sensitive),
        "not_required": sum(not result.case.required for result in results),
        "failed": failed,
    }


def _print_notes(results: "Sequence[CaseResult | BlockResult | CanvasResult]") -> None:
    for result in results:
        if result.case.required and not result.passed:
            say(f"  failed: {result.case.id}: {result.difference}")
    required = [result for result in results if result.case.required]
    say(f"{sum(result.passed for result in required)} of {len(required)} required cases pass.")
    if len(required) < len(results):
        say(
            f"{len(results) - len(required)} are not required: a library's order of equal values, or a defect of the "
            f"recorded code, decides their ids."
        )


_MODELS = ("block_diffusion", "canvas")
_RATES = ("max_sequence_length", "matrix_learning_rate", "learning_rate", "warmup_steps")
TRAINED = Some(TrainConfig, ("steps", "seed", "start", "gen_length", "tokens_per_batch", *_MODELS, *_RATES))


def train_tiny(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    task: Annotated[
        list[str] | None, typer.Option(help="Tasks it is trained on. By default mini-gsm and mini-code.")
    ] = None,
    knobs: Annotated[Given, Knobs(lambda: {opt.WORKLOAD: (TRAINED,)})],
) -> None:
    """Train a tiny LLaDA or block-diffusion model on generated problems; 'repro eval --model OUT' tells what it solves."""
    from repro.training.loop import train_tiny as train

    config = TrainConfig() if not task else TrainConfig(tasks=tuple(task))
    print_json(train(with_knobs(config, knobs), out))


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    budget: float = 520.0
    """Seconds that this call may take. A job starts only if it fits into the rest."""
    result_dir: Path | None = None
    """Folder for results [default: results/PLATFORM]."""
    export: Path | None = None
    """Folder for one archive of the results, rewritten after every job."""
    platform: str | None = None
    """Platform of the card [default: read off the card]; cpu-tiny runs small stages on this CPU."""
    stage: list[str] | None = None
    """Run only this stage; several times."""
    first: bool = False
    """Run only the stages of the first minutes on a card."""
    dry_run: bool = False
    """List the jobs with their estimates, on any machine."""

    def check(self) -> None:
        if not self.budget > 0:
            raise UserError(f"budget={self.budget:g} must be a positive number of seconds")
        if IS_INSTALLED and not self.dry_run:
            raise UserError(
                "gpu-suite runs the tests and benchmarks of a checkout: clone the repository, and run it there"
            )
        if self.first and self.stage:
            raise UserError(f"stage={self.stage[0]!r} and first: give one of them")

    def wanted_stages(self, stage_names: Sequence[str]) -> Sequence[str]:
        from repro.gpu_suite import suite as plan

        stages = [name for name in plan.FIRST if name in stage_names] if self.first else self.stage or stage_names
        if unknown := sorted(set(stages) - set(stage_names)):
            raise UserError(f"stage={unknown[0]!r} is unknown: use one of {', '.join(stage_names)}")
        return stages

    def command(self, platform: str, root: Path) -> str:
        """The command that continues where this call stops."""
        # Keep the path relative: this machine's absolute path would be of no use elsewhere.
        folder = str(root.relative_to(REPO)) if root.is_relative_to(REPO) else str(root)
        words = [f"python3 -m repro gpu-suite --budget {self.budget:g} --platform {platform} --result-dir {folder}"]
        return " ".join(
            [*words, *(["--first"] if self.first else []), *(f"--stage {stage}" for stage in self.stage or ())]
        )


def gpu_suite(*, options: SuiteOptions, json: opt.Json = False) -> None:
    """Run tests, throughput, steps, figures and checks on a card, most useful first. Continues where the last call stopped."""
    start = time.monotonic()
    from repro.gpu_suite import suite as plan

    options.check()
    card, platform = _card_and_platform(options)
    scale = plan.scale_of(platform, None if card is None else card.memory_bytes)
    root = options.result_dir or RESULTS / platform
    suite = _suite(options, scale, platform, root)
    if options.dry_run:
        _list_jobs(suite, scale.where.title, json=json)
        return
    for option, folder in opt.given_options(export=options.export, result_dir=root).items():
        writable_folder(option, folder)
    outcome = suite.run(options.budget, began=start)
    figures = plan.draw(suite, plan.figures(scale)) if "figures" in (suite.stages or ()) else []
    if json:
        print_json({**asdict(outcome), "drawn": figures, "command": suite.command})
    else:
        _say_outcome(suite, outcome, figures, is_first=options.first)
    if outcome.failed or (outcome.left and not outcome.ran):
        raise typer.Exit(1)


def _card_and_platform(options: SuiteOptions) -> "tuple[FoundGpu | None, str]":
    """Return the card, if there is one, and its platform. Exits the command if a card is missing."""
    from repro.checks.doctor import driver_card, platform_on, torch_card

    card, platform = driver_card(), options.platform
    if options.dry_run:
        return card, platform or ("h200" if card is None else platform_on(card, None))
    if platform is not None or card is not None:
        platform = platform_on(card, platform)  # refuses another card at once, before torch is loaded
    if platform is not None and find_platform(platform).part(DllmPart).device == "cpu":
        return card, platform
    gpu = torch_card()
    if not isinstance(gpu, str):
        return gpu, platform_on(gpu, platform)
    say(f"gpu-suite: nothing was run, {gpu}. It needs")
    say("an NVIDIA GPU with its driver (nvidia-smi must work); 24 GB for LLaDA-8B", "  ")
    say("a CUDA build of torch: make clean, then make setup TORCH=torch", "  ")
    say(
        "'repro doctor' says what this machine can run; 'repro gpu-suite --dry-run' lists the jobs, docs/gpu.md says what they "
        "are."
    )
    raise typer.Exit(1)


def _suite(options: SuiteOptions, scale: "Scale", platform: str, root: Path) -> "Suite":
    from repro.gpu_suite import suite as plan
    from repro.gpu_suite.verdict import VERDICT, write_verdict
    from repro.runs.store import Store

    stages = plan.stages(scale)
    wanted = options.wanted_stages(list(dict.fromkeys(stage.stage for stage in stages)))
    shown = {*wanted, *(() if options.dry_run else plan.FIRST)}  # the summary speaks of the first stages, whichever run

    def write_pages(suite: "Suite") -> None:
        plan.write_summary(suite)
        try:
            write_verdict(suite)
        except Exception as error:  # an unwritten page must not cost minutes on a card: any machine can write it again
            say(f"{VERDICT} is not written ({type(error).__name__}: {error})", file=sys.stderr)

    return plan.Suite(
        jobs=plan.jobs_of([stage for stage in stages if stage.stage in shown], Store(LOCAL / "gpu-suite-expected")),
        root=root,
        platform=platform,
        command=options.command(platform, root),
        export=options.export,
        on_line=lambda line: say(line, file=sys.stderr),
        on_done=write_pages,
        stages=frozenset(wanted),
    )


def _say_outcome(suite: "Suite", outcome: "JobOutcome", figures: Sequence[str], *, is_first: bool) -> None:
    from repro.gpu_suite.suite import README
    from repro.gpu_suite.verdict import VERDICT

    say(
        f"{count_text(outcome.ran, 'job')} ran, {len(outcome.failed)} failed, {len(outcome.left)} are left (about "
        f"{outcome.left_s:.0f} s): {outcome.stopped}"
    )
    for name in outcome.failed:
        say(f"failed {name}: {suite.entries[name].note}")
    if figures:
        say(f"drawn: {', '.join(figures)}")
    if outcome.left or outcome.failed:
        print(f"to go on: {suite.command}")
    verdict = suite.root / VERDICT
    if is_first and verdict.is_file():
        print("", verdict.read_text(encoding="utf-8"), sep="\n")
    say(f"summary: {suite.root / README}, verdict: {verdict}")


def _list_jobs(suite: "Suite", title: str, *, json: bool) -> None:
    jobs = [
        {
            "stage": job.stage,
            "what": job.label,
            "name": job.name,
            "expected_s": round(suite.expected_s(job)),
            "status": suite.entries[job.name].status,
        }
        for job in suite.chosen
    ]
    left_s = sum(suite.expected_s(job) for job in suite.chosen if suite.entries[job.name].status != "done")
    if json:
        print_json({"platform": suite.platform, "jobs": jobs, "left_s": left_s})
        return
    rows = [tuple(str(job[name]) for name in ("stage", "what", "expected_s", "status")) for job in jobs]
    print_table(f"GPU suite on {title}", ("stage", "job", "expected s", "status"), rows)
    say(f"{count_text(len(rows), 'job')}, about {left_s:.0f} s left")
