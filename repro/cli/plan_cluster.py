"""``repro plan-cluster``: how to split GPUs into prefill and decode workers (AMPD §5)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table, say

PLAN_SEED = 10**6
MOST_SESSIONS = 10**5
LEAST_RATE = 1e-6
"""A session in twelve days."""
OBJECTIVES_S = (1e-6, 1e6)
"""Least and largest objective: integer programs lose their digits beyond."""


def plan_cluster(
    model: Annotated[str, typer.Option(help="A shape: Qwen3-32B, Llama-3.1-70B, Mixtral-8x7B, Qwen2.5-7B, ...")],
    trace: Annotated[str, typer.Option(help="toolbench, gaia, hotpotqa or dureader.")],
    gpus: Annotated[int, typer.Option(help="GPUs to split.")],
    hardware: Annotated[
        str, typer.Option(help="The kind of GPU: h20, b200, h200, h100, a100, l40s or rtx4090.")
    ] = "h20",
    rate: Annotated[
        float | None, typer.Option(help="Sessions/s to plan for [default: 0.6 for the GPUs of the trace's card].")
    ] = None,
    slo_ttft_s: Annotated[float | None, typer.Option(help="TTFT objective [default: the paper's].")] = None,
    slo_itl_s: Annotated[float | None, typer.Option(help="ITL objective [default: the paper's].")] = None,
    trace_path: Annotated[
        Path | None, typer.Option(help="JSONL of your own sessions, as they are, instead of the generator.")
    ] = None,
    num_sessions: Annotated[
        int | None, typer.Option(help="Sessions of the sample [default: 99, more for more GPUs].")
    ] = None,
    constants: Annotated[str, typer.Option(help="Of the cost model: physical, trial-r2, ...")] = "physical",
    method: Annotated[
        str | None, typer.Option(help="Coefficients: direct, cached or closed [default: by the number of GPUs].")
    ] = None,
    solver: Annotated[
        str, typer.Option(help="enumeration, or scip or highs where '.[planner]' is installed; all are exact.")
    ] = "enumeration",
    top: Annotated[int, typer.Option(help="Plans to show.")] = 3,
    json: opt.Json = False,
) -> None:
    """The best deployments of AMPD's planner, with the P95 latencies it expects. Simulated."""
    import time

    from engines.ampd.planner.coefficients import coefficients
    from engines.ampd.planner.planner import PlannerConfig, solve
    from engines.ampd.planner.workload import PlanningWorkload
    from engines.bounds import MOST
    from engines.errors import require
    from engines.hardware.catalogue import gpu
    from engines.models.shape import model_shape
    from engines.policies.slo import Slo
    from repro.cli.data_file import readable
    from repro.systems.ar.part import PAPER_OBJECTIVES
    from repro.systems.ar.planning import MOST_PLANS
    from repro.systems.ar.settings import (
        DIFFUSION,
        PLANNING_RATE,
        hardware_of,
        performance_of,
        profiled_context,
        sessions_of,
    )
    from repro.workloads.arrivals import ArrivalConfig
    from repro.workloads.sessions import SessionWorkloadConfig, load_session_card

    card, shape, gpu_name = load_session_card(trace), model_shape(model), gpu(hardware).name
    require(
        not shape.name.lower().startswith(DIFFUSION),
        f"model={shape.name!r} is a diffusion model and has no prefill and decode workers: use an autoregressive one",
    )
    require(2 <= gpus <= 4096, f"gpus={gpus} must be between 2 and 4096: a prefill and a decode worker need one each")
    require(1 <= top <= MOST_PLANS, f"top={top} must be between 1 and {MOST_PLANS}")
    planned_rate = PLANNING_RATE * gpus / card.num_gpus if rate is None else rate
    require(
        LEAST_RATE <= planned_rate <= MOST["rate"],
        f"rate={rate} must be between {LEAST_RATE:g} and {MOST['rate']:g} sessions/s",
    )
    require(
        num_sessions is None or 1 <= num_sessions <= MOST_SESSIONS,
        f"num_sessions={num_sessions} must be between 1 and {MOST_SESSIONS:,}",
    )
    printed = PAPER_OBJECTIVES.get((shape.name, card.name))
    ttft_s = slo_ttft_s if slo_ttft_s is not None else None if printed is None else printed.ttft_ms / 1e3
    itl_s = slo_itl_s if slo_itl_s is not None else None if printed is None else printed.itl_ms / 1e3
    for name, value in (("slo-ttft-s", ttft_s), ("slo-itl-s", itl_s)):
        require(value is not None, f"{shape.name} on {card.name} has no published objective: give --{name}, in seconds")
        assert value is not None
        least, most = OBJECTIVES_S
        require(least <= value <= most, f"{name}={value} must be between {least:g} and {most:g} seconds")
    assert ttft_s is not None
    assert itl_s is not None
    slo = Slo(ttft_s=ttft_s, itl_s=itl_s)
    config = PlannerConfig(method=method, solver=solver)  # type: ignore[arg-type]
    num = (
        max(card.paper_sessions, card.paper_sessions * gpus // card.num_gpus) if num_sessions is None else num_sessions
    )
    asked = SessionWorkloadConfig(
        trace=card.name,
        num_sessions=num,
        seed=PLAN_SEED,
        arrivals=ArrivalConfig(kind="poisson", rate=planned_rate),
        source="embedded" if trace_path is None else "local",
        trace_path=None if trace_path is None else str(trace_path),
        meets_totals=trace_path is None,
    )
    with readable("trace-path", trace_path, [card.name]):
        drawn = sessions_of(asked)
    sessions = drawn.sessions
    if trace_path is not None:
        say(drawn.provenance.description, file=sys.stderr)
    ground = hardware_of(shape.name, gpu_name, constants)
    degrees = ground.degrees(min_kv_tokens=max(session.context_tokens for session in sessions))
    require(
        gpus >= 2 * min(degrees),
        f"gpus={gpus} do not hold a prefill and a decode worker of {shape.name}, which takes {min(degrees)} x {gpu_name} or "
        f"more each: give at least {2 * min(degrees)}",
    )
    start = time.perf_counter()
    performance = performance_of(shape.name, gpu_name, ground.constants.name, gpus, profiled_context(asked))
    profiled = time.perf_counter()
    workload = PlanningWorkload(sessions=sessions, rate=planned_rate, slo=slo)
    table = coefficients(performance, workload, degrees, gpus, config.method)
    found = solve(table, gpus, top=top, config=config)
    end = time.perf_counter()
    require(bool(found), f"gpus={gpus}: no split into prefill and decode workers uses them all, give an even number")
    rows = [
        {
            "rank": rank,
            "deployment": str(plan.deployment),
            "worst_of_slo": plan.value,
            "ttft_p95_s": plan.prefill.seconds,
            "ttft_p95_of_slo": plan.prefill.of_slo,
            "round_decode_p95_s": plan.decode.seconds,
            "itl_p95_of_slo": plan.decode.of_slo,
            "itl_p95_s": plan.decode.of_slo * slo.itl_s,
        }
        for rank, plan in enumerate(found, start=1)
    ]
    if json:
        print_json(
            {
                "model": shape.name,
                "trace": card.name,
                "gpus": gpus,
                "hardware": gpu_name,
                "rate": planned_rate,
                "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
                "constants": ground.constants.name,
                "solver": found[0].solver,
                "performance_model_error": performance.max_error,
                "profile_seconds": profiled - start,
                "plan_seconds": end - profiled,
                "obtained": "simulated",
                "plans": rows,
            }
        )
        return
    print_table(
        f"{shape.name}, {card.title}, {gpus} x {gpu_name}, {planned_rate:g} sessions/s (simulated)",
        ("rank", "deployment", "P95 TTFT s", "of TTFT SLO", "P95 ITL ms", "of ITL SLO", "P95 decode of a round s"),
        [
            (
                str(rank),
                str(plan.deployment),
                number(plan.prefill.seconds, 3),
                f"{plan.prefill.of_slo:.3g}",
                number(1e3 * plan.decode.of_slo * slo.itl_s, 1),
                f"{plan.decode.of_slo:.3g}",
                number(plan.decode.seconds, 2),
            )
            for rank, plan in enumerate(found, start=1)
        ],
    )
    if found[0].value > 1:
        say(
            f"no split meets both objectives at P95: the best is {found[0].value:.3g} times over; lower the rate or add GPUs"
        )
    say(
        f"planned in {end - profiled:.2f} s ({found[0].solver}), after {profiled - start:.2f} s of profiling (worst fit error "
        f"{100 * performance.max_error:.1f} %)"
    )
