"""What a server says of itself in Prometheus' form, before a run and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from baselines.servers.asking import ask

_INCREASING = ("_total", "_sum", "_count")
"""Ends of the names of what only grows; buckets of histograms are left out."""
TOKEN_COUNTERS = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "dynamo_frontend_output_sequence_tokens_sum",
    'repro_tokens_total{kind="completion"}',
)
"""Tokens of answers, as servers call them."""


@dataclass(frozen=True, kw_only=True)
class ServerMetrics:
    """``values`` by name and labels, as they are written: ``name{label="value"}``."""

    values: Mapping[str, float]

    def since(self, before: ServerMetrics) -> dict[str, float]:
        """What grew, by how much, and what else there is, as it is at the end. What stayed 0 is left out."""
        found = {}
        for name, value in self.values.items():
            if name.partition("{")[0].endswith(_INCREASING):
                value -= before.values.get(name, 0.0)
            if value:
                found[name] = value
        return found


def parse(text: str) -> ServerMetrics:
    """Raises ValueError for what is no page of metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # A time of creation, and values that JSON has no number for.
            if sample.name.endswith(("_bucket", "_created")) or not -1e300 < sample.value < 1e300:
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return ServerMetrics(values=values)


def fetch(base: str, headers: Mapping[str, str]) -> str | None:
    """The page, unread; None where there is none."""
    try:
        return ask(f"{base}/metrics", headers).decode(errors="replace")
    except (OSError, HTTPException):
        return None


def change(before: str | None, after: str | None) -> dict[str, Any] | None:
    """None where the server tells nothing that can be read, or the reader is not installed (extra http)."""
    if before is None or after is None:
        return None
    try:
        return parse(after).since(parse(before))
    except (ImportError, ValueError):
        return None


def tokens_generated(told: Mapping[str, float] | None) -> float | None:
    """By the server's own count, whoever asked for them; None where it does not say."""
    counts = [value for name, value in (told or {}).items() if name.startswith(TOKEN_COUNTERS)]
    return sum(counts) if counts else None
