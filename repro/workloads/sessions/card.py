"""Cards of session traces, read from ``datasets/sessions/<name>.yaml``: facts, the generator, and the role of each number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from engines.errors import UserError, require
from repro.paths import DATASETS

CARDS_DIR = DATASETS / "sessions"

Lengths = Literal["per_session", "per_round"]
"""What the table's prefill and decode length are the mean of: all tokens of a session, or those of one round."""
RoundsKind = Literal["fixed", "poisson", "negative_binomial"]
SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
Role = Literal["stated", "inferred", "assumed", "by construction"]
_SECTIONS = ("rounds", "lengths", "environment")
MOST_DELAY_S = 10**6
"""Between two rounds; twelve days."""


def check_delay(name: str, delay_s: float) -> None:
    require(0 <= delay_s <= MOST_DELAY_S, f"{name}={delay_s} must be between 0 and {MOST_DELAY_S:,} s")


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Rounds of a session: 1 + a count with the mean that is left, or always the same number."""

    kind: RoundsKind
    mean: float
    shape: float | None = None
    """Of a negative binomial; smaller is more spread."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RoundsKind):
            raise UserError(f"rounds kind={self.kind!r} is unknown: use one of {', '.join(get_args(RoundsKind))}")
        require(self.mean >= 1, f"rounds mean={self.mean} must be at least 1")
        if self.kind == "fixed":
            require(self.mean == int(self.mean), f"rounds mean={self.mean} must be whole where kind is fixed")
        if (self.kind == "negative_binomial") != (self.shape is not None):
            raise UserError(f"rounds shape={self.shape}: it goes with kind negative_binomial, and with it only")


@dataclass(frozen=True, kw_only=True)
class LengthTotals:
    """Means of Table 1 and how sessions and rounds scatter around them (log-normal, sigma of the logarithm)."""

    counted: Lengths
    prefill_tokens: float
    decode_tokens: float
    session_sigma: float
    round_sigma: float
    first_round_weight: float = 1.0
    """Expected share of the first prompt in a session's prefill tokens, relative to a later round's."""
    grows_with_rounds: bool
    """Whether a session of more rounds has more tokens (agents), or as many (a fixed number of retrievals)."""

    def __post_init__(self) -> None:
        if self.counted not in get_args(Lengths):
            raise UserError(f"counted={self.counted!r} is unknown: use one of {', '.join(get_args(Lengths))}")
        for name in ("prefill_tokens", "decode_tokens", "first_round_weight"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"{name}={value} must be a positive number")
        for name in ("session_sigma", "round_sigma"):
            value = getattr(self, name)
            require(value >= 0 and math.isfinite(value), f"{name}={value} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Time between the rounds of a session, exponential."""

    delay_mean_s: float

    def __post_init__(self) -> None:
        check_delay("delay_mean_s", self.delay_mean_s)


@dataclass(frozen=True, kw_only=True)
class SessionFile:
    path: str
    format: SessionFormat
    note: str = ""

    def __post_init__(self) -> None:
        if self.format not in get_args(SessionFormat):
            raise UserError(f"format={self.format!r} is unknown: use one of {', '.join(get_args(SessionFormat))}")


@dataclass(frozen=True, kw_only=True)
class SessionCard:
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    rounds: RoundCounts
    lengths: LengthTotals
    environment: Environment
    roles: Mapping[str, Role]
    """Of every number above, by its field."""
    sources: tuple[str, ...]
    local: tuple[SessionFile, ...]
    num_gpus: int
    """Of the paper's run."""
    paper_sessions: int
    defects: tuple[str, ...]


def known_session_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in cards_dir.glob("*.yaml")))


@cache
def load_session_card(name: str, cards_dir: Path = CARDS_DIR) -> SessionCard:
    """The card of a trace; case does not matter."""
    import yaml

    names = known_session_cards(cards_dir)
    if name.lower() not in names:
        raise UserError(f"trace={name!r} is unknown: use one of {', '.join(names) or 'none: there are no cards'}")
    path = cards_dir / f"{name.lower()}.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path.name} is not YAML: {error}") from error
    card = parse_session_card(raw, where=path.name)
    require(card.name == path.stem, f"{path.name}: name={card.name!r} must be the file's own name, {path.stem!r}")
    return card


def parse_session_card(raw: object, *, where: str) -> SessionCard:
    top = _section(raw, SessionCard, where)
    card = SessionCard(
        **{
            **top,
            "rounds": _build(RoundCounts, top["rounds"], f"{where}: rounds"),
            "lengths": _build(LengthTotals, top["lengths"], f"{where}: lengths"),
            "environment": _build(Environment, top["environment"], f"{where}: environment"),
            "local": tuple(
                _build(SessionFile, entry, f"{where}: local[{index}]") for index, entry in enumerate(top["local"])
            ),
            "sources": tuple(top["sources"]),
            "defects": tuple(top["defects"]),
        }
    )
    numbers = {
        f"{section}.{field.name}"
        for section in _SECTIONS
        for field in fields(getattr(card, section))
        if getattr(getattr(card, section), field.name) is not None
    }
    if card.roles.keys() != numbers:
        odd = sorted(card.roles.keys() ^ numbers)
        raise UserError(f"{where}: roles must name every number once; wrong or missing: {', '.join(odd)}")
    for key, role in card.roles.items():
        require(role in get_args(Role), f"{where}: roles {key}={role!r}: use one of {', '.join(get_args(Role))}")
    return card


def _build(cls: type, raw: object, where: str) -> Any:
    try:
        return cls(**_section(raw, cls, where))
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _section(raw: object, cls: type, where: str) -> dict[str, Any]:
    """A mapping with the fields of ``cls``: none unknown, none missing that has no default."""
    if not isinstance(raw, dict):
        raise UserError(f"{where} holds {type(raw).__name__}: it must be a mapping")
    names = [field.name for field in fields(cls)]
    needed = [field.name for field in fields(cls) if field.default is MISSING]
    unknown, missing = sorted(set(raw) - set(names)), [name for name in needed if name not in raw]
    if unknown or missing:
        raise UserError(f"{where} has unknown keys {unknown} and lacks {missing}: give {', '.join(names)}")
    return raw
