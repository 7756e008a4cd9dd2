"""Workers without processes: each makes what it is given when it is told to, or is lost."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from repro.runs.experiment import Experiment
from repro.runs.pool import Packing, Start, WorkerLost
from repro.runs.provenance import GitState

PACKING = Packing(git=GitState(commit=None, dirty=None), command=("repro", "bench"))


class Lost(Exception):
    """What a fake worker's futures hold once it is gone."""


@dataclass(eq=False)
class FakeWorker:
    """``dies_at``: how many runs it has made when it is lost, in the middle of the next; negative before it begins."""

    where: str
    dies_at: int | None
    log: list[tuple[str, int]]
    """(worker, seed), as runs are begun."""
    is_dead: bool = False
    is_closed: bool = False
    num_made: int = 0
    gone: str | None = None
    """What it needs, which is no longer there: it never begins."""

    def hopeless(self) -> str | None:
        return self.gone

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        """Makes it at once: a pool never has to wait."""
        assert not self.is_closed
        assert not self.is_dead
        future: Future[Any] = Future()
        try:
            if experiment is not None:
                self._make(experiment, future)
            elif self.gone is None:
                self._begin(future)
        except Exception as error:
            future.set_exception(error)
        return future

    def _begin(self, future: Future[Any]) -> None:
        if self.dies_at is not None and self.dies_at < 0:
            raise Lost
        future.set_result(None)

    def _make(self, experiment: Experiment, future: Future[Any]) -> None:
        self.log.append((self.where, experiment.cell.seed))
        self.is_dead = self.num_made == self.dies_at
        self.num_made += 1
        if self.is_dead:
            raise Lost
        future.set_result(PACKING.make(experiment))

    def result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except Lost as error:
            raise WorkerLost(f"the worker on {self.where} was lost") from error


@dataclass
class FakeCluster:
    """``deaths``: ``dies_at`` of the workers in the order in which they start; the others live."""

    deaths: list[int | None] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)
    """What workers need that is no longer there, by the order in which they start."""
    workers: list[FakeWorker] = field(default_factory=list)

    def starts(self, num: int) -> list[Start]:
        start: Callable[[], Any] = self._worker
        return [start] * num

    @contextmanager
    def _worker(self) -> Iterator[FakeWorker]:
        place = len(self.workers)
        dies_at = self.deaths[place] if place < len(self.deaths) else None
        worker = FakeWorker(where=f"node {place}", dies_at=dies_at, log=self.log, gone=self.gone.get(place))
        self.workers.append(worker)
        try:
            yield worker
        finally:
            worker.is_closed = True
