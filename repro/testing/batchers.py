"""What a batching policy of autoregressive systems is held to, on the queue that it takes prefills from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engines.errors import RunError, UserError
from engines.policies.own import taken
from engines.policies.views import Batching, OpenQueue, PrefillQueue
from repro.testing.examples import Source
from repro.testing.prefills import (
    SLO,
    STEPS,
    Sessions,
    Step,
    Turns,
    Watched,
    check_sessions,
    draw_sessions,
    draw_siege,
    draw_turns,
    other_name,
    stays_of,
)
from repro.testing.properties import Bound, Kind, Property, bound_of, check_waits, made, no_starvation

_SIZES = ("max_num_batched_tokens", "max_num_seqs")
_LONGEST = 2048
"""Tokens of the longest prompt where a policy has no budget of tokens."""


@dataclass(frozen=True, kw_only=True)
class BatchingPolicy:
    """The policy that ``make`` is, or gives; it is told ``max_num_batched_tokens``, ``max_num_seqs``, ``model`` and ``slo`` where it
    takes them."""

    make: Any
    queue: Callable[[], PrefillQueue] = OpenQueue
    longest_wait: Bound | None = None

    def __post_init__(self) -> None:
        if not hasattr(self._one, "next_step"):
            raise UserError(
                f"{self._one!r:.80} is no batching policy, it has no next_step(): name one, or what makes one"
            )

    @cached_property
    def _one(self) -> Batching:
        try:
            return self.policy(_LONGEST, 8)
        except RunError as error:
            raise UserError(f"no batching policy is made of {' and '.join(_SIZES)}, model and slo: {error}") from error

    def policy(self, cap: int, max_num_seqs: int) -> Batching:
        sizes = dict(zip(_SIZES, (cap, max_num_seqs), strict=True))
        found: Batching = made(self.make, **sizes, model=STEPS, slo=SLO)
        return found

    def watched(self, case: Turns | Sessions) -> Watched:
        return Watched(self.policy(case.cap, case.max_num_seqs))

    def steps(self, turns: Turns) -> list[Step]:
        watched = self.watched(turns)
        turns.simulate(watched, self.queue)
        return watched.steps

    @cached_property
    def takes_cap(self) -> bool:
        return _SIZES[0] in taken(self.make, *_SIZES)

    @cached_property
    def takes_places(self) -> bool:
        return _SIZES[1] in taken(self.make, *_SIZES)

    @cached_property
    def own_cap(self) -> int | None:
        return None if self.takes_cap else getattr(self._one, _SIZES[0], None)

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self._one, self.longest_wait)

    def cap(self, source: Source) -> int:
        """No prompt of an example is longer: a policy may run prompts whole."""
        return source.whole(16, 512) if self.takes_cap else self.own_cap or _LONGEST


def _turns(source: Source, subject: BatchingPolicy) -> Turns:
    return draw_turns(source, subject.cap(source))


def _besieged(source: Source, subject: BatchingPolicy) -> Turns:
    return draw_siege(source, subject.cap(source))


def _with_decoding(source: Source, subject: BatchingPolicy) -> Sessions:
    return draw_sessions(source, subject.cap(source))


def _in_little_memory(source: Source, subject: BatchingPolicy) -> Sessions:
    return draw_sessions(source, subject.cap(source), is_tight=True)


def _cut(source: Source, subject: BatchingPolicy) -> tuple[Turns, float]:
    turns = _turns(source, subject)
    return turns, source.one_of(turns.turns).arrival_s


def _otherwise(source: Source, subject: BatchingPolicy) -> tuple[Turns, int]:
    return _turns(source, subject), source.one_of((1, 37, 1008))


def _conservation(subject: BatchingPolicy, case: Sessions) -> None:
    run = case.simulate(batching=subject.watched(case), make_queue=subject.queue)
    check_sessions(run, case.sessions)


def _cap(subject: BatchingPolicy, case: Turns) -> None:
    for step in subject.steps(case):
        tokens = sum(tokens for _, tokens in step.shares) + step.decoding
        if tokens > case.cap:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s computes {tokens} tokens of prefills {_listed(step.shares)}, "
                f"max_num_batched_tokens={case.cap}"
            )
        if subject.takes_places and len(step.shares) > case.max_num_seqs:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s runs {len(step.shares)} prefills, max_num_seqs={case.max_num_seqs}"
            )


def _memory(subject: BatchingPolicy, case: Sessions) -> None:
    watched = subject.watched(case)
    run = case.simulate(batching=watched, make_queue=subject.queue)
    for step in watched.steps:
        if step.needs > step.room:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s admits prefills {_listed(step.shares)} with {step.needs} tokens of K/V, there "
                f"is room for {step.room}"
            )
    check_sessions(run, case.sessions)


def _causality(subject: BatchingPolicy, case_and_time: tuple[Turns, float]) -> None:
    """All of it runs first: what the policy keeps of it elsewhere would be the future of the second run."""
    case, time_s = case_and_time
    known = case.until(time_s)
    if not known.turns:
        return
    whole = [step for step in subject.steps(case) if step.start_s < time_s]
    cut = [step for step in subject.steps(known) if step.start_s < time_s]
    _check_alike(whole, cut, f"nothing comes from {time_s:.4g} s on")


def _same_names(subject: BatchingPolicy, case_and_factor: tuple[Turns, int]) -> None:
    case, factor = case_and_factor
    before, after = subject.steps(case), subject.steps(case.named_otherwise(factor))
    said = ", ".join(f"{turn.session_id} is {other_name(turn.session_id, factor)}" for turn in case.turns)
    _check_alike(before, after, f"ids of sessions are others ({said})")


def _check_alike(steps: Sequence[Step], others: Sequence[Step], where: str) -> None:
    for step, other in zip(steps, others, strict=False):
        if (step.start_s, step.shares) != (other.start_s, other.shares):
            raise AssertionError(
                f"the step at {step.start_s:.4g} s runs prefills {_listed(step.shares)}, and {_listed(other.shares)} at "
                f"{other.start_s:.4g} s where {where}"
            )
    if len(steps) != len(others):
        raise AssertionError(f"{len(steps)} steps begin, and {len(others)} where {where}")


def _listed(shares: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{task_id} ({tokens} tokens)" for task_id, tokens in shares)


def _no_starvation(subject: BatchingPolicy, case: Turns) -> None:
    watched = subject.watched(case)
    stays = stays_of(case.simulate(watched, subject.queue))
    step_s = max(STEPS.prefill_s(0, sum(tokens for _, tokens in step.shares)) for step in watched.steps)
    check_waits(stays, step=step_s, bound=bound_of(watched.batching, subject.longest_wait), unit="s")


def _no_cap(subject: BatchingPolicy) -> str | None:
    return None if subject.takes_cap or subject.own_cap else "it takes and has no max_num_batched_tokens"


BATCHER: Kind[BatchingPolicy] = Kind(
    name="batcher",
    properties=(
        Property(name="conservation", draw=_with_decoding, check=_conservation),
        Property(name="cap", draw=_turns, check=_cap, without=_no_cap),
        Property(name="little memory", draw=_in_little_memory, check=_memory),
        Property(name="causality", draw=_cut, check=_causality),
        no_starvation(_besieged, _no_starvation),
        Property(name="independence of ids", draw=_otherwise, check=_same_names),
    ),
)
