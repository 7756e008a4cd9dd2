"""Pools by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from engines.errors import UserError, require
from engines.knobs import check_value
from repro.runs.cell import plain
from repro.runs.pool import Jobs, LocalPool, Pool

POOLS = ("local", "ray")


def pool_of(name: str, address: str | None = None, jobs: int | None = None) -> AbstractContextManager[Pool]:
    """Refuses what cannot be, ``jobs`` that the pool is to make at once included; ends with the body whatever was started
    for it."""
    check_value(Jobs, "jobs", jobs)
    name, address = plain(name), plain(address)
    require(address is None or isinstance(address, str), f"address={address!r} must be a text: auto or host:port")
    if not isinstance(name, str) or name not in POOLS:
        raise UserError(f"pool={name!r} is unknown: use {' or '.join(POOLS)}")
    if name == "local":
        require(address is None, f"address={address!r} is of a Ray cluster: add --pool ray, or leave it out")
        return nullcontext(LocalPool())
    from repro.runs.ray_pool import RayPool

    return RayPool(address)
