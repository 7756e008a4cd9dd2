"""Commands whose options are made of settings: a parameter that is a group of options becomes one option for each of its
fields. A group is a dataclass, or ``Knobs``: the knobs of settings that are an engine's or a system's own (engines.knobs)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from engines.knobs import Knob, helps_of, knobs_of
from repro.files import size_of

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Given = dict[str, Any]
"""What a user gave of some settings, by name; what is not in it keeps its default further down."""


class Some(NamedTuple):
    """Settings of which only some knobs are meant."""

    kind: type
    names: tuple[str, ...]


class Knobs:
    """Options that are the knobs of settings; a parameter of this kind holds what is ``Given`` of them. ``panels`` are the settings
    by the panel of the help that they are shown in, found when the command is asked for; ``usual`` are defaults other than the
    fields' own, as the help says them; "" says none. Where ``several``, an option may be given several times, but for one that is on
    or off; what is given of it then is a tuple."""

    def __init__(
        self,
        panels: Callable[[], Mapping[str, Sequence[type | Some]]],
        *,
        without: Sequence[str] = (),
        usual: Callable[[], Mapping[str, object]] = dict,
        several: bool = False,
    ) -> None:
        self._panels, self._without, self._usual, self._several = panels, without, usual, several

    @cached_property
    def _found(self) -> Mapping[str, _Placed]:
        found: dict[str, _Placed] = {}
        for panel, settings in self._panels().items():
            for each in settings:
                kind, names = each if isinstance(each, Some) else (each, knobs_of(each))
                for name in names:
                    if name not in self._without:
                        found.setdefault(name, _Placed(knobs_of(kind)[name], kind, panel))
        return found

    def parameters(self) -> Iterator[inspect.Parameter]:
        for knob, _, panel in self._found.values():
            yield _parameter(knob, panel, default=None, several=self._several and knob.kind is not bool)

    def taken(self, given: Given) -> Given:
        """What was given; a size may have a unit."""
        values = {name: given.pop(name) for name in self._found}
        return {name: self._value(name, value) for name, value in values.items() if value not in (None, [])}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            values = tuple(dict.fromkeys(self._value(name, each) for each in value))
            return values if len(values) > 1 else values[0]
        return size_of(name, value) if self._found[name].knob.is_size else value

    def helps(self) -> Iterator[tuple[str, str]]:
        """The text of each option. Reads sources: for a help that is asked for."""
        usual = self._usual()
        for name, (knob, kind, _) in self._found.items():
            text, default = _text(knob, kind), usual.get(name, _written(knob.default))
            yield name, text if default in (None, "") else f"{text.removesuffix('.')} [default: {default}]."


class _Placed(NamedTuple):
    knob: Knob
    kind: type
    panel: str


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each group of options as its options. ``helps`` of it are the texts that are read off settings, ``paths`` the
    names of options that take a path."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        declared = hints[parameter.name]
        group = next((mark for mark in getattr(declared, "__metadata__", ()) if isinstance(mark, Knobs)), None)
        if group is None and is_dataclass(declared):
            groups[parameter.name] = declared
            parameters += _of_dataclass(declared)
        elif group is not None:
            groups[parameter.name] = group
            parameters += group.parameters()
        else:
            parameters.append(parameter.replace(annotation=declared))

    @wraps(command)
    def spread_out(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.taken(given) if isinstance(group, Knobs) else _built(group, given)
        command(**given)

    def helps() -> dict[str, str]:
        found: dict[str, str] = {}
        for group in groups.values():
            found |= group.helps() if isinstance(group, Knobs) else helps_of(group)
        return found

    keyword_only = [parameter.replace(kind=_KEYWORD) for parameter in parameters]
    spread_out.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread_out.helps = helps  # type: ignore[attr-defined]
    spread_out.paths = [each.name for each in parameters if _is_path(each)]  # type: ignore[attr-defined]
    return spread_out


def _text(knob: Knob, kind: type) -> str:
    """What stands below a field, and its choices where that does not name them."""
    text = helps_of(kind).get(knob.name, "")
    return (
        text if all(each in text for each in knob.choices) else f"{text.removesuffix('.')}: {', '.join(knob.choices)}."
    )


def _is_path(parameter: inspect.Parameter) -> bool:
    declared = get_args(parameter.annotation)[0] if get_origin(parameter.annotation) is Annotated else None
    return declared is Path or Path in get_args(declared)


def _built(group: Any, given: Given) -> Any:
    values = {field.name: given.pop(field.name) for field in fields(group)}
    sizes = {name for name, knob in knobs_of(group).items() if knob.is_size and values[name] is not None}
    return group(**values | {name: size_of(name, values[name]) for name in sizes})


def _of_dataclass(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    knobs = knobs_of(group)
    for field in fields(group):
        declared, default, panel = hints[field.name], field.default, getattr(group, "panel", None)
        if field.name in knobs and not _is_option(declared):
            yield _parameter(knobs[field.name], panel, default=default)
        else:
            # A path, or several of something.
            own = declared if _is_option(declared) else Annotated[declared, typer.Option(rich_help_panel=panel)]
            yield inspect.Parameter(field.name, _KEYWORD, default=_or_required(default), annotation=own)


def _is_option(declared: Any) -> bool:
    return any(isinstance(mark, typer.models.ParameterInfo) for mark in getattr(declared, "__metadata__", ()))


def _parameter(knob: Knob, panel: str | None, *, default: object, several: bool = False) -> inspect.Parameter:
    """An option for a knob. What is on by default can be switched off."""
    name = f"--{knob.name.replace('_', '-')}"
    names = f"{name}/--no-{name[2:]}" if knob.default is True else name
    kind: Any = str if knob.is_size else knob.kind
    kind = list[kind] if several else kind
    declared: Any = Annotated[kind | None if default is None else kind, typer.Option(names, rich_help_panel=panel)]
    return inspect.Parameter(knob.name, _KEYWORD, default=_or_required(default), annotation=declared)


def _or_required(default: object) -> object:
    return inspect.Parameter.empty if default is MISSING else default


def _written(default: object) -> object:
    """A default as a help says it; nothing of what is off, or is found out."""
    if default is MISSING or default is None or default is False:
        return ""
    return "yes" if default is True else default
