"""``repro eval``: how many of a task's problems a system solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.dllm_knobs import answer_knobs, of_platform
from repro.cli.output import number, print_json, print_table
from repro.cli.spread import Given, Knobs, Some

if TYPE_CHECKING:
    from engines.dllm.method import Sampler
    from repro.runs.cell import Cell
    from repro.runs.store import StoredRun
    from repro.runs.system import Deployment


def _evaluated() -> dict[str, Sequence[type | Some]]:
    from repro.systems.dllm.knobs import Asked, BaselineKnobs, Device, ModelKnobs

    return {
        opt.WHAT: (Some(ModelKnobs, ("model",)),),
        opt.WORKLOAD: (Some(Asked, ("num_fewshot", "chat", "dataset_source")),),
        opt.ENGINE: (
            Some(BaselineKnobs, ("batch_size",)),
            Some(ModelKnobs, ("memory_limit",)),
            Some(Device, ("dtype", "device")),
        ),
        **answer_knobs(),
    }


KNOBS = Knobs(_evaluated, usual=of_platform)


@dataclass(frozen=True, kw_only=True)
class Asked(Checked):
    panel: ClassVar[str] = opt.WHAT
    task: str = "mini-gsm"
    """mini-gsm, mini-code, mini-chain, gsm8k or humaneval."""
    system: str = "dllm-serve"
    """Any of 'repro list'."""
    platform: str = "cpu-tiny"
    """Memory and defaults; the model always runs."""
    limit: Annotated[int, Range(1, 10**5)] | None = None
    """First problems only [default: all; 500 of a generated task]."""
    seed: opt.Seed = 0

    def cell(self, knobs: Mapping[str, Any]) -> Cell:
        from repro.runs.cell import Cell
        from repro.systems.platforms import platform as platform_of

        return Cell(
            system=self.system,
            dataset=self.task,
            platform=platform_of(self.platform).name,
            executor="torch",
            rate=None,
            seed=self.seed,
            knobs=tuple({**knobs, **opt.given(num_prompts=self.limit)}.items()),
        )


def evaluate(
    *,
    asked: Asked,
    dataset_path: opt.DatasetPath = None,
    given: Annotated[Given, KNOBS],
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    place: opt.Place,
    json: opt.Json = False,
) -> None:
    """Ask a task's problems, all at once, and grade the answers; the model always runs, nothing is simulated."""
    from repro.cli.data_file import readable
    from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
    from repro.runs.system import SYSTEMS
    from repro.systems.dllm.requests import require_task
    from repro.tasks.registry import task_entry

    opened = place.opened()
    task_entry(asked.task)
    implied = getattr(SYSTEMS.get(asked.system), "implied", None)
    options = {**({} if implied is None else implied(given)), **given, **opt.of_data_file(dataset_path, given)}
    cell = asked.cell(options | opt.parse_knobs(knob or (), options))
    with opened as pool:
        with readable("dataset_path", dataset_path, [asked.task]):
            sweep = sweep_of([cell], stored.store, force=stored.force, pool=pool)
        deployment = sweep.experiments[0].deployment
        require_task(getattr(deployment, "task", None), cell)
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

    facts, entry = run.manifest["facts"], task_entry(run.cell.dataset)
    return {
        "task": run.cell.dataset,
        "criterion": entry.criterion,
        "strict_criterion": entry.strict,
        "system": facts["system"],
        "model": facts["model"],
        "platform": facts["platform"],
        **_context(deployment),
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


def _context(deployment: Deployment) -> dict[str, Any]:
    """What a step computes the block against."""
    from repro.systems.block.system import Deployment as BlockDeployment
    from repro.systems.dllm.deployment import Deployment as DllmDeployment

    if isinstance(deployment, BlockDeployment):
        return {"selection": None, "cache": deployment.context, "retention": None}
    assert isinstance(deployment, DllmDeployment), "only diffusion models answer problems"
    sampler = deployment.sampler
    sparsity, caches = sampler.sparsity, sampler.rule.caches
    return {
        "selection": sparsity.selection if caches else None,
        "cache": _cache(sampler),
        "retention": None if not caches else 1.0 if sparsity.selection == "dense" else sparsity.retention_ratio,
    }


def _cache(sampler: Sampler) -> str:
    from baselines.dllm.dllm_cache.method import FeatureSampler
    from engines.dllm.scheduling.settling import Settling

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
    usual, own = asdict(Settling()), asdict(sampler.settling)
    left_out = "".join(f", {name}={value}" for name, value in own.items() if value != usual[name])
    if sparsity.selection == "dense":
        return f"all context rows{left_out}"
    whole = "" if sparsity.whole_layer is None else f", all of them in layer {sparsity.whole_layer}"
    return f"{100 * sparsity.retention_ratio:g} % of the context rows ({sparsity.selection}){whole}{left_out}"


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
