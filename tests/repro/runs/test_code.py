"""What of an edit makes a run another run: code and what a plug-in reads do, comments do not."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.cells import a_cell
from support.command import Result, refused, repro
from support.refusals import refuses
from support.tables import data_beside, edit

from engines.errors import UserError
from repro.paths import REPO
from repro.runs import provenance as code
from repro.runs.experiment import prepare
from repro.runs.provenance import Code, code_of, files_of_plug_in, is_alone, without_comments

DATA = data_beside(__file__, "code")

CASES = data_beside(__file__, "cases")

SOURCE = '''"""A module."""
from plug.other import helper

LIMIT = 4
TEXT = "#4"  # A mark.
FORM = """
# Of two lines: "{LIMIT}"
"""


def charge(length: int) -> int:
    # The whole length.
    return helper(length) + len(TEXT)
'''


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody's own, which declares what it reads."""
    folder = tmp_path / "plug"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "policy.py").write_text(SOURCE + "reads = ['../table.txt', '../many', '$PLUG_ALPHA', '$PLUG_API_KEY']\n")
    (folder / "other.py").write_text("def helper(n):\n    return n\n")
    (folder / "sizes.yaml").write_text('# A size.\nsize: 4\nasked: "# one"\n')
    (folder / "inner" / "data.bin").write_bytes(b"1")
    (tmp_path / "table.txt").write_text("1")
    (tmp_path / "many").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    forget()


def forget() -> None:
    """As a new process knows nothing."""
    code_of.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("plug", "alone")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def now(name: str = "plug.policy:charge") -> Code:
    forget()
    return code_of("dllm", (), (name,))


@pytest.mark.parametrize(("file", "old", "new", "counts"), CASES["edits"])
def test_a_plug_in_is_its_package_without_comments(plug, file, old, new, counts):
    before = now()
    edit(plug / file, old, new)
    assert now().changed_from(before.modules) == (("plug",) if counts else ())


def test_hidden_and_compiled_files_a_link_to_nothing_and_a_pipe_are_no_part_of_it(plug):
    before = now()
    (plug / ".log").write_text("1")
    (plug / "__pycache__").mkdir(exist_ok=True)
    (plug / "__pycache__" / "policy.cpython-311.pyc").write_bytes(b"1")
    assert now() == before
    (plug / "gone.txt").symlink_to(plug / "nowhere.txt")
    os.mkfifo(plug / "inner" / "pipe")
    (plug.parent / "many" / "gone.txt").symlink_to(plug / "nowhere.txt")
    assert now() == before


def test_of_a_file_alone_the_python_files_beside_it_count(plug):
    folder = plug.parent
    (folder / "alone.py").write_text("LIMIT = 1\n")
    (folder / "beside.py").write_text("LIMIT = 1\n")
    before = now("alone:LIMIT")
    (folder / "results.csv").write_text("1")
    assert now("alone:LIMIT") == before
    for path in (folder / "beside.py", plug / "other.py"):
        before = now("alone:LIMIT")
        path.write_text("LIMIT = 2\n")
        assert now("alone:LIMIT").changed_from(before.modules) == ("alone",)
    assert now("alone:LIMIT").plug_ins == ("alone",)
    assert {"alone.py", "beside.py", "plug/other.py"} <= files_of_plug_in("alone").keys()
    assert is_alone("alone")
    assert not is_alone("plug")


