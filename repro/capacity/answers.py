"""The answers to a question, of all sites and sizes.

Those of a site come one after the other, small sizes first, as each search begins where the answer before says. Sites are searched side
by side, by processes that share nothing, so that no answer hangs on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial

from engines.errors import RunError
from engines.runtime.signals import held
from repro.capacity.question import Question, Sizes
from repro.capacity.search import Lattice
from repro.capacity.site import Site
from repro.capacity.study import Answer, fewest_gpus, largest_rate
from repro.cores import usable_cores
from repro.runs.experiment import held_here
from repro.runs.workers import LOST, worker_processes

FEW_SESSIONS = 1000
"""Sessions of all seeds and sizes together, below which another process costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class Search:
    question: Question
    sizes: Sizes
    rate: float | None
    """Asked for with the fewest GPUs; None asks for the largest of each size."""
    resolution: float

    def answers(
        self, sites: Sequence[Site], advance: Callable[[], None], num_processes: int | None = None
    ) -> list[Answer]:
        """Best first. ``advance`` is called as each comes, ``num_processes`` None leaves to the machine and the work."""
        rows = [_Row(search=self, site=site, sizes=self._sizes(site)) for site in sites]
        num = self._num_processes(rows) if num_processes is None else num_processes
        if num == 1:
            for row in rows:
                while (task := row.task()) is not None:
                    row.answers.append(task())
                    advance()
        else:
            _side_by_side(rows, num, advance)
        found = [answer for row in rows for answer in row.answers]
        if self.rate is None:
            return sorted(found, key=lambda each: (-(each.rate or 0.0), each.gpus))
        return sorted(found, key=lambda each: (each.plan is None, each.gpus, -each.at.attainment if each.at else 0.0))

    def _sizes(self, site: Site) -> list[tuple[int, ...]]:
        """Numbers of GPUs by the answers that are of them."""
        return [self.sizes.fitting(site)] if self.rate is not None else [(gpus,) for gpus in self.sizes.halved(site)]

    def _num_processes(self, rows: Sequence[_Row]) -> int:
        num_prompts, num_seeds = self.question.num_prompts, self.question.num_seeds
        is_little = (
            num_prompts is not None and num_prompts * num_seeds * sum(len(row.sizes) for row in rows) < FEW_SESSIONS
        )
        if is_little or any(held_here(row.site.cell, elsewhere=False) is not None for row in rows):
            return 1
        return min(usable_cores(), len(rows))

    def answer(self, site: Site, gpus: Sequence[int], start: float | None) -> Answer:
        """The answer of one size, or of the fewest of several; ``start`` is about the rate, where another answer tells."""
        objectives, num_seeds = self.question.objectives(), self.question.num_seeds
        sized = self.question.of_size(site, gpus[-1], start if self.rate is None else self.rate)
        if self.rate is not None:
            return fewest_gpus(sized, gpus, objectives, self.rate, num_seeds)
        return largest_rate(sized, gpus[-1], objectives, Lattice(resolution=self.resolution), num_seeds, start)


@dataclass(kw_only=True)
class _Row:
    """The answers of a site, one after the other."""

    search: Search
    site: Site
    sizes: Sequence[tuple[int, ...]]
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.answers) == len(self.sizes)

    def task(self) -> Callable[[], Answer] | None:
        """What makes the next answer, in whatever process; None after the last."""
        if self.is_over:
            return None
        gpus, start = self.sizes[len(self.answers)], None
        if self.answers and (last := self.answers[-1]).rate:
            start = last.rate * gpus[-1] / last.gpus
        return partial(self.search.answer, self.site, gpus, start)


def _side_by_side(rows: Sequence[_Row], num_processes: int, advance: Callable[[], None]) -> None:
    """Raises what a single process would: the error of the first site that has one."""
    with worker_processes(num_processes) as pool:
        running: dict[Future[Answer], _Row] = {}

        def go_on(row: _Row) -> None:
            if (task := row.task()) is not None:
                with held():  # the first ones start the processes
                    running[pool.submit(task)] = row

        for row in rows:
            go_on(row)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                row = running.pop(future)
                try:
                    row.answers.append(future.result())
                except BrokenProcessPool as error:
                    raise RunError(LOST) from error
                except Exception as error:
                    row.error = error
                else:
                    advance()
                    go_on(row)
            unsettled = next((row for row in rows if row.error is not None or not row.is_over), None)
            if unsettled is not None and unsettled.error is not None:
                raise unsettled.error
