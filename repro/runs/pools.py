"""Pools by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from engines.errors import UserError, require
from repro.runs.pool import LocalPool, Pool

POOLS = ("local", "ray")


def pool_of(name: str, address: str | None = None) -> AbstractContextManager[Pool]:
    """Refuses what cannot be, at once; ends with the body whatever was started for it."""
    if name not in POOLS:
        raise UserError(f"pool={name!r} is unknown: use {' or '.join(POOLS)}")
    if name == "local":
        require(address is None, f"address={address!r} is of a Ray cluster: add --pool ray, or leave it out")
        return nullcontext(LocalPool())
    from repro.runs.ray_pool import RayPool

    return RayPool(address)
