"""A run of a plug-in is bound to what the plug-in reads: its number is not served where that has changed."""

import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Result, refused, repro

from repro.runs import code, inputs
from repro.runs.code import code_of
from repro.runs.inputs import Inputs, changed, inputs_of, merged


def forget() -> None:
    """As a new process knows nothing."""
    for known in (
        inputs._seen.digests,
        inputs._seen.owners,
        inputs._seen.variables,
        inputs._seen.writers,
        inputs._seen.made,
    ):
        known.clear()
    code.code_of.cache_clear()
    code._source.cache_clear()
    code._is_loose.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("plug", "other", "helper", "far") or getattr(module, "is_plugged", False):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two places on ``sys.path``, and a working directory that is neither."""
    for name in ("lib", "src", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "here.txt").write_text("1")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("PLUG_ALPHA", "1")
    forget()
    yield tmp_path
    forget()


def write(folder: Path, **sources: str) -> None:
    for name, text in sources.items():
        path = folder / "src" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def run() -> Inputs:
    """What a run of the plug-in rests on; it is asked for a number."""
    plug = importlib.import_module("plug")
    plug.number()
    return inputs_of(code_of(("plug",)))


def stale(before: Inputs, codes: object) -> bool:
    """Whether a process that is asked for the same cell makes it again: it looks before it runs anything."""
    forget()
    importlib.import_module("plug")
    now = code_of(("plug",))
    return now != codes or bool(changed(before, now))


HERE = "import os, json\nfrom pathlib import Path\nhere = Path(__file__).parent\ntable = here / ('da' + 'ta.txt')\n"
READS = {
    "a file, when it is imported": HERE + "data = table.read_text()\ndef number(): pass",
    "a file, when it runs": HERE + "def number(): open(table).close()",
    "a file in bytes, by the system's own call": HERE + "def number(): os.close(os.open(os.fsencode(table), 0))",
    "a file of a name that it makes up": HERE + "def number(): table.read_bytes()",
    "a file by another way": HERE + "def number(): open(os.path.join(here, '..', 'src', table.name)).close()",
    "a file through a link": HERE + "def number(): (here / 'link').read_text()",
    "a file by numpy": HERE + "import numpy\ndef number(): numpy.loadtxt(table)",
    "a file in a thread": HERE
    + "import threading\ndef number():\n"
    + "    t = threading.Thread(target=table.read_text)\n    t.start()\n    t.join()",
    "a file that it keeps": HERE + "import functools\n@functools.cache\ndef number(): return table.read_text()",
    "a file that it executes": HERE + "def number(): exec(table.read_text())",
    "a file that it names, and reads who knows how": "NAME = 'data.txt'\ndef number(): pass",
    "the names in a folder": HERE + "def number(): list((here / 'many').glob('*.txt'))",
    "a file that is not there": HERE + "def number():\n    try: open(here / 'none.txt')\n    except OSError: pass",
    "a module that it names": "import importlib\nmine = importlib.import_module('helper')\ndef number(): pass",
    "a module of a name that it makes up": "import importlib\ndef number(): importlib.import_module('hel' + 'per')",
    "a module that is imported": "import helper\ndef number(): pass",
    "a module of another package": "from other.deep import value\ndef number(): pass",
    "a module in another place": "import far\ndef number(): pass",
    "a module by its place": HERE
    + "from importlib.util import module_from_spec, spec_from_file_location\ndef number():\n"
    + "    spec = spec_from_file_location('x' + 'y', here / 'helper.py')\n"
    + "    spec.loader.exec_module(module_from_spec(spec))",
    "a module that a module finds": "import finds\ndef number(): pass",
    "a package's data": "from importlib.resources import files\n"
    + "def number(): (files('other') / 'table.txt').read_text()",
    "a variable": "import os\ndef number(): os.environ.get('PLUG_ALPHA')",
    "a variable, when it is imported": "from os import getenv\nalpha = getenv('PLUG_ALPHA', '1')\ndef number(): pass",
    "a variable in bytes": "import os\ndef number(): os.environb[b'PLUG_ALPHA']",
    "a variable in a path": "import os\ndef number(): os.path.expandvars('/tmp/${PLUG_ALPHA}.txt')",
    "a variable in a shell": "import os\ndef number(): os.system(': $PLUG_ALPHA')",
    "a variable in a copy": "import os\ndef number(): dict(os.environ)['PLUG_ALPHA']",
    "a variable of a name that it makes up": "import os\ndef number(name='alpha'): os.environ[f'PLUG_{name.upper()}']",
    "a variable by its end": "import os\ndef number(name='plug'): os.environ[name.upper() + '_ALPHA']",
    "a variable of a module": "import uses\ndef number(): uses.number()",
    "a variable that is not there": "import os\ndef number(): os.environ.get('PLUG_BETA')",
}


def change(folder: Path, step: str) -> None:
    """Everything that a plug-in here could rest on."""
    src, is_first = folder / "src", step == "1"
    (src / "data.txt").write_text(step)
    (src / "many").mkdir(exist_ok=True)
    (src / "many" / "a.txt").write_text("1")
    for path in (src / "many" / "b.txt", src / "none.txt"):
        path.unlink(missing_ok=True) if is_first else path.write_text("2")
    for name, text in (("v1", "1"), ("v2", "2")):
        (src / name).write_text(text)
    (src / "link").unlink(missing_ok=True)
    (src / "link").symlink_to(f"v{step}")
    write(
        folder,
        helper=f"is_plugged, value = True, {step}\n",
        **{"other/__init__": "", "other/deep": f"value = {step}\n"},
        finds="import importlib\nhelp = importlib.import_module('h' + 'elper')\nis_plugged = True\n",
        uses="import os\nis_plugged = True\ndef number(): os.environ['PLUG_ALPHA']\n",
    )
    (src / "other" / "table.txt").write_text(step)
    (folder / "lib" / "far.py").write_text(f"value = {step}\n")
    os.environ["PLUG_ALPHA"] = step
    if is_first:
        os.environ.pop("PLUG_BETA", None)
    else:
        os.environ["PLUG_BETA"] = step


@pytest.mark.parametrize("what", READS)
def test_a_run_is_bound_to(what, folder, monkeypatch):
    monkeypatch.setenv("PLUG_BETA", "")
    change(folder, "1")
    write(folder, plug=READS[what])
    before, codes = run(), code_of(("plug",))
    assert not stale(before, codes)
    change(folder, "2")
    assert stale(before, codes)
    change(folder, "1")
    assert not stale(before, codes)


def test_a_module_that_was_there_before_it_was_asked_for(folder):
    """A script has imported it; nothing is opened when the plug-in does."""
    change(folder, "1")
    write(folder, plug=READS["a module that it names"])
    importlib.import_module("helper")
    before, codes = run(), code_of(("plug",))
    change(folder, "2")
    assert stale(before, codes)


def test_what_nothing_reads_and_words_about_code_do_not_count(folder):
    change(folder, "1")
    write(folder, plug="import helper\ndef number(): helper.__doc__\n", finds="import far\n")
    before, codes = run(), code_of(("plug",))
    (folder / "src" / "data.txt").write_text("2")
    (folder / "src" / "many" / "c.txt").write_text("")
    write(folder, helper='"""What it is."""\n# And more.\nis_plugged, value = True, 1\n', finds="import numpy\n")
    os.environ["PLUG_ALPHA"] = "7"
    assert not stale(before, codes)


def test_what_it_writes_is_no_input(folder):
    """A log grows with every run."""
    write(
        folder,
        plug=HERE + "def number():\n    with open(here / 'log.txt', 'a') as log: log.write('x')\n"
        "    (here / 'tmp').write_text('1')\n    (here / 'tmp').read_text()\n    (here / 'tmp').unlink()",
    )
    before, codes = run(), code_of(("plug",))
    (folder / "src" / "log.txt").write_text("xxx")
    assert not stale(before, codes)


@pytest.mark.parametrize("what", ["a file, when it is imported", "a file, when it runs", "a variable"])
def test_what_changed_under_a_process_binds_to_nothing(what, folder):
    """What it has kept from before cannot be told from what it has read since; a new process makes it again."""
    change(folder, "1")
    write(folder, plug=READS[what])
    run()
    change(folder, "2")
    del sys.modules["plug"]
    again, codes = run(), code_of(("plug",))
    assert stale(again, codes)
    fresh = run()
    assert not stale(fresh, codes)


def test_a_module_that_was_edited_after_it_was_imported(folder):
    """The number is of the code that was there, whatever the file says now."""
    write(folder, plug="def number(): return 1\n")
    importlib.import_module("plug")
    write(folder, plug="def number(): return 2\n")
    before, codes = run(), code_of(("plug",))
    assert stale(before, codes)


def test_what_was_read_before_anybody_looked_is_not_known(folder, monkeypatch):
    """The script imports its plug-in first; ``helper`` is about to import us, and reads what it reads later."""
    change(folder, "1")
    write(folder, plug="import helper\nfrom other import deep\ndef number(): pass\n")
    importlib.import_module("plug")
    monkeypatch.setattr(sys.modules["helper"].__spec__, "_initializing", True, raising=False)
    monkeypatch.setattr(inputs._seen, "before", set(inputs._imported()))
    found, codes = run(), code_of(("plug",))
    assert {name for name in found if name.endswith(", imported before repro")} == {
        f"{name}, imported before repro" for name in ("plug.py", "other/__init__.py", "other/deep.py")
    }
    assert stale(found, codes)
    monkeypatch.setattr(inputs._seen, "before", set())
    forget()
    assert not stale(run(), codes)


def test_a_plug_in_of_a_script_is_its_file_and_one_of_no_file_is_refused(folder, monkeypatch):
    script = types.ModuleType("__main__")
    exec("from engines.dllm.scheduling import PhaseScheduler\nclass Own(PhaseScheduler): pass", vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    bench = (*BENCH, "--scheduler", "__main__:Own", "--result-dir", folder / "runs", "--dry-run")
    refused(repro(*bench), "'__main__:Own' is in no file, and its source cannot be read: put it into a file")
    (folder / "work" / "script.py").write_text("ALPHA = 1\n")
    script.__file__ = str(folder / "work" / "script.py")
    assert "not stored" in repro(*bench).out
    first = code_of(("__main__",))
    (folder / "work" / "script.py").write_text("ALPHA = 2\n")
    forget()
    assert code_of(("__main__",)).changed_from(first.modules) == ("__main__",)


def test_a_name_is_the_same_on_another_machine_and_holds_no_folder_of_this(folder):
    change(folder, "1")
    write(
        folder,
        plug=HERE + "import far\ndef number():\n    open('here.txt').close()\n    (here / 'data.txt').read_text()",
    )
    names = set(run())
    assert {"plug.py", "far.py", "data.txt", "here.txt"} <= names
    assert not [name for name in names if str(folder) in name]


def test_of_two_processes_that_saw_different_things_neither_counts():
    assert merged({"a": "1", "b": "1"}, {"a": "1", "b": None, "c": "3"}) == {"a": "1", "b": inputs.TWO, "c": "3"}


def test_nothing_is_kept_of_our_own_systems():
    assert inputs_of(code_of(("repro.runs.cell",))) == {}


SCHEDULER = """
import json
from importlib import import_module
from pathlib import Path

