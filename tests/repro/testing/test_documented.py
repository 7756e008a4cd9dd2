"""What CONTRIBUTING.md says of conformance, in a folder outside of the repository."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from repro.paths import REPO
from repro.testing import check_scheduler

PAGE = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Conformance\n")[2].partition("\n## ")[0]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    for name, text in re.findall(r"^`(mine/\w+\.py)`:\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_example_passes_under_pytest(mine):
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTEST_ADDOPTS": ""}
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "mine/test_patient.py")
    done = subprocess.run(
        [sys.executable, *words], cwd=mine.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert re.search(r"^7 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_the_policy_above_lets_requests_starve(mine, monkeypatch):
    monkeypatch.setattr("repro.testing.properties.MOST_SHORTER", 0)  # it makes no example smaller
    shortest = importlib.import_module("mine.shortest").Shortest
    with pytest.raises(AssertionError, match=r"^no starvation: request "):
        check_scheduler(shortest, examples=30)


def test_every_property_is_in_the_table():
    from support.judged import SUITES

    names = {each.name for suite, _ in SUITES.values() for each in suite.properties}
    assert set(re.findall(r"^\| ([\w ]+) \| (?!of)", SECTION, re.MULTILINE)) == names
