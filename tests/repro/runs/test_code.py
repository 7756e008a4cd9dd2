"""What of an edit makes a run another run: code does, words about it do not."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import a_cell

from engines.errors import UserError
from repro.paths import REPO
from repro.runs import code
from repro.runs.cell import Cell
from repro.runs.code import Code, code_of
from repro.runs.experiment import prepare

SOURCE = '''"""A module."""
from plug.other import helper

LIMIT = 4
"""Of something."""


def charge(length: int, *, twice: bool = False) -> int:
    """Tokens."""
    # The whole length.
    name = f"{length:>3} of {LIMIT!r}"
    return (2 if twice else 1) * helper(length) + len(name)
'''
PINNED = "e48a910b98ca"
"""The digest of SOURCE by itself: another Python, or another way to write a tree down, must not change what is stored."""


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody's own."""
    folder = tmp_path / "plug"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "policy.py").write_text(SOURCE)
    (folder / "other.py").write_text("def helper(n):\n    from plug.deep import value\n\n    return value + n\n")
    (folder / "deep.py").write_text("import numpy\n\nvalue = 1\n")
    (folder / "unused.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "plug"]:
        del sys.modules[name]


def forget() -> None:
    code.code_of.cache_clear()
    code._source.cache_clear()


def now() -> Code:
    forget()
    return code_of(("plug.policy",))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_digest_is_the_same_everywhere(plug):
    assert now().modules["plug.policy"] == PINNED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# The whole length.", "# All of it."),
        ("    # The whole length.\n", ""),
        ('"""A module."""', '"""The module\n\nand more."""'),
        ('"""Tokens."""\n', '"""Query tokens."""\n'),
        ('"""Of something."""\n', ""),
        ("(length: int, *, twice: bool = False)", "(\n    length: int,\n    *,\n    twice: bool = False,\n)"),
        ("(2 if twice else 1) * helper(length)", "((2 if twice else 1) * (helper(length)))"),
        ("LIMIT = 4", "LIMIT   =  4"),
    ],
)
def test_words_and_layout_change_nothing(plug, old, new):
    before = now()
    edit(plug / "policy.py", old, new)
    assert now() == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("policy.py", "(2 if twice", "(16 * 2 if twice"),
        ("policy.py", "LIMIT = 4", "LIMIT = 5"),
        ("policy.py", ":>3}", ":>4}"),
        ("policy.py", "{LIMIT!r}", "{LIMIT!s}"),
        ("policy.py", "helper(length) +", "helper(length) -"),
        ("policy.py", "twice: bool = False", "twice: bool = True"),
        ("other.py", "value + n", "value * n"),
        ("deep.py", "value = 1", "value = 1.0"),
        ("__init__.py", "", "import plug.unused"),
    ],
)
def test_code_changes_it_wherever_it_is_imported(plug, file, old, new):
    before = now()
    edit(plug / file, old, new)
    after = now()
    assert after.digest != before.digest
    assert f"plug.{file.removesuffix('.py')}".removesuffix(".__init__") in after.changed_from(before.modules)


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("size: 4", "size: 5", True),
        ("the first", "the last", True),
        ("# A size.", "# How large.", False),
        ("  # Inside.\n", "\n", False),
    ],
)
def test_a_yaml_file_of_a_module_s_name_counts_without_its_comments(plug, old, new, counts):
    data = plug / "deep.yaml"
    data.write_text('# A size.\nsize: 4\nasked:\n  # Inside.\n  - "### Question: the first"\n')
    before = now()
    edit(data, old, new)
    assert now().changed_from(before.modules) == (("plug.deep",) if counts else ())


def test_what_is_not_imported_does_not_count(plug):
    before = now()
    edit(plug / "unused.py", "2", "3")
    assert now() == before
    assert set(before.modules) == {"plug", "plug.policy", "plug.other", "plug.deep"}


def test_what_only_type_checkers_import_does_not_count(plug):
    lines = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from plug import unused\n"
    (plug / "deep.py").write_text(f"{lines}\nvalue = 1\n")
    assert "plug.unused" not in now().modules


def test_imports_relative_to_a_package_are_followed(plug):
    inner = plug / "inner"
    inner.mkdir()
    (inner / "__init__.py").write_text("from . import near\nfrom ..unused import value\n")
    (inner / "near.py").write_text("")
    (plug / "deep.py").write_text("import plug.inner\n\nvalue = 1\n")
    assert {"plug.inner", "plug.inner.near", "plug.unused"} <= now().modules.keys()


