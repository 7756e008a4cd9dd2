"""Conversations to serve: drawn from a card's distributions, or from a file.

Prompts are drawn in equal strata of their distribution, in random order: every sample has the published shares, to one turn, and
about the same number of tokens, so that what differs between two seeds is the order. Prompts of first and of later turns,
answers, turns and order have random streams of their own.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from engines.ar.session import Round, Session
from engines.errors import UserError, require
from repro.workloads.conversations.card import SHORT, ConversationCard, load_conversation_card
from repro.workloads.conversations.chats import Chat, read_chats
from repro.workloads.data_dir import DATA_DIR_VARIABLE, file_digest, find_data_dir
from repro.workloads.lengths import LogNormalParameters
from repro.workloads.seed import derive_seed
from repro.workloads.sessions.card import RoundCounts
from repro.workloads.sessions.generator import draw_rounds
from repro.workloads.sessions.traces import RecordedRound, repeats
from repro.workloads.sessions.workload import Source

Ints = npt.NDArray[np.int64]
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """``low`` and ``high`` keep prompts of so many tokens alone, each a conversation of one turn without history; None keeps
    conversations whole."""

    dataset: str
    num_turns: int
    """At least; the last conversation is not cut."""
    seed: int
    think_s: float = 0.0
    """Between the first token of an answer and the user's next turn: always the same."""
    answer_tokens: int | None = None
    """Of every answer, in place of what is drawn or recorded."""
    low: int | None = None
    high: int | None = None
    source: Source = "embedded"
    path: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", self.dataset.lower())
        require(1 <= self.num_turns <= 10**6, f"num_turns={self.num_turns} must be between 1 and 1,000,000")
        require(self.seed >= 0, f"seed={self.seed} must not be negative")
        answer = self.answer_tokens
        require(answer is None or 1 <= answer <= 10**6, f"answer_tokens={answer} must be between 1 and 1,000,000")
        require(0 <= self.think_s < math.inf, f"think_s={self.think_s} must be 0 s or more")
        if self.source not in ("embedded", "local"):
            raise UserError(f"source={self.source!r} is unknown: use embedded or local")
        require(self.path is None or self.source == "local", f"path={self.path!r} has no effect with source='embedded'")
        low, high = 1 if self.low is None else self.low, math.inf if self.high is None else self.high
        require(1 <= low <= high, f"low={self.low}, high={self.high}: prompts need 1 <= low <= high tokens")

    @property
    def is_banded(self) -> bool:
        return self.low is not None or self.high is not None


@dataclass(frozen=True, kw_only=True)
class ConversationProvenance:
    source: Source
    location: str
    revision: str | None
    """``sha256:...`` of the local files."""
    description: str
    checksum: str
    shares: dict[str, float]
    """Prompts below 256 tokens, of first and of later turns, in this sample."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Sessions of rounds, ``arrival_s`` 0: who serves them says when they come."""

    name: str
    sessions: tuple[Session, ...]
    provenance: ConversationProvenance

    @property
    def num_turns(self) -> int:
        return sum(len(session.rounds) for session in self.sessions)


def draw_conversations(config: ConversationConfig, *, data_dir: Path | None = None) -> Conversations:
    card = load_conversation_card(config.dataset)
    description = _describe(card, config)
    if config.source == "local":
        paths = _local_files(card, config, data_dir)
        held = _asked(card, read_chats(paths), config)
        chats, location = _sampled(card, held, config), ", ".join(path.name for path in paths)
        description += repeats(sum(map(len, chats)), sum(map(len, held)), "turn")
        revision = ", ".join(map(file_digest, paths))
    else:
        chats, location, revision = _drawn(card, config), f"datasets/conversations/{card.name}.yaml", None
    sessions = tuple(
        Session(
            index,
            0.0,
            tuple(Round(prompt, config.answer_tokens or answer or 1, config.think_s) for prompt, answer, _ in chat),
        )
        for index, chat in enumerate(chats)
    )
    return Conversations(
        name=card.name,
        sessions=sessions,
        provenance=ConversationProvenance(
            source=config.source,
            location=location,
            revision=revision,
            description=description,
            checksum=_checksum(sessions),
            shares=short_shares(sessions),
        ),
    )


def short_shares(sessions: tuple[Session, ...], short: int = SHORT) -> dict[str, float]:
    first = [session.rounds[0].prefill_tokens for session in sessions]
    later = [turn.prefill_tokens for session in sessions for turn in session.rounds[1:]]
    return {
        name: sum(tokens < short for tokens in prompts) / len(prompts)
        for name, prompts in (("first", first), ("later", later))
        if prompts
    }


# -- generator ----------------------------------------------------------------------------------------------


