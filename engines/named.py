"""Things that a user names as ``module:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from engines.errors import RunError, UserError

T = TypeVar("T")


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
    """What ``module:NAME`` names; refused where it lacks one of ``having``."""
    module, _, name = where.partition(":")
    loaded = load_module(kind, where, module)
    if not hasattr(loaded, name):
        raise UserError(f"{kind}={where!r}: module {module!r} has no {name!r}: write module:NAME")
    found = getattr(loaded, name)
    for wanted in having:
        if not hasattr(found, wanted):
            raise UserError(f"{kind}={where!r} is no {kind}, it has no {wanted!r}: name one")
    return found


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
