"""Cards of conversations, read from ``datasets/conversations/<name>.yaml``: the generator, and the role of each number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from engines.errors import UserError
from engines.knobs import Proportion, Range
from repro.paths import DATASETS
from repro.workloads.lengths import LogNormalParameters, fit_quantiles
from repro.workloads.schema import Part, SourcedCard, known_cards, load

CARDS_DIR = DATASETS / "conversations"
SHORT, LONG = 256, 1000
"""A prompt below ``SHORT`` tokens is short (LAPS Figure 2), one above ``LONG`` is long (LAPS Figures 1 and 3)."""


@dataclass(frozen=True, kw_only=True)
class Turns(Part):
    """Turns of a conversation, geometric."""

    mean: Annotated[float, Range(1, 1000)]


@dataclass(frozen=True, kw_only=True)
class PromptShares(Part):
    """Shares of prompts below ``SHORT`` and above ``LONG`` tokens, which fix a log-normal."""

    short_share: Proportion
    long_share: Proportion

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short_share + self.long_share >= 1:
            raise UserError(f"short_share={self.short_share}, long_share={self.long_share}: their sum must be below 1")

    @property
    def log_normal(self) -> LogNormalParameters:
        return fit_quantiles(self.short_share, SHORT - 0.5, 1 - self.long_share, LONG + 0.5)


@dataclass(frozen=True, kw_only=True)
class Answers(Part):
    """Tokens of an answer, log-normal."""

    median: Annotated[float, Range(1, 10**6)]
    sigma: Annotated[float, Range(above=0, most=5)]


@dataclass(frozen=True, kw_only=True)
class Bounds(Part):
    """Least and most tokens of a prompt or an answer; what is drawn beyond is put there."""

    low: Annotated[int, Range(1, SHORT - 1)]
    high: Annotated[int, Range(LONG + 1, 10**6)]


@dataclass(frozen=True, kw_only=True)
class ConversationCard(SourcedCard):
    """The path of a local file may be a pattern."""

    turns: Turns
    first: PromptShares
    later: PromptShares
    answers: Answers
    bounds: Bounds


def known_conversation_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_conversation_card(name: str, cards_dir: Path = CARDS_DIR) -> ConversationCard:
    return load(ConversationCard, name, cards_dir, unknown=f"dataset={name!r} is no set of conversations")