def _drawn(card: ConversationCard, config: ConversationConfig) -> list[Chat]:
    if config.is_banded:
        alone = _lengths(card, card.first.log_normal, config.num_turns, config, "first", band=True)
        return [(RecordedRound(prompt, 1),) for prompt in alone.tolist()]
    counts = RoundCounts(kind="negative_binomial", mean=card.turns.mean, shape=1.0)
    if card.turns.mean == 1:
        turns = np.ones(config.num_turns, dtype=np.int64)
    else:
        turns = draw_rounds(counts, math.ceil(config.num_turns / card.turns.mean), config.seed)
    first = _lengths(card, card.first.log_normal, len(turns), config, "first").tolist()
    later = _lengths(card, card.later.log_normal, int(turns.sum()) - len(turns), config, "later").tolist()
    spread = LogNormalParameters(mu=math.log(card.answers.median), sigma=card.answers.sigma)
    answers = _lengths(card, spread, int(turns.sum()), config, "answers").tolist()
    chats: list[Chat] = []
    done = 0
    for index, count in enumerate(turns.tolist()):
        after = done - index
        prompts = [first[index], *later[after : after + count - 1]]
        chats.append(tuple(RecordedRound(*pair) for pair in zip(prompts, answers[done : done + count], strict=True)))
        done += count
    return chats


def _lengths(
    card: ConversationCard,
    spread: LogNormalParameters,
    num: int,
    config: ConversationConfig,
    stream: str,
    *,
    band: bool = False,
) -> Ints:
    """One draw from each of ``num`` strata of equal probability, in random order; ``band``: of the distribution within
    [low, high]."""
    rng = np.random.default_rng(derive_seed(config.seed, "conversations", stream))
    strata = (rng.permutation(num) + rng.random(num)) / max(num, 1)
    bottom, top = 0.0, 1.0
    if band:
        bottom = _share_below(spread, card.bounds.low if config.low is None else config.low)
        top = _share_below(spread, 1 + (card.bounds.high if config.high is None else config.high))
        require(top - bottom > 1e-6, f"low={config.low}, high={config.high}: {card.name} has no such prompts")
    uniform = np.clip(bottom + (top - bottom) * strata, 2.0**-53, 1 - 2.0**-53)
    normal = np.array([_NORMAL.inv_cdf(each) for each in uniform.tolist()], dtype=np.float64)
    lengths = np.rint(np.exp(spread.mu + spread.sigma * normal))
    return np.clip(lengths, card.bounds.low, card.bounds.high).astype(np.int64)


def _share_below(spread: LogNormalParameters, tokens: int) -> float:
    """Of lengths that round to less than ``tokens``."""
    return _NORMAL.cdf((math.log(tokens - 0.5) - spread.mu) / spread.sigma)


# -- files --------------------------------------------------------------------------------------------------


def _local_files(card: ConversationCard, config: ConversationConfig, data_dir: Path | None) -> list[Path]:
    if config.path is not None:
        return [Path(config.path)]
    directory = find_data_dir(data_dir)
    for entry in card.local:
        if directory is not None and (found := sorted(directory.glob(entry.path))):
            return found
    accepted = ", ".join(entry.path for entry in card.local)
    raise UserError(
        f"source='local': no file for dataset {card.name!r} in {repr(str(directory)) if directory else 'any data directory'}: "
        f"set {DATA_DIR_VARIABLE} to a folder with one of {accepted}"
    )


def _asked(card: ConversationCard, recorded: tuple[Chat, ...], config: ConversationConfig) -> tuple[Chat, ...]:
    if not config.is_banded:
        return recorded
    low, high = config.low or 1, math.inf if config.high is None else config.high
    alone = tuple((turn,) for chat in recorded for turn in chat if low <= turn.prefill_tokens <= high)
    require(bool(alone), f"low={config.low}, high={config.high}: the file of {card.name} has no such prompts")
    return alone


def _sampled(card: ConversationCard, recorded: tuple[Chat, ...], config: ConversationConfig) -> list[Chat]:
    """In random order, again and again as needed; answers that nobody recorded are drawn."""
    chats: list[Chat] = []
    left = config.num_turns
    while left > 0:
        rng = np.random.default_rng(derive_seed(config.seed, "conversations", "sample", len(chats)))
        for index in rng.permutation(len(recorded)).tolist():
            chats.append(recorded[index])
            left -= len(recorded[index])
            if left <= 0:
                break
    spread = LogNormalParameters(mu=math.log(card.answers.median), sigma=card.answers.sigma)
    drawn = iter(_lengths(card, spread, sum(map(len, chats)), config, "answers").tolist())
    return [
        tuple(
            turn if turn.decode_tokens else turn._replace(decode_tokens=answer)
            for turn, answer in zip(chat, drawn, strict=False)
        )
        for chat in chats
    ]


def _describe(card: ConversationCard, config: ConversationConfig) -> str:
    band = (
        f", prompts of {config.low or 1} to {config.high or 'any number of'} tokens alone" if config.is_banded else ""
    )
    if config.source == "embedded":
        return f"{card.title}: embedded generator, shares of short and long prompts met by construction{band}"
    return f"{card.title}: recorded conversations, lengths of the file's texts at 4 characters a token{band}"


def _checksum(sessions: tuple[Session, ...]) -> str:
    digest = hashlib.sha256()
    for session in sessions:
        digest.update(f"{session.session_id}|{session.rounds}\n".encode())
    return digest.hexdigest()
