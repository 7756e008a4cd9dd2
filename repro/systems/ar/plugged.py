"""Routers of one's own, named as ``module:NAME``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy

from engines.errors import UserError, require
from engines.named import load_named
from engines.policies.routing import Router
from repro.systems.ar.plans import Ground

_NEEDED = "name a class, or a function, that called with model, slo and seed gives an object with route(task, home, prefills, now)"


def router_maker(ground: Ground, where: str) -> Callable[[int], Router]:
    """What makes a run's router from its seed. One is made here: what is none is refused before any run."""
    make = load_named("router", where)
    require(callable(make), f"router={where!r} cannot be called: {_NEEDED}")

    def made(seed: int) -> Router:
        # Its own copies: what is shared decides other systems' runs, and the verdict on its own.
        router: Router = make(model=deepcopy(ground.performance), slo=deepcopy(ground.slo), seed=seed)
        return router

    try:
        found = made(0)
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        raise UserError(f"router={where!r} fails when called ({type(error).__name__}: {said}): {_NEEDED}") from error
    require(
        _takes(getattr(found, "route", None), 4),
        f"router={where!r} makes {type(found).__name__}, which has no route() of four arguments: {_NEEDED}",
    )
    return made


def _takes(call: object, num: int) -> bool:
    """Whether it can be called with so many arguments; True where Python does not know."""
    if not callable(call):
        return False
    try:
        inspect.signature(call).bind(*range(num))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
