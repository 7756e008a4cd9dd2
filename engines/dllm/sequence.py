"""A live request as a state machine: (block, step in block) decides its phase and its quota.

In Dream's denoising schedule, time runs from 1 to EPS, and each step keeps the share s / t of the masks. We round as torch rounds, all in
float32. A quota is a truncated product of these numbers, so their last bit decides tokens.
"""

import struct
from collections.abc import Callable, Collection, Iterator
from copy import copy, deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engines.dllm.config import (
    DecodeConfig,
    EngineConfig,
    GenerationConfig,
    Learned,
    Phase,
    RefreshRule,
    Seen,
    Settling,
    check_phase,
    sees,
)
from engines.dllm.memory import cache_rows
from engines.dllm.plan import NOTHING_CHOSEN, POSITION_BYTES, Request
from engines.dllm.rows import RowRule, Rows, Standing

Tokens = npt.NDArray[np.int64]
"""One number for each of some consecutive steps."""

_EPS = 1e-3


def _float32(x: float) -> float:
    """``x`` rounded to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


@lru_cache(maxsize=64)
def timesteps(num_steps: int) -> tuple[float, ...]:
    """Return linspace(1, EPS, num_steps + 1), built from both ends inwards.

    A product and sum in double precision, rounded once, equals the fused multiply-add of torch's kernel.
    """
    end = _float32(_EPS)
    step = _float32(_float32(end - 1.0) / num_steps)
    half = (num_steps + 1) // 2
    return tuple(_float32(1.0 + step * i if i < half else end - step * (num_steps - i)) for i in range(num_steps + 1))


def commit_share(step: int, num_steps: int) -> float:
    """Return 1 - s / t of step ``step``; 1 on the last."""
    if step >= num_steps - 1:
        return 1.0
    times = timesteps(num_steps)
    return _float32(1.0 - _float32(times[step + 1] / times[step]))


def timestep_quota(masks_left: int, step: int, num_steps: int) -> int:
    """Return the tokens of step ``step``: truncated in float32, everything left on the last."""
    return int(_float32(masks_left * commit_share(step, num_steps)))


def steps_per_block(generation: GenerationConfig) -> tuple[int, ...]:
    """Share the steps out in proportion to block lengths; S = steps / blocks if that is whole.

    Cumulative floors keep every block at one step or more whenever steps >= blocks, even if the last block is shorter.
    """
    ends = [min((b + 1) * generation.block_length, generation.gen_length) for b in range(generation.num_blocks)]
    bounds = [0, *(generation.steps * end // generation.gen_length for end in ends)]
    return tuple(after - before for before, after in pairwise(bounds))


def is_open_ended(generation: GenerationConfig, decode: DecodeConfig) -> bool:
    """Whether the executor, not the schedule, says how many tokens a step commits."""
    return generation.is_parallel or decode.quota == "origin"


def rule_of(rule: RefreshRule, request: Request) -> RefreshRule:
    """Return the request's own rule if the rule sees: what its ``of`` makes for the request, or a copy. Else return the rule itself."""
    if not sees(rule):
        return rule
    make = getattr(rule, "of", None)
    return deepcopy(rule) if make is None else make(request)


