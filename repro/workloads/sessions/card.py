"""Cards of session traces, read from ``datasets/sessions/<name>.yaml``: facts, the generator, and the role of each number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from engines.errors import UserError, require
from repro.paths import DATASETS
from repro.workloads.sourced_card import SourcedCard, known_cards, load_card, parse_card

CARDS_DIR = DATASETS / "sessions"

Lengths = Literal["per_session", "per_round"]
"""What the table's prefill and decode length are the mean of: all tokens of a session, or those of one round."""
RoundsKind = Literal["fixed", "poisson", "negative_binomial"]
SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
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
class SessionCard(SourcedCard):
    rounds: RoundCounts
    lengths: LengthTotals
    environment: Environment
    local: tuple[SessionFile, ...]
    num_gpus: int
    """Of the paper's run."""
    paper_sessions: int


_SECTIONS = {"rounds": RoundCounts, "lengths": LengthTotals, "environment": Environment}


def known_session_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_session_card(name: str, cards_dir: Path = CARDS_DIR) -> SessionCard:
    return load_card(name, cards_dir, parse_session_card, unknown=f"trace={name!r} is unknown")


def parse_session_card(raw: object, *, where: str) -> SessionCard:
    return parse_card(raw, SessionCard, _SECTIONS, SessionFile, where=where)
