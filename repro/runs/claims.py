"""Units that a sweep keeps from other sweeps while it makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack

from repro.runs.experiment import Experiment
from repro.runs.store import Store, StoredRun
from repro.runs.unit import broken, together

logger = logging.getLogger(__name__)

OnReused = Callable[[Experiment, StoredRun], None]


class Claims:
    """``seen`` says how each cell was stored when the sweep looked; ``on_reused`` hears of runs that another sweep has made
    since."""

    def __init__(self, store: Store, seen: Mapping[str, tuple[int, int] | None], on_reused: OnReused) -> None:
        self._store = store
        self._seen = seen
        self._on_reused = on_reused
        self.busy: list[Sequence[Experiment]] = []
        """Units that others were making when they were asked for."""

    def take(self, unit: Sequence[Experiment], *, wait: bool = False) -> ExitStack | None:
        """What gives the unit back; None where it is not to be made: others are at it, or have made it. ``wait`` for those
        others, which must not be done with units in hand: they may be waiting too."""
        with ExitStack() as held:
            if not held.enter_context(self._store.claim([experiment.cell for experiment in unit], wait=wait)):
                self.busy.append(unit)
                return None
            if runs := self._made_meanwhile(unit):
                for experiment in unit:
                    self._on_reused(experiment, runs[experiment.cell.key])
                return None
            return held.pop_all()

    def one_by_one(self, experiments: Sequence[Experiment]) -> Generator[Experiment]:
        """Unit by unit, each held until the next is asked for. Those that others are making come last."""
        for unit in together(experiments):
            if (held := self.take(unit)) is not None:
                with held:
                    yield from unit
        for busy in self.left_busy():
            if (held := self.take(busy, wait=True)) is not None:
                with held:
                    yield from busy

    def left_busy(self) -> list[Sequence[Experiment]]:
        """The busy units, which are to be waited for."""
        busy, self.busy = self.busy, []
        if busy:
            logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
        return busy

    def _made_meanwhile(self, unit: Sequence[Experiment]) -> dict[str, StoredRun]:
        """The unit's runs, where another sweep has made them since this one looked."""
        if all(self._store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return {}
        runs = {experiment.cell.key: self._store.find(experiment).run for experiment in unit}
        found = {key: run for key, run in runs.items() if run is not None}
        return found if len(found) == len(unit) and broken(unit, found) is None else {}