from engines.dllm.scheduling import PhaseScheduler

is_plugged = True

class Own(PhaseScheduler):
    def schedule(self, *args, **kwargs):
        import_module("hel" + "per").look(Path(__file__).with_name("da" + "ta.txt"))
        return super().schedule(*args, **kwargs)
"""
BENCH = ("bench", "--platform", "l40s", "--request-rate", 1, "--num-prompts", 2, "--json")


def test_a_stale_number_is_not_served(folder, monkeypatch):
    """Through the command line, with a file that a helper found at run time reads."""
    (folder / "src" / "data.txt").write_text("1")
    write(
        folder,
        plug=SCHEDULER,
        far=SCHEDULER,
        helper="is_plugged = True\nimport functools\n\n@functools.cache\ndef look(path): return path.read_text()\n",
    )

    def bench(*more: object, by: str = "plug") -> Result:
        return repro(*BENCH, "--scheduler", f"{by}:Own", "--result-dir", folder / "runs", *more)

    assert "1 run done, 0 reused" in bench().err
    # Another cell of this process, whose plug-in has everything at hand already.
    assert "1 run done, 0 reused" in bench("--seed", 1).err
    # And of another plug-in, which finds what the first has loaded.
    assert "1 run done, 0 reused" in bench(by="far").err
    for seed in (0, 1):
        forget_plugs()
        assert '"why": "done: ' in bench("--seed", seed, "--dry-run").out
    (folder / "src" / "data.txt").write_text("2")
    for seed in (0, 1):
        assert "what its plug-in reads has changed, or is not known: data.txt" in bench("--seed", seed, "--dry-run").out
    assert "what its plug-in reads has changed, or is not known: data.txt" in bench("--dry-run", by="far").out
    assert "other code: data.txt" in bench("--accept-other-code", "--dry-run").out
    forget_plugs()
    assert "1 run done, 0 reused" in bench("--force").err
    (folder / "src" / "data.txt").write_text("1")
    forget_plugs()
    assert "what its plug-in reads has changed, or is not known: data.txt" in bench("--dry-run").out


def forget_plugs() -> None:
    """As ``forget``, but for our own modules' digests, which take long."""
    for known in (inputs._seen.digests, inputs._seen.owners, inputs._seen.writers):
        known.clear()
    for name in ("plug", "helper", "far"):
        sys.modules.pop(name, None)


def test_a_secret_is_told_to_be_there_and_not_by_a_digest(folder, monkeypatch):
    """Whoever has a digest can try what it is of."""
    (folder / "src" / "plug.py").write_text("import os\ndef number(): os.environ.get('PLUG_API_KEY')")

    def seen() -> str | None:
        forget()
        importlib.import_module("plug").number()
        return inputs_of(code_of(("plug",)))["$PLUG_API_KEY"]

    absent = seen()
    monkeypatch.setenv("PLUG_API_KEY", "harmless")
    first = seen()
    monkeypatch.setenv("PLUG_API_KEY", "another")
    assert absent is None
    assert first is not None
    assert seen() == first
