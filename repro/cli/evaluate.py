"""``repro eval``: how many of a task's problems a system solves."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.dllm.config import Cut, Settling
from engines.knobs import Checked, Range
from engines.models.checkpoint import EMBEDDED
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some, answer_knobs, platform_defaults
from repro.cli.output import count_text, number, print_json, print_table, say
from repro.cli.plots import check_plot, save_accuracy_plot
from repro.cli.run_table import provenance_of
from repro.cli.sweep import readable, run_sweep, say_what_ran, say_what_runs, sweep_of
from repro.families.dllm.settings import BaselineKnobs, Device, ModelKnobs, WorkloadKnobs
from repro.runs.system import Deployment
from repro.tasks.registry import task_entry
from repro.workbench.grid import Grid

if TYPE_CHECKING:
    from engines.dllm.method import Sampler
    from repro.runs.store import StoredRun
    from repro.runs.sweep import Sweep
    from repro.workbench.accuracy import Curve, Point


def _knob_groups() -> dict[str, Sequence[type | Some]]:
    return {
        opt.WHAT: (Some(ModelKnobs, ("model",)),),
        opt.WORKLOAD: (Some(WorkloadKnobs, ("num_fewshot", "chat", "allow_code_execution", "dataset_source")),),
        opt.ENGINE: (
            Some(BaselineKnobs, ("batch_size",)),
            Some(ModelKnobs, ("memory_limit",)),
            Some(Device, ("dtype", "quantization", "device")),
        ),
        **answer_knobs(),
    }


KNOBS = Knobs(_knob_groups, defaults=platform_defaults, several=True)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Checked):
    panel: ClassVar[str] = opt.WHAT
    task: list[str] | None = None
    """mini-gsm, mini-code, mini-chain, mini-far, mini-roll, gsm8k or humaneval; several times [default: mini-gsm]."""
    system: list[str] | None = None
    """Any system of 'repro list'; several times [default: dllm-serve]."""
    platform: str = "cpu-tiny"
    """Platform that sets memory and defaults. The model always runs."""
    limit: Annotated[int, Range(1, 10**5)] | None = None
    """Use only the first problems [default: all, 500 for a generated task]."""
    seed: opt.Seeds = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.task or ("mini-gsm",)))

    def grid(self, knobs: Mapping[str, Any]) -> Grid:
        knobs = {**knobs, **opt.given_options(num_prompts=self.limit)}
        return Grid(
            system=tuple(dict.fromkeys(self.system or ("dllm-serve",))),
            dataset=self.tasks,
            platform=(self.platform,),
            executor=("torch",),
            seed=tuple(dict.fromkeys(self.seed or (0,))),
            knobs={name: value if isinstance(value, tuple) else (value,) for name, value in knobs.items()},
        )


def evaluate(
    *,
    options: EvalOptions,
    dataset_path: opt.DatasetPath = None,
    knobs: Annotated[Given, KNOBS],
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    place: opt.Place,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Ask a task's problems, all at once, and grade the answers; the model always runs, nothing is simulated. Several values of
    --retention-ratio draw accuracy against it, beside a cache that keeps every row. Several values of another option do likewise."""
    from repro.families.dllm.requests import require_task
    from repro.workbench.accuracy import axis_of, curves_of, references_of

    opened = place.opened()
    for task in options.tasks:
        task_entry(task)
    knobs = {**knobs, **opt.data_file_knobs(dataset_path, knobs)}
    knobs |= opt.parse_knobs(knob or (), knobs, several=True)
    grid = options.grid(knobs)
    if plot is not None:
        check_plot(plot, *grid.files)
    axis = axis_of({name: grid.knobs[name] for name in grid.varied})
    cells = grid.cells()
    references = references_of(cells, axis)
    with opened as pool:
        with readable("dataset_path", dataset_path, options.tasks):
            sweep = sweep_of([*cells, *references], stored.store, force=stored.force, pool=pool)
        for experiment, cell in zip(sweep.experiments, (*cells, *references), strict=True):
            require_task(getattr(experiment.deployment, "task", None), cell)
        _warn_of_small_models(sweep)
        say_what_runs(sweep)
        outcomes = run_sweep(sweep)
    results = [
        _result(experiment.deployment, run) for experiment, run in zip(sweep.experiments, sweep.runs, strict=True)
    ]
    curves = curves_of(sweep.runs, len(cells), grid.varied, axis)
    by_key = {run.cell.key: result for run, result in zip(sweep.runs, results, strict=True)}
    rows = []
    for curve in curves:
        # The points, and their reference if nobody asked for it as a point.
        points = (*curve.points, curve.reference) if curve.reference.is_reference else curve.points
        rows += [_point_row(point, curve, by_key) for point in points]
    if json:
        print_json(results[0] if len(cells) == 1 and plot is None else {"axis": axis, "points": rows})
    else:
        _print_curves(curves, rows)
    if plot is not None:
        say(f"files: {', '.join(map(str, save_accuracy_plot(plot, curves, rows)))}", file=sys.stderr)
    say_what_ran(outcomes, sweep.store.root)
    if not all(run.validity.valid for run in sweep.runs):
        raise typer.Exit(1)


