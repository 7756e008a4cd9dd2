"""Knobs: fields of settings, which declare the values that they may have.

    @dataclass(frozen=True, kw_only=True)
    class RoutingConfig:
        alpha: Annotated[float, Range(0, 10)] = 0.9
        '''Proportion of the TTFT objective that a prefill worker may have used up (§4.1).'''

A field's kind, its choices (a ``Literal``), its ``Range`` and its dependencies are stated there and nowhere else. ``Only`` lists the values
of other fields with which it has an effect: with other values ``with_knobs`` refuses it if a user gives it. ``Needs`` lists the values of
other fields that it requires: with other values ``with_knobs`` and a ``Checked`` dataclass refuse all but its default.

``Checked`` settings refuse values that their fields may not have. ``build`` builds settings from values by name, nested settings
too, and ``with_knobs`` changes some of them. The command line, the reference in the docs and the errors are made from ``knobs_of``. The
text below a field is its help, and is not part of the code identity.
"""

import ast
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from engines.errors import UserError

Settings = TypeVar("Settings")
T = TypeVar("T")

MANY = 40
"""With at most so many names, the error for an unknown name lists all; with more, only those that are spelled alike."""
FEW = 1000
"""Up to this upper bound, errors tell both ends of a range. A larger one only says what a machine holds."""


class Range(NamedTuple):
    """Numbers from ``least`` to ``most``, both included, or numbers greater than ``above``."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def allows(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    @property
    def in_words(self) -> str:
        """The range in words, which follow the kind of number in a sentence."""
        if self.least is not None and self.most is not None:
            return f"from {_short_number(self.least)} to {_short_number(self.most)}"
        low = f"above {_short_number(self.above)}" if self.above is not None else ""
        low = low if self.least is None else f"at least {_short_number(self.least)}"
        return ", ".join(filter(None, (low, "" if self.most is None else f"at most {_short_number(self.most)}")))

    def refusal(self, value: float) -> str:
        """Return a clause that says what is wrong with a number outside the range, to follow that number."""
        if self.most is not None and self.most <= 1:
            low = f"({_short_number(self.above or 0)}" if self.least is None else f"[{_short_number(self.least)}"
            return f"must be in {low}, {_short_number(self.most)}]"
        if self.most is not None and self.most <= FEW and self.least is not None:
            return f"must be between {_short_number(self.least)} and {_short_number(self.most)}"
        if self.most is not None and value > self.most:
            return f"is more than {_short_number(self.most)}, the most that is taken: give a smaller number"
        if self.least is None:
            return f"must be above {_short_number(self.above or 0)}"
        return f"must be at least {_short_number(self.least)}" if self.least != 0 else "must not be negative"


class Except(NamedTuple):
    """Any value but this one."""

    value: object


SOMETHING = Except(None)
"""Stands for any value but None: a field may depend on another one being given."""


class _Beside:
    """Values that other fields must have: one, any of a tuple, a ``Range``, ``SOMETHING``, or all ``Except`` one."""

    def __init__(self, **values: object) -> None:
        is_one = (Range, Except)
        self.values: dict[str, tuple[Any, ...]] = {
            name: value if isinstance(value, tuple) and not isinstance(value, is_one) else (value,)
            for name, value in values.items()
        }

    @property
    def in_words(self) -> str:
        return ", ".join(_condition_text(name, wanted) for name, wanted in self.values.items())

    def unmet(self, values: Mapping[str, object]) -> str | None:
        """Return the first field with an unwanted value. A field missing from ``values`` is checked elsewhere."""
        return next((name for name, wanted in self.values.items() if not _is_met(wanted, values, name)), None)


class Only(_Beside):
    """A field has an effect only if others have these values; otherwise a user cannot give it."""


class Needs(_Beside):
    """A field must have its default unless others have these values."""


def _is_met(allowed_values: tuple[Any, ...], values: Mapping[str, object], name: str) -> bool:
    if name not in values:
        return True
    value: Any = values[name]
    for allowed in allowed_values:
        if isinstance(allowed, Range):
            is_met = value is not None and allowed.allows(value)
        elif isinstance(allowed, Except):
            is_met = value != allowed.value
        else:
            is_met = value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        if is_met:
            return True
    return False


def _condition_text(name: str, allowed_values: tuple[Any, ...]) -> str:
    first = allowed_values[0]
    if isinstance(first, Range):
        return f"{name} {first.in_words}"
    if first == SOMETHING:
        return f"{name} given"
    if isinstance(first, Except):
        return f"{name} other than {_value_text(first.value)}"
    if allowed_values == (None,):
        return f"no {name}"
    return f"{name}={' or '.join(map(_value_text, allowed_values))}"


class Size:
    """Marks a number of bytes, which the command line takes with a unit, such as 24GB."""


class Names:
    """Marks a text that is one of these names, or that names a user's own policy."""

    def __init__(self, *words: str) -> None:
        self.words = words


