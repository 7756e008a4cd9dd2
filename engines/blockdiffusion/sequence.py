"""A request in the engine: what is asked for, the blocks that are final, and the one that is denoised; no torch.

There is neither a prefill nor a commit of its own kind, only final blocks whose K/V is missing: the prompt's when a
request begins (PREFILL), a generated one after its last denoise (COMMIT). Where nothing reads the K/V it is never made.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Literal

import numpy as np

from engines.blockdiffusion.rules import Bools, DecodeRule, LowConfidence
from engines.errors import require
from engines.knobs import Checked, Needs, Proportion, Range, Seed
from engines.runtime.rows import Ints

AnswerTokens = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True, kw_only=True)
class BlockSampling(Checked):
    """How tokens are drawn, and what confidence is: the token's probability after temperature, top_k and top_p, in that order
    (LLaDA2, SDAR). Temperature 0 is greedy, its confidence the model's own probability."""

    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    top_k: Annotated[int, Range(1, 2**31 - 1), Needs(temperature=Range(above=0))] | None = None
    top_p: Annotated[Proportion, Needs(temperature=Range(above=0))] = 1.0
    draws: bool = True
    """False takes the likeliest token, whose confidence is still what temperature, top_k and top_p leave of it."""
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
    """A block that holds one of them, beside the prompt, is the last."""
    exits_early: bool = False
    """Ends within a block, once no hole is left in front of a stop token; of rules that edit nothing."""
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
    """At most ``gen_length``, up to the first stop token and with it."""
    reason: Literal["stop", "length"]
    denoised: int
    """Forwards that denoised a block, anew after a preemption too."""
    committed: int
    """Forwards that wrote the K/V of a generated block that was final."""
    prefilled: int
    """Blocks of the prompt that were computed, anew after a preemption too; a prefix hit saves them."""
    rows: int
    """Rows that were computed for it."""


_DIGEST_BYTES = 16


@dataclass(slots=True, eq=False)
class BlockSequence:
    request: BlockRequest
    order: int
    """Rank by arrival; the lower is the older."""
    block: int
    """Tokens of a block."""
    shifts: bool
    """Whether a block's first token comes from the forward that commits the block before (Fast-dLLM v2)."""
    final: Ints = field(init=False)
    """Ids of the final blocks, whole ones."""
    ids: Ints = field(init=False)
    """[B] the block that is denoised, behind them."""
    holes: Bools = field(init=False)
    given: Bools = field(init=False)
    awaits_first: bool = False
    """Whether its first token is still to come."""
    step: int = 0
    full: int = 0
    """As in ``Blocks``."""
    forwards: int = 0
    """Those that denoised any of its blocks."""
    draws: int = 0
    """Those of them that a rule decided by, for its random numbers."""
    slot: int = -1
    """-1 while it waits."""
    computed: int = 0
    """Tokens of ``final`` whose K/V is in the pool."""
    served: int = -1
    """The step of the engine it last took part in."""
    has_begun: bool = False
    """Whether any of its answer was final, and was told."""
    committed: int = 0
    prefilled: int = 0
    rows: int = 0
    keys: list[bytes] = field(default_factory=list)
    """One for every unit of the prefix cache that is final."""

    def __post_init__(self) -> None:
        prompt = np.array(self.request.prompt_ids, dtype=np.int64)
        whole = len(prompt) // self.block * self.block
        self.final = prompt[:whole]
        self._open(prompt[whole:])

    @property
    def missing(self) -> int:
        """Final blocks without K/V."""
        return (len(self.final) - self.computed) // self.block

    @property
    def prompt_blocks(self) -> int:
        return self.request.prompt_len // self.block

    def take_first(self, token: int) -> None:
        """The token that the block before gives."""
        self.ids[0], self.holes[0], self.given[0] = token, False, True
        self.awaits_first = False

    def denoised(self, tokens: Ints, take: Bools, *, was_done: bool) -> None:
        """``was_done`` where the rule had done with the block before: the forward decides nothing."""
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
        """The block is final; ``has_kv`` where the forward that ended it had it as its input."""
        self.final = np.concatenate((self.final, self.ids))
        if has_kv and self.computed == len(self.final) - self.block:
            self.computed = len(self.final)
        self._open(np.zeros(0, dtype=np.int64))

    def evict(self) -> None:
        """Its K/V is gone. A block whose forwards read K/V of earlier ones begins anew."""
        self.slot, self.computed = -1, 0
        if not self.request.rule.is_exact:
            self.draws -= self.step
            self.step = self.full = 0
            self.holes = ~self.given

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come, after a block became final or got its first token."""
        stops, generated = self.request.stop_ids, self.final[self.request.prompt_len :]
        known = len(self.final)
        if self.shifts and self.given[0] and known >= self.request.prompt_len:
            known, generated = known + 1, np.append(generated, self.ids[0])
        return known >= self.request.total or bool(stops and np.isin(generated, list(stops)).any())

    @property
    def has_output(self) -> bool:
        return len(self.final) > self.request.prompt_len

    @property
    def ends_within(self) -> bool:
        """Whether a stop token of the block has no hole in front of it."""
        if not (self.request.exits_early and self.request.stop_ids):
            return False
        is_stop = np.isin(self.ids, list(self.request.stop_ids)) & ~self.holes & ~self.given
        if not is_stop.any():
            return False
        return not self.holes[: int(np.argmax(is_stop))].any()

    @property
    def answer(self) -> BlockAnswer:
        known = int(np.argmax(self.holes)) if self.holes.any() else self.block
        whole = np.concatenate((self.final, self.ids[:known]))
        ids = whole[self.request.prompt_len : self.request.total].tolist()
        cut = next((i + 1 for i, token in enumerate(ids) if token in self.request.stop_ids), None)
        return BlockAnswer(
            ids=tuple(ids[:cut]),
            reason="length" if cut is None else "stop",
            denoised=self.forwards,
            committed=self.committed,
            prefilled=self.prefilled,
            rows=self.rows,
        )

    def unit_keys(self, unit: int) -> list[bytes]:
        """A key for every ``unit`` tokens of final blocks: of these tokens and all before them."""
        for i in range(len(self.keys), len(self.final) // unit):
            before = self.keys[-1] if self.keys else b""
            own = self.final[i * unit : (i + 1) * unit].tobytes()
            self.keys.append(blake2b(before + own, digest_size=_DIGEST_BYTES).digest())
        return self.keys

    def _open(self, opening: Ints) -> None:
        """A block of holes behind these tokens."""
        self.ids = np.zeros(self.block, dtype=np.int64)
        self.ids[: len(opening)] = opening
        self.given = np.arange(self.block) < len(opening)
        self.holes = ~self.given
        self.step = self.full = 0
        self.awaits_first = self.shifts and not len(opening) and len(self.final) > 0
