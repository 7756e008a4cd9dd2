"""``repro bench``: any system on any workload and platform."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.option_groups import Decoding, Placement, spread
from repro.cli.output import print_json, print_table, say
from repro.cli.run_table import print_runs, rate_of
from repro.cli.said import as_json

if TYPE_CHECKING:
    from repro.runs.store import StoredRun
    from repro.runs.sweep import Sweep

ENDPOINT = "endpoint"
"""Where a system behind --url runs."""


@spread
def bench(
    *,
    system: Annotated[
        list[str] | None,
        typer.Option(help="'repro list', or module:NAME; several times [default: dllm-serve, or ampd on clusters]."),
    ] = None,
    dataset_name: Annotated[
        list[str] | None,
        typer.Option(
            help="livebench, burst or osc, a session trace or conversations; several times [default: osc, dureader or lmsys-chat-1m, as the system serves]."
        ),
    ] = None,
    platform: Annotated[
        str, typer.Option(help="cpu-tiny, rtx4090, l40s, a100, h100, h200, b200, h20x32 for clusters, or module:NAME.")
    ] = "cpu-tiny",
    executor: Annotated[
        str | None, typer.Option(help="torch (measured) or roofline (simulated) [default: the platform's].")
    ] = None,
    request_rate: Annotated[
        list[str] | None, typer.Option(help="Requests/s or 'inf'; several times [default: inf].")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests per run [default: the platform's].")] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="poisson, gamma or constant at --request-rate; trace for those of --dataset-path; burst for all at once "
            "[default: poisson, or burst without a rate]."
        ),
    ] = None,
    burstiness: Annotated[float | None, typer.Option(help="Shape of gamma arrivals; 1 is Poisson.")] = None,
    dataset_path: Annotated[Path | None, typer.Option(help="Local file in a format of the dataset's card.")] = None,
    dataset_source: Annotated[str | None, typer.Option(help="auto, hub, local or embedded [default: auto].")] = None,
    input_len: Annotated[int | None, typer.Option(help="Fix every prompt to this many tokens.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="phase, request, lookahead or module:NAME [default: the system's].")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Query tokens per packed step [default: the platform's].")
    ] = None,
    max_num_logits: Annotated[
        int | None, typer.Option(help="Logit rows alive at once [default: the platform's].")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests running at once [default: the platform's].")
    ] = None,
    reading: opt.Reading = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Static batch of a baseline [default: what --batch-rule says].")
    ] = None,
    batch_rule: Annotated[
        str | None,
        typer.Option(
            help="Static batch of a baseline: one, or the largest that holds the workload's longest request or one of "
            "max_model_len: workload or max_model_len [default: workload]."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Emulated device memory, e.g. 24GB [default: the platform's].")
    ] = None,
    logit_rows: Annotated[
        str | None,
        typer.Option(help="Logits of the wanted rows in chunks, or of every row at once: decomposed or monolithic."),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="auto, flash-attn, torch-varlen, sdpa-padded or sdpa, of measured packed steps.")
    ] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option(help="Replay the forwards of small Reuse steps, on CUDA [default: yes].")
    ] = None,
    fused_kernels: Annotated[
        bool | None, typer.Option(help="Triton kernels for 16-bit models, on CUDA [default: yes].")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices of this machine to divide the model among.")
    ] = None,
    model: opt.Model = None,
    weights: opt.Weights = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server to drive, in place of a system here or as --system vllm, dynamo or sglang."
        ),
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="With --url, requests under way at once.")] = None,
    goodput: Annotated[
        str | None, typer.Option(help="With --url, limits in ms of a good request, like 'ttft:200 tpot:50 e2el:5000'.")
    ] = None,
    decoding: Decoding,
    seed: opt.Seed = 0,
    result_dir: opt.ResultDir = None,
    placement: Placement,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Say where a step's time goes and how near it is to the hardware's limits; disturbs what it measures, so "
            "stored apart from plain runs.",
        ),
    ] = False,
    profile_every: Annotated[
        int | None,
        typer.Option(
            help="With --profile, one step in this many is taken apart; prime to the steps of a block, or it meets the same ones "
            "in each [default: 7 on CUDA, else 1]."
        ),
    ] = None,
    force: opt.Force = False,
    accept_other_code: opt.OtherCode = False,
    knob: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of AMPD, LAPS or a system of your own, which no option is for; several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the runs and why each would run.")
    ] = False,
    continue_on_error: Annotated[
        bool, typer.Option("--continue-on-error", help="Go on with the next run after a failure.")
    ] = False,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Run systems on a workload; the same command again continues, and reuses what is done."""
    from engines.bounds import check_most
    from engines.errors import require
    from repro.cli.data_file import data_of, readable
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.profile import print_profile
    from repro.cli.sweep import is_failure, run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.runs.cell import Cell
    from repro.runs.store import Store
    from repro.runs.system import SYSTEMS
    from repro.systems.ar.part import ArPart
    from repro.systems.dllm.part import DllmPart
    from repro.systems.dllm.settings import default_profile_every
    from repro.systems.laps.part import part_of
    from repro.systems.platforms import platform as platform_of

    opened = placement.opened()
    if url is not None:
        system = system or ["openai-http"]
        platform = ENDPOINT if platform == "cpu-tiny" else platform
    where = platform_of(platform)
    is_cluster = any(isinstance(part, ArPart) for part in where.parts)
    check_most("num_prompts", num_prompts)
    if plot is not None:
        check_plot(plot)
    require(
        profile or profile_every is None,
        f"profile_every={profile_every} has no effect without --profile: add it, or leave this out",
    )
    require(profile_every is None or profile_every >= 1, f"profile_every={profile_every} must be at least 1")
    require(
        not profile or (executor or where.executor) == "torch",
        "profile: a simulated step has no parts to take apart: leave --profile out, or use --executor torch",
    )
    knobs = opt.given(
        num_prompts=num_prompts,
        arrivals=arrivals,
        burstiness=burstiness,
        dataset_path=None if dataset_path is None else str(dataset_path),
        dataset_source=dataset_source,
        input_len=input_len,
        scheduler=scheduler,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits=max_num_logits,
        max_num_seqs=max_num_seqs,
        reading=reading,
        attention_backend=attention_backend,
        cuda_graphs=cuda_graphs,
        fused_kernels=fused_kernels,
        tensor_parallel=tensor_parallel,
        batch_size=batch_size,
        batch_rule=batch_rule,
        memory_limit=opt.parse_memory_limit(memory_limit),
        logit_rows=logit_rows,
        url=url,
        max_concurrency=max_concurrency,
        goodput=goodput,
        model=model,
        weights=weights,
        dtype=dtype,
        device=device,
        **decoding.given(),
    )
    systems = system or ["ampd" if is_cluster else "dllm-serve"]
    families = {SYSTEMS.get(name).family.name for name in systems}
    is_served = families == {"http"}
    if is_served and decoding.steps is None:
        # One token a step is the default of systems here; what another server does is its own affair.
        knobs.pop("steps", None)
    knobs |= opt.parse_knobs(knob or (), knobs)
    if input_len is not None and not is_served:
        knobs["length_scale"] = 1.0
    if dataset_path is not None and dataset_source is None:
        knobs["dataset_source"] = "local"
    if burstiness is not None:
        knobs.setdefault("arrivals", "gamma")
    if profile:
        knobs["profile_every"] = profile_every or default_profile_every(device or where.part(DllmPart).device)
    of_system = {name: dict(knobs) for name in systems}
    heeding = [name for name in systems if getattr(SYSTEMS.get(name), "has_readings", True)]
    if reading is not None and heeding:
        # What a baseline stands for beside the system under test, which is what it is.
        for name in {*systems} - {*heeding}:
            del of_system[name]["reading"]
    default_dataset = next((part.trace for part in where.parts if isinstance(part, ArPart)), "osc")
    if families == {"prefill"}:
        default_dataset = part_of(where).dataset
    if is_served:
        default_dataset = getattr(SYSTEMS.get(systems[0]), "dataset", default_dataset)
    datasets = dataset_name or [default_dataset]
    cells = [
        Cell(
            system=name,
            dataset=dataset,
            platform=platform,
            executor=executor or where.executor,
            rate=opt.parse_rate(rate),
            seed=seed,
            knobs=tuple(of_system[name].items()),
        )
        for dataset in datasets
        for rate in request_rate or ["inf"]
        for name in systems
    ]
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    if families <= {"ar", "live", "prefill"}:
        opt.check_ranges(knobs)
    with opened as pool:
        with (
            opt.named_as_given(),
            readable("dataset_path", dataset_path, datasets),
            opt.plugged_in("router", knobs.get("router")),
        ):
            sweep = sweep_of(cells, store, force=force, pool=pool)
        if dry_run:
            pool.check(sweep.experiments)
            _print_reasons(sweep, json=json)
            return
        for line in data_of(sweep.experiments):
            say(line, file=sys.stderr)
        outcomes = run_sweep(sweep, continue_on_error=continue_on_error, jobs=placement.jobs)
    runs = sweep.runs
    if json:
        print_json(
            {
                "runs": [
                    {
                        "cell": run.cell.to_dict(),
                        **as_json(run),
                        "obtained": run.obtained,
                        "valid": run.validity.valid,
                        "reasons": list(run.validity.reasons),
                        "facts": run.facts,
                        "file": str(run.file),
                        "summary": run.summary,
                    }
                    for run in runs
                ]
            }
        )
    else:
        print_runs(runs)
        if profile:
            for run in runs:
                print_profile(run)
    if plot is not None and runs:
        drawn = save_plot(plot, f"repro bench on {where.title}", [_as_plotted(run) for run in runs])
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)
    if any(map(is_failure, outcomes)):
        raise typer.Exit(1)


def _print_reasons(sweep: Sweep, *, json: bool) -> None:
    reasons = [(e.cell.folder_name, sweep.why(e.cell)) for e in sweep.experiments]
    if json:
        print_json({"runs": [{"run": name, "why": reason} for name, reason in reasons]})
    else:
        print_table("What would run, or be reused", ("run", "why"), reasons)


def _as_plotted(run: StoredRun) -> dict[str, Any]:
    cell, summary = run.cell, run.summary
    rate = rate_of(run) if cell.rate is None else f"{cell.rate:g} req/s"
    return {
        "label": f"{run.title}, {cell.dataset}, {'all at once' if rate == 'inf' else rate}",
        "throughput_tok_s": summary["throughput_tok_s"],
        "mean_latency_s": summary["e2el_s"]["mean"],
        "p50_latency_s": summary["e2el_s"]["p50"],
        "p99_latency_s": summary["e2el_s"]["p99"],
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "run": cell.folder_name,
    }
