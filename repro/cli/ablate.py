"""``repro ablate``: one component on and off, all else equal."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar

from engines.errors import require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.study import run_study

if TYPE_CHECKING:
    from repro.cli.study import Study
    from repro.reports.ablation import Variant

STUDIES = {"dllm-serve": "ablate_dllm", "ampd": "ablate_cluster", "laps": "ablate_prefill"}
"""Where the ablations of a system's components are, below ``repro.cli``."""


@dataclass(frozen=True, kw_only=True)
class Asked(Checked):
    panel: ClassVar[str] = opt.WHAT
    component: str
    """engine, scheduler, budgeting, sparsity or refresh; ladder for all, one by one. Of AMPD: routing or reordering. Of LAPS: graphs,
    disaggregation, awd or reserve."""
    variant: list[str] | None = None
    """A policy of one's own as one more variant, module:NAME or with its knobs module:NAME@name=value,...; several times."""
    dataset: list[str] | None = None
    """Several times [default: livebench, burst, osc; dureader, gaia of AMPD, lmsys-chat-1m of LAPS]."""
    platform: str | None = None
    """Where ('repro list' shows platforms; or a card's YAML file) [default: cpu-tiny, h20x32 for AMPD, h200 for LAPS]."""
    reading: str | None = None
    """Reading of Sparse-dLLM: published, efficient or policy [default: published where simulated, else efficient]."""
    request_rate: str | None = None
    """Requests/s, or inf [default: the platform's highest; 2 of AMPD, 60 of LAPS]."""
    num_runs: Annotated[int, Range(1, 1000)] | None = None
    """Repeats with seeds 0, 1, ... [default: 5 where measured, 10 on clusters, else 1]."""
    limit: Annotated[int, Range(0, 10**5)] | None = None
    """Problems per task, where variants commit other tokens and are measured; 0 for no accuracy [default: 200]."""
    model: str | None = None
    """Model of AMPD and LAPS [default: Llama-3.1-70B, Qwen2.5-14B]."""

    def refuse(self, *names: str, why: str = "") -> None:
        """What has no effect on the component."""
        for name in names:
            value = getattr(self, name)
            require(value is None, f"{name}={value!r} has no effect on component={self.component!r}{why}: leave it out")

    def own(self) -> list[Variant]:
        """The variants that are a user's own."""
        from repro.reports.ablation import own_variant

        told = [text.partition("@") for text in dict.fromkeys(self.variant or ())]
        return [
            own_variant(self.component, name, opt.parse_knobs(knobs.split(",") if knobs else (), {}))
            for name, _, knobs in told
        ]

    def rate(self, usual: float) -> float | None:
        return usual if self.request_rate is None else opt.parse_rate(self.request_rate)

    def seeds(self, usual: int) -> range:
        return range(self.num_runs or usual)


def ablate(
    *,
    asked: Asked,
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    placement: opt.Placement,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Throughput, latency, memory, concurrency and accuracy with a component switched."""
    from repro.reports.ablation import system_of

    model, module = opt.given(model=asked.model), import_module(f"repro.cli.{STUDIES[system_of(asked.component)]}")
    study: Study = module.study(asked, model | opt.parse_knobs(knob or (), model))
    run_study(study, stored=stored, placement=placement, plot=plot, json=json)