CHANGES: dict[str, Callable[[Path], object]] = {
    "../table.txt": lambda folder: (folder / "table.txt").write_text("2"),
    "../many": lambda folder: (folder / "many" / "b.txt").write_text("2"),
    "$PLUG_ALPHA": lambda folder: os.environ.update(PLUG_ALPHA="2"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_plug_in_declares_counts(plug, what, monkeypatch):
    monkeypatch.setenv("PLUG_ALPHA", "1")
    before = now()
    CHANGES[what](plug.parent)
    assert now().changed_from(before.modules) == (f"plug reads {what}",)


def test_in_a_folder_that_is_read_a_file_has_its_place(plug):
    many = plug.parent / "many"
    (many / "a").mkdir()
    (many / "a" / "rows.txt").write_text("1")
    before = now()
    (many / "a").rename(many / "b")
    assert now().changed_from(before.modules) == ("plug reads ../many",)


def test_a_file_that_is_not_there_yet_counts_and_a_class_may_declare_it(plug):
    edit(plug / "other.py", "def helper", "class Own:\n    reads = ('later.txt',)\n\ndef helper")
    before = now("plug.other:Own")
    (plug.parent / "plug" / "later.txt").write_text("1")
    assert "plug reads later.txt" in now("plug.other:Own").changed_from(before.modules)


def test_of_a_secret_only_that_it_is_set_counts(plug, monkeypatch):
    """Whoever has a digest can try what it is of."""
    absent = now()
    monkeypatch.setenv("PLUG_API_KEY", "harmless")
    first = now()
    monkeypatch.setenv("PLUG_API_KEY", "another")
    assert absent != first == now()


@pytest.mark.parametrize("said", ["'table.txt'", "[1]", "['']"])
def test_a_list_that_is_none_is_refused(plug, said):
    edit(plug / "policy.py", "reads = [", f"reads = {said} or [")
    with refuses("reads="):
        now()


def test_a_large_folder_is_refused(plug, monkeypatch):
    monkeypatch.setattr(code, "MOST_BYTES", 10)
    with refuses("reads = [...]"):
        now()


# -- our own ------------------------------------------------------------------------------------------------

ASKED = DATA["asked"]
MEASURED = ("dllm-serve", "burst", "cpu-tiny", "torch")
LOADED = """
import json, sys
from pathlib import Path
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
system, dataset, platform, executor = sys.argv[1:]
rate = None if system == "laps" else 8.0 if executor == "torch" else 0.5
knobs = (("num_prompts", 64 if system == "laps" else 2),)
found = prepare(Cell(system=system, dataset=dataset, platform=platform, executor=executor, rate=rate, seed=0, knobs=knobs))
found.run()
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in ("engines", "repro", "baselines")]
print(json.dumps([sorted(found.code.modules), sorted(files)]))
"""
HARNESS = ("__init__", "clean", "code", "environment", "experiment")
DECIDES_NOTHING = ("repro/__init__.py", *(f"repro/runs/{name}.py" for name in HARNESS))
MOST_MODULES = 70


@pytest.mark.parametrize("asked", [*((name, *cell) for name, cell in ASKED.items()), MEASURED], ids="-".join)
def test_every_module_that_a_run_loads_is_in_its_code(asked):
    done = subprocess.run([sys.executable, "-c", LOADED, *asked], capture_output=True, text=True, check=True)
    rooms, files = json.loads(done.stdout.splitlines()[-1])
    names = [str(Path(file).relative_to(REPO)) for file in files]
    assert len(names) <= MOST_MODULES or asked == MEASURED
    left = [
        name
        for name in names
        if not name.startswith(DECIDES_NOTHING) and not any(_lies_in(name, room) for room in rooms)
    ]
    assert left == []


def _lies_in(name: str, room: str) -> bool:
    if room.endswith("/*"):
        return name.rpartition("/")[0] == room[:-2]
    return name == room or name.startswith(f"{room}/")


@pytest.mark.parametrize(("system", "others"), data_beside(__file__, "code")["code_of_another_family_decides_nothing"])
def test_code_of_another_family_decides_nothing(system, others):
    dataset, platform, executor = ASKED[system]
    found = prepare(a_cell(system, dataset, platform, executor, rate=None if system == "laps" else 0.5, num_prompts=64))
    assert not [room for room in found.code.modules if room.startswith((*others, "repro/cli", "repro/reports"))]
    assert "repro/families/*" in found.code.modules


@pytest.mark.parametrize("file", ["host.cpp", "lanes.hpp", "choice.py"])
def test_sources_of_kernels_count(tmp_path, monkeypatch, file):
    monkeypatch.setattr(code, "_HOME", tmp_path)
    kernels = tmp_path / "engines" / "kernels"
    shutil.copytree(REPO / "engines" / "kernels", kernels)
    before = code._folder_digest.__wrapped__("engines/kernels")
    with (kernels / file).open("a") as changed:
        changed.write("\nLIMIT = 1;\n")
    assert code._folder_digest.__wrapped__("engines/kernels") != before


def test_all_packages_decide_a_family_that_is_none_of_ours():
    assert {"engines", "baselines", "repro/families"} <= code_of("of mine", ()).modules.keys()


def test_a_comment_may_hold_quotes(tmp_path):
    (tmp_path / "a.py").write_text("a = 1  # it's \"\"\" one\nb = '#'\n\n  # two '\nc = f'{a}#'\n# three")
    assert without_comments(tmp_path / "a.py") == b"a = 1\nb = '#'\nc = f'{a}#'"


@pytest.mark.parametrize(
    "text", ['f"{d["#4"]}"', "f'{d['#4']}'", 'rf"{d["#"]} # {{"', 'f"{"#":{w}}"', 'f"{{ # }}"', 'f""', 'f"{x!r:#x}"']
)
def test_a_string_in_braces_may_have_quotes_like_those_around_them(tmp_path, text):
    (tmp_path / "a.py").write_text(f'a = {text}  # it\'s "one"\nb = 1\n')
    assert without_comments(tmp_path / "a.py").decode() == f"a = {text}\nb = 1"


def test_without_comments_a_source_says_the_same():
    for path in (REPO / "repro").glob("[rw]*/*.py"):
        assert ast.dump(ast.parse(without_comments(path))) == ast.dump(ast.parse(path.read_bytes()))


def test_a_module_that_is_not_there_is_refused():
    plain = a_cell("dllm-serve", platform="l40s", executor="roofline", rate=1.0, num_prompts=4)
    with pytest.raises(UserError, match=r"no_scheduler:Own.*there is no module no_scheduler"):
        prepare(replace(plain, knobs=(*plain.knobs, ("scheduler", "no_scheduler:Own"))))


BENCH = ("bench", "--platform", "l40s", "--request-rate", "1", "--num-prompts", "2", "--result-dir", "runs")


def test_an_edit_of_a_schedulers_charge_runs_again_and_one_of_a_comment_does_not(tmp_path, monkeypatch, request):
    request.addfinalizer(code_of.cache_clear)
    monkeypatch.setattr(code, "_folder_digest", cache(code._folder_digest.__wrapped__))
    for name in ("engines", "baselines", "repro"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "*.gz"))
    monkeypatch.setattr(code, "_HOME", tmp_path)
    scheduler = tmp_path / "engines" / "dllm" / "scheduling.py"

    def bench(*options: str) -> str:
        code_of.cache_clear()
        code._folder_digest.cache_clear()
        done = repro(*BENCH[:-1], tmp_path / "runs", *options)
        assert done.code == 0, done.err
        return " ".join((done.out + done.err).split())

    assert "1 run done, 0 reused" in bench()
    charge = "        return sequence.query_tokens\n"
    edit(scheduler, charge, f"        # Charged.\n{charge}")
    reused = bench()
    assert "0 runs done, 1 reused" in reused
    assert "other code" not in reused
    edit(scheduler, charge, "        return 16 * sequence.query_tokens\n")
    assert "code changed: engines/dllm" in bench("--dry-run")
    accepted = bench("--accept-other-code")
    assert "0 runs done, 1 reused" in accepted
    assert "other code" in accepted
    again = bench()
    assert "1 run done, 0 reused" in again
    assert "other code" not in again


SCHEDULER = """
from pathlib import Path

from engines.dllm.scheduling import PhaseScheduler


class Own(PhaseScheduler):
    reads = ["../table.txt"]
"""


def test_a_stale_number_is_not_served(plug, tmp_path):
    (plug / "policy.py").write_text(SCHEDULER)

    def asked(*more: str) -> Result:
        forget()
        return repro(*BENCH[:-1], tmp_path / "runs", "--scheduler", "plug.policy:Own", *more)

    assert "1 run done, 0 reused" in asked().err
    assert "0 runs done, 1 reused" in asked().err
    (tmp_path / "table.txt").write_text("2")
    assert "code changed: plug reads ../table.txt" in " ".join(asked("--dry-run").out.split())
    assert "1 run done, 0 reused" in asked().err
    edit(plug / "policy.py", 'reads = ["../table.txt"]', "reads = 7")
    refused(asked(), "reads=7")
