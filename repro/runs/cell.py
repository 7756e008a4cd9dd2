"""One cell of an experiment grid: everything that is asked of a run. The code that runs it is identified apart (repro.runs.provenance)."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from types import FunctionType
from typing import Annotated, Any

from engines.data import PLACE, name_of
from engines.errors import UserError
from engines.knobs import Range, check_value
from repro.runs.clean import REDACTED, clean_value, is_secret, with_home, without_secrets

Scalar = str | int | float | bool | None

CELL_SCHEMA_VERSION = 1
"""Version of the meaning of a cell's fields. Raising it gives every cell a new key, so old runs are not reused."""

COMPARISON = "comparison"
"""Knob that names the comparison of a measured cell. It is part of the key, so no run is in two comparisons: each comparison makes its own
runs, together. No system sees this knob."""
BASIS = "basis"
"""Knob of a prepared cell: a digest of its requests, and of the checkpoint or calibration behind its numbers."""
WORKLOAD = "workload"
"""Knob that names what is served in place of a data set; the cell's data set is named after it."""
NOTES = (BASIS,)
"""Knobs that describe a cell and ask nothing of its run."""

_UNHASHED = ("reading", "efficient")
"""A knob that does not enter the key: the key stays that of runs made while this value was every cell's default."""

Rate = Annotated[float, Range(above=0, most=1e6)]
KEY_LENGTH = 12
PREFIX_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that is asked of one run. ``figure`` says who asked; it is not part of the key, so figures share runs.

    ``rate`` is the arrival rate in requests per second, or None if the workload brings its own arrivals. ``knobs`` are (name, JSON scalar)
    pairs, sorted by name when the cell is built. A policy given as a class becomes its ``module:NAME``.
    """

    figure: str | None = None
    system: str
    dataset: str
    platform: str
    executor: str
    rate: float | None = None
    seed: int = 0
    knobs: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        for name in ("figure", "system", "dataset", "platform", "executor", "seed", "rate", "knobs"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("system", "dataset", "platform", "executor"):
            _check_text(name, getattr(self, name))
        if self.figure is not None:
            _check_text("figure", self.figure)
        _check_seed(self.seed)
        if self.rate is not None:
            check_value(Rate, "rate", self.rate)
            object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "knobs", _sorted_knobs(self.knobs))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Cell":
        """The inverse of ``to_dict``; ``knobs`` may also be a list of pairs."""
        if not isinstance(values, Mapping):
            raise UserError(f"cell={values!r} must be a mapping of its keys to values")
        allowed = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(allowed)):
            raise UserError(f"cell key {unknown[0]!r} is unknown: use {', '.join(allowed)}")
        if missing := [name for name in allowed if name not in values and name not in ("figure", "knobs")]:
            raise UserError(f"cell key {missing[0]!r} is missing: give it a value")
        knobs = values.get("knobs", ())
        return cls(**{**values, "knobs": tuple(knobs.items()) if isinstance(knobs, Mapping) else knobs})

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"knobs": dict(self.knobs)}

    def written(self) -> dict[str, Any]:
        """Like ``to_dict``, in the form that is stored and shown: without secrets, and with ``~`` for the home folder."""
        plain_values: dict[str, Any] = clean_value(self.to_dict())
        return plain_values

    @classmethod
    def from_written(cls, values: Mapping[str, Any]) -> "Cell":
        """The inverse of ``written``, except for secrets."""

        def expanded(value: Any) -> Any:
            return with_home(value) if isinstance(value, str) else value

        restored = {name: expanded(value) for name, value in values.items()}
        if isinstance(knobs := restored.get("knobs"), Mapping):
            restored["knobs"] = {name: expanded(value) for name, value in knobs.items()}
        return cls.from_dict(restored)

    def without(self, knob: str) -> "Cell":
        knobs = tuple(pair for pair in self.knobs if pair[0] != knob)
        return self if knobs == self.knobs else replace(self, knobs=knobs)

    def with_seed(self, seed: int) -> "Cell":
        """Like ``replace``, but checks only the seed, because figures have thousands of repeats."""
        _check_seed(seed)
        return self._with("seed", seed)

    def with_figure(self, figure: str) -> "Cell":
        """Like ``with_seed``, for the figure; keeps the cached key."""
        _check_text("figure", figure)
        return self._with("figure", figure)

    def with_knobs(self, knobs: Mapping[str, Scalar]) -> "Cell":
        """Adds or replaces knobs; nothing else is checked again."""
        return self._with("knobs", _sorted_knobs(tuple({**self.knob_values, **knobs}.items())))

    def _with(self, name: str, value: object) -> "Cell":
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **{name: value})
        if name != "figure":
            vars(copy).pop("key", None)
        return copy

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that the cell gives as ``module:NAME``. The workload is none of them: it names the data set."""
        knobs = (value for name, value in self.knobs if name != WORKLOAD and isinstance(value, str))
        matches = map(PLACE.fullmatch, knobs)
        return tuple(match[1] for match in matches if match is not None)

    @property
    def knob_values(self) -> dict[str, Scalar]:
        return dict(self.knobs)

    @property
    def requested(self) -> dict[str, Scalar]:
        """The knobs that are not None and ask something of the run."""
        return {name: value for name, value in self.knobs if name not in NOTES and value is not None}

    @property
    def comparison(self) -> str | None:
        name = self.knob_values.get(COMPARISON)
        return None if name is None else str(name)

    @cached_property
    def key(self) -> str:
        # Secrets are left out of the digest, because guesses could be tried against it.
        knobs = {name: _redacted(name, value) for name, value in self.knobs if (name, value) != _UNHASHED}
        hashed = {name: getattr(self, name) for name in _HASHED}
        text = _CANONICAL.encode({"schema": CELL_SCHEMA_VERSION, **_canonical(hashed), "knobs": _canonical(knobs)})
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]

    @property
    def folder_name(self) -> str:
        return f"{self.folder_prefix}_{self.key}"

    @property
    def folder_prefix(self) -> str:
        """The start of the folder name, shared by cells that differ only in their knobs."""
        # For a card from a file, keep the card's name and drop the file's path.
        platform = re.sub(r"^.*\.ya?ml:", "", self.platform)
        parts = [self.system, self.dataset, platform, self.executor]
        if self.rate is not None:
            parts.append(f"r{self.rate:g}")
        return file_name("_".join([*parts, f"s{self.seed}"]))


