"""``repro bench``: any system on any workload and platform."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from engines.errors import require
from engines.knobs import Checked, Needs, Range
from repro.cli import options as opt
from repro.cli.dllm_knobs import engine_knobs, of_platform
from repro.cli.output import number, percent, print_json, print_table, say
from repro.cli.run_table import by_setting, print_runs, rate_of, run_json
from repro.cli.spread import Given, Knobs, Some

if TYPE_CHECKING:
    from repro.runs.store import StoredRun
    from repro.systems.platforms import Platform
    from repro.workbench.grid import Grid

CPU = "cpu-tiny"
PROFILE_COLUMNS = {"with a Refresh": ("refresh", "mixed"), "Reuse only": ("reuse",), "all": ("all",)}
"""Title -> the kinds of step in it, as the metric ``profile`` has them."""
ENDPOINT = "endpoint"
"""Where a system behind --url runs."""


@dataclass(frozen=True, kw_only=True)
class OwnPolicies:
    """What systems of autoregressive models take; a scheduler and a refresh rule are settings of diffusion LLMs."""

    router: str | None = None
    """A router of one's own as module:NAME, of ampd, ampd-live and laps; of dynamo how a request finds its worker."""
    batcher: str | None = None
    """A batching policy of one's own as module:NAME, of laps."""
    queue: str | None = None
    """An order of waiting prefills of one's own as module:NAME, of ampd and ampd-live, and of laps beside a batcher."""
    binder: str | None = None
    """What says where a session lives, as module:NAME, of ampd and ampd-live."""


def _knobs() -> Mapping[str, Sequence[type | Some]]:
    own = engine_knobs()
    return {**own, opt.ENGINE: (*own[opt.ENGINE], OwnPolicies)}


