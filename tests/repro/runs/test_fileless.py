"""Policies that lie in no file: a notebook's cells, ``python -c``."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
from support.cells import a_cell
from support.refusals import refuses

import repro
from engines.data import name_of
from engines.dllm.scheduling import PhaseScheduler
from engines.errors import UserError
from repro.paths import REPO
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.ray_pool import RayPool
from repro.runs.store import Store

CELL = """
from collections import deque
from engines.dllm.scheduling import PhaseScheduler

SIGN = 1

def rank(sequence):
    return SIGN * sequence.request.total_len

class Shortest(PhaseScheduler):
    def schedule(self):
        self.waiting = deque(sorted(self.waiting, key=rank))
        return super().schedule()
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in no file, with the class of a cell."""
    module = ModuleType("cells_of_mine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(CELL, vars(module))
    return module


def cell(**knobs: object) -> Cell:
    return a_cell(platform="rtx4090", executor="roofline", rate=20.0, **{"num_prompts": 12, **knobs})


def test_a_class_of_a_cell_decides_a_run_which_is_made_again_each_time(notebook, tmp_path, caplog):
    grid = {"system": "dllm-serve", "dataset": "osc", "platform": "rtx4090", "rate": 20}
    grid |= {"knobs": {"num_prompts": 12, "max_num_seqs": 2, "scheduler": ["phase", notebook.Shortest]}}
    # More cells than are made in one process otherwise.
    runs = repro.sweep(grid, repeats=6, result_dir=tmp_path)
    assert [each.title for each in runs] == ["dLLM-Serve"] * 6 + ["dLLM-Serve, Shortest"] * 6
    assert runs[0].summary["e2el_s"] != runs[6].summary["e2el_s"]
    caplog.clear()
    again = repro.sweep(grid, repeats=6, result_dir=tmp_path)
    assert [each.provenance is runs[0].provenance for each in again] == [False] * 12
    states = [Store(tmp_path).find(prepare(each.cell.without("basis"))) for each in (again[0], again[6])]
    assert states[0].run is not None
    assert "cells_of_mine:Shortest" in states[1].reason
    assert [record.levelname for record in caplog.records if "in no file" in record.message] == ["WARNING"]
    assert runs[6].cell.knob_values["scheduler"] == "cells_of_mine:Shortest"


def test_other_processes_are_refused_in_a_sentence(notebook, tmp_path):
    cells = [cell(scheduler=notebook.Shortest), cell(scheduler=notebook.Shortest, num_prompts=13)]
    with refuses("jobs=2"):
        repro.sweep(cells, result_dir=tmp_path, jobs=2)


def test_live_workers_are_processes_too(notebook):
    exec("from engines.policies.views import PrefillQueue\nclass Mine(PrefillQueue):\n    pass", vars(notebook))
    live = a_cell("ampd-live", "toolbench", rate=1.0, queue=notebook.Mine)
    with refuses("queue='cells_of_mine:Mine'"):
        prepare(live)


def test_a_class_of_a_file_is_named_and_one_inside_a_function_refused():
    assert name_of(PhaseScheduler) == "engines.dllm.scheduling:PhaseScheduler"
    assert cell(scheduler=PhaseScheduler) == cell(scheduler=name_of(PhaseScheduler))

    class Inside(PhaseScheduler):
        pass

    with pytest.raises(UserError, match="define it at the top"):
        cell(scheduler=Inside)


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env)


def test_a_class_of_a_command_works_there(tmp_path: Path):
    text = CELL + (
        "import repro\n"
        "run = repro.run('dllm-serve', 'osc', platform='rtx4090', rate=20, num_prompts=4, scheduler=Shortest, "
        f"result_dir={str(tmp_path)!r})\n"
        "print(run.title)\n"
    )
    ran = started("-c", text)
    assert ran.stdout.splitlines()[-1:] == ["dLLM-Serve, Shortest"], ran.stderr


@pytest.mark.skipif(find_spec("IPython") is None, reason="needs IPython")
def test_a_class_of_ipython_works_there(tmp_path: Path):
    text = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"shell.run_cell({CELL!r}, store_history=True)\n"
        "shell.run_cell('import repro')\n"
        'shell.run_cell(\'\'\'run = repro.run("dllm-serve", "osc", platform="rtx4090", rate=20, num_prompts=4, '
        f"scheduler=Shortest, result_dir=\"{tmp_path}\")''')\n"
        "shell.run_cell('print(run.title)')\n"
    )
    script = tmp_path / "shell.py"
    script.write_text(text)
    ran = started(str(script))
    assert ran.stdout.splitlines()[-1:] == ["dLLM-Serve, Shortest"], ran.stdout + ran.stderr


SCRIPT = """
import sys
from collections import deque

