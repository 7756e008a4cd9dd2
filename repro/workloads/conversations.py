"""Conversations to serve: drawn from the distributions of a card (``datasets/conversations/<name>.yaml``), or from a file.

We draw prompts from equal strata of their distribution, in random order. So every sample has the published shares, to one turn, and
about the same number of tokens, and two seeds differ in the order. Prompts of first turns, prompts of later turns, answers, turns
and order each have a random stream of their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import numpy as np

from engines.cluster.sessions import Round, Session
from engines.errors import require
from engines.knobs import Checked, Proportion, Range, Seconds, Seed
from repro.paths import DATASETS
from repro.workloads.card import (
    Origin,
    Provenance,
    Section,
    SourcedCard,
    checksum,
    chosen_file,
    embedded_origin,
    known_cards,
    load,
)
from repro.workloads.draws import (
    NORMAL,
    SMALLEST_UNIFORM,
    ArrivalConfig,
    Ints,
    LogNormalParameters,
    derive_seed,
    fit_quantiles,
)
from repro.workloads.rounds import RecordedRound, TracedSession
from repro.workloads.served import Traced, local_trace, take, take_from, trace_of
from repro.workloads.sessions import RoundCounts, SessionWorkload, Source, draw_rounds

SHORT, LONG = 256, 1000
"""A prompt below ``SHORT`` tokens is short (LAPS Figure 2), one above ``LONG`` is long (LAPS Figures 1 and 3)."""


@dataclass(frozen=True, kw_only=True)
class Turns(Section):
    """The number of turns of a conversation, geometrically distributed."""

    mean: Annotated[float, Range(1, 1000)]


@dataclass(frozen=True, kw_only=True)
class PromptShares(Section):
    """The shares of prompts below ``SHORT`` and above ``LONG`` tokens, which determine a log-normal."""

    short_share: Proportion
    long_share: Proportion

    @property
    def log_normal(self) -> LogNormalParameters:
        return fit_quantiles(self.short_share, SHORT - 0.5, 1 - self.long_share, LONG + 0.5)


@dataclass(frozen=True, kw_only=True)
class Answers(Section):
    """The tokens of an answer, log-normally distributed."""

    median: Annotated[float, Range(1, 10**6)]
    sigma: Annotated[float, Range(above=0, most=5)]


@dataclass(frozen=True, kw_only=True)
class Bounds(Section):
    """The fewest and the most tokens of a prompt or an answer. We clip drawn lengths to them."""

    low: Annotated[int, Range(1, SHORT - 1)]
    high: Annotated[int, Range(LONG + 1, 10**6)]


@dataclass(frozen=True, kw_only=True)
class ConversationCard(SourcedCard):
    """The card of a set of conversations. The path of its local file may be a pattern."""

    folder = "conversations"
    turns: Turns
    first: PromptShares
    later: PromptShares
    answers: Answers
    bounds: Bounds


def known_conversation_cards() -> tuple[str, ...]:
    return known_cards(DATASETS / ConversationCard.folder)


@cache
def load_conversation_card(name: str) -> ConversationCard:
    return load(ConversationCard, name, unknown=f"dataset={name!r} is no set of conversations")


Tokens = Annotated[int, Range(1, 10**6)]


@dataclass(frozen=True, kw_only=True)
class ConversationConfig(Checked):
    """The conversations to make. ``low`` and ``high`` keep only prompts of that many tokens, each a conversation of one turn without
    history. None keeps conversations whole."""

    dataset: str
    num_turns: Tokens
    """The least number of turns. There may be more, because we do not cut the last conversation."""
    seed: Seed
    think_s: Seconds = 0.0
    """Seconds between the first token of an answer and the user's next turn, always the same."""
    answer_tokens: Tokens | None = None
    """The tokens of every answer, instead of drawn or recorded numbers."""
    low: Tokens | None = None
    high: Tokens | None = None
    source: Source = "embedded"
    path: str | None = None
    file: Traced | None = None
    """A file or workload to serve instead of a data set, without a card. With ``replayed`` it arrives at its own times, from 0 on."""
    replayed: ArrivalConfig | None = None

    @property
    def is_banded(self) -> bool:
        return self.low is not None or self.high is not None

    @property
    def band(self) -> tuple[int, float]:
        return 1 if self.low is None else self.low, math.inf if self.high is None else self.high


