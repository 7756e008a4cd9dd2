"""How AMPD's figures look, and what their captions say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from repro.reports.figures import View
from repro.runs.store import StoredRun
from repro.systems.ar.part import ArPart

_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000"
LINES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ampd": {"color": _BLUE, "marker": "o", "linestyle": "-"},
        "ampd-tuned": {"color": _BLUE, "marker": "o", "linestyle": "--"},
        "ours": {"color": _BLACK, "marker": "P", "linestyle": "-"},
        "ours-tuned": {"color": _BLACK, "marker": "P", "linestyle": "--"},
        "load": {"color": _SKY, "marker": "v", "linestyle": "-"},
        "backlog": {"color": _SKY, "marker": "<", "linestyle": "--"},
        "dynamo": {"color": _ORANGE, "marker": "s", "linestyle": "-"},
        "dynamo-tuned": {"color": _ORANGE, "marker": "s", "linestyle": "--"},
        "vllm": {"color": _GREEN, "marker": "^", "linestyle": "-"},
        "vllm-tuned": {"color": _GREEN, "marker": "^", "linestyle": "--"},
        "continuum": {"color": _PINK, "marker": "D", "linestyle": "-"},
        "continuum-tuned": {"color": _PINK, "marker": "D", "linestyle": "--"},
    }
)


def rates_of(view: View) -> tuple[float, ...]:
    return view.rates or tuple(view.platform.part(ArPart).rates)


def seeds_text(view: View) -> str:
    return f"{len(view.seeds)} paired seeds"


def obtained_sentence(runs: Sequence[StoredRun]) -> str:
    """How the numbers came about."""
    found = sorted({str(run.record.manifest["calibration"]) for run in runs[:1]})
    return f"All runs simulated on a discrete-event cluster; {' and '.join(found)}".rstrip(".") + "."


def transient_sentence(runs: Sequence[StoredRun]) -> str:
    over = sum(run.facts["overload_reason"] is not None for run in runs)
    return (
        f"In {over} of {len(runs)} runs prefills ask for more than the workers have time for while sessions arrive: their "
        "attainment is of this number of sessions and falls with more."
    )
