"""Request-level FCFS with a fixed batch size, padded to its longest member; plain policy, no torch. Also finds the largest batch that
fits in memory, by running batches (the paper's "preliminary profiling", §6.1).

The search doubles sizes, then approaches the limit in halving strides. It runs a size only if a straight line through the last two peaks
leaves room for it. A padded batch takes the same memory for each member; the guard band, which the limit leaves free, covers what the
line misses.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from engines.dllm.config import DecodeConfig, EngineConfig, GenerationConfig, Phase, RefreshRule
from engines.dllm.memory import GUARD_FRACTION
from engines.dllm.plan import Request, StepPlan
from engines.dllm.scheduling import KvPool, Scheduler, plan_item
from engines.dllm.sequence import Coming, Sequence, hold_together
from engines.errors import UserError, require
from engines.models.shape import ModelShape

Phases = tuple[Phase, ...]


def check_in_step(generation: GenerationConfig, decode: DecodeConfig, batch_size: int) -> None:
    """Refuse settings under which members of a static batch would commit different numbers of tokens per step."""
    alone = "ends requests of a static batch at different steps, and its members must stay in step: add --batch-size 1"
    require(
        batch_size == 1 or not generation.is_parallel,
        "{}={}: parallel decoding {}".format(*generation.parallel_by or ("", ""), alone),
    )
    require(batch_size == 1 or not generation.stop_at_eos, f"stop_at_eos=True {alone}")
    require(batch_size == 1 or decode.quota != "origin", f"alg='origin' {alone}")


class StaticBatchScheduler(Scheduler):
    """Forms a batch only when nothing runs: the oldest waiting request and the next ones that fit with it, at most ``batch_size``. All
    members are in the same phase at every step and end with the longest; a member with all its tokens is still computed.
    ``mixes_lengths``: whether requests with different gen_length can share a batch. ``room``: whether a batch of a longest length and a
    number of members fits in memory, if ``batch_size`` alone does not tell."""

    repeats = True

    def __init__(
        self,
        config: EngineConfig,
        pool: KvPool,
        rule: RefreshRule,
        *,
        batch_size: int,
        exact_steps: bool = True,
        mixes_lengths: bool = True,
        room: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__(config, pool, rule, exact_steps=exact_steps)
        require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
        self.batch_size, self._mixes_lengths, self._room = batch_size, mixes_lengths, room
        self._pad_to = 0
        self._known: dict[GenerationConfig, Phases] = {}

    def submit(self, request: Request) -> None:
        check_in_step(request.generation, self.config.decode, self.batch_size)
        super().submit(request)

    def cancel(self, request_id: int) -> bool:
        """Cancel a waiting request only: the slabs of a running batch stay evenly spaced to its end."""
        require(
            all(sequence.request.request_id != request_id for sequence in self.running),
            f"request {request_id} runs in a static batch, whose members end together: wait for its end",
        )
        return super().cancel(request_id)

    def charge(self, sequence: Sequence) -> int:
        return sequence.query_tokens

    def schedule(self) -> StepPlan | None:
        admitted: list[Request] = []
        if not self.running:
            self._form_batch()
            admitted = [sequence.request for sequence in self.running]
        if not self.running:
            return None
        self._coming = Coming(1)
        running, rows = self.running, self._pad_to
        if not running[0].phase.is_refresh:
            rows = max([sequence.window_end - sequence.block_start for sequence in running])
        return StepPlan(tuple(map(plan_item, running)), tuple(admitted), rows * len(running), self._pad_to)

    def follow(self, begun: Iterable[int], number: int) -> StepPlan | None:
        members = [self._by_id[request_id] for request_id in begun]
        window = max([sequence.window_end - sequence.block_start for sequence in members], default=0)
        for sequence in members:
            course = sequence.course()
            assert course is not None
            self._coming.add(number, course.rows(self._pad_to, window, 0)[None, sequence.step_in_block :])
        if not self.running:
            return None
        (charged,) = self._coming.at(number)
        return StepPlan(tuple(map(plan_item, members)), (), charged, self._pad_to)

    def _form_batch(self) -> None:
        """Give members equal slabs, so that the padded cache is one strided view of the pool. Requests that do not fit with the oldest
        wait until they are the oldest."""
        if not self.waiting:
            return
        members, phases = [self.waiting[0]], self._phases(self.waiting[0])
        for sequence in islice(self.waiting, 1, None):
            if len(members) == self.batch_size:
                break
            short, long = sorted((phases, self._phases(sequence)), key=len)
            if (
                not self._mixes_lengths
                and sequence.request.generation.gen_length != members[0].request.generation.gen_length
            ):
                continue
            if short != long[: len(short)]:
                continue
            if max(member.kv_rows for member in (*members, sequence)) * (len(members) + 1) > self.pool.num_rows:
                break
            longest = max(member.request.total_len for member in (*members, sequence))
            if self._room is not None and not self._room(longest, len(members) + 1):
                break
            members.append(sequence)
            phases = long
        slab = max(sequence.kv_rows for sequence in members)
        self.running = members
        for sequence in members:
            self.waiting.remove(sequence)
            sequence.kv_rows = slab
            reserved = self._reserve(sequence)
            assert reserved, "an empty pool holds the slabs just counted"
        hold_together(members)
        self._pad_to = max(sequence.request.total_len for sequence in members)

    def _phases(self, sequence: Sequence) -> Phases:
        """Return the phases of all its steps; none if it runs alone, as its steps may be unknown."""
        if self.batch_size == 1:
            return ()
        generation = replace(sequence.request.generation, seed=0)
        if generation not in self._known:
            self._known[generation] = tuple(phase for phase, _ in sequence.trajectory())
        return self._known[generation]


@dataclass(frozen=True, kw_only=True)
class StaticFootprint:
    """Memory of a padded batch in its largest step: a fixed part and one per member, with all members at the longest length."""

    fixed_bytes: int
    per_request_bytes: int

    def peak_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.per_request_bytes


def base_bytes(shape: ModelShape, memory_bytes: int) -> int:
    """Weights and guard band, held even without requests."""
    return shape.weight_bytes + round(memory_bytes * GUARD_FRACTION)


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    size: int
    peak_bytes: int
    """Peak of the largest step, with everything included."""
    probes: tuple[tuple[int, int], ...]
    """(size, peak) of every batch that was run, in order."""


def largest_batch(peak_bytes: Callable[[int], int], limit_bytes: int, *, fixed_bytes: int = 0, most: int) -> FoundBatch:
    """Return the largest size of 1 to ``most`` whose ``peak_bytes`` is within the limit. Raises UserError if even one member is too
    large.

    ``fixed_bytes`` is held without any member, and gives the line's first point. Only a batch of one is run on no more evidence than
    that.
    """
    probes: list[tuple[int, int]] = []
    fitting = [(0, fixed_bytes)]
    stride, is_doubling, ceiling = 1, True, most
    while stride:
        size = fitting[-1][0] + stride
        is_safe = len(fitting) == 1
        if not is_safe:
            (n0, peak0), (n1, peak1) = fitting[-2:]
            # By the straight line through the last two, rounded up.
            is_safe = peak1 - (peak0 - peak1) * (size - n1) // (n1 - n0) <= limit_bytes
        if size <= ceiling and is_safe:
            peak = peak_bytes(size)
            probes.append((size, peak))
            if peak <= limit_bytes:
                fitting.append((size, peak))
                # While approaching, we repeat the same stride: the line may have become flatter.
                stride = size if is_doubling else stride
                continue
            if size == 1:
                raise UserError(
                    f"memory_bytes={limit_bytes}: budget too small for one request in a static batch, which takes "
                    f"{peak} bytes: give more memory or shorten the requests"
                )
            ceiling = size - 1
        stride, is_doubling = stride // 2, False
    size, peak = fitting[-1]
    return FoundBatch(size=size, peak_bytes=peak, probes=tuple(probes))
