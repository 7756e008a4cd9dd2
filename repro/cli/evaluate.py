"""``repro eval``: how many of a task's problems a system solves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.option_groups import Decoding, spread
from repro.cli.output import number, print_json, print_table

if TYPE_CHECKING:
    from repro.runs.experiment import Experiment
    from repro.runs.store import StoredRun


@spread
def evaluate(
    *,
    task: Annotated[str, typer.Option(help="mini-gsm, mini-code, gsm8k or humaneval.")] = "mini-gsm",
    system: Annotated[str, typer.Option(help="Any of 'repro list'.")] = "dllm-serve",
    limit: Annotated[
        int | None, typer.Option(help="First problems only [default: all; 500 of a generated task].")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question (gsm8k) [default: 5].")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in a conversation, by the checkpoint's template.")] = False,
    platform: Annotated[str, typer.Option(help="Memory and defaults; the model always runs.")] = "cpu-tiny",
    dataset_path: Annotated[Path | None, typer.Option(help="Local file in a format of the dataset's card.")] = None,
    dataset_source: Annotated[str | None, typer.Option(help="auto, hub or local.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Static batch of a baseline [default: largest that fits].")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Emulated device memory, e.g. 24GB.")] = None,
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    decoding: Decoding,
    seed: opt.Seed = 0,
    result_dir: Annotated[Path | None, typer.Option(help="Where run folders go [default: results/local].")] = None,
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    json: opt.Json = False,
) -> None:
    """Ask a task's problems, all at once, and grade the answers; the model always runs, nothing is simulated."""
    from repro.cli.sweep import load_all, prepare_all, run_sweep, say_what_ran
    from repro.paths import LOCAL
    from repro.runs.cell import Cell
    from repro.runs.store import Store
    from repro.tasks.evaluation import require_task
    from repro.tasks.registry import task_entry

    task_entry(task)
    knobs = opt.given(
        num_requests=limit,
        num_fewshot=num_fewshot,
        chat=chat or None,
        dataset_path=None if dataset_path is None else str(dataset_path),
        source=dataset_source,
        batch_size=batch_size,
        memory_bytes=opt.parse_memory_limit(memory_limit),
        model=model,
        dtype=dtype,
        device=device,
        **decoding.given(),
    )
    if dataset_path is not None and dataset_source is None:
        knobs["source"] = "local"
    cell = Cell(
        system=system,
        dataset=task,
        platform=platform,
        executor="torch",
        rate=None,
        seed=seed,
        knobs=tuple(knobs.items()),
    )
    experiments = prepare_all([cell])
    require_task(experiments[0].task, cell)
    store = Store(result_dir or LOCAL)
    outcomes = run_sweep(experiments, store, force=force, continue_on_error=False)
    (run,) = load_all(experiments, store)
    result = _result(experiments[0], run, store)
    if json:
        print_json(result)
    else:
        print_table(f"{result['task']}, {result['criterion']}", ("what", "value"), _rows(result))
    say_what_ran(outcomes, store.root)
    if not run.validity.valid:
        raise typer.Exit(1)


def _result(experiment: Experiment, run: StoredRun, store: Any) -> dict[str, Any]:
    from repro.tasks.registry import task_entry

    entry, sparsity = task_entry(run.cell.dataset), experiment.resources.config.sparsity
    caches = experiment.resources.method.rule.caches
    return {
        "task": run.cell.dataset,
        "criterion": entry.criterion,
        "strict_criterion": entry.strict,
        "system": run.record.manifest["system"],
        "model": run.record.manifest["model"],
        "platform": run.record.manifest["platform"],
        "selection": sparsity.selection if caches else None,
        "cache": _cache(experiment),
        "retention": None if not caches else 1.0 if sparsity.selection == "dense" else sparsity.retention_ratio,
        "accuracy": run.summary["accuracy"],
        "accuracy_strict": run.summary["accuracy_strict"],
        "throughput_tok_s": run.summary["throughput_tok_s"],
        "window_s": run.summary["window_s"],
        "dataset": run.record.manifest["dataset"]["description"],
        "obtained": run.record.obtained,
        "valid": run.validity.valid,
        "reasons": list(run.validity.reasons),
        "cell": run.cell.to_dict(),
        "folder": str(store.folder(run.cell)),
    }


def _cache(experiment: Experiment) -> str:
    method, sparsity = experiment.resources.method, experiment.resources.config.sparsity
    if (features := method.features) is not None:
        return (
            f"features, of the prompt every {features.prompt_interval} steps, of the response every {features.gen_interval} "
            f"and {100 * features.transfer_ratio:g} % of its rows in between"
        )
    if not method.rule.caches:
        return "no KV cache"
    if method.rule.window == "suffix":
        return "the rows before the block"
    if sparsity.selection == "dense":
        return "all context rows"
    return f"{100 * sparsity.retention_ratio:g} % of the context rows ({sparsity.selection})"


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("system", result["system"]),
        ("model", f"{result['model']} ({result['platform']})"),
        ("cache", result["cache"]),
    ]
    rows.append((f"accuracy ({result['criterion']})", _share(result["accuracy"])))
    if result["accuracy_strict"] is not None:
        rows.append((f"accuracy ({result['strict_criterion']})", _share(result["accuracy_strict"])))
    rows.append(("throughput", f"{number(result['throughput_tok_s'])} tok/s over {number(result['window_s'])} s"))
    rows += [("problems", result["dataset"]), ("obtained", result["obtained"])]
    verdict = "VALID" if result["valid"] else f"INVALID: {'; '.join(result['reasons'])}"
    return [*rows, ("verdict", verdict)]


def _share(accuracy: dict[str, Any]) -> str:
    percent = {name: 100 * accuracy[name] for name in ("value", "low", "high")}
    return f"{percent['value']:.1f} % ({percent['low']:.1f} to {percent['high']:.1f} %, n = {accuracy['n']})"
