"""Findings about AMPD's claims."""

from __future__ import annotations

from repro.reports.claims import Finding

DEFAULT = "reading round/every/p95, 99 sessions a run"


def finding(
    claim: str, value: float | tuple[float, ...], how: str, *, of: tuple[str, ...] = (), holds: bool | None = None
) -> Finding:
    """Of simulated runs."""
    return Finding(claim=claim, value=value, obtained="simulated", how=how, of=of, holds=holds)