@dataclass(frozen=True, kw_only=True)
class ConversationProvenance(Provenance):
    shares: dict[str, float]
    """The shares of prompts below 256 tokens in this sample, for first and for later turns."""


Conversations = SessionWorkload[ConversationProvenance]


def draw_conversations(config: ConversationConfig, *, data_dir: Path | None = None) -> Conversations:
    """Make the conversations of ``config``: those of a file, recorded ones of a data set, or drawn ones."""
    low, high = config.band
    require(low <= high, f"min_tokens={config.low} is more than max_tokens={config.high}: exchange them")
    band = ""
    if config.is_banded:
        band = f", prompts of {low} to {config.high or 'any number of'} tokens alone"
    if config.file is not None:
        keep = _in_band(config, trace_of(config.file, config.seed).sessions, repr(config.file.where))
        chosen = take_from(config.file, config.replayed, config.seed, num=config.num_turns, in_rounds=True, keep=keep)
        description = f"{chosen.description}; {chosen.trace.how} conversations{band}"
        return _workload(chosen.trace.name, config, chosen.sessions, chosen.arrival_s, chosen.trace.origin, description)
    card = load_conversation_card(config.dataset)
    local = chosen_file(card, config.source, config.path, data_dir)
    if local is not None:
        from repro.workloads.recorded import read_chats

        recorded = read_chats(local.paths)
        trace = local_trace(card, local, _in_band(config, recorded, f"the file of {card.name}") or recorded)
        stream = ("conversations", "sample")
        chosen = take(
            trace, None, config.seed, num=config.num_turns, in_rounds=True, stream=stream, step=len(trace.sessions)
        )
        sessions = _with_answers(card, chosen.sessions, config)
        origin = replace(trace.origin, location=", ".join(path.name for path in local.paths))
        description = f"{card.title}: recorded conversations, lengths of the file's texts at 4 characters a token{band}"
        description += chosen.repeated
    else:
        sessions = _draw_sessions(card, config)
        description = f"{card.title}: embedded generator, shares of short and long prompts met by construction{band}"
        origin = embedded_origin(card)
    return _workload(card.name, config, sessions, [0.0] * len(sessions), origin, description)


def _workload(
    name: str,
    config: ConversationConfig,
    recorded: Sequence[TracedSession],
    arrival_s: Sequence[float],
    origin: Origin,
    description: str,
) -> Conversations:
    """The workload of recorded or drawn conversations. A last turn without an answer gets one token, for which nobody waits. If a file is
    replayed, so are its delays."""
    is_replayed = config.file is not None and config.replayed is not None
    rounds = [
        tuple(
            Round(prompt, config.answer_tokens or answer or 1, (delay_s or 0.0) if is_replayed else config.think_s)
            for prompt, answer, delay_s in session.rounds
        )
        for session in recorded
    ]
    sessions = tuple(map(Session, range(len(rounds)), arrival_s, rounds))
    prompts = {
        "first": [session.rounds[0].prefill_tokens for session in sessions],
        "later": [turn.prefill_tokens for session in sessions for turn in session.rounds[1:]],
    }
    return SessionWorkload(
        name=name,
        sessions=sessions,
        provenance=ConversationProvenance(
            **vars(origin),
            description=description,
            # Times are the file's if they are replayed. Otherwise the family that serves the sessions decides them.
            checksum=checksum(
                f"{session.session_id}|{f'{session.arrival_s:.6f}|' if session.arrival_s else ''}{session.rounds}"
                for session in sessions
            ),
            shares={name: sum(tokens < SHORT for tokens in each) / len(each) for name, each in prompts.items() if each},
        ),
    )


# -- generator ----------------------------------------------------------------------------------------------


