"""What the cells of a sweep share of files that were read once: the next call from Python reads them anew, as they may be others."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT: list[Any] = []


def kept(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As ``lru_cache``, until ``forget``."""

    def keep(read: Callable[..., T]) -> Callable[..., T]:
        cached = lru_cache(maxsize=maxsize)(read)
        _KEPT.append(cached)
        return cached

    return keep


def forget() -> None:
    for each in _KEPT:
        each.cache_clear()
