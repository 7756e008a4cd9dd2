"""LAPS's components, switched one at a time on one prefill instance (LAPS §3, Figure 6), and ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from repro.reports.paired_ablation import PairedVariant

_laps = partial(PairedVariant, system="laps")

PREFILL_COMPONENTS: Mapping[str, tuple[PairedVariant, ...]] = MappingProxyType(
    {
        "graphs": (
            _laps(label="no graphs", knobs=(("graphs", "none"),)),
            _laps(label="the nearest captured one (§3.1)", knobs=(("graphs", "nearest"),)),
            _laps(label="where predicted faster", is_ours=True),
            _laps(label="packed sizes, where predicted faster", knobs=(("graphs", "ladder"),), is_ours=True),
        ),
        "disaggregation": (
            _laps(label="one queue, first come, first served", system="laps-graphs-only"),
            _laps(label="classes apart, one long prompt a step (§3.2)", knobs=(("long_dispatch", "single"),)),
            _laps(label="classes apart, long prompts packed", is_ours=True),
            _laps(label="the more urgent class first", knobs=(("class_rule", "urgency"),), is_ours=True),
        ),
        "awd": (
            _laps(label="no waiting", knobs=(("wait", "off"),)),
            _laps(label="Algorithm 1 to the letter", knobs=(("wait", "printed"),)),
            _laps(label="Algorithm 1 with D >= 1", knobs=(("wait", "guarded"),)),
            _laps(label="repaired, 5 ms at most", is_ours=True),
            _laps(label="repaired, 20 ms at most", knobs=(("max_window_s", 0.02),), is_ours=True),
        ),
        "reserve": (
            _laps(label="SGLang PD", system="sglang-pd"),
            _laps(label="LAPS"),
            _laps(label="Reserve, share by its bound", system="reserve", is_ours=True),
            _laps(label="Reserve, share 0.25", system="reserve", knobs=(("share", 0.25),), is_ours=True),
            _laps(label="Reserve, share 0.5", system="reserve", knobs=(("share", 0.5),), is_ours=True),
            _laps(label="Reserve without aging", system="reserve", knobs=(("aging", 0.0),), is_ours=True),
        ),
    }
)
"""The first of each is the component switched off."""