def cell(system: str, executor: str, platform: str = "l40s") -> Cell:
    return a_cell(system, platform=platform, executor=executor, rate=1.0, num_prompts=4)


def test_a_simulation_depends_on_no_torch_code_and_on_no_other_method():
    modules = prepare(cell("dllm-serve", "roofline")).code.modules
    assert {
        "engines.dllm.scheduling",
        "engines.cost.roofline",
        "repro.workloads.workload",
        "repro.runs.metrics",
    } <= modules.keys()
    kept_out = (
        *("engines.attention", "engines.kernels", "engines.dllm.executor.torch", "baselines.dllm.fast_dllm"),
        *("repro.cli", "repro.reports"),
    )
    assert not [name for name in modules if name.startswith(kept_out)]


def test_a_measured_run_depends_on_what_runs_it():
    modules = prepare(cell("fast-dllm", "torch", "cpu-tiny")).code.modules
    assert {
        "baselines.dllm.fast_dllm",
        "baselines.dllm.static.executor",
        "engines.dllm.executor.torch",
        "engines.attention.reference",
    } <= modules.keys()
    assert "baselines.dllm.sparse_dllm" not in modules


def test_a_scheduler_that_is_not_there_is_refused():
    plain = cell("dllm-serve", "roofline")
    knobs = (*plain.knobs, ("scheduler", "no_scheduler:Own"))
    with pytest.raises(UserError, match=r"no_scheduler:Own.*there is no module no_scheduler"):
        prepare(replace(plain, knobs=knobs))


def test_a_schedulers_module_is_among_them(tmp_path, monkeypatch):
    text = "from engines.dllm.scheduling import PhaseScheduler\n\n\nclass Own(PhaseScheduler):\n    pass\n"
    (tmp_path / "plug_scheduler.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = cell("dllm-serve", "roofline")
    own = prepare(replace(plain, knobs=(*plain.knobs, ("scheduler", "plug_scheduler:Own"))))
    assert "plug_scheduler" in own.code.modules
    assert own.run().requests == prepare(plain).run().requests


BENCH = ("bench", "--platform", "l40s", "--request-rate", "1", "--num-prompts", "4", "--result-dir", "runs")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, to edit."""
    for name in ("engines", "baselines", "repro", "datasets"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(REPO / "results" / "calibration", tmp_path / "results" / "calibration")
    return tmp_path


SEVERAL = """
import sys
from repro.cli import main
asked = " ".join(sys.argv[1:]).split(" then ")
for words in asked:
    sys.argv = ["repro", *words.split()]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
    print("<end>", flush=True)
"""


def bench(checkout: Path, *options: str) -> list[str]:
    """What a process of its own says of a command with each of the ``options``, one after the other."""
    asked = " then ".join(" ".join((*BENCH, each)) for each in options)
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, asked],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split("<end>\n")[:-1]


def test_an_edit_of_a_schedulers_charge_runs_again_and_one_of_a_comment_does_not(checkout):
    scheduler = checkout / "engines" / "dllm" / "scheduling" / "scheduler.py"
    (first,) = bench(checkout, "")
    assert "1 run done, 0 reused" in first
    edit(scheduler, '"""The paper\'s scheduler:', '# Charged by phase.\n    """The scheduler of the paper:')
    (reused,) = bench(checkout, "")
    assert "0 runs done, 1 reused" in reused
    assert "other code" not in reused
    edit(scheduler, "        return sequence.query_tokens\n", "        return 16 * sequence.query_tokens\n")
    why, accepted, again = bench(checkout, "--dry-run", "--accept-other-code", "")
    assert "code changed: engines.dllm.scheduling" in " ".join(why.split())
    assert "0 runs done, 1 reused" in accepted
    assert "other code" in accepted
    assert "1 run done, 0 reused" in again
    assert "other code" not in again


def test_what_the_package_offers_to_python_is_no_part_of_a_run():
    """Another name in ``repro/__init__.py`` makes no stored run another; the harness's own modules below it do."""
    modules = code_of(("repro.systems.dllm.system",)).modules
    assert "repro" not in modules
    assert {"repro.systems", "repro.systems.dllm.system", "repro.runs.record"} <= {*modules}