KNOBS = Knobs(
    _knobs,
    several=True,
    without=("dataset_path", "profile_every", "num_fewshot", "chat", "allow_code_execution", "length_scale"),
    usual=of_platform,
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The cells, besides their knobs: each system on each data set at each rate."""

    panel: ClassVar[str] = opt.WHAT
    system: list[str] | None = None
    """'repro list', or module:NAME; several times [default: dllm-serve, or ampd on clusters]."""
    dataset_name: list[str] | None = None
    """livebench, burst or osc, a session trace or conversations; several times [default: osc, dureader or lmsys-chat-1m, as
    the system serves]."""
    platform: list[str] | None = None
    """cpu-tiny, rtx4090, l40s, a100, h100, h200, b200, h20x32 or h200x32 for clusters, h200-sdar-8b and others of block diffusion
    ('repro list'), the YAML file of a card of yours (CONTRIBUTING.md), or module:NAME; several times [default: cpu-tiny]."""
    executor: list[str] | None = None
    """torch (measured) or roofline (simulated); several times [default: the platform's]."""
    request_rate: list[str] | None = None
    """Requests/s or 'inf'; several times [default: inf]."""
    seed: opt.Seeds = None

    @property
    def where(self) -> tuple[str, ...]:
        return tuple(self.platform or (CPU,))

    def grid(self, options: Mapping[str, Any]) -> Grid:
        """``options``: the knobs."""
        from repro.workbench.grid import Grid

        return Grid(
            system=tuple(self.system or ()),
            dataset=tuple(self.dataset_name or ()),
            platform=self.where,
            executor=tuple(self.executor or ()),
            rate=tuple(map(opt.parse_rate, self.request_rate or ["inf"])),
            seed=tuple(self.seed or (0,)),
            knobs={name: value if isinstance(value, tuple) else (value,) for name, value in options.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server to drive in place of a system here."""

    panel: ClassVar[str] = opt.SERVER
    url: str | None = None
    """Base URL of an OpenAI-compatible server to drive, in place of a system here or as --system vllm, dynamo or sglang."""
    max_concurrency: int | None = None
    """With --url, requests under way at once."""
    goodput: str | None = None
    """With --url, limits in ms of a good request, like 'ttft:200 tpot:50 e2el:5000'."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Checked):
    panel: ClassVar[str] = opt.RUNS
    profile: bool = False
    """Say where a step's time goes and how near it is to the hardware's limits; disturbs what it measures, so stored apart from plain
    runs."""
    profile_every: Annotated[int, Range(1, 10**9), Needs(profile=True)] | None = None
    """With --profile, one step in this many is taken apart; prime to the steps of a block, or it meets the same ones in each
    [default: 7 on CUDA, else 1]."""

    def knobs(self, device: str | None, where: Platform, executor: str | None) -> dict[str, int]:
        from repro.systems.dllm.settings import default_profile_every
        from repro.systems.platforms import DllmPart

        if not self.profile:
            return {}
        require(
            (executor or where.executor) == "torch",
            "profile: a simulated step has no parts to take apart: leave --profile out, or use --executor torch",
        )
        return {"profile_every": self.profile_every or default_profile_every(device or where.part(DllmPart).device)}


def bench(
    *,
    asked: Asked,
    dataset_path: opt.DatasetPath = None,
    given: Annotated[Given, KNOBS],
    endpoint: Endpoint,
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    placement: opt.Placement,
    profiled: Profiled,
    dry_run: opt.DryRun = False,
    continue_on_error: opt.ContinueOnError = False,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Run systems on a workload; the same command again continues, and reuses what is done."""
    from dataclasses import asdict, replace
    from functools import partial

    from repro.cli.making import make_and_show
    from repro.cli.plots import check_plot
    from repro.systems.platforms import platform as platform_of

    opened = placement.opened()
    if endpoint.url is not None and asked.where == (CPU,):
        asked = replace(asked, platform=[ENDPOINT])
    if endpoint.url is not None and not asked.system:
        asked = replace(asked, system=["openai-http"])
    where = [platform_of(name) for name in asked.where]
    options = {**given, **opt.given(**asdict(endpoint)), **opt.of_data_file(dataset_path, given)}
    options |= profiled.knobs(given.get("device"), where[0], next(iter(asked.executor or ()), None))
    options |= opt.parse_knobs(knob or (), options, several=True)
    grid = asked.grid(options)
    if plot is not None:
        check_plot(plot, *grid.files)
    title = f"repro bench on {', '.join(each.title for each in where)}"
    show = partial(_show, title=title, varied=grid.varied, is_profiled=profiled.profile, plot=plot, json=json)
    make_and_show(
        grid.cells(),
        store=stored.store,
        opened=opened,
        show=show,
        force=stored.force,
        jobs=placement.jobs,
        dry_run=dry_run,
        continue_on_error=continue_on_error,
        json=json,
    )


def _show(
    runs: Sequence[StoredRun], *, title: str, varied: Sequence[str], is_profiled: bool, plot: Path | None, json: bool
) -> None:
    from repro.cli.plots import save_plot, titles_of

    if json:
        print_json({"runs": [run_json(run) for run in runs]})
    else:
        print_runs(by_setting(runs), varied)
        for run in runs if is_profiled else ():
            _print_profile(run)
    if plot is not None and runs:
        drawn = save_plot(plot, title, [_as_plotted(run, varied) for run in runs], titles_of(runs))
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)


def _as_plotted(run: StoredRun, varied: Sequence[str]) -> dict[str, Any]:
    cell, summary = run.cell, run.summary
    knobs = [f"{name}={cell.knob_values.get(name, 'default')}" for name in varied]
    return {
        "label": ", ".join([run.title, cell.dataset, _rate_text(run), *knobs]),
        "throughput_tok_s": summary["throughput_tok_s"],
        "mean_latency_s": summary["e2el_s"]["mean"],
        "p50_latency_s": summary["e2el_s"]["p50"],
        "p99_latency_s": summary["e2el_s"]["p99"],
        "obtained": run.obtained,
        "valid": run.validity.valid,
        "run": cell.folder_name,
    }


def _print_profile(run: StoredRun) -> None:
    """Where the time of a profiled run's steps went."""
    summary, facts = run.summary, run.facts
    name = f"{run.record.manifest['system']}, {run.cell.dataset}, {_rate_text(run)}"
    if summary["profile"] is None:
        say(f"{name}: no step was taken apart")
    else:
        _print_parts(name, summary["profile"])
    card = f" of {facts['bound']['card']}" if "bound" in facts else ""
    say(
        f"share of roofline{card}: {percent(summary['roofline_share'])}; CUDA graph hit rate: "
        f"{percent(summary['graph_hit_rate'])}; outside the forward: {percent(summary['outside_forward_share'])}"
    )


def _print_parts(name: str, profile: Mapping[str, Any]) -> None:
    from engines.runtime.step_timer import STEP_PARTS

    columns = []
    for title, kinds in PROFILE_COLUMNS.items():
        count = sum(profile[kind]["num_steps"] for kind in kinds)
        seconds = {part: sum(profile[kind]["seconds"][part] for kind in kinds) for part in STEP_PARTS}
        columns.append((f"{title} ({count})", _shares({**seconds, "whole step": sum(seconds.values())}, count)))
    print_table(
        f"Where a step's time goes: {name}",
        ("ms, share", *(title for title, _ in columns)),
        [(part, *(cells[part] for _, cells in columns)) for part in (*STEP_PARTS, "whole step")],
    )


def _shares(seconds: Mapping[str, float], count: int) -> dict[str, str]:
    total = seconds["whole step"]
    return {
        part: f"{number(1e3 * value / count, 3)}  {percent(value / total):>7}" if count and total else "-"
        for part, value in seconds.items()
    }


def _rate_text(run: StoredRun) -> str:
    rate = rate_of(run) if run.cell.rate is None else f"{run.cell.rate:g} req/s"
    return "all at once" if rate == "inf" else rate
