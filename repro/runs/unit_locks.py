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


class UnitLocks:
    """``seen`` says how each cell was stored when the sweep looked; ``on_reused`` hears of runs that another sweep has made
    since."""

    def __init__(self, store: Store, seen: Mapping[str, tuple[int, int] | None], on_reused: OnReused) -> None:
        self._store = store
        self._seen = seen
        self._on_reused = on_reused
        self._busy: list[Sequence[Experiment]] = []
        """Units that others were making when they were asked for."""

    def take(self, unit: Sequence[Experiment], *, wait: bool = False) -> ExitStack | None:
        """What unlocks the unit; None where it is not to be made: others are at it, or have made it. ``wait`` for those
        others, which must not be done with units in hand: they may be waiting too."""
        with ExitStack() as locked:
            if not locked.enter_context(self._store.locked([experiment.cell for experiment in unit], wait=wait)):
                self._busy.append(unit)
                return None
            if runs := self._made_meanwhile(unit):
                for experiment in unit:
                    self._on_reused(experiment, runs[experiment.cell.key])
                return None
            return locked.pop_all()

    def one_by_one(self, experiments: Sequence[Experiment]) -> Generator[Experiment]:
        """Unit by unit, each locked until the next is asked for. Those that others are making come last."""
        for unit in together(experiments):
            if (locked := self.take(unit)) is not None:
                with locked:
                    yield from unit
        for waited, locked in self.waited_for():
            with locked:
                yield from waited

    def waited_for(self) -> Generator[tuple[Sequence[Experiment], ExitStack]]:
        """The busy units once others have let them go, but for those that they have made."""
        busy, self._busy = self._busy, []
        if busy:
            logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
        for each in busy:
            if (locked := self.take(each, wait=True)) is not None:
                yield each, locked

    def _made_meanwhile(self, unit: Sequence[Experiment]) -> dict[str, StoredRun]:
        """The unit's runs, where another sweep has made them since this one looked."""
        if all(self._store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return {}
        runs = {experiment.cell.key: self._store.find(experiment).run for experiment in unit}
        found = {key: run for key, run in runs.items() if run is not None}
        return found if len(found) == len(unit) and broken(unit, found) is None else {}
