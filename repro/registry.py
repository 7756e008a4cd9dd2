"""Things by name: those that come with the package, those of installed packages, and any other as ``module:NAME``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from engines.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """``entries`` maps a name to where it is, ``module:NAME``, which is imported when it is asked for. Packages add
    to it through the entry-point group ``repro.<kind>``."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> T:
        """Raises UserError for a name that is not known, or a module that has no such thing."""
        if name in self._entries:
            return cast(T, load(self.kind, self._entries[name]))
        if ":" in name:
            return cast(T, load(self.kind, name))
        for point in entry_points(group=f"repro.{self.kind}"):
            if point.name == name:
                return cast(T, load(self.kind, point.value))
        raise UserError(f"{self.kind}={name!r} is unknown: use one of {', '.join(self._entries)}, or module:NAME")


def load(kind: str, where: str) -> Any:
    """What ``module:NAME`` names."""
    module, _, name = where.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{kind}={where!r}: there is no module {error.name}: correct it or install it") from None
    except (ValueError, AttributeError):
        raise UserError(f"{kind}={where!r}: module {module!r} has no {name!r}: write module:NAME") from None
