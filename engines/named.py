"""Things that a user names as ``module:NAME``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engines.errors import UserError


def load_module(kind: str, where: str, module: str) -> Any:
    """``where``, the ``kind``'s name, is what a refusal says; a package that the module lacks in turn is an ImportError."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{kind}={where!r}: there is no module {error.name}: correct it or install it") from None
    except ImportError:
        raise
    except Exception as error:
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
