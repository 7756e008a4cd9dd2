"""``repro eval``: how many of a task's problems a system solves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.option_groups import Decoding, Place, spread
from repro.cli.output import number, print_json, print_table

if TYPE_CHECKING:
    from repro.runs.store import StoredRun
    from repro.systems.dllm.deployment import Deployment


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
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory, hub id or 'tiny' [default: the platform's].")
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    decoding: Decoding,
    seed: opt.Seed = 0,
    result_dir: opt.ResultDir = None,
    place: Place,
    force: opt.Force = False,
    accept_other_code: opt.OtherCode = False,
    json: opt.Json = False,
) -> None:
    """Ask a task's problems, all at once, and grade the answers; the model always runs, nothing is simulated."""
    from repro.cli.data_file import readable
    from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.runs.cell import Cell
    from repro.runs.store import Store
    from repro.systems.dllm.deployment import Deployment
    from repro.systems.dllm.graded import require_task
    from repro.tasks.registry import task_entry

    opened = place.opened()
    task_entry(task)
    knobs = opt.given(
        num_prompts=limit,
        num_fewshot=num_fewshot,
        chat=chat or None,
        dataset_path=None if dataset_path is None else str(dataset_path),
        dataset_source=dataset_source,
        batch_size=batch_size,
        memory_limit=opt.parse_memory_limit(memory_limit),
        model=model,
        dtype=dtype,
        device=device,
        **decoding.given(),
    )
    if dataset_path is not None and dataset_source is None:
        knobs["dataset_source"] = "local"
    cell = Cell(
        system=system,
        dataset=task,
        platform=platform,
        executor="torch",
        rate=None,
        seed=seed,
        knobs=tuple(knobs.items()),
    )
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    with opened as pool:
        with readable("dataset_path", dataset_path, [task]):
            sweep = sweep_of([cell], store, force=force, pool=pool)
        deployment = sweep.experiments[0].deployment
        assert isinstance(deployment, Deployment)
        require_task(deployment.task, cell)
        outcomes = run_sweep(sweep)
    (run,) = sweep.runs
    result = _result(deployment, run)
    if json:
        print_json(result)
    else:
        print_table(f"{result['task']}, {result['criterion']}", ("what", "value"), _rows(result))
    say_what_ran(outcomes, sweep.store.root)
    if not run.validity.valid:
        raise typer.Exit(1)


def _result(deployment: Deployment, run: StoredRun) -> dict[str, Any]:
    from repro.tasks.registry import task_entry

    facts = run.manifest["facts"]
    entry, sparsity = task_entry(run.cell.dataset), deployment.sampler.sparsity
    caches = deployment.sampler.rule.caches
    return {
        "task": run.cell.dataset,
        "criterion": entry.criterion,
        "strict_criterion": entry.strict,
        "system": facts["system"],
        "model": facts["model"],
        "platform": facts["platform"],
        "selection": sparsity.selection if caches else None,
        "cache": _cache(deployment),
        "retention": None if not caches else 1.0 if sparsity.selection == "dense" else sparsity.retention_ratio,
        "accuracy": run.summary["accuracy"],
        "accuracy_strict": run.summary["accuracy_strict"],
        "throughput_tok_s": run.summary["throughput_tok_s"],
        "window_s": run.summary["window_s"],
        "dataset": facts["dataset"]["description"],
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "reasons": list(run.validity.reasons),
        "cell": run.cell.to_dict(),
        "file": str(run.file),
    }


def _cache(deployment: Deployment) -> str:
    from baselines.dllm.dllm_cache.method import FeatureSampler

    sampler = deployment.sampler
    sparsity = sampler.sparsity
    if isinstance(sampler, FeatureSampler):
        features = sampler.features
        return (
            f"features, of the prompt every {features.prompt_interval} steps, of the response every {features.gen_interval} "
            f"and {100 * features.transfer_ratio:g} % of its rows in between"
        )
    if not sampler.rule.caches:
        return "no KV cache"
    if sampler.rule.window == "suffix":
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
