"""Two sweeps at once over one folder: every unit is made by one of them, whole, and the other reuses it."""

import shutil
import time
from pathlib import Path

import pytest
from support.fake_system import deployed, fake_cell
from support.forks import forks
from support.stored_runs import parts

from repro.runs.cell import COMPARISON
from repro.runs.experiment import prepare
from repro.runs.sitting import Sitting
from repro.runs.store import Store
from repro.runs.sweep import Sweep

SYSTEMS = ("support.fake_system:FAKE", "support.fake_system:OTHER")


def sweep_in(folder: Path, name: str, comparison: str, num_seeds: int) -> None:
    """One of two sweeps; both look before either makes a run."""
    knobs = {COMPARISON: comparison} if comparison else {}
    cells = [
        fake_cell(rate=rate, seed=seed, system=system, executor="real", num_prompts=3, **knobs)
        for seed in range(num_seeds)
        for system in SYSTEMS
        for rate in (1.0, 2.0)
    ]
    made = [deployed(each, before=(folder / f"{name}-made-{each.cell.key}").touch) for each in map(prepare, cells)]
    sweep = Sweep(made, Store(folder / "runs"))
    (folder / f"{name}-ready").touch()
    while len(list(folder.glob("*-ready"))) < 2:  # both have looked, and found nothing
        time.sleep(0.01)
    outcomes = sweep.run(sitting=Sitting(loop=lambda: 0.05), jobs=1)
    sittings = {run.provenance.get("sitting") for run in sweep.runs} - {None}
    (folder / f"{name}-said").write_text(" ".join([*sorted({each.status for each in outcomes}), *sorted(sittings)]))


@pytest.mark.parametrize(("comparison", "seeds"), [("rates", 1), ("rates", 3), ("", 2)], ids=["one", "three", "alone"])
def test_each_measured_unit_is_made_once(comparison, seeds, tmp_path):
    names = ("first", "second")
    both = [forks().Process(target=sweep_in, args=(tmp_path, name, comparison, seeds)) for name in names]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    said = [(tmp_path / f"{name}-said").read_text() for name in names]
    made = [path.name.partition("-made-") for path in tmp_path.glob("*-made-*")]
    assert len(made) == len({key for *_, key in made}) == 4 * seeds
    assert len(list((tmp_path / "runs").glob("*.gz"))) == 4 * seeds
    if comparison:
        # Whole: no unit has runs of both.
        assert all(
            len({name for name, _, key in made if key in unit}) == 1
            for unit in [[key for *_, key in made if _seed(tmp_path, key) == seed] for seed in range(seeds)]
        )
        if seeds == 1:
            assert sorted(line.split()[0] for line in said) == ["ran", "reused"]
            assert len({line.split()[1] for line in said}) == 1


def test_a_run_that_another_sweep_stores_meanwhile(tmp_path, monkeypatch):
    """Simulated runs are nobody's: they are the same numbers whoever makes them, and the later one stays."""
    replace, others = Path.replace, []

    def late(self: Path, target: Path) -> Path:
        others.append(shutil.copy(self, target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", late)
    (outcome,) = Sweep([prepare(fake_cell(num_prompts=3))], Store(tmp_path)).run(jobs=1)
    assert outcome.status == "ran"
    assert [path.resolve() for path in tmp_path.iterdir()] == others
    assert Store(tmp_path).find(prepare(fake_cell(num_prompts=3))).run is not None


def _seed(folder: Path, key: str) -> int:
    (found,) = (folder / "runs").glob(f"*{key}*")
    seed: int = parts(found)["cell"]["seed"]
    return seed
