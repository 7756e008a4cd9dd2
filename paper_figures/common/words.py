"""Intervals and numbers in words, and whether an interval excludes a value."""

from __future__ import annotations

import math

from repro.runs.statistics import Interval


def said(interval: Interval, unit: str = "", digits: int = 1) -> str:
    """``12.3 ± 4.5 %``; without an interval the number alone."""
    if interval.mean is None:
        return "-"
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.{digits}f}"
    return f"{interval.mean:.{digits}f}{spread}{f' {unit}' if unit else ''}"


def number(interval: Interval) -> float:
    return math.nan if interval.mean is None else interval.mean


def is_above(interval: Interval, least: float = 0.0) -> bool:
    """Outside noise."""
    return interval.mean is not None and interval.mean - (interval.half_width or 0.0) > least


def is_below(interval: Interval, most: float = 0.0) -> bool:
    return interval.mean is not None and interval.mean + (interval.half_width or 0.0) < most


def shown(value: float | None, form: str = ".4g", unit: str = "") -> str:
    """A dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def exactly(value: float | None) -> Interval:
    """A number that no repeat can change."""
    return Interval(mean=value, half_width=None, n=1, confidence=0.95)
