"""Cards of session traces, read from ``datasets/sessions/<name>.yaml``: facts, the generator, and the role of each
number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from engines.errors import UserError, require
from engines.knobs import Range
from repro.paths import DATASETS
from repro.workloads.schema import LocalFile, Part, SourcedCard, known_cards, load

CARDS_DIR = DATASETS / "sessions"

Lengths = Literal["per_session", "per_round"]
"""What the table's prefill and decode length are the mean of: all tokens of a session, or those of one round."""
SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
MOST_DELAY_S = 10**6
"""Between two rounds; twelve days."""
Delay = Annotated[float, Range(0, MOST_DELAY_S)]
Mean = Annotated[float, Range(above=0, most=1e9)]
Sigma = Annotated[float, Range(0, 100)]


@dataclass(frozen=True, kw_only=True)
class RoundCounts(Part):
    """Rounds of a session: 1 + a count with the mean that is left, or always the same number."""

    kind: Literal["fixed", "poisson", "negative_binomial"]
    mean: Annotated[float, Range(1, 1e6)]
    shape: Mean | None = None
    """A negative binomial has one; smaller is more spread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "fixed":
            require(self.mean == int(self.mean), f"mean={self.mean} must be whole where kind is fixed")
        if (self.kind == "negative_binomial") != (self.shape is not None):
            raise UserError(f"shape={self.shape}: it goes with kind negative_binomial, and with it only")


@dataclass(frozen=True, kw_only=True)
class LengthTotals(Part):
    """Means of Table 1 and how sessions and rounds scatter around them (log-normal, sigma of the logarithm)."""

    counted: Lengths
    prefill_tokens: Mean
    decode_tokens: Mean
    session_sigma: Sigma
    round_sigma: Sigma
    first_round_weight: Mean = 1.0
    """Expected share of the first prompt in a session's prefill tokens, relative to a later round's."""
    grows_with_rounds: bool
    """Whether a session of more rounds has more tokens (agents), or as many (a fixed number of retrievals)."""


@dataclass(frozen=True, kw_only=True)
class Environment(Part):
    """Time between the rounds of a session, exponential."""

    delay_mean_s: Delay


@dataclass(frozen=True, kw_only=True)
class SessionFile(LocalFile):
    format: SessionFormat


@dataclass(frozen=True, kw_only=True)
class SessionCard(SourcedCard):
    rounds: RoundCounts
    lengths: LengthTotals
    environment: Environment
    local: tuple[SessionFile, ...]
    num_gpus: Annotated[int, Range(1, 10**6)]
    """GPUs that the paper's run had."""
    paper_sessions: Annotated[int, Range(1, 10**6)]


def known_session_cards(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_session_card(name: str, cards_dir: Path = CARDS_DIR) -> SessionCard:
    return load(SessionCard, name, cards_dir, unknown=f"trace={name!r} is unknown")
