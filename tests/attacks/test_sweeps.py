"""Two sweeps at once over one folder: every unit is made by one of them, whole, and the other reuses it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_system import fake_cell
from support.run_files import parts

from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep

SWEEP = """
import sys, time
from functools import partial
from pathlib import Path

from support.fake_system import deployed, fake_cell
from repro.runs.cell import COMPARISON
from repro.runs.experiment import prepare
from repro.runs.sitting import Sitting
from repro.runs.store import Store
from repro.runs.sweep import Sweep

folder, name, executor, comparison, seeds = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
knobs = {COMPARISON: comparison} if comparison else {}
systems = ("support.fake_system:FAKE", "support.fake_system:OTHER")
cells = [
    fake_cell(rate=rate, seed=seed, system=system, executor=executor, num_prompts=3, **knobs)
    for seed in range(seeds) for system in systems for rate in (1.0, 2.0)
]

def before(cell):
    (folder / f"{name}-made-{cell.key}").touch()

experiments = [prepare(cell) for cell in cells]
sweep = Sweep([deployed(each, before=partial(before, each.cell)) for each in experiments], Store(folder / "runs"))
(folder / f"{name}-ready").touch()
while len(list(folder.glob("*-ready"))) < 2:  # both have looked, and found nothing
    time.sleep(0.01)
outcomes = sweep.run(sitting=Sitting(loop=lambda: 0.05), jobs=1)
print(*sorted({outcome.status for outcome in outcomes}), *sorted({run.provenance.get("sitting") for run in sweep.runs} - {None}))
"""


@pytest.mark.parametrize(("comparison", "seeds"), [("rates", 1), ("rates", 3), ("", 2)], ids=["one", "three", "alone"])
def test_each_measured_unit_is_made_once(comparison, seeds, tmp_path):
    said = two_sweeps(tmp_path, "real", comparison, str(seeds))
    made = [path.name.partition("-made-") for path in tmp_path.glob("*-made-*")]
    assert len(made) == len({key for *_, key in made}) == 4 * seeds
    assert len(list((tmp_path / "runs").iterdir())) == 4 * seeds
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


def two_sweeps(folder: Path, *arguments: str) -> list[str]:
    script = folder / "sweep.py"
    script.write_text(SWEEP)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [
        subprocess.Popen(
            [sys.executable, script, folder, name, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    return [out.strip() for out, _ in said]
