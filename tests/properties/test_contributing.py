"""What CONTRIBUTING.md and docs/cards.md show works as it stands: their files in a folder of one's own, their commands in order."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.documents import files_of, lines_of, resized
from support.exact_instance import profile_little
from support.tables import data_beside
from typer.testing import CliRunner

from repro.cli.main import app
from repro.families.platforms import platform
from repro.paths import REPO
from repro.reports.figures import View

PAGES = data_beside(__file__, "contributing")

FILES = files_of("CONTRIBUTING.md") | files_of("docs/cards.md")
CARDS = [line for line in lines_of("docs/cards.md") if "mine/l4.yaml" in line or "mine.card" in line]
"""tests/repro/families/dllm/test_timed_run.py runs the others."""
LINES = [*lines_of("CONTRIBUTING.md"), *CARDS]
SERVING = [line for line in LINES if line.startswith("repro serve ")]
COMMANDS = [line for line in LINES if line not in SERVING]


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("num_prompts: 8", "num_prompts: 4"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    profile_little(monkeypatch)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_every_file_and_command_of_the_page(own_folder):
    assert len(FILES) == 15
    assert {shlex.split(command)[1] for command in COMMANDS} == set(PAGES["said"])
    for command in COMMANDS:
        program, name, *arguments = [part for word in shlex.split(command) for part in glob(word) or [word]]
        assert program == "repro"
        has_place = "--result-dir" in arguments or name in ("calibrate", "plan-cluster", "capacity")
        runs = [] if has_place else ["--result-dir", "runs"]
        sizes = [size for start, size in PAGES["fewer"].items() if " ".join((name, *arguments)).startswith(start)]
        asked = resized([name, *arguments, *runs], sizes[0] if sizes else {})
        ran = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert ran.exit_code == 0, (command, ran.output)
        assert PAGES["said"][name] in ran.output, (command, ran.output)
        assert "INVALID" not in ran.output, (command, ran.output)
    # Figures of every system are drawn of it, too.
    for name, stem in {"mine.card:ON_L4": "on_l4", "mine/l4.yaml:l4": "l4"}.items():
        view = View(platform=platform(name), reading="published")
        assert (view.cell(None, "dllm-serve", "livebench").platform, view.stem) == (name, stem)
    refused = CliRunner().invoke(app, ["bench", "--system", "mine.periodic:PERIODIC", "--knob", "period=0"])
    assert str(refused.exception).endswith("period=0 must be at least 1")


def test_the_server_of_the_page_serves_with_the_policy(own_folder):
    """Until it is ended; at a port that is free. The model has no tokenizer, so prompts are ids."""
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason=f"needs the extra server: {package} is not installed")
    (line,) = SERVING
    words = shlex.split(line)[1:]
    refused = CliRunner().invoke(app, [word.replace("0.02", "20") for word in words])
    assert str(refused.exception).endswith("window_s=20 must be between 0 and 10")

    command = [sys.executable, "-m", "repro", *words, "--port", "0"]
    path = os.pathsep.join(map(str, (REPO, own_folder)))
    own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=own_folder, env=own, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if line.startswith("ready: "))
            url = ready.split()[1].removesuffix(",")
            with urlopen(f"{url}/models") as answer:
                (served,) = json.load(answer)["data"]
            asked = {"model": served["id"], "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            request = Request(f"{url}/completions", json.dumps(asked).encode(), {"content-type": "application/json"})
            with urlopen(request) as answer:
                usage = json.load(answer)["usage"]
        finally:
            process.terminate()
            process.communicate()
    assert (served["scheduler"], usage["completion_tokens"]) == ("mine.gather:Gather", 4)
    assert process.returncode == 0
