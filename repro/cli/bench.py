"""``repro bench``: any system on any workload and platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli import options as opt
from repro.cli.option_groups import Decoding, spread
from repro.cli.output import number, print_json, print_table


@spread
def bench(
    *,
    system: Annotated[list[str] | None, typer.Option(help="May be given several times [default: dllm-serve].")] = None,
    dataset_name: Annotated[
        list[str] | None, typer.Option(help="livebench, burst or osc; several times [default: osc].")
    ] = None,
    platform: Annotated[str, typer.Option(help="cpu-tiny, rtx4090, l40s or h200.")] = "cpu-tiny",
    executor: Annotated[str | None, typer.Option(help="torch (measured) or roofline (simulated).")] = None,
    request_rate: Annotated[
        list[str] | None, typer.Option(help="Requests/s or 'inf'; several times [default: inf].")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests per run.")] = None,
    burstiness: Annotated[float | None, typer.Option(help="Shape of gamma arrivals; 1 is Poisson.")] = None,
    dataset_path: Annotated[Path | None, typer.Option(help="Local file in a format of the dataset's card.")] = None,
    dataset_source: Annotated[str | None, typer.Option(help="auto, hub, local or embedded.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Fix every prompt to this many tokens.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="phase, request or lookahead.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Query tokens per packed step.")] = None,
    max_num_logits: Annotated[int | None, typer.Option(help="Logit rows alive at once.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests running at once.")] = None,
    reading: opt.Reading = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Static batch of a baseline [default: largest that fits].")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Emulated device memory, e.g. 24GB.")] = None,
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
    decoding: Decoding,
    seed: opt.Seed = 0,
    result_dir: Annotated[Path | None, typer.Option(help="Where run folders go [default: results/local].")] = None,
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
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check everything, list the runs and why each would run.")] = False,
    continue_on_error: Annotated[bool, typer.Option(help="Go on with the next run after a failure.")] = False,
    json: opt.Json = False,
) -> None:
    """Run systems on a workload; the same command again continues, and reuses what is done."""
    from engines.errors import require
    from repro.cli.profile import print_profile
    from repro.cli.sweep import check_devices, load_all, prepare_all, run_sweep, say_what_ran
    from repro.paths import LOCAL
    from repro.runs.cell import Cell
    from repro.runs.store import Store
    from repro.systems.platforms import platform as platform_of
    from repro.systems.settings import default_profile_every

    where = platform_of(platform)
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
        num_requests=num_prompts,
        burstiness=burstiness,
        dataset_path=None if dataset_path is None else str(dataset_path),
        source=dataset_source,
        fixed_prompt_len=input_len,
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
        memory_bytes=opt.parse_memory_limit(memory_limit),
        logit_rows=logit_rows,
        model=model,
        weights=weights,
        dtype=dtype,
        device=device,
        **decoding.given(),
    )
    if input_len is not None:
        knobs["length_scale"] = 1.0
    if dataset_path is not None and dataset_source is None:
        knobs["source"] = "local"
    if burstiness is not None:
        knobs["arrivals"] = "gamma"
    if profile:
        knobs["profile_every"] = profile_every or default_profile_every(device or where.device)
    cells = [
        Cell(
            system=name,
            dataset=dataset,
            platform=platform,
            executor=executor or where.executor,
            rate=opt.parse_rate(rate),
            seed=seed,
            knobs=tuple(knobs.items()),
        )
        for dataset in dataset_name or ["osc"]
        for rate in request_rate or ["inf"]
        for name in system or ["dllm-serve"]
    ]
    store = Store(result_dir or LOCAL)
    experiments = prepare_all(cells)
    if dry_run:
        check_devices(experiments)
        reasons = [(e.cell.folder_name, store.why(e.cell)) for e in experiments]
        if json:
            print_json([{"run": name, "why": reason} for name, reason in reasons])
        else:
            print_table("Would run", ("run", "why"), reasons)
        return
    outcomes = run_sweep(experiments, store, force=force, continue_on_error=continue_on_error)
    runs = load_all(experiments, store)
    if json:
        print_json(
            [
                {
                    "cell": run.cell.to_dict(),
                    "obtained": run.obtained,
                    "valid": run.validity.valid,
                    "reasons": list(run.validity.reasons),
                    "facts": run.record.manifest["facts"],
                    "folder": str(store.folder(run.cell)),
                    "summary": run.summary,
                }
                for run in runs
            ]
        )
    else:
        print_table("Runs", _COLUMNS, [_row(run) for run in runs])
        if profile:
            for run in runs:
                print_profile(run)
    say_what_ran(outcomes, store.root)
    if any(o.status == "failed" or (o.validity is not None and not o.validity.valid) for o in outcomes):
        raise typer.Exit(1)


_COLUMNS = (
    "system",
    "dataset",
    "platform",
    "rate req/s",
    "tok/s",
    "mean s",
    "p50 s",
    "p90 s",
    "running",
    "outside fwd",
    "obtained",
    "verdict",
)


def _row(run) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    summary, cell = run.summary, run.cell
    latency = summary["e2el_s"]
    outside = summary["outside_forward_share"]
    return (
        run.record.manifest["system"],
        cell.dataset,
        cell.platform,
        "inf" if cell.rate is None else f"{cell.rate:g}",
        number(summary["throughput_tok_s"]),
        number(latency["mean"], 2),
        number(latency["p50"], 2),
        number(latency["p90"], 2),
        number(summary["mean_running"]),
        "-" if outside is None else f"{100 * outside:.1f} %",
        run.obtained,
        "VALID" if run.validity.valid else "INVALID",
    )
