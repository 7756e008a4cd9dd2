"""Things by name: those that come with the package, those of installed packages, and any other as ``module:NAME``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from engines.errors import UserError
from engines.named import load_named, where_of

T = TypeVar("T")


class Registry(Generic[T]):
    """``entries`` maps a name to where it is, ``module:NAME``, which is imported when it is asked for. Packages add
    to it through the entry-point group ``repro.<kind>``. What lacks one of ``having`` is refused."""

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str],
        *,
        having: tuple[str, ...] = (),
        moved: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``moved`` says where things are now that stored cells name by an older ``module:NAME``."""
        self.kind, self._moved = kind, moved
        self._having = having
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> T:
        """Raises UserError for a name that is not known or is none, or a module that has no such thing."""
        if not isinstance(name, str):
            raise UserError(f"{self.kind}={name!r} must be a name: use one of {', '.join(self)}, or module:NAME")
        where = self._entries.get(name) or self._moved.get(name) or where_of(self.kind, name, self)
        return cast(T, load_named(self.kind, where, having=self._having))
