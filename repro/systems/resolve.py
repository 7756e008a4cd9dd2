"""The one resolver: what a platform says, what a system implies and what a cell asks become the settings of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from engines.knobs import Knob, check_given, given_to, made
from repro.workloads.own import workload_knobs

Settings = TypeVar("Settings")
Others = type | Mapping[str, Knob]


def resolve(
    kind: type[Settings],
    given: Mapping[str, Any],
    *others: Others,
    who: str,
    usual: Mapping[str, Any] | None = None,
    beside: Mapping[str, object] | None = None,
    **fixed: object,
) -> Settings:
    """Settings of a ``kind``: their defaults, over them the ``usual`` values of platform and system, and over these what is ``given``.

    Values go by the names of fields, wherever inside of the settings a field stands. ``fixed`` are fields of the outermost settings that
    no name reaches, ``beside`` what else decides whether a field has an effect. Raises UserError for a name that neither the settings
    nor ``others`` (the system's own knobs, those of a user's policies) have, and for a value that a field may not have or that has no
    effect; ``who`` is blamed for it.
    """
    check_given(given, kind, *others, workload_knobs(given), who=f"system={who!r}")
    return given_to(made(kind, usual or {}, **fixed), given, **(beside or {}))
