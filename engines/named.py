"""Things that a user names as ``module:NAME``, or as an installed package names them."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from engines.errors import RunError, UserError

T = TypeVar("T")

_GROUPS = "repro."
"""Entry-point groups are named after a kind: one of these, ``repro.system``, ``repro.platform``, ``repro.gpu``."""
POLICIES = ("scheduler", "refresh_rule", "router", "batcher", "queue", "binder")
"""Kinds of policies, each the knob that names one."""
KINDS = (*POLICIES, "workload")
"""Kinds that a knob names."""
PLACE = re.compile(r"[A-Za-z_][\w.]*:([A-Za-z_]\w*)")
"""``module:NAME``."""


def installed(kind: str) -> Mapping[str, str]:
    """Names that installed packages declare of a kind, and where each is, ``module:NAME``."""
    return _installed(tuple(sys.path)).get(_field(kind), {})


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    """By kind. ``path`` is where packages are looked for."""
    from importlib.metadata import distributions

    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for each in (each for package in distributions() for each in package.entry_points):
        if each.group.startswith(_GROUPS):
            found[each.group.removeprefix(_GROUPS)].setdefault(each.name, each.value)
    return found


def _field(kind: str) -> str:
    return kind.replace(" ", "_")


def where_of(kind: str, name: str, known: Iterable[str] = ()) -> str:
    """``module:NAME`` of what is named so, or as an installed package has it. ``known`` names are those that come with this
    one, which a refusal tells."""
    if ":" in name:
        return name
    theirs = installed(kind)
    if name in theirs:
        return theirs[name]
    others = ", ".join((*known, *theirs))
    fix = f"use one of {others}, or module:NAME" if others else "name a class as module:NAME"
    raise UserError(f"{_field(kind)}={name!r} is unknown: {fix}")


def load_module(kind: str, where: str, module: str) -> Any:
    """``where``, the ``kind``'s name, is what a refusal says; a package that the module lacks in turn is an ImportError."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{kind}={where!r}: there is no module {error.name}: correct it or install it") from None
    except (ImportError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UserError(f"{kind}={where!r}: {module!r} is no module: write module:NAME") from None
        raise UserError(
            f"{kind}={where!r}: module {module!r} fails on import ({type(error).__name__}: {error}): correct it"
        ) from error


def load_named(kind: str, where: str, *, having: tuple[str, ...] = ()) -> Any:
    """What ``where`` names; refused where it lacks one of ``having``."""
    module, _, name = where_of(kind, where).partition(":")
    loaded = load_module(kind, where, module)
    if not hasattr(loaded, name):
        raise UserError(f"{kind}={where!r}: module {module!r} has no {name!r}: write module:NAME")
    found = getattr(loaded, name)
    for wanted in having:
        if not hasattr(found, wanted):
            raise UserError(f"{kind}={where!r} is no {kind}, it has no {wanted!r}: name one")
    return found


def name_of(policy: Any) -> str:
    """``module:NAME`` of a class or a function, by which it is found again in this process."""
    module, name = policy.__module__, policy.__qualname__
    if getattr(sys.modules.get(module), name, None) is not policy:
        raise UserError(f"{module}.{name} is not what is called {name!r} in its module: define it at the top, and once")
    return f"{module}:{name}"


def asked(ask: Callable[..., T], *args: Any, **options: Any) -> T:
    """What a policy answers, which may be anyone's: whatever it raises is said of it in one sentence."""
    try:
        return ask(*args, **options)
    except (UserError, RunError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        owner = getattr(ask, "__self__", None)
        where = getattr(ask, "__name__", "a call") if owner is None else f"{type(owner).__name__}.{ask.__name__}"
        said = " ".join(str(error).split())
        raise RunError(f"policy {where} fails ({type(error).__name__}: {said}): correct it") from error