class Fixed:
    """Marks a field that is no knob: the method, the platform or other settings decide its value."""


Count = Annotated[int, Range(1, 2**20)]
Tokens = Annotated[int, Range(1, 2**20)]
Seconds = Annotated[float, Range(0, 1e6)]
Proportion = Annotated[float, Range(above=0, most=1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Memory = Annotated[int, Range(1, 10**15), Size]
"""Bytes."""


class Knob(NamedTuple):
    name: str
    kind: type
    """int, float, bool or str."""
    may_be_none: bool
    choices: tuple[str, ...]
    """Words to choose from; empty if the field is not limited to some."""
    words: tuple[str, ...]
    """The choices, or the words of ``Names``, to which a user can add."""
    range: Range | None
    only: Only
    needs: Needs
    is_fixed: bool
    is_size: bool
    default: Any
    """MISSING if a user must give a value."""

    @property
    def takes(self) -> str:
        """The values that it may have, in words."""
        if self.choices:
            return ", ".join(self.choices)
        return ", ".join(filter(None, (_KIND_SAID[self.kind], self.range.in_words if self.range else "")))

    def check(self, value: Any, *, prefix: str = "") -> Any:
        """Return the value in the field's kind: 1 given for seconds becomes 1.0. Raises UserError unless it is of that kind, one
        of the choices, finite and in the range."""
        if value is None and self.may_be_none:
            return None
        label = f"{prefix}{self.name}"
        is_of_kind = type(value) is self.kind or (isinstance(value, _KINDS[self.kind]) and not isinstance(value, bool))
        if not is_of_kind:
            raise UserError(f"{label}={value!r} must be {_KIND_SAID[self.kind]}")
        if isinstance(value, str) and not value.strip() and value != self.default:
            raise UserError(f"{label}={value!r} must be a text that is not empty: give one, or leave it out")
        if self.choices and value not in self.choices:
            raise UserError(f"{label}={value!r} is unknown: use one of {', '.join(self.choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{label}={value} must be a finite number")
        if self.range is not None and not self.range.allows(value):
            raise UserError(f"{label}={number_text(value)} {self.range.refusal(value)}")
        return float(value) if self.kind is float else value


_KINDS: Mapping[type, type] = {int: Integral, float: Real, bool: bool, str: str}
_KIND_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class _Schema(NamedTuple):
    """The declarations of a class of settings."""

    own: Mapping[str, Knob]
    """The fields that are a number, a text or a truth value, fixed ones included."""
    inside: Mapping[str, type]
    """The fields that are nested settings, whose fields are knobs too."""
    knobs: Mapping[str, Knob]
    conditions: tuple[tuple[str, Only | Needs], ...]


@cache
def _schema_of(kind: Any) -> _Schema:
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UserError(
            f"settings {kind.__qualname__} declare a field by what is imported for type checkers alone ({error}): import it"
        ) from None
    own: dict[str, Knob] = {}
    inside: dict[str, type] = {}
    knobs: dict[str, Knob] = {}
    conditions: list[tuple[str, Only | Needs]] = []
    for field in fields(kind):
        base, may_be_none, marks = _unwrap_type(hints[field.name])
        default = field.default if field.default_factory is MISSING else field.default_factory()
        only = _merged_mark(Only, marks)
        knob = _knob(field.name, default, base, may_be_none, marks, only)
        if knob is not None:
            own[field.name] = knob
        elif isinstance(base, type) and is_dataclass(base) and not may_be_none and Fixed not in marks:
            inside[field.name], inner = base, _schema_of(base)
            knobs |= inner.knobs
            conditions += [*inner.conditions, *((name, only) for name in inner.knobs)]
    own_conditions = [
        (knob.name, condition) for knob in own.values() if not knob.is_fixed for condition in (knob.only, knob.needs)
    ]
    return _Schema(
        own,
        inside,
        {name: knob for name, knob in own.items() if not knob.is_fixed} | knobs,
        tuple((name, condition) for name, condition in (*own_conditions, *conditions) if condition.values),
    )


def knobs_of(kind: Any) -> Mapping[str, Knob]:
    """Return the knobs of settings by name, those of nested settings included."""
    return _schema_of(kind).knobs


def free_knobs(kind: Any) -> Mapping[str, Knob]:
    """Return the knobs of fields that have a default and can be given; a user cannot set the others."""
    excluded = {
        field.name
        for field in fields(kind)
        if not field.init or (field.default is MISSING and field.default_factory is MISSING)
    }
    schema = _schema_of(kind)
    knobs = {name: knob for name, knob in schema.own.items() if name not in excluded and not knob.is_fixed}
    for name, nested in schema.inside.items():
        knobs |= {} if name in excluded else knobs_of(nested)
    return knobs


def conditions_of(kind: Any) -> tuple[tuple[str, Only | Needs], ...]:
    """Return each field that depends on values of others, with its condition."""
    return _schema_of(kind).conditions


class Checked:
    """A dataclass that refuses values that its fields may not have; nested settings check themselves."""

    def __post_init__(self) -> None:
        kind: Any = self.__class__
        knobs = _schema_of(kind).own
        for name, knob in knobs.items():
            value = knob.check(getattr(self, name))
            if not knob.needs.values or value == knob.default:
                continue
            if (other := knob.needs.unmet(vars(self))) is not None:
                raise no_effect(name, value, other, getattr(self, other), f"or correct {other}")


def check_value(declared: Any, name: str, value: object) -> None:
    """Raise UserError for a number, text or truth value that its declared type forbids. Values of other declared types pass."""
    knob = _knob_of(declared, name)
    if knob is not None:
        knob.check(value)


@lru_cache(maxsize=256)
def _knob_of(declared: Any, name: str) -> "Knob | None":
    return _knob(name, MISSING, *_unwrap_type(declared), Only())


def with_knobs(settings: Settings, requested: Mapping[str, Any], **other_values: object) -> Settings:
    """Return the settings with the ``requested`` fields changed, by name; a field may be one of nested settings.

    Raises UserError for a value that a field may not have. Raises it also for a value without effect, given the other fields
    and ``other_values``, which are no fields.
    """
    requested = {name: value for name, value in requested.items() if value is not None}
    changed = _with_values(settings, requested)
    kind: Any = settings.__class__
    schema = _schema_of(kind)
    conditions = [
        (name, condition)
        for name, condition in schema.conditions
        if name in requested and (isinstance(condition, Only) or requested[name] != schema.knobs[name].default)
    ]
    values = other_values | _values(changed) if conditions else {}
    for name, condition in conditions:
        if (other := condition.unmet(values)) is not None:
            hint = "or use --executor torch" if condition.values[other] == ("torch",) else ""
            raise no_effect(name, requested[name], other, values[other], hint)
    return changed


def no_effect(name: str, value: object, other: str, other_value: object, fix: str = "") -> UserError:
    """Return the error for a field that has no effect because ``other`` is ``other_value``; ``fix`` is another remedy than leaving it out."""
    clause = f"without {other}" if other_value is None else f"with {other}={_value_text(other_value)}"
    return UserError(
        f"{name}={_value_text(value)} has no effect {clause}: {', '.join(filter(None, ('leave it out', fix)))}"
    )


def build(kind: Callable[..., Settings], values: Mapping[str, Any], **fixed: object) -> Settings:
    """Build settings from values by name; a field may be one of nested settings. Fields without a value get their defaults, and
    ``fixed`` are fields of the outermost settings. Raises UserError for a value that a field may not have."""
    declared: Any = kind
    schema = _schema_of(declared)
    args: dict[str, Any] = {name: knob.check(values[name]) for name, knob in schema.own.items() if name in values}
    defaults = {field.name: field.default_factory for field in fields(declared)}
    for name, nested in schema.inside.items():
        if name not in fixed:
            make: Any = defaults[name]
            args[name] = build(nested, values) if make is MISSING else _with_values(make(), values, with_fixed=True)
    return kind(**{**args, **fixed})


def check_requested(requested: Mapping[str, Any], *kinds: type | Mapping[str, Knob], owner: str) -> None:
    """Raise UserError for a name that no settings or knobs of ``kinds`` have, and for a value that the knob may not have."""
    knobs: dict[str, Knob] = {}
    for kind in kinds:
        knobs |= kind if isinstance(kind, Mapping) else knobs_of(kind)
    for name, value in requested.items():
        if name not in knobs:
            listed = knobs if len(knobs) <= MANY else get_close_matches(name, knobs, cutoff=0.8)
            hint = f", or use one of {', '.join(listed)}" if listed else ""
            raise UserError(f"{name}={value!r} has no effect with {owner}: leave it out{hint}")
        knobs[name].check(value)


def resolve(
    kind: type[Settings],
    requested: Mapping[str, Any],
    *other_knobs: type | Mapping[str, Knob],
    system: str,
    defaults: Mapping[str, Any] | None = None,
    other_values: Mapping[str, object] | None = None,
    **fixed: object,
) -> Settings:
    """Build settings of a ``kind`` from a cell's knobs; nothing else does. ``requested`` values win over the ``defaults`` of platform and
    system, and these win over those of the fields.

    Values go by field names, also those of nested settings. ``fixed`` are fields of the outermost settings that no name reaches.
    ``other_values`` also decide whether a field has an effect. Raises UserError for a name that neither the settings nor
    ``other_knobs`` (the system's own knobs, those of a user's policies and workload) have. Raises UserError also for a value that a field
    may not have or that has no effect. The error blames the ``system``, a name.
    """
    check_requested(requested, kind, *other_knobs, owner=f"system={system!r}")
    return with_knobs(build(kind, defaults or {}, **fixed), requested, **(other_values or {}))


def helps_of(kind: type) -> Mapping[str, str]:
    """Return the text below each field on one line, for nested settings too."""
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            helps |= _texts_of(base)
    for nested in _schema_of(kind).inside.values():
        helps |= helps_of(nested)
    return helps


def number_text(number: object) -> str:
    """Return the number as text, also an integer of more than 4,300 digits, which Python does not write."""
    try:
        return f"{number}"
    except ValueError:
        return f"{'-' if number < 0 else ''}9999..."  # type: ignore[operator]


def _with_values(settings: Any, requested: Mapping[str, Any], *, with_fixed: bool = False) -> Any:
    schema = _schema_of(settings.__class__)
    knobs = {name: knob for name, knob in schema.own.items() if with_fixed or not knob.is_fixed}
    changes = {name: knobs[name].check(value) for name, value in requested.items() if name in knobs}
    for name, nested in schema.inside.items():
        if with_fixed or requested.keys() & knobs_of(nested).keys():
            changes[name] = _with_values(getattr(settings, name), requested, with_fixed=with_fixed)
    return replace(settings, **changes) if changes else settings


def _values(settings: Any) -> dict[str, object]:
    """Return all fields that are a number, a text or a truth value, those of nested settings included."""
    schema = _schema_of(settings.__class__)
    values = {name: getattr(settings, name) for name in schema.own}
    for name in schema.inside:
        values |= _values(getattr(settings, name))
    return values


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _merged_mark(kind: Callable[..., T], marks: tuple[Any, ...]) -> T:
    """Return one mark that merges all marks of a kind."""
    return kind(**{name: value for mark in marks if type(mark) is kind for name, value in mark.values.items()})


def _knob(name: str, default: Any, base: Any, may_be_none: bool, marks: tuple[Any, ...], only: Only) -> Knob | None:
    choices: tuple[str, ...] = ()
    if get_origin(base) is Literal:
        choices, base = get_args(base), str
    if base not in _KINDS:
        return None
    return Knob(
        name=name,
        kind=base,
        may_be_none=may_be_none,
        choices=choices,
        words=next((mark.words for mark in marks if isinstance(mark, Names)), choices),
        range=next((mark for mark in marks if isinstance(mark, Range)), None),
        only=only,
        needs=_merged_mark(Needs, marks),
        is_fixed=Fixed in marks,
        is_size=Size in marks,
        default=default,
    )


def _unwrap_type(declared: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Return the declared type without None and marks; whether None is allowed; and the marks."""
    marks: tuple[Any, ...] = ()
    may_be_none = False
    while True:
        origin = get_origin(declared)
        if origin is Annotated:
            marks += declared.__metadata__
            declared = declared.__origin__
        elif origin in (Union, types.UnionType) and type(None) in get_args(declared):
            may_be_none = True
            others = [arg for arg in get_args(declared) if arg is not type(None)]
            if len(others) != 1:
                return None, True, marks
            (declared,) = others
        else:
            return declared, may_be_none, marks


@cache
def _texts_of(kind: type) -> Mapping[str, str]:
    for node in _module_of(kind.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            break
    else:
        return {}
    texts = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            texts[field.target.id] = " ".join(text.value.value.split())  # type: ignore[attr-defined]
    return texts


@cache
def _module_of(name: str) -> ast.Module:
    try:
        return ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):
        return ast.Module(body=[], type_ignores=[])


def _short_number(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"
