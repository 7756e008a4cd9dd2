"""Intervals and numbers as words, and tests whether an interval excludes a value."""

import math

from repro.runs.statistics import Interval, decimals


def said(interval: Interval, unit: str = "", digits: int = 1) -> str:
    """Format ``12.3 ± 4.5 %``, or ``1.35 [1.29, 1.42]`` if it is not symmetric, with no more decimals than the interval warrants. Without
    an interval, format the number alone."""
    if interval.mean is None:
        return "-"
    shown_digits = decimals(interval, digits)
    text, suffix = f"{interval.mean:.{shown_digits}f}", f" {unit}" if unit else ""
    if unit == "x":
        text, suffix = f"{text}x", ""
    if interval.bounds is not None:
        text += f" [{', '.join(f'{end:.{shown_digits}f}' for end in interval.bounds)}]"
    elif interval.half_width is not None:
        text += f" ± {interval.half_width:.{shown_digits}f}"
    return text + suffix


def ends(interval: Interval) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high for a CSV."""
    return interval.mean, interval.low, interval.high


def times(interval: Interval) -> str:
    """Format a ratio with two decimals at most."""
    return said(interval, "x", 2)


def number(interval: Interval) -> float:
    return math.nan if interval.mean is None else interval.mean


def is_above(interval: Interval, least: float = 0.0) -> bool:
    """Whether the whole interval lies above ``least``."""
    return interval.mean is not None and interval.mean - interval.arms[0] > least


def is_below(interval: Interval, most: float = 0.0) -> bool:
    return interval.mean is not None and interval.mean + interval.arms[1] < most


def shown(value: float | None, form: str = ".4g", unit: str = "") -> str:
    """Format a value; a dash if there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def brief(value: float) -> str:
    """Format four digits, or all before the point if there are more."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def exactly(value: float | None) -> Interval:
    """Return an interval for a number that no repeat can change."""
    return Interval(mean=value, half_width=None, n=1, confidence=0.95)