_HASHED = tuple(field.name for field in fields(Cell) if field.name not in ("figure", "knobs"))
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@lru_cache(maxsize=4096, typed=True)
def _redacted(name: str, value: Scalar) -> Scalar:
    if not isinstance(value, str):
        return value
    return REDACTED if value and is_secret(name) else without_secrets(value)


def file_name(text: str) -> str:
    """A file name made of the text: at most ``PREFIX_LENGTH`` characters, with - for others than letters, digits, dot, _ and -."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:PREFIX_LENGTH]


_PLAIN = frozenset((str, float, bool, tuple, type(None)))


def plain(value: Any) -> Any:
    """Turns a number of numpy or torch, a path, or a subclass of str or int into Python's own type. An integer too large for a float
    becomes infinity, which an error message can show. Returns everything else unchanged."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_scalar = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    result = value.item() if is_scalar else value
    if isinstance(result, str):
        return str.__str__(result)
    if isinstance(result, int) and not isinstance(result, bool):
        result = int.__index__(result)
    if not isinstance(result, int) or result.bit_length() <= 1024:
        return result
    return math.inf if result > 0 else -math.inf


def knob_value(value: Any) -> Any:
    """Like ``plain``, but turns a class or a function into its ``module:NAME``."""
    return name_of(value) if isinstance(value, type | FunctionType) else plain(value)


def _check_seed(seed: object) -> None:
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UserError(f"seed={seed!r} must be an integer of at least 0, and below 2^63")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{name}={value!r} must be a non-empty name")


def _sorted_knobs(knobs: tuple[tuple[str, Scalar], ...]) -> tuple[tuple[str, Scalar], ...]:
    if not isinstance(knobs, tuple | list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in knobs
    ):
        raise UserError(f"knobs={knobs!r} must be pairs of a name and a value: write (('num_prompts', 8),)")
    pairs = tuple((name, knob_value(value)) for name, value in knobs)
    for name, value in pairs:
        _check_text("knob name", name)
        if value is not None and not isinstance(value, str | int | float | bool):
            raise UserError(f"knob {name}={value!r} must be a string, a number, a boolean or null")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"knob {name}={value!r} must be finite")
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"knob {repeated[0]!r} is given more than once: keep one")
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns 1.0 into 1, so that a grid written in YAML equals one written in Python."""
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in values.items()}
