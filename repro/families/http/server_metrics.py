"""What a server says of itself in Prometheus' form, before a run and after it. What cannot be true is not used, and told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baselines.servers.asking import NoPage, ask

_INCREASING = ("_total", "_sum", "_count")
"""Ends of the names of what only grows, unless it is a gauge; buckets of histograms are left out."""
TOKEN_COUNTERS = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "dynamo_frontend_output_sequence_tokens_sum",
    'repro_tokens_total{kind="completion"}',
)
"""Tokens of answers, as servers call them."""
LONGEST_PAGE, LONGEST_LINE = 1 << 22, 1 << 14
"""Characters; the reader takes seconds for such a page, and its time grows with the square of a line."""
_MOST = 1e300
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Page:
    """As it was fetched. Neither where there is none."""

    text: str | None = None
    fault: str | None = None
    """Why one that is there cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ServerMetrics:
    """``values`` by name and labels, as they are written: ``name{label="value"}``; ``faults`` are those left out, and why."""

    values: Mapping[str, float]
    growing: frozenset[str]
    faults: Mapping[str, str]

    def since(self, before: ServerMetrics) -> ServerMetrics:
        """What grew, by how much, and what else there is, as it is at the end. What stayed 0 is left out."""
        found, faults = {}, {**before.faults, **self.faults}
        for name, value in self.values.items():
            if name in before.faults:
                continue
            if name in self.growing:
                first = before.values.get(name, 0.0)
                if value < first:
                    faults[name] = f"fell from {first:g} to {value:g}"
                    continue
                value -= first
            if value:
                found[name] = value
        return ServerMetrics(values=found, growing=self.growing, faults=faults)


def parse(text: str) -> ServerMetrics:
    """Raises ValueError for what is no whole page of metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    if len(text) > LONGEST_PAGE:
        raise ValueError(f"it has more than {LONGEST_PAGE} characters")
    if text and not text.endswith("\n"):
        raise ValueError("its last line has no end")
    if any(len(line) > LONGEST_LINE for line in text.splitlines()):
        raise ValueError(f"it has a line of more than {LONGEST_LINE} characters")
    values: dict[str, float] = {}
    growing, faults = set(), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # A time of creation, and quantiles of nothing, which are NaN by rights.
            if sample.name.endswith(("_bucket", "_created")) or (
                "quantile" in sample.labels and math.isnan(sample.value)
            ):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            if sample.name.endswith(_INCREASING) and family.type != "gauge":
                growing.add(name)
            if name in values or name in faults:
                values.pop(name, None)
                faults[name] = "is given twice"
            elif not -_MOST < sample.value < _MOST:
                faults[name] = "is no finite number"
            elif name in growing and sample.value < 0:
                faults[name] = f"is {sample.value:g}, though it only grows"
            else:
                values[name] = sample.value
    return ServerMetrics(values=values, growing=frozenset(growing), faults=faults)


def fetch(base: str, headers: Mapping[str, str]) -> Page:
    try:
        return Page(text=ask(f"{base}/metrics", headers).decode())
    except NoPage as error:
        is_none = error.status is not None and 400 <= error.status < 500
        return Page() if is_none else Page(fault=str(error))
    except UnicodeDecodeError:
        return Page(fault="it is no UTF-8 text")


def change(before: Page, after: Page) -> tuple[dict[str, Any] | None, list[str]]:
    """What the server counted, None where it tells nothing that can be used or the reader is not installed (extra http), and a
    sentence on what is not used."""
    fault = before.fault or after.fault
    if fault is None:
        if before.text is None or after.text is None:
            return None, []
        try:
            found = parse(after.text).since(parse(before.text))
        except ImportError:
            return None, []
        except Exception as error:  # the reader's own are of many kinds
            fault = str(error) if type(error) is ValueError and str(error) else "it is none of Prometheus' form"
        else:
            return dict(found.values), _told(found.faults)
    return None, [f"the server's /metrics is not used: {' '.join(fault.split())[:200]}"]


def _told(faults: Mapping[str, str]) -> list[str]:
    if not faults:
        return []
    named = "; ".join(f"{name[:80]} {why}" for name, why in list(faults.items())[:_NUM_NAMED])
    more = f"; and {len(faults) - _NUM_NAMED} more" if len(faults) > _NUM_NAMED else ""
    return [f"values of the server's /metrics are not used: {named}{more}"]


def tokens_generated(told: Mapping[str, float] | None) -> float | None:
    """By the server's own count, whoever asked for them; None where it does not say."""
    counts = [value for name, value in (told or {}).items() if name.startswith(TOKEN_COUNTERS)]
    return sum(counts) if counts else None
