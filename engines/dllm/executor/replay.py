"""A simulated run follows what a measured one did: its commits, stops and refreshes, at the cost of another card.

What the model decides, how many tokens a step commits, when a rule refreshes and where a request stops, does not depend on the
batch, so it is the same whenever and in whatever company a request runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engines.dllm.config import GenerationConfig
from engines.dllm.phase import Phase, RefreshRule, Seen, Window
from engines.dllm.plan import DelegatingExecutor, Executor, Request, StepOutcome, StepPlan
from engines.errors import UserError, require

LETTERS = {"f": Phase.FULL, "b": Phase.BUILD, "p": Phase.PARTIAL, "r": Phase.REUSE}
"""How a step's phase is written."""


class Block(NamedTuple):
    """What the steps of one block did."""

    phases: tuple[Phase, ...]
    committed: tuple[int, ...]
    stop: int | None = None
    """The place of the stop token that ended it; None of a block that none did."""


Path = tuple[Block, ...]


class Recording(DelegatingExecutor):
    """Notes what every request's steps did, whoever asks for them."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.steps: dict[int, dict[int, list[tuple[Phase, int]]]] = {}
        """By request and by its block's first position."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.execute(plan)
        for item, count in zip(plan.items, outcome.committed, strict=True):
            self.steps.setdefault(item.request_id, {}).setdefault(item.block_start, []).append((item.phase, count))
        return outcome


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The paths to follow, by request."""

    paths: Mapping[int, Path]

    def check(self, request: Request) -> None:
        path = self.paths.get(request.request_id)
        require(path is not None, f"replay has no request {request.request_id}: it asks other requests than its run")
        assert path is not None
        generation, lengths = request.generation, block_lengths(request.generation)
        stops = path[-1].stop is not None
        fits = [sum(block.committed) == length for block, length in zip(path, lengths, strict=False)]
        require(
            all(fits) and (len(path) == len(lengths) or stops),
            f"replay of request {request.request_id} has blocks of {', '.join(str(sum(b.committed)) for b in path)} tokens, "
            f"where gen_length={generation.gen_length} and block_length={generation.block_length} ask for others: give those "
            f"of the run",
        )


def block_lengths(generation: GenerationConfig) -> list[int]:
    ends = [*range(0, generation.gen_length, generation.block_length), generation.gen_length]
    return [after - before for before, after in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class ReplayedRule:
    """Refreshes where the run did. Only for one whose own rule sees what a model gives: of any other the rule itself is asked."""

    rule: RefreshRule
    replayed: Replayed
    needs: Collection[str] = frozenset()

    @property
    def caches(self) -> bool:
        return self.rule.caches

    @property
    def window(self) -> Window:
        return self.rule.window

    def phase(self, step_in_block: int) -> Phase:
        raise AssertionError("every request has a rule of its own")

    def see(self, seen: Seen) -> None:
        raise AssertionError("every request has a rule of its own")

    def of(self, request: Request) -> _OfRequest:
        self.replayed.check(request)
        return _OfRequest(self.rule, self.replayed.paths[request.request_id])


class _OfRequest:
    needs: Collection[str] = frozenset()

    def __init__(self, rule: RefreshRule, path: Path) -> None:
        self.caches, self.window, self._path = rule.caches, rule.window, path
        self._block = -1

    def phase(self, step_in_block: int) -> Phase:
        self._block += step_in_block == 0
        phase = self._path[self._block].phases[step_in_block]
        return Phase.BUILD if phase is Phase.PARTIAL else phase  # of which it is made again

    def see(self, seen: Seen) -> None:
        return


class ReplayingExecutor(DelegatingExecutor):
    """Charges steps as ``executor`` does, and commits and stops as the run did."""

    def __init__(self, executor: Executor, replayed: Replayed) -> None:
        super().__init__(executor)
        self._replayed = replayed
        self._requests: dict[int, Request] = {}

    def validate(self, request: Request) -> None:
        self._replayed.check(request)
        self._requests[request.request_id] = request

    def release(self, request_id: int) -> tuple[int, ...] | None:
        del self._requests[request_id]
        return super().release(request_id)

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.execute(plan)
        committed, stops = [], {}
        for item in plan.items:
            request = self._requests[item.request_id]
            place = (item.block_start - request.prompt_len) // request.generation.block_length
            block = self._replayed.paths[item.request_id][place]
            committed.append(block.committed[item.step_in_block])
            if block.stop is not None and item.step_in_block == len(block.committed) - 1:
                stops[item.request_id] = item.block_start + block.stop
        return outcome._replace(committed=tuple(committed), stops=stops)


def drawn(paths: Collection[Path], requests: Sequence[Request], seed: int) -> Replayed:
    """For other requests than the run's: each block that of some request of the run, of the same length, drawn evenly and by the
    request's number alone. A block that a stop token ended has all its steps; no request stops early."""
    whole: dict[int, list[Block]] = {}
    for path in paths:
        for block in path:
            whole.setdefault(sum(block.committed), []).append(block._replace(stop=None))
    found = {}
    for request in requests:
        rng = np.random.default_rng([seed, request.request_id])
        chosen: list[Block] = []
        for length in block_lengths(request.generation):
            if length not in whole:
                known = ", ".join(map(str, sorted(whole))) or "none"
                raise UserError(
                    f"block_length={request.generation.block_length}: the run to replay has no block of {length} tokens, "
                    f"only of {known}: give a length of its blocks"
                )
            chosen.append(whole[length][int(rng.integers(len(whole[length])))])
        found[request.request_id] = tuple(chosen)
    return Replayed(paths=found)
