"""A request in the engine: its settings, its final blocks, and the block that is denoised; no torch.

There are no separate prefills and commits, only final blocks whose K/V is missing. It is the prompt's when a request begins (PREFILL), and
a generated block's after its last denoise (COMMIT). K/V that nothing reads is never made.

The prefix cache shares final blocks between sequences. Its unit is a whole number of pool blocks and of diffusion blocks, and its key
depends on its ids and all ids before. Blocks not final, or only partly wanted, have no key: a token's K/V depends on its whole block.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np

from engines.blockdiffusion.rules import Bools, DecodeRule, Floats, LowConfidence
from engines.errors import require
from engines.knobs import Checked, Needs, Proportion, Range, Seed
from engines.runtime.rows import NOBODY, BlockTables, Ints

AnswerTokens = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True, kw_only=True)
class BlockSampling(Checked):
    """How tokens are drawn, and which confidence they have: their probability after temperature, top_k and top_p, in that order (LLaDA2,
    SDAR). Temperature 0 is greedy; its confidence is the model's own probability."""

    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    top_k: Annotated[int, Range(1, 2**31 - 1), Needs(temperature=Range(above=0))] | None = None
    top_p: Annotated[Proportion, Needs(temperature=Range(above=0))] = 1.0
    draws: bool = True
    """False takes the likeliest token, with its probability after temperature, top_k and top_p as confidence."""
    seed: Seed = 0


GREEDY = BlockSampling()


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    request_id: int
    prompt_ids: tuple[int, ...]
    gen_length: AnswerTokens
    rule: DecodeRule = field(default_factory=LowConfidence)
    sampling: BlockSampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    """The first block that holds one of these ids, outside the prompt, is the last."""
    exits_early: bool = False
    """Whether the request ends within a block, once no hole is left before a stop token; only for rules that edit nothing."""
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.gen_length >= 1, f"gen_length={self.gen_length} must be at least 1")
        require(bool(self.prompt_ids), "prompt_ids is empty: give at least one token")
        require(
            not (self.exits_early and self.rule.edits),
            f"exits_early with {type(self.rule).__name__}: its tokens may change until their block is final; leave it out",
        )

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def total(self) -> int:
        return self.prompt_len + self.gen_length


@dataclass(frozen=True, kw_only=True)
class BlockAnswer:
    ids: tuple[int, ...]
    """At most ``gen_length`` ids, up to and including the first stop token."""
    reason: Literal["stop", "length"]
    denoised: int
    """Forwards that denoised a block, including repeats after a preemption."""
    committed: int
    """Forwards that wrote the K/V of a generated, final block."""
    prefilled: int
    """Blocks of the prompt (tokens, for canvases) that were computed, including repeats after a preemption; a prefix hit saves them."""
    rows: int
    """Rows that were computed for the request."""


_DIGEST_BYTES = 16


