"""An environment for each server: their packages conflict with this project's, and with each other's."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from engines.errors import RunError, UserError, require

Device = Literal["cpu", "cuda"]
FOLDER_VARIABLE = "REPRO_SERVERS_DIR"
"""Variable that names the folder of environments; without it we use the working directory."""
MARK = "repro-environment.json"
"""File that is written last; it holds the environment's recipe and packages."""
_LIST = "import importlib.metadata as m, json; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"

_PLACE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"

Run = Callable[[Sequence[str]], int]
"""Runs a command with visible output, and returns its exit code."""


def machine_device() -> Device:
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


@dataclass(frozen=True, kw_only=True)
class ServerEnvironment:
    name: str
    device: Device
    steps: tuple[tuple[str, ...], ...]
    """Arguments of its pip, in order; each step may be repeated."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files below its site-packages that a package lacks."""
    check: str
    """Program that fails if the environment does not work."""
    disk_gb: float
    minutes: str

    @property
    def folder(self) -> Path:
        return Path(os.environ.get(FOLDER_VARIABLE) or ".").expanduser().absolute() / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def cost(self) -> str:
        return f"{self.disk_gb:g} GB, {self.minutes} minutes"

    @property
    def recipe(self) -> str:
        """A digest of how the environment is made."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def packages(self) -> Mapping[str, str] | None:
        """Versions by name; None if it was not installed by this recipe."""
        try:
            mark = json.loads((self.folder / MARK).read_text())
            return dict(mark["packages"]) if mark["recipe"] == self.recipe and self.python.exists() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def require_installed(self, *, otherwise: str = "give the --url of a server that runs") -> None:
        if self.packages is None:
            option = "" if self.device == machine_device() else f" --device {self.device}"
            raise UserError(
                f"{self.name} is not installed in {self.folder} ({FOLDER_VARIABLE} names another folder): run 'repro install "
                f"{self.name}{option}' ({self.cost}), or {otherwise}"
            )

    def commands(self) -> Iterator[tuple[str, ...]]:
        """Yield the commands that ``install`` runs."""
        python = str(self.python)
        yield (sys.executable, "-m", "venv", str(self.folder))
        for step in self.steps:
            yield (python, "-m", "pip", "--disable-pip-version-check", *step)
        yield (python, "-c", self.check)

    def install(self, run: Run, say: Callable[[str], None]) -> None:
        """Create the environment, or finish one that was begun. Raises RunError if a command fails."""
        if self.packages is not None:
            say(f"{self.name} is installed in {self.folder}")
            return
        existing = next(parent for parent in (self.folder, *self.folder.parents) if parent.is_dir())
        free_gb = shutil.disk_usage(existing).free / 1e9
        # An interrupted install already occupies its room.
        require(
            self.folder.exists() or free_gb >= self.disk_gb,
            f"{existing} has {free_gb:.1f} GB free and {self.name} takes {self.disk_gb:g}: make room, or set {FOLDER_VARIABLE}",
        )
        commands = list(self.commands())
        say(f"{self.name}: {self.folder}, {self.cost}")
        for number, command in enumerate(commands, 1):
            say(f"{number}/{len(commands)}: {shlex.join(command)}")
            for name, content in self.files.items() if number == len(commands) else ():
                path = Path(self._ask(_PLACE).strip()) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
            if code := run(command):
                raise RunError(
                    f"installing {self.name} failed in step {number} of {len(commands)} (exit code {code}, its output is "
                    f"above): mend it, and the same command goes on"
                )
        packages = json.loads(self._ask(_LIST))
        mark = self.folder / MARK
        temporary = mark.with_suffix(".partial")
        temporary.write_text(json.dumps({"recipe": self.recipe, "packages": packages}, indent=1, sort_keys=True) + "\n")
        temporary.replace(mark)
        say(f"{self.name} is installed")

    def _ask(self, program: str) -> str:
        return subprocess.run((str(self.python), "-c", program), stdout=subprocess.PIPE, text=True, check=True).stdout


def environments_of(server: str) -> Mapping[Device, ServerEnvironment]:
    return _environments()[server]


def known_servers() -> tuple[str, ...]:
    return tuple(_environments())


@cache
def _environments() -> Mapping[str, Mapping[Device, ServerEnvironment]]:
    import yaml

    stored = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text())
    return {
        name: {
            build["device"]: ServerEnvironment(name=name, **{**build, "steps": tuple(map(tuple, build["steps"]))})
            for build in builds
        }
        for name, builds in stored.items()
    }
