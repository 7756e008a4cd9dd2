"""The suite of a plug-in that is named as ``module:NAME``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from engines.dllm.scheduling.scheduler import Scheduler
from engines.errors import UserError, require
from engines.named import load_named
from repro.testing.batchers import BATCHER, BatchingPolicy
from repro.testing.properties import Kind
from repro.testing.routers import ROUTER, Routing
from repro.testing.rules import REFRESH_RULE, Refreshing
from repro.testing.schedulers import SCHEDULER, Scheduling


class Suite(NamedTuple):
    kind: Kind[Any]
    subject: Any


KINDS: dict[str, tuple[Kind[Any], Callable[..., Any]]] = {
    "scheduler": (SCHEDULER, Scheduling),
    "refresh-rule": (REFRESH_RULE, Refreshing),
    "router": (ROUTER, Routing),
    "batcher": (BATCHER, BatchingPolicy),
}


def suite_of(where: str, kind: str | None = None, queue: str | None = None) -> Suite:
    """Raises UserError for what is no plug-in of any kind, or not of this one."""
    require(":" in where, f"name={where!r} names no plug-in: write module:NAME")
    found = load_named("name", where)
    kind = kind or _kind_of(where, found)
    require(queue is None or kind == "batcher", f"queue={queue!r} has no effect with a {kind}: leave it out")
    properties, make = KINDS[kind]
    try:
        subject = make(make=found)
    except UserError as error:
        raise UserError(f"name={where!r}: {error}") from error
    if queue is not None:
        subject = replace(subject, queue=load_named("queue", queue))
    return Suite(properties, subject)


def _kind_of(where: str, found: Any) -> str:
    """By what it is, of a function by what it is said to give."""
    found = getattr(found, "func", found)
    if inspect.isfunction(found):
        found = inspect.get_annotations(found, eval_str=True).get("return")
    if isinstance(found, type) and issubclass(found, Scheduler):
        return "scheduler"
    by_method = {"next_step": "batcher", "phase": "refresh-rule", "route": "router", "pick": "router"}
    for method, kind in by_method.items():
        if callable(getattr(found, method, None)):
            return kind
    raise UserError(f"name={where!r} says by no method which kind of plug-in it is: add --kind {', '.join(KINDS)}")