class Sequence:
    """The state of a live request. ``advance`` and ``move`` change it; everything a scheduler or an executor needs is derived.

    ``exact_steps`` runs every step of a block even when nothing is left to commit, as published samplers do. Otherwise a finished block
    ends at once, which cannot change a token.
    """

    def __init__(self, request: Request, rule: RefreshRule, config: EngineConfig, *, exact_steps: bool = False) -> None:
        """``config`` is that of the engine that runs the request."""
        self.request = request
        self.sees = sees(rule)
        self.rule = rule_of(rule, request)
        self.masked = Rows(request.prompt_len, request.total_len) if isinstance(self.rule, RowRule) else None
        """The positions of masks, if the rule chooses rows by them; else None."""
        self.config, self.decode = config, config.decode
        self.settles = config.settling.settles
        """Whether its Reuse steps may leave rows out."""
        self.has_cache = False
        """Whether the block has built a cache; between two blocks, whether the previous one has."""
        self.is_open_ended = is_open_ended(request.generation, self.decode)
        self.runs_all_steps = exact_steps and not request.generation.is_parallel
        self.quota_steps = steps_per_block(request.generation)
        self.total_len = request.total_len
        self.chosen = NOTHING_CHOSEN
        self.suffix = b""
        self._enter(0)
        self.kv_rows = 0
        if rule.caches:
            self.kv_rows = cache_rows(request.total_len, request.generation, config.sparsity, rule.window)
        self.kv_start = -1
        """-1 until the request is admitted and its rows are reserved. Without a cache it reserves zero rows in the same way."""
        self.stop: int | None = None
        self.num_steps = 0
        self.held: tuple[Phase, ...] = ()
        """Phases of the static batch, which the request runs to the batch's end (``hold_together``)."""
        self.is_idle = False
        """Whether it has all its tokens and runs on with its batch, as padding."""

    def _enter(self, block: int) -> None:
        generation = self.request.generation
        self.block = block
        self.block_steps = self.quota_steps[block]
        self._course: Course | None = None
        self.step_in_block = 0
        had_cache, self.has_cache = self.has_cache, False
        self.phase: Phase = self._next_phase()
        self.block_start = self.request.prompt_len + block * generation.block_length
        self.block_end = min(self.block_start + generation.block_length, self.total_len)
        self.length = self.total_len
        """Rows that a full Refresh of the block computes: fewer than ``total_len`` if masks behind the block are cut."""
        if (cut := self.config.cut).cuts:
            self.suffix = (np.array(cut.kept(generation, block), dtype=np.int64) + self.request.prompt_len).tobytes()
            self.length = self.block_end + len(self.suffix) // POSITION_BYTES
        self.window_end = self.block_end if self.rule.window == "block" else self.length
        self.masks_left = self.block_end - self.block_start
        self.masks: tuple[int, ...] = (self.masks_left,)
        """Masks in the block at the start of each of its steps so far, if rows settle."""
        self.first_row = self.settled_rows = self.settled_before = 0
        if self.phase is Phase.BUILD and had_cache and self.config.settling.is_partial(block):
            self.phase, self.first_row = Phase.PARTIAL, self.block_start - generation.block_length
        context = self.length - (self.window_end - self.block_start)
        self.kept_rows = self.config.sparsity.kept_rows(context) if self.rule.caches else 0
        if self.masked is not None:
            self._choose(self.masked)

    @property
    def is_finished(self) -> bool:
        return self.block == len(self.quota_steps)

    @property
    def output_len(self) -> int:
        """Generated tokens of a finished request, up to and including the stop token that ended it."""
        return self.request.generation.gen_length if self.stop is None else self.stop + 1 - self.request.prompt_len

    @property
    def query_tokens(self) -> int:
        if self.chosen.rows:
            return self.chosen.num_rows
        if self.phase is Phase.REUSE:
            return self.window_end - self.block_start - self.settled_rows
        return self.length - self.first_row

    @property
    def quota(self) -> int:
        """Tokens to commit in this step.

        ``even``: n // S, the remainder to the earliest steps of the block; ``timestep``: Dream's schedule. Under parallel decoding it is
        the least number, one; the executor says how many passed.
        """
        return self.chosen.commit if self.chosen.rows else self._num_due

    @property
    def _num_due(self) -> int:
        """Tokens that the schedule commits in this step."""
        if self.masks_left == 0:
            return 0
        if self.decode.first_step == "first_position" and self.step_in_block == 0:
            return 1
        if self.request.generation.anchor_threshold is not None:
            quota, remainder = divmod(self.block_end - self.block_start, self.block_steps)
            return min(self.masks_left, quota + (self.step_in_block < remainder))
        if self.is_open_ended:
            return 0 if self.decode.quota == "origin" else 1
        if self.decode.quota == "timestep":
            return timestep_quota(self.masks_left, self.step_in_block, self.block_steps)
        return -(-self.masks_left // max(1, self.block_steps - self.step_in_block))

    @property
    def commit_probability(self) -> float:
        if self.decode.quota != "origin":
            return 0.0
        return float(commit_share(self.step_in_block, self.block_steps))

    def course(self) -> "Course | None":
        """The steps of the current block; None if the schedule does not decide them."""
        if self._course is None and not (self.is_idle or self.sees or self.is_open_ended or self.masked is not None):
            self._course = course_of(
                self.rule,  # type: ignore[arg-type]
                self.decode,
                self.config.settling,
                self.block_end - self.block_start,
                self.block_steps,
                exact_steps=self.runs_all_steps,
                is_partial=self.first_row > 0,
            )
        return self._course

    def coming_tokens(self) -> Tokens:
        """Return ``query_tokens`` of this step and the later steps of its block, by its ``course``."""
        course = self.course()
        assert course is not None
        window, partial = self.window_end - self.block_start, self.length - self.first_row
        return course.rows(self.length, window, partial)[self.step_in_block :]

    def move(self, times: int) -> None:
        """Book ``times`` executed steps of the block's ``course``, none of them the last."""
        course = self.course()
        assert course is not None
        self.num_steps += times
        self.step_in_block = step = self.step_in_block + times
        self.phase, self.masks_left = course.phases[step], course.masks[step]
        self.settled_rows, self.settled_before = course.settled[step]
        self.has_cache = self.has_cache or Phase.BUILD in course.phases[: step + 1]
        self.first_row = 0
        if self.settles:
            self.masks = course.masks[: step + 1]

    def trajectory(self) -> Iterator[tuple[Phase, int]]:
        """Yield phase and query tokens of this and every later step; they are certain unless ``is_open_ended``.

        An early stop ends the trajectory sooner and changes nothing before.
        """
        sequence = copy(self)
        sequence.held = ()
        while not sequence.is_finished:
            yield sequence.phase, sequence.query_tokens
            sequence.advance(sequence.quota)

    def _choose(self, masked: Rows) -> None:
        """Choose the rows of the next step. A step that computes all rows is a PARTIAL: nothing is packed behind it."""
        standing = Standing(self.block_start, self.block_end, self.step_in_block, masked.masks, self._num_due)
        self.chosen = self.rule.choose(standing)  # type: ignore[attr-defined]
        self.phase = Phase.PARTIAL if self.chosen.num_rows == self.total_len else Phase.REUSE

    def _next_phase(self) -> Phase:
        if self.masked is not None:
            return Phase.REUSE
        phase = self.rule.phase(self.step_in_block)
        if self.sees:
            check_phase(self.rule, phase, has_cache=self.has_cache)
        self.has_cache = self.has_cache or phase is Phase.BUILD
        return phase

    def _settle(self, last_phase: Phase) -> None:
        """After a step of a block, decide which rows the next one leaves out. A full forward caches nothing, so the tokens committed around
        it still need their K and V."""
        self.masks = (*self.masks, self.masks_left)
        leaves_out = self.phase is Phase.REUSE and last_phase is not Phase.FULL
        self.settled_before = self.config.settling.settled_before(self.masks) if leaves_out else 0
        self.settled_rows = self.masks[0] - self.masks[self.settled_before]

    def advance(
        self,
        committed: int,
        stop: int | None = None,
        confidences: tuple[float, ...] = (),
        learned: Learned | None = None,
    ) -> None:
        """Book one executed step. A complete block leads to the next block, or to the end if it holds a stop token, at position
        ``stop``."""
        self.num_steps += 1
        self.masks_left -= committed
        if self.masked is not None:
            places = self.masked.committed(self.chosen, committed, None if learned is None else learned.places)
            learned = Learned(places) if learned is None else learned
        if self.sees:
            facts = Seen(self.block, self.step_in_block, self.phase, committed, self.masks_left, confidences, learned)
            self.rule.see(facts)  # type: ignore[attr-defined]
        self.step_in_block += 1
        if not self.is_idle:
            # A sampler that commits the mask token commits that position again, and so commits more than the block holds.
            block_done = self.step_in_block == self.block_steps if self.runs_all_steps else self.masks_left <= 0
            if not block_done:
                before, self.phase = self.phase, self._next_phase()
                self.first_row = 0
                if self.settles:
                    self._settle(before)
                if self.masked is not None:
                    self._choose(self.masked)
                return
            self.stop = stop
            if stop is None and self.block + 1 < len(self.quota_steps):
                self._enter(self.block + 1)
                return
            self.masks_left = 0
        # A member of a static batch stays in its last block until its batch ends.
        self.is_idle, self._course = self.num_steps < len(self.held), None
        if self.is_idle:
            self.phase = self.held[self.num_steps]
        else:
            self.block = len(self.quota_steps)


class Course:
    """The steps of a block that the schedule decides, in order. Masks left and settled rows are those at a step's start."""

    def __init__(self, steps: list[tuple[Phase, int, int, tuple[int, int]]]) -> None:
        self.phases, self.quotas, self.masks, self.settled = zip(*steps, strict=True)
        kinds = list(zip(self.phases, self.quotas, strict=True))
        self.turns = [step for step in range(1, len(kinds)) if kinds[step] != kinds[step - 1]]
        """Steps whose phase or quota differs from the step before."""
        self.is_build, self.is_reuse, self.is_partial = (
            np.array([phase is kind for phase in self.phases], dtype=np.int64)
            for kind in (Phase.BUILD, Phase.REUSE, Phase.PARTIAL)
        )
        self.is_refresh = 1 - self.is_reuse - self.is_partial
        self.num_settled = np.array([rows for rows, _ in self.settled], dtype=np.int64)

        self.rows: Callable[[int, int, int], Tokens] = lru_cache(maxsize=1024)(self._rows)

    def _rows(self, whole: int, window: int, partial: int) -> Tokens:
        """Query rows of each step, given those of a Refresh, a Reuse and a partial Refresh."""
        return whole * self.is_refresh + window * self.is_reuse + partial * self.is_partial - self.num_settled


@lru_cache(maxsize=256)
def course_of(
    rule: RefreshRule,
    decode: DecodeConfig,
    settling: Settling,
    length: int,
    num_steps: int,
    *,
    exact_steps: bool,
    is_partial: bool,
) -> Course:
    """Return the course of any block of this length; ``is_partial`` if its first step leaves out rows before it."""
    generation = GenerationConfig(gen_length=length, block_length=length, steps=num_steps)
    request = Request(request_id=0, prompt_len=1, generation=generation)
    sequence = Sequence(request, rule, EngineConfig(decode=decode, settling=settling), exact_steps=exact_steps)
    steps: list[tuple[Phase, int, int, tuple[int, int]]] = []
    while not sequence.is_finished:
        phase = Phase.PARTIAL if is_partial and not steps else sequence.phase
        steps.append((phase, sequence.quota, sequence.masks_left, (sequence.settled_rows, sequence.settled_before)))
        sequence.advance(sequence.quota)
    return Course(steps)


class Coming:
    """Sums over requests of what they take in the coming steps, by kind and by number of step."""

    def __init__(self, num_kinds: int) -> None:
        self._num_kinds = num_kinds
        self._sums: Tokens
        self._first: int | None = None

    def add(self, number: int, totals: Tokens) -> None:
        """Add a request's ``totals`` [kinds, steps] from step ``number`` on; sums of earlier steps may be forgotten."""
        if self._first is None:
            self._first, self._sums = number, np.zeros((self._num_kinds, 256), dtype=np.int64)
        start, num_steps = number - self._first, totals.shape[1]
        if start + num_steps > self._sums.shape[1]:
            zeros = np.zeros((self._num_kinds, 256 + num_steps), dtype=np.int64)
            self._sums = np.concatenate((self._sums[:, start:], zeros), axis=1)
            self._first, start = number, 0
        self._sums[:, start : start + num_steps] += totals

    def at(self, number: int) -> list[int]:
        """Return the sums, by kind, of a step that some request takes part in."""
        assert self._first is not None
        sums: list[int] = self._sums[:, number - self._first].tolist()
        return sums


def hold_together(members: Collection[Sequence]) -> None:
    """Have members of a static batch run as long as the longest of them: published code pads a batch to one gen_length."""
    if len(members) > 1:
        # Members with the same settings have the same phases, whatever their prompts, unless rows are chosen or a rule sees.
        differing = {
            id(member)
            if member.sees or member.masked is not None
            else replace(member.request.generation, seed=0): member
            for member in members
        }
        longest = max(([phase for phase, _ in member.trajectory()] for member in differing.values()), key=len)
        for member in members:
            member.held = tuple(longest)