def _draw_sessions(card: ConversationCard, config: ConversationConfig) -> list[TracedSession]:
    first_spread = card.first.log_normal
    if config.is_banded:
        sizes = _lengths(card, first_spread, config.num_turns, config, "first", shares=_shares_of_band(card, config))
        return [TracedSession((RecordedRound(prompt, 1),)) for prompt in sizes]
    if card.turns.mean == 1:
        turns = [1] * config.num_turns
    else:
        counts = RoundCounts(kind="negative_binomial", mean=card.turns.mean, shape=1.0)
        turns = draw_rounds(counts, math.ceil(config.num_turns / card.turns.mean), config.seed).tolist()
    first = iter(_lengths(card, first_spread, len(turns), config, "first"))
    later = iter(_lengths(card, card.later.log_normal, sum(turns) - len(turns), config, "later"))
    answers = iter(_answers(card, sum(turns), config))
    return [
        TracedSession(
            tuple(map(RecordedRound, chain(islice(first, 1), islice(later, count - 1)), islice(answers, count)))
        )
        for count in turns
    ]


def _answers(card: ConversationCard, num: int, config: ConversationConfig) -> list[int]:
    spread = LogNormalParameters(math.log(card.answers.median), card.answers.sigma)
    return _lengths(card, spread, num, config, "answers")


def _lengths(
    card: ConversationCard,
    spread: LogNormalParameters,
    num: int,
    config: ConversationConfig,
    stream: str,
    *,
    shares: tuple[float, float] = (0.0, 1.0),
) -> list[int]:
    """Draw one length from each of ``num`` strata of equal probability, in random order, between two ``shares`` of the distribution."""
    rng = np.random.default_rng(derive_seed(config.seed, "conversations", stream))
    strata = (rng.permutation(num) + rng.random(num)) / max(num, 1)
    bottom, top = shares
    uniform = np.clip(bottom + (top - bottom) * strata, SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM)
    lengths: Ints = np.clip(np.rint(spread.quantiles(uniform)), card.bounds.low, card.bounds.high).astype(np.int64)
    return lengths.tolist()


def _shares_of_band(card: ConversationCard, config: ConversationConfig) -> tuple[float, float]:
    """Return the share of first prompts below the band, and the share of those not above it."""
    spread = card.first.log_normal
    low = card.bounds.low if config.low is None else config.low
    high = card.bounds.high if config.high is None else config.high
    # A length that rounds to less than n is below n - 0.5.
    bottom, top = (NORMAL.cdf((math.log(n - 0.5) - spread.mu) / spread.sigma) for n in (low, 1 + high))
    require(
        top - bottom > 1e-6,
        f"min_tokens={config.low}, max_tokens={config.high}: {card.name} has no such prompts, ask for other lengths",
    )
    return bottom, top


# -- files --------------------------------------------------------------------------------------------------


def _in_band(
    config: ConversationConfig, sessions: Iterable[TracedSession], location: str
) -> tuple[TracedSession, ...] | None:
    """Return the turns whose prompts are in the band, each as its own conversation. None without a band."""
    if not config.is_banded:
        return None
    low, high = config.band
    chats = tuple(
        chat._replace(rounds=(turn,)) for chat in sessions for turn in chat.rounds if low <= turn.prefill_tokens <= high
    )
    require(
        bool(chats),
        f"min_tokens={config.low}, max_tokens={config.high}: {location} has no such prompts, ask for other lengths",
    )
    return chats


def _with_answers(
    card: ConversationCard, sessions: Sequence[TracedSession], config: ConversationConfig
) -> list[TracedSession]:
    """Return the conversations with drawn answers for turns without a recorded one."""
    answers = iter(_answers(card, sum(len(session.rounds) for session in sessions), config))
    return [
        session._replace(
            rounds=tuple(
                turn if turn.decode_tokens else turn._replace(decode_tokens=answer)
                for turn, answer in zip(session.rounds, answers, strict=False)
            )
        )
        for session in sessions
    ]
