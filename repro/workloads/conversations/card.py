"""Cards of conversations, read from ``datasets/conversations/<name>.yaml``: the generator, and the role of each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from engines.errors import UserError, require
from repro.paths import DATASETS
from repro.workloads.lengths import LogNormalParameters, fit_quantiles

CARDS_DIR = DATASETS / "conversations"
SHORT, LONG = 256, 1000
"""A prompt below ``SHORT`` tokens is short (LAPS Figure 2), one above ``LONG`` is long (LAPS Figures 1 and 3)."""

Role = Literal["stated", "inferred", "assumed", "by construction"]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Turns of a conversation, geometric."""

    mean: float

    def __post_init__(self) -> None:
        require(1 <= self.mean <= 1000, f"turns mean={self.mean} must be between 1 and 1000")


@dataclass(frozen=True, kw_only=True)
class PromptShares:
    """Shares of prompts below ``SHORT`` and above ``LONG`` tokens, which fix a log-normal."""

    short_share: float
    long_share: float

    def __post_init__(self) -> None:
        if not 0 < self.short_share < 1 - self.long_share < 1:
            raise UserError(
                f"short_share={self.short_share}, long_share={self.long_share}: both must be above 0, and their sum below 1"
            )

    @property
    def log_normal(self) -> LogNormalParameters:
        return fit_quantiles(self.short_share, SHORT - 0.5, 1 - self.long_share, LONG + 0.5)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Tokens of an answer, log-normal."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        require(self.median >= 1, f"answers median={self.median} must be at least 1")
        require(0 < self.sigma <= 5, f"answers sigma={self.sigma} must be above 0 and at most 5")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least and most tokens of a prompt or an answer; what is drawn beyond is put there."""

    low: int
    high: int

    def __post_init__(self) -> None:
        require(1 <= self.low < SHORT, f"bounds low={self.low} must be between 1 and {SHORT - 1}")
        require(LONG < self.high <= 10**6, f"bounds high={self.high} must be above {LONG} and at most 1,000,000")


@dataclass(frozen=True, kw_only=True)
class ChatFile:
    path: str
    """Below the data directory; may be a pattern."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ConversationCard:
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    turns: Turns
    first: PromptShares
    later: PromptShares
    answers: Answers
    bounds: Bounds
    roles: Mapping[str, Role]
    """Of every number above, by its field."""
    sources: tuple[str, ...]
    local: tuple[ChatFile, ...]
    defects: tuple[str, ...]


_SECTIONS: Mapping[str, type] = {
    "turns": Turns,
    "first": PromptShares,
    "later": PromptShares,
    "answers": Answers,
    "bounds": Bounds,
}


def known_conversation_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in cards_dir.glob("*.yaml")))


@cache
def load_conversation_card(name: str, cards_dir: Path = CARDS_DIR) -> ConversationCard:
    """The card of a data set; case does not matter."""
    import yaml

    names = known_conversation_cards(cards_dir)
    if name.lower() not in names:
        raise UserError(
            f"dataset={name!r} is no set of conversations: use one of {', '.join(names) or 'none: there are no cards'}"
        )
    path = cards_dir / f"{name.lower()}.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path.name} is not YAML: {error}") from error
    card = parse_conversation_card(raw, where=path.name)
    require(card.name == path.stem, f"{path.name}: name={card.name!r} must be the file's own name, {path.stem!r}")
    return card


def parse_conversation_card(raw: object, *, where: str) -> ConversationCard:
    top = _section(raw, ConversationCard, where)
    card = ConversationCard(
        **{
            **top,
            **{name: _build(kind, top[name], f"{where}: {name}") for name, kind in _SECTIONS.items()},
            "local": tuple(_build(ChatFile, entry, f"{where}: local") for entry in top["local"]),
            "sources": tuple(top["sources"]),
            "defects": tuple(top["defects"]),
        }
    )
    numbers = {f"{section}.{field.name}" for section, kind in _SECTIONS.items() for field in fields(kind)}
    if odd := sorted(card.roles.keys() ^ numbers):
        raise UserError(f"{where}: roles must name every number once; wrong or missing: {', '.join(odd)}")
    for key, role in card.roles.items():
        require(role in get_args(Role), f"{where}: roles {key}={role!r}: use one of {', '.join(get_args(Role))}")
    return card


def _build(kind: type, raw: object, where: str) -> Any:
    try:
        return kind(**_section(raw, kind, where))
    except TypeError as error:
        raise UserError(f"{where}: {error}") from error


def _section(raw: object, kind: type, where: str) -> dict[str, Any]:
    """A mapping with the fields of ``kind``: none unknown, none missing that has no default."""
    if not isinstance(raw, dict):
        raise UserError(f"{where} holds {type(raw).__name__}: it must be a mapping")
    names = [field.name for field in fields(kind)]
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    unknown, missing = sorted(set(raw) - set(names)), [name for name in needed if name not in raw]
    if unknown or missing:
        raise UserError(f"{where} has unknown keys {unknown} and lacks {missing}: give {', '.join(names)}")
    return raw