def _warn_of_small_models(sweep: "Sweep") -> None:
    """Warn that the embedded models answer only the generated tasks, and almost nothing of the published ones."""
    from repro.families.block.settings import EMBEDDED_DIRS

    warned: dict[tuple[str, str], None] = {}
    for experiment in sweep.to_run:
        entry = task_entry(experiment.cell.dataset)
        model = str(getattr(getattr(experiment.deployment, "settings", None), "model", None))
        if not entry.is_generated and model in (*EMBEDDED, *EMBEDDED_DIRS):
            warned[model, entry.title] = None
    for model, title in warned:
        say(
            f"warning: model={model!r} is an embedded model of stories, sums and small programs, which answers next to nothing of "
            f"{title}: give a checkpoint with --model, or one of its own tasks, --task mini-gsm or mini-code",
            file=sys.stderr,
        )


# -- points of curves -----------------------------------------------------------------------------------------


def _point_row(point: "Point", curve: "Curve", by_key: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    from repro.runs.statistics import points_apart

    first = by_key[point.runs[0].cell.key]
    pair = None if point is curve.reference else point.against(curve.reference)
    gain = None if pair is None else points_apart(pair)
    copied = ("task", "criterion", "strict_criterion", "system", "model", "platform", "selection", "cache", "retention")
    return {
        **{name: first[name] for name in copied},
        **point.knobs,
        "is_reference": point is curve.reference,
        "accuracy": point.share(),
        "accuracy_strict": point.share("correct_strict"),
        "added_points": None if gain is None else gain.mean,
        "added_low": None if gain is None else gain.low,
        "added_high": None if gain is None else gain.high,
        "only_this": None if pair is None else pair.only_first,
        "only_reference": None if pair is None else pair.only_second,
        "p_value": None if pair is None else pair.p_value,
        "throughput_tok_s": point.mean("throughput_tok_s"),
        "tokens_per_processor_s": point.mean("tokens_per_processor_s"),
        "cache_rows": point.mean("cache_rows"),
        "num_runs": len(point.runs),
        "dataset": first["dataset"],
        **provenance_of(point.runs),
        "files": [str(run.file) for run in point.runs],
    }


def _print_curves(curves: "Sequence[Curve]", rows: Sequence[Mapping[str, Any]]) -> None:
    criteria = dict.fromkeys(f"{row['task']}, {row['criterion']}" for row in rows)
    texts = [_point_texts(row, list(curves[0].points[0].knobs)) for row in rows]
    columns = [name for name in texts[0] if any(text[name] != "-" for text in texts)]
    if len(rows) == 1:
        pairs = [(name, texts[0][name]) for name in columns if name != "added, points"]
        print_table("; ".join(criteria), ("what", "value"), [*pairs, ("cache", rows[0]["cache"])])
    else:
        print_table("; ".join(criteria), columns, [[text[name] for name in columns] for text in texts])
    model = ", ".join(dict.fromkeys(f"{row['model']} ({row['platform']})" for row in rows))
    say(f"model: {model}; problems: {'; '.join(dict.fromkeys(row['dataset'] for row in rows))}")
    note = "accuracy: Wilson's 95 % interval"
    if any(row["added_points"] is not None for row in rows):
        note += (
            "; added: points more than the reference solves of the same problems, with a 95 % interval of paired shares, and "
            "McNemar's exact test"
        )
    strict = dict.fromkeys(row["strict_criterion"] for row in rows if row["accuracy_strict"] is not None)
    say(f"{note}; strict: {', '.join(strict)}" if strict else note)
    unpaired = [row for row in rows if not row["is_reference"] and row["added_points"] is None and row["valid"]]
    if unpaired:
        say(f"{count_text(len(unpaired), 'row')} asked other problems than the reference, and cannot be paired with it")
    for row in rows:
        if row["reasons"]:
            say(f"{row['task']}, {row['system']}: {'; '.join(row['reasons'])}")


def _point_texts(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    added = "reference" if row["is_reference"] else "-"
    if row["added_points"] is not None:
        added = f"{row['added_points']:+.1f} [{row['added_low']:.1f}, {row['added_high']:.1f}]"
    knobs = {name.replace("_", " "): "default" if row[name] is None else f"{row[name]}" for name in names}
    return {
        "task": row["task"],
        "system": row["system"],
        **knobs,
        "accuracy %": _percent_text(row["accuracy"]),
        "strict %": _percent_text(row["accuracy_strict"]),
        "n": "-" if row["accuracy"] is None else str(row["accuracy"]["n"]),
        "added, points": added,
        "McNemar p": "-" if row["p_value"] is None else f"{row['p_value']:.2g}",
        "tok/s": number(row["throughput_tok_s"]),
        "tok/CPU s": number(row["tokens_per_processor_s"]),
        "cache rows": number(row["cache_rows"]),
        "obtained": row["obtained"],
        "verdict": "VALID" if row["valid"] else "INVALID",
    }


def _percent_text(accuracy: Mapping[str, Any] | None) -> str:
    if accuracy is None:
        return "-"
    value, low, high = (100 * accuracy[name] for name in ("value", "low", "high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


# -- runs -----------------------------------------------------------------------------------------------------


def _result(deployment: Deployment, run: "StoredRun") -> dict[str, Any]:
    facts, entry = run.manifest["facts"], task_entry(run.cell.dataset)
    return {
        "task": run.cell.dataset,
        "criterion": entry.criterion,
        "strict_criterion": entry.strict,
        "system": facts["system"],
        "model": facts["model"],
        "platform": facts["platform"],
        **_context_facts(deployment),
        "accuracy": run.summary["accuracy"],
        "accuracy_strict": run.summary["accuracy_strict"],
        "throughput_tok_s": run.summary["throughput_tok_s"],
        "window_s": run.summary["window_s"],
        "dataset": facts["dataset"]["description"],
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "reasons": list(run.validity.reasons),
        "cell": run.cell.written(),
        "file": str(run.file),
    }


def _context_facts(deployment: Deployment) -> dict[str, Any]:
    """Which cached context a step computes the block against."""
    from repro.families.block.system import BlockDeployment
    from repro.families.dllm.deployment import DllmDeployment

    if isinstance(deployment, BlockDeployment):
        return {"selection": None, "cache": deployment.context, "retention": None}
    assert isinstance(deployment, DllmDeployment), "only diffusion models answer problems"
    sampler = deployment.sampler
    sparsity, caches = sampler.sparsity, sampler.rule.caches
    return {
        "selection": sparsity.selection if caches else None,
        "cache": _cache_text(sampler),
        "retention": None if not caches else 1.0 if sparsity.selection == "dense" else sparsity.retention_ratio,
    }


def _cache_text(sampler: "Sampler") -> str:
    from baselines.dllm.dllm_cache.method import FeatureSampler

    sparsity = sampler.sparsity
    if isinstance(sampler, FeatureSampler):
        features = sampler.features
        return (
            f"features, of the prompt every {features.prompt_interval} steps, of the response every {features.gen_interval} "
            f"and {100 * features.transfer_ratio:g} % of its rows in between"
        )
    if not sampler.rule.caches:
        return "no KV cache"
    defaults, values = asdict(Settling()) | asdict(Cut()), asdict(sampler.settling) | asdict(sampler.cut)
    left_out = "".join(f", {name}={value}" for name, value in values.items() if value != defaults[name])
    if sampler.rule.window == "suffix":
        return f"the rows before the block{left_out}"
    if sparsity.selection == "dense":
        return f"all context rows{left_out}"
    whole_layer = "" if sparsity.whole_layer is None else f", all of them in layer {sparsity.whole_layer}"
    return f"{100 * sparsity.retention_ratio:g} % of the context rows ({sparsity.selection}){whole_layer}{left_out}"
