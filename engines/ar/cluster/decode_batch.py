"""Sequences that decode together, one token a step each.

While the members stay the same, steps are not events: a run of them is charged at once. Nothing is
counted per member and step. A member leaves at a known step, and the gaps between its tokens are those
of the batch, which are logged once, from its second token on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from engines.ar.cluster.worker import Live
from engines.ar.record import Stay, TokenLog
from engines.ar.window import TokenRun
from engines.cost.roofline import DecodeLine


class Run(NamedTuple):
    """Steps in which nobody joins or leaves; each is longer than the one before by what the context grew."""

    start_s: float
    first_s: float
    growth_s: float
    steps: int

    def after_s(self, steps: int) -> float:
        """Duration of the first ``steps``."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_by(self, now: float) -> int:
        """Steps that have ended by ``now``."""
        elapsed = now - self.start_s
        if self.growth_s:
            linear = self.first_s / self.growth_s - 0.5
            guess = math.floor(math.sqrt(linear * linear + 2 * elapsed / self.growth_s) - linear)
        else:
            guess = math.floor(elapsed / self.first_s)
        while guess < self.steps and self.after_s(guess + 1) <= elapsed:
            guess += 1
        while guess > 0 and self.after_s(guess) > elapsed:
            guess -= 1
        return min(guess, self.steps)

    def cut_at(self, now: float) -> Run:
        """The same run up to the next token boundary: a step that has begun is finished."""
        done = self.steps_by(now)
        if done == 0 or self.start_s + self.after_s(done) < now:
            done += 1
        return Run(self.start_s, self.first_s, self.growth_s, min(done, self.steps))


@dataclass(slots=True, eq=False)
class DecodeBatch:
    size: int = 0
    steps: int = 0
    """Steps so far, over all runs."""
    context: int = 0
    """Tokens of the members, summed."""
    token_s: float = 0.0
    """End of the last step."""
    log: TokenLog = field(default_factory=TokenLog)
    _members: dict[int, Live] = field(default_factory=dict)
    _finish: list[tuple[int, int]] = field(default_factory=list)
    _joined: list[Live] = field(default_factory=list)

    def join(self, live: Live) -> None:
        """``live`` has a newest token and at least one to come."""
        live.joined_step = self.steps
        live.finish_step = self.steps + live.left
        live.stay_start = -1
        self._members[live.order] = live
        heappush(self._finish, (live.finish_step, live.order))
        self._joined.append(live)
        self.context += live.context
        self.size += 1

    def next_finish(self) -> int:
        """Steps until the first member has all its tokens."""
        return self._finish[0][0] - self.steps

    def finished(self) -> list[Live]:
        """Members that have all their tokens leave, those that came first to their end first, then the older."""
        left = []
        while self._finish and self._finish[0][0] <= self.steps:
            live = self._members[heappop(self._finish)[1]]
            self.leave(live)
            left.append(live)
        return left

    def youngest(self) -> Live:
        return self._members[max(self._members)]

    def leave(self, live: Live) -> None:
        """Bring the member's state up to date and let it go."""
        del self._members[live.order]
        if live.finish_step > self.steps:
            self._finish.remove((live.finish_step, live.order))
            heapify(self._finish)
        steps = self.steps - live.joined_step
        live.context += steps
        live.left -= steps
        self.context -= live.context
        self.size -= 1
        if live.stay_start < 0:
            self._joined.remove(live)  # it had no token here
        else:
            live.token_s = self.token_s
            self.log.stays.append(Stay(live.row, live.first_gap_s, live.stay_start, len(self.log.gaps)))

    def run(self, start_s: float, steps: int, line: DecodeLine) -> Run:
        """At most ``steps`` steps, fewer where the context outgrows the line's floor on the way."""
        base, slope, floor = line
        first = base + slope * self.context
        growth = slope * self.size
        if first >= floor or growth == 0:
            return Run(start_s, max(first, floor), growth if first >= floor else 0.0, steps)
        return Run(start_s, floor, 0.0, min(steps, math.ceil((floor - first) / growth)))

    def advance(self, run: Run, end_s: float) -> tuple[TokenRun, ...]:
        """Log the run; what it means for the windowed ITL."""
        gaps, counts = self.log.gaps, self.log.counts
        parts = even = self.token_runs(run, run.steps)
        if self._joined or run.start_s != self.token_s:
            first_end = run.start_s + run.first_s
            gaps.append(first_end - self.token_s)
            counts.append(1)
            for live in self._joined:
                live.first_gap_s = first_end - live.token_s
                live.stay_start = len(gaps)
            self._joined.clear()
            even = parts[1:]
        for part in even:
            gaps.append(part.gap_s)
            counts.append(part.steps)
        self.steps += run.steps
        self.context += run.steps * self.size
        self.token_s = end_s
        return parts

    def token_runs(self, run: Run, steps: int) -> tuple[TokenRun, ...]:
        """The tokens of its first ``steps`` for a windowed mean; the first step apart where someone joined or the batch stood
        still: its gap differs from the next ones, or between members."""
        first_end = run.start_s + run.first_s
        if not self._joined and run.start_s == self.token_s:
            gap = run.after_s(steps) / steps
            return (TokenRun(run.start_s, gap, steps, self.size, gap),)
        waited = (self.size - len(self._joined)) * (first_end - self.token_s)
        waited += math.fsum([first_end - live.token_s for live in self._joined])
        first = TokenRun(run.start_s, run.first_s, 1, self.size, waited / self.size)
        if steps == 1:
            return (first,)
        gap = (run.after_s(steps) - run.first_s) / (steps - 1)
        return first, TokenRun(first_end, gap, steps - 1, self.size, gap)
