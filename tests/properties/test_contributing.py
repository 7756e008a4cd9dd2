"""What CONTRIBUTING.md shows works as it stands: its files in a folder of one's own, its commands one after the other."""

import shlex
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest
from support.documents import files_of, lines_of
from typer.testing import CliRunner

from repro.cli.main import app
from repro.reports.figures import View
from repro.systems.platforms import platform

FILES = files_of("CONTRIBUTING.md")
COMMANDS = lines_of("CONTRIBUTING.md")
SAID = {
    "conformance": "7 of 7 properties pass",
    "bench": "VALID",
    "reproduce": "orders-rtx4090.png",
    "claims": "not reproduced",
    "ablate": "lookahead",
    "calibrate": "leave-one-out error",
    "sweep": "ageing.png",
    "compare": "no change beyond",
    "eval": "mini-gsm",
    "plan-cluster": "16 x l4",
    "capacity": "Qwen2.5-32B",
}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_every_file_and_command_of_the_page(own_folder):
    assert len(FILES) == 15
    assert {shlex.split(command)[1] for command in COMMANDS} == set(SAID)
    for command in COMMANDS:
        program, name, *arguments = [part for word in shlex.split(command) for part in glob(word) or [word]]
        assert program == "repro"
        has_place = "--result-dir" in arguments or name in ("conformance", "calibrate", "plan-cluster", "capacity")
        runs = [] if has_place else ["--result-dir", "runs"]
        ran = CliRunner().invoke(app, [name, *arguments, *runs], catch_exceptions=False)
        assert ran.exit_code == 0, (command, ran.output)
        assert SAID[name] in ran.output, (command, ran.output)
        assert "INVALID" not in ran.output, (command, ran.output)
    # Figures of every system are drawn of it, too.
    for name, stem in {"mine.card:ON_L4": "on_l4", "mine/l4.yaml:l4": "l4"}.items():
        view = View(platform=platform(name), reading="published")
        assert (view.cell(None, "dllm-serve", "livebench").platform, view.stem) == (name, stem)
    refused = CliRunner().invoke(app, ["bench", "--system", "mine.periodic:PERIODIC", "--knob", "period=0"])
    assert str(refused.exception).endswith("period=0 must be at least 1")