import repro
from engines.dllm.scheduling import PhaseScheduler
{above}
if __name__ == "__main__":
{within}
    grid = {{"system": "dllm-serve", "dataset": "osc", "platform": "rtx4090", "rate": 20, "seed": [0, 1]}}
    grid["knobs"] = {{"num_prompts": 8, "max_num_seqs": 2, "scheduler": Shortest}}
    print([run.summary["e2el_s"]["mean"] for run in repro.sweep(grid, result_dir=sys.argv[1], jobs=int(sys.argv[2]))])
"""
SHORTEST = """
class Shortest(PhaseScheduler):
    def schedule(self):
        self.waiting = deque(sorted(self.waiting, key=lambda each: each.request.total_len))
        return super().schedule()
"""


def script(folder: Path, *, is_guarded: bool) -> Path:
    parts = ("", indent(SHORTEST, "    ")) if is_guarded else (SHORTEST, "")
    (folder / "study.py").write_text(SCRIPT.format(above=parts[0], within=parts[1]))
    return folder / "study.py"


def ran(path: Path, jobs: int) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), f"runs{jobs}", str(jobs)]
    return subprocess.run(command, cwd=path.parent, env=own, capture_output=True, text=True, check=False)


def test_a_class_of_a_script_is_read_again_by_its_processes(tmp_path):
    path = script(tmp_path, is_guarded=False)
    here, there = (ran(path, jobs) for jobs in (1, 2))
    assert (here.returncode, there.returncode) == (0, 0), (here.stderr, there.stderr)
    assert here.stdout == there.stdout != ""
    names = [sorted(each.name for each in (tmp_path / f"runs{jobs}").glob("*.gz")) for jobs in (1, 2)]
    assert names[0] == names[1]
    assert len(names[0]) == 2


def test_a_class_that_a_script_makes_only_where_it_is_run_is_refused_to_others(tmp_path):
    path = script(tmp_path, is_guarded=True)
    done = ran(path, 2)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "engines.errors.UserError: jobs=2: '__main__:Shortest' stands under if __name__ == \"__main__\":, which other processes "
        "leave out: put it above, or give jobs=1"
    )
    assert not [*tmp_path.glob("runs2/*.gz")]
    assert ran(path, 1).returncode == 0


def test_a_script_is_none_of_a_cluster(tmp_path, monkeypatch):
    main = ModuleType("__main__")
    main.__file__ = str(script(tmp_path, is_guarded=False))
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(f"from collections import deque\nfrom engines.dllm.scheduling import PhaseScheduler\n{SHORTEST}", vars(main))
    monkeypatch.setattr("repro.runs.ray_pool.require_ray", lambda: None)
    monkeypatch.setattr("repro.runs.ray_pool.connected", lambda *_: pytest.fail("a cluster was started"))
    said = (
        r"^pool='ray': '__main__:Shortest' is in the script that is run, which is not what workers elsewhere run: put it into a "
        "module, and import that$"
    )
    with pytest.raises(UserError, match=said):
        RayPool("auto").check([prepare(cell(scheduler="__main__:Shortest"))])
    measured = a_cell(num_prompts=2, scheduler="__main__:Shortest")
    with pytest.raises(UserError, match=said):
        RayPool("auto").placed([prepare(measured)])