@dataclass(slots=True, eq=False)
class BlockSequence:
    request: BlockRequest
    order: int
    """Rank by arrival; lower is older."""
    block: int
    """Tokens of a block."""
    shifts: bool
    """Whether a block's first token comes from the forward that commits the previous block (Fast-dLLM v2)."""
    final: Ints = field(init=False)
    """Ids of the final blocks, which are whole."""
    ids: Ints = field(init=False)
    """[B] the block that is denoised, behind the final ones."""
    holes: Bools = field(init=False)
    given: Bools = field(init=False)
    awaits_first: bool = False
    """Whether the block's first token is still to come."""
    step: int = 0
    full: int = 0
    """``step`` and ``full`` are as in ``Blocks``."""
    forwards: int = 0
    """Forwards that denoised any of its blocks."""
    draws: int = 0
    """How many of these a rule decided by; its random numbers depend on this count."""
    slot: int = -1
    """-1 while the request waits."""
    computed: int = 0
    """Tokens of ``final`` whose K/V is in the pool."""
    served: int = -1
    """The engine step in which it last took part."""
    has_begun: bool = False
    """Whether some of its answer was final, and has been reported."""
    committed: int = 0
    prefilled: int = 0
    rows: int = 0
    keys: list[bytes] = field(default_factory=list)
    """One key for each unit of the prefix cache that is final."""

    def __post_init__(self) -> None:
        prompt = np.array(self.request.prompt_ids, dtype=np.int64)
        num_final = len(prompt) // self.grain * self.grain
        self.final = prompt[:num_final]
        self._open(prompt[num_final:])

    @property
    def grain(self) -> int:
        """How many final tokens are computed together and see each other."""
        return self.block

    @property
    def longest(self) -> int:
        """Tokens at the request's end, with its last block whole."""
        return -(-self.request.total // self.block) * self.block

    @property
    def draw(self) -> int:
        """Number of the draw that the next forward makes."""
        return self.draws

    @property
    def missing(self) -> int:
        """Final tokens without K/V."""
        return len(self.final) - self.computed

    def book_final(self, tokens: int) -> tuple[int, int]:
        """Book the K/V of ``tokens`` more final tokens; return how many generated blocks it covers, and how many of the prompt."""
        first_block, prompt_blocks = self.computed // self.block, self.request.prompt_len // self.block
        self.computed += tokens
        committed = max(0, self.computed // self.block - max(first_block, prompt_blocks))
        prefilled = tokens // self.block - committed
        self.committed += committed
        self.prefilled += prefilled
        return committed, prefilled

    def take_first(self, token: int) -> None:
        """Set the first token, which the previous block gives."""
        self.ids[0], self.holes[0], self.given[0] = token, False, True
        self.awaits_first = False

    def book_forward(self, tokens: Ints, take: Bools, *, was_done: bool) -> None:
        """Book a forward. With ``was_done`` the rule was already done with the block, so the forward decides nothing."""
        self.forwards += 1
        if was_done:
            return
        was_full = not self.holes.any()
        self.ids = np.where(take, tokens, self.ids)
        self.holes = self.holes & ~take
        self.step += 1
        self.full += was_full
        self.draws += 1

    def finish_block(self, *, has_kv: bool) -> None:
        """Make the block final; ``has_kv`` says that the forward that ended it had the final block as its input."""
        self.final = np.concatenate((self.final, self.ids))
        if has_kv and self.computed == len(self.final) - self.block:
            self.computed = len(self.final)
        self._open(np.zeros(0, dtype=np.int64))

    def evict(self) -> None:
        """Drop its K/V. If a block's forwards read K/V of earlier ones, the block begins anew."""
        self.slot, self.computed = -1, 0
        if not self.request.rule.is_exact:
            self.draws -= self.step
            self.step = self.full = 0
            self.holes = ~self.given

    @property
    def is_over(self) -> bool:
        """Whether the request is over, after a block became final or got its first token."""
        stops, generated = self.request.stop_ids, self.final[self.request.prompt_len :]
        num_known = len(self.final)
        if self.shifts and self.given[0] and num_known >= self.request.prompt_len:
            num_known, generated = num_known + 1, np.append(generated, self.ids[0])
        return num_known >= self.request.total or bool(stops and np.isin(generated, list(stops)).any())

    @property
    def has_output(self) -> bool:
        return len(self.final) > self.request.prompt_len

    @property
    def ends_within(self) -> bool:
        """Whether no hole of the block is left before a stop token."""
        if not (self.request.exits_early and self.request.stop_ids):
            return False
        is_stop = np.isin(self.ids, list(self.request.stop_ids)) & ~self.holes & ~self.given
        if not is_stop.any():
            return False
        return not self.holes[: int(np.argmax(is_stop))].any()

    @property
    def answer(self) -> BlockAnswer:
        num_known = int(np.argmax(self.holes)) if self.holes.any() else self.block
        tokens = np.concatenate((self.final, self.ids[:num_known]))
        ids = tokens[self.request.prompt_len : self.request.total].tolist()
        end = next((i + 1 for i, token in enumerate(ids) if token in self.request.stop_ids), None)
        return BlockAnswer(
            ids=tuple(ids[:end]),
            reason="length" if end is None else "stop",
            denoised=self.forwards,
            committed=self.committed,
            prefilled=self.prefilled,
            rows=self.rows,
        )

    def unit_keys(self, unit: int) -> list[bytes]:
        """Return a key for each ``unit`` tokens of final blocks; it depends on these tokens and all before them."""
        for i in range(len(self.keys), len(self.final) // unit):
            previous = self.keys[-1] if self.keys else b""
            token_bytes = self.final[i * unit : (i + 1) * unit].tobytes()
            self.keys.append(blake2b(previous + token_bytes, digest_size=_DIGEST_BYTES).digest())
        return self.keys

    def _open(self, opening: Ints) -> None:
        """Begin a block with these tokens, followed by holes."""
        self.ids = np.zeros(self.block, dtype=np.int64)
        self.ids[: len(opening)] = opening
        self.given = np.arange(self.block) < len(opening)
        self.holes = ~self.given
        self.step = self.full = 0
        self.awaits_first = self.shifts and not len(opening) and len(self.final) > 0


_MOST_STEPS = 4096
"""The most steps of a canvas, by ``rules.Steps``."""


@dataclass(slots=True, eq=False)
class CanvasSequence(BlockSequence):
    """A request whose blocks are canvases (DiffusionGemma).

    Final tokens are causal, so the computed or cached part of them may end at any token. A canvas lies behind all final tokens. Each
    forward decides all its places anew. So every place stays a hole until the likeliest tokens of the last forward become final. That
    forward computed other K/V than final tokens have, so none is kept.
    """

    likeliest: Ints | None = None
    """[B] the likeliest tokens that the last forward found."""
    repeats: int = 0
    """How many forwards right before the last found the same."""

    @property
    def grain(self) -> int:
        return 1

    @property
    def longest(self) -> int:
        return self.request.prompt_len + -(-self.request.gen_length // self.block) * self.block

    @property
    def draw(self) -> int:
        """A number that identifies canvas and step."""
        return (len(self.final) - self.request.prompt_len) // self.block * _MOST_STEPS + self.step

    def count_repeats(self, likeliest: Ints, noise: Ints) -> int:
        """Book the tokens that a forward found; return ``repeats``, with it counted."""
        is_same = self.likeliest is not None and np.array_equal(self.likeliest, likeliest)
        self.repeats = self.repeats + 1 if is_same else 0
        self.likeliest, self.ids = likeliest, noise
        return self.repeats

    def book_forward(self, tokens: Ints, take: Bools, *, was_done: bool) -> None:
        BlockSequence.book_forward(self, tokens, take, was_done=was_done)
        self.holes = ~self.given

    def finish_block(self, *, has_kv: bool) -> None:
        assert self.likeliest is not None, "a canvas ends with a forward"
        self.ids = self.likeliest
        BlockSequence.finish_block(self, has_kv=False)

    def book_final(self, tokens: int) -> tuple[int, int]:
        """Book the K/V of ``tokens`` tokens; return how many canvases it completes, and how many tokens are the prompt's."""
        prompt_len, computed = self.request.prompt_len, self.computed
        self.computed += tokens
        committed = max(0, self.computed - prompt_len) // self.block - max(0, computed - prompt_len) // self.block
        prefilled = min(self.computed, prompt_len) - min(computed, prompt_len)
        self.committed += committed
        self.prefilled += prefilled
        return committed, prefilled

    def evict(self) -> None:
        """Drop its K/V; its canvas begins anew, with the same draws."""
        BlockSequence.evict(self)
        self._forget()

    def _open(self, opening: Ints) -> None:
        BlockSequence._open(self, opening)
        self._forget()

    def _forget(self) -> None:
        self.likeliest, self.repeats = None, 0


class SharedTables(BlockTables):
    """Block tables with a prefix cache of units of ``unit`` tokens. K/V of unused units stays until room is needed. The least recently used
    goes first, and the last unit of a sequence before its others."""

    def __init__(self, *, block_size: int, diffusion_block: int, caches: bool = True, **sizes: int) -> None:
        """``sizes`` are those of ``BlockTables``."""
        super().__init__(block_size=block_size, **sizes)
        require(
            block_size % diffusion_block == 0 or diffusion_block % block_size == 0,
            f"block_size={block_size} of the pool must divide the diffusion block of {diffusion_block} tokens, or be a multiple of it",
        )
        self.unit = max(block_size, diffusion_block)
        self.caches = caches
        self._width = self.unit // block_size
        self._known: dict[bytes, list[int]] = {}
        """Key -> pool blocks of the unit."""
        self._key_of: dict[int, bytes] = {}
        """Pool block -> key of its unit."""
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def room(self) -> int:
        """Pool blocks that are available: free ones, and those of units that nobody holds."""
        return self.num_free + len(self._idle) * self._width

    def adopt(self, slot: int, keys: Sequence[bytes]) -> int:
        """Have an empty slot hold the units of the longest known prefix of ``keys``; return its number of tokens."""
        assert self.block_counts[slot] == 0, f"slot {slot} holds blocks"
        num_known = self._num_known(keys)
        for i, key in enumerate(keys[:num_known]):
            self.table[slot, i * self._width : (i + 1) * self._width] = self._known[key]
            self._users[key] += 1
            self._idle.pop(key, None)
        self.block_counts[slot] = num_known * self._width
        return num_known * self.unit

    def cached(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Tokens of the longest known prefix of ``keys``, and how many of its pool blocks nobody holds."""
        num_known = self._num_known(keys)
        return num_known * self.unit, sum(key in self._idle for key in keys[:num_known]) * self._width

    def publish(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Make the slot's units from ``first`` on known by these keys: they are final and computed."""
        if not self.caches:
            return
        for i, key in enumerate(keys, start=first):
            if key in self._known:
                continue
            blocks = self.table[slot, i * self._width : (i + 1) * self._width].tolist()
            self._known[key], self._users[key] = blocks, 1
            self._key_of |= dict.fromkeys(blocks, key)

    def grow(self, slots: Ints, lengths: Ints) -> None:
        missing = self.missing(slots, lengths)
        while self.num_free < missing and self._idle:
            key, _ = self._idle.popitem(last=False)
            self._forget(key)
        super().grow(slots, lengths)

    def trim(self, slot: int, tokens: int) -> int:
        """Free the blocks behind the first ``tokens``, a whole number of units; return how many."""
        num_kept, num_held = min(self.blocks_for(tokens), int(self.block_counts[slot])), int(self.block_counts[slot])
        blocks = self.table[slot, num_kept:num_held].tolist()
        self._free(np.array([block for block in blocks if block not in self._key_of], dtype=np.int32))
        # The last unit is the first to go if room is needed.
        for key in dict.fromkeys(self._key_of[block] for block in reversed(blocks) if block in self._key_of):
            self._users[key] -= 1
            if not self._users[key]:
                self._idle[key] = None
        self.table[slot, num_kept:num_held] = NOBODY
        self.block_counts[slot] = num_kept
        return num_held - num_kept

    def _forget(self, key: bytes) -> None:
        blocks = self._known.pop(key)
        del self._users[key]
        for block in blocks:
            del self._key_of[block]
        self._free(np.array(blocks, dtype=np.int32))

    def _num_known(self, keys: Sequence[bytes]) -> int:
        """Number of units of the longest known prefix."""
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))


class Work(NamedTuple):
    """One request's share of a step."""

    request_id: int
    slot: int
    start: int
    """Tokens that already have K/V."""
    tokens: int
    """Final tokens behind ``start`` whose K/V the work makes: PREFILL or COMMIT."""
    rows: tuple[int, int] | None
    """The first row and the end of the rows that are denoised, of the block behind those tokens."""
    wants_first: bool
    """Whether the last row of ``tokens`` gives the next block's first token."""

    @property
    def num_rows(self) -> int:
        return self.tokens + (0 if self.rows is None else self.rows[1] - self.rows[0])


class BlockStepPlan(NamedTuple):
    works: tuple[Work, ...]
    admitted: tuple[int, ...]
    """Requests whose first step this is, or the first after a preemption."""
    preempted: tuple[int, ...]
    num_rows: int


class Denoised(NamedTuple):
    """The blocks of a step that are denoised, in the order of its works."""

    ids: Ints
    holes: Bools
    wanted: Bools
    """All [n, B]."""
    sampling: tuple[BlockSampling, ...]
    draw: Ints
    """[n] number of the draw of its request."""
    forward: Ints
    """[n] number of the forward of its request; some forwards draw nothing, because their block is done."""
    step: Ints
    """[n] how many forwards have denoised the block."""
    rules: tuple[DecodeRule, ...]


class Outcome(NamedTuple):
    tokens: Ints
    confidence: Floats
    """Both [denoised, B]; arbitrary where nothing was wanted."""
    first: Ints
    """[works that want one] the first tokens."""
    duration_s: float
    likeliest: Ints | None = None
    """[denoised, B] likeliest tokens of canvases."""
    noise: Ints | None = None
    """[denoised, B] the tokens that places of canvases hold next if the rule accepts nothing there."""


class BlockExecutor(Protocol):
    tables: SharedTables
    makes_canvases: bool
    """Whether its requests are ``CanvasSequence``s."""

    @property
    def block(self) -> int:
        """Tokens of a block."""

    @property
    def shifts(self) -> bool:
        """Whether row i of the logits predicts the token at i + 1."""

    def open(self, final: Ints) -> int:
        """Return a slot that holds these ids and no K/V."""

    def extend(self, slot: int, start: int, ids: Ints) -> None:
        """Append final ids behind the first ``start``."""

    def close_slot(self, slot: int) -> None: ...

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome: ...


class BlockStepRecord(NamedTuple):
    step: int
    duration_s: float
    num_rows: int
    denoised: int
    """Requests whose block was denoised."""
    committed: int
    """Generated blocks whose K/V was made."""
    prefilled: int
    """Blocks of prompts (tokens, if the model makes canvases) whose K/V was made."""
    taken: int
    """Tokens written, edits included."""
    admitted: tuple[int, ...]
    begun: tuple[int, ...]
    """Requests whose first tokens are final."""
    finished: tuple[int, ...]
    preempted: tuple[int, ...]
    num_running: int
    num_waiting: int


NO_BLOCKS = np.zeros((0, 0), dtype=np.int64)
