"""dKV-Cache (arXiv:2505.15781): K and V of a token are kept one step after its commit. ``settle_after`` takes its idea from here.

``decode``: a step leaves out tokens committed more than a step ago, and every ``refresh_interval`` steps it computes all rows.
``greedy``: the order of commits is drawn beforehand; a step computes only the tokens due, those just committed, and masks near those due.
On Dream, whose row predicts the next token, rows settle and not tokens. There ``prefill`` leaves out only the prompt, and ``pd`` both.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Literal

import numpy as np

from baselines.dllm.dream import timestep_decode
from baselines.dllm.options import DkvOptions
from engines.dllm.config import DecodeConfig, GenerationConfig, Seen
from engines.dllm.method import BLOCKS, LEAP, PARALLEL, SERVED, Method, Options, Sampler
from engines.dllm.plan import Chosen, Request
from engines.dllm.rows import NONE, Positions, RowRule, Standing
from engines.errors import require


@dataclass
class DkvDecode(RowRule):
    """For LLaDA. The first two steps of a block compute all rows, and no cache outlives a block."""

    refresh_interval: int
    total_len: int = 0
    committed: Positions = field(default_factory=NONE.copy)
    """Places that the step before committed."""

    def of(self, request: Request) -> "DkvDecode":
        return replace(self, total_len=request.total_len)

    def choose(self, at: Standing) -> Chosen:
        step = at.step_in_block
        rows = np.union1d(at.masks, self.committed)
        if step < 2 or step % self.refresh_interval == 0:
            rows = np.arange(self.total_len)
        return Chosen.of(rows, at.in_block, at.quota)

    def see(self, seen: Seen) -> None:
        assert seen.learned is not None
        self.committed = np.array(seen.learned.places, dtype=np.int64)


@dataclass
class DkvGreedy(RowRule):
    """For LLaDA, with ``remasking='random'``: we know the next commits a step ahead."""

    refresh_interval: int
    near: int
    given: str | None = None
    total_len: int = 0
    order: Sequence[int] = ()
    """Positions in the order of their commits."""
    before: tuple[Positions, Positions] | None = None
    """Masks at the start of the last step, and the places it committed."""

    def of(self, request: Request) -> "DkvGreedy":
        generation = request.generation
        listed = [] if self.given is None else self.given.replace(" ", "").split(",")
        places = list(map(str, range(generation.gen_length)))
        require(
            self.given is None or sorted(listed) == sorted(places),
            f"commit_order={self.given!r} is no order of the {generation.gen_length} places of an answer: name each once",
        )
        order = [request.prompt_len + place for place in map(int, listed or drawn_order(generation))]
        return replace(self, total_len=request.total_len, order=order)

    def choose(self, at: Standing) -> Chosen:
        masks = set(at.in_block.tolist())
        due = np.array([place for place in self.order if place in masks][: at.quota], dtype=np.int64)
        rows = np.arange(self.total_len)
        if at.step_in_block % self.refresh_interval:
            assert self.before is not None
            masked, committed = self.before
            computed = {*committed.tolist(), *due.tolist()}
            for place in due.tolist():
                computed.update(self._near(place, set(masked.tolist()) - computed))
            rows = np.array(sorted(computed), dtype=np.int64)
        self.before = at.masks, due
        return Chosen.of(rows, np.sort(due), len(due))

    def _near(self, place: int, able: set[int]) -> list[int]:
        """The nearest places in ``able``, alternating left and right, one further each turn; at most ``near`` of them."""
        turns = (neighbor for d in range(1, self.total_len) for neighbor in (place - d, place + d))
        return list(islice((neighbor for neighbor in turns if neighbor in able), self.near))


def drawn_order(generation: GenerationConfig) -> list[int]:
    """Draw the order of commits block by block, from the request's seed alone."""
    random, length = Random(generation.seed), generation.block_length
    blocks = [list(range(s, min(s + length, generation.gen_length))) for s in range(0, generation.gen_length, length)]
    return [place for block in blocks for place in random.sample(block, len(block))]


@dataclass
class DkvDream(RowRule):
    """For Dream, which has no blocks: a row settles once the token it predicts is known, or with ``un_right`` also its own."""

    variant: Literal["decode", "prefill", "pd"]
    refresh_interval: int
    shift: Literal["un", "un_right"]
    prompt_len: int = 0
    total_len: int = 0
    settled: Positions = field(default_factory=NONE.copy)
    """Rows that the step before found settled; this delays them by one step."""

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        return frozenset({"ids"} if self.shift == "un_right" else ())

    def of(self, request: Request) -> "DkvDream":
        return replace(self, prompt_len=request.prompt_len, total_len=request.total_len)

    def choose(self, at: Standing) -> Chosen:
        step, all_rows = at.step_in_block, np.arange(self.total_len)
        head = all_rows[: self.prompt_len - 1]  # the prompt's last row predicts the first answer token
        cached = head if step and self.variant != "decode" else all_rows[:0]
        if self.variant != "prefill" and step % self.refresh_interval:
            cached = np.union1d(cached, self.settled)
        self.settled = self._settled_rows(at.masks) if step else head
        return Chosen.of(np.setdiff1d(all_rows, cached), at.in_block, at.quota)

    def _settled_rows(self, masks: Positions) -> Positions:
        known = np.ones(self.total_len + 1, dtype=np.bool_)
        known[masks] = False
        if self.shift == "un":
            return np.flatnonzero(known[1:])
        is_settled = known[:-1] & known[1:]
        is_settled[-1] = is_settled[-2]
        return np.flatnonzero(is_settled)


class DkvCache(Method):
    name = "dkv-cache"
    title = "dKV-Cache"
    heeds = {"llada": BLOCKS | PARALLEL | LEAP, "dream": frozenset({"alg_temp"})}
    own = DkvOptions

    def _sampler(self, family: str, own: DkvOptions, options: Options) -> Sampler:
        variant, interval = own.variant, own.refresh_interval
        if family == "dream":
            require(
                variant != "greedy", "variant='greedy' is of LLaDA alone: use decode, prefill or pd on a dream model"
            )
            require(
                variant != "prefill" or not {"refresh_interval", "shift"} & options.keys(),
                "refresh_interval and shift have no effect with variant='prefill', whose answer is computed at every step: leave them out",
            )
            rule: RowRule = DkvDream(variant=variant, refresh_interval=interval or 4, shift=own.shift)  # type: ignore[arg-type]
            decode = timestep_decode(own.alg)
        else:
            require(
                variant in ("decode", "greedy"),
                f"variant={variant!r} is of Dream alone: use decode or greedy on a llada model",
            )
            rule, decode = DkvDecode(interval or 8), DecodeConfig(confidence_dtype="float64")
            if variant == "greedy":
                rule = DkvGreedy(interval or 2, own.greedy_window, own.commit_order)
        return Sampler(rule=rule, decode=replace(decode, learns="places"), **SERVED)

    def has_blocks(self, family: str, options: Options) -> bool:
        return family != "dream"

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        require(
            options.get("variant") != "greedy" or generation.parallel_by is None,
            f"{'{}={}'.format(*generation.parallel_by or ('', ''))} has no effect with variant='greedy', whose commits are drawn beforehand: "
            f"leave it out",
        )
        return generation


DKV_CACHE = DkvCache()
