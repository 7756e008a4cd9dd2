"""Cards of conversations, read from ``datasets/conversations/<name>.yaml``: the generator, and the role of each number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engines.errors import UserError, require
from repro.paths import DATASETS
from repro.workloads.lengths import LogNormalParameters, fit_quantiles
from repro.workloads.sourced_card import SourcedCard, known_cards, load_card, parse_card

CARDS_DIR = DATASETS / "conversations"
SHORT, LONG = 256, 1000
"""A prompt below ``SHORT`` tokens is short (LAPS Figure 2), one above ``LONG`` is long (LAPS Figures 1 and 3)."""


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
class ConversationCard(SourcedCard):
    turns: Turns
    first: PromptShares
    later: PromptShares
    answers: Answers
    bounds: Bounds
    local: tuple[ChatFile, ...]


_SECTIONS = {"turns": Turns, "first": PromptShares, "later": PromptShares, "answers": Answers, "bounds": Bounds}


def known_conversation_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_conversation_card(name: str, cards_dir: Path = CARDS_DIR) -> ConversationCard:
    return load_card(name, cards_dir, parse_conversation_card, unknown=f"dataset={name!r} is no set of conversations")


def parse_conversation_card(raw: object, *, where: str) -> ConversationCard:
    return parse_card(raw, ConversationCard, _SECTIONS, ChatFile, where=where)
