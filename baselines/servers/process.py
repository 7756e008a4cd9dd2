"""Processes of a server: started together, waited for until they answer, stopped together whatever happens."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from baselines.servers.asking import NoPage, ask
from engines.errors import RunError
from engines.machine import settled

WARDEN = Path(__file__).with_name("warden.py")
GRACE_S = 20.0
"""Between asking a server to end and killing it."""
_POLL_S = 0.1
_BREAK_S = 5.0
"""From when a process's connections break to its end, at most."""
_TOLD_LINES = 3
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""Variables of this process that would change what a server does, beside those that we ``settled``."""


@dataclass(frozen=True, kw_only=True)
class Command:
    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what is inherited."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """``url`` is ready once ``/v1/models`` lists ``model``, every one of ``paths`` says 200, and ``/health`` lists
    ``num_workers`` instances of ``endpoint``."""

    url: str
    model: str
    paths: tuple[str, ...] = ()
    num_workers: int | None = None
    """None where the server lists none."""
    endpoint: str = "generate"

    def missing(self) -> str | None:
        """What it lacks, in a few words; None where it is ready."""
        try:
            for path in self.paths:
                ask(f"{self.url}{path}")
            if all(card.get("id") != self.model for card in json.loads(ask(f"{self.url}/v1/models"))["data"]):
                return f"it lists no model {self.model!r}"
            if self.num_workers is not None:
                listed = json.loads(ask(f"{self.url}/health"))["instances"]
                came = len({each["instance_id"] for each in listed if each["endpoint"] == self.endpoint})
                if came < self.num_workers:
                    return f"{came} of {self.num_workers} workers are there"
        except NoPage as error:
            return f"it does not answer ({error})"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "it does not answer as such servers do"
        return None


class _Process:
    def __init__(self, command: Command, folder: Path) -> None:
        self.name, self.log = command.name, folder / f"{command.name}.log"
        ours = {*_OURS, *settled(os.environ)}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        with self.log.open("wb") as log:
            self.warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WARDEN), str(GRACE_S), "--", *command.arguments],
                env={**inherited, **command.environment},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """The last lines of its log that speak of an error, else the last there are."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        wrong = [line for line in lines if "Error" in line or "error" in line]
        return " | ".join((wrong or lines)[-_TOLD_LINES:]) or "nothing"


@contextmanager
def running(
    name: str, commands: Sequence[Command], address: Address, *, folder: Path, within_s: float
) -> Iterator[float]:
    """The seconds until it was ready. Logs go into ``folder``. Raise RunError where a process ends before it is asked to, or
    where ``within_s`` is over."""
    processes: list[_Process] = []

    def check(when: str) -> None:
        for each in processes:
            if each.warden.poll() is not None:
                raise RunError(
                    f"{name} ended {when} (exit code {each.warden.returncode}): {each.last_words()}; all it said: {each.log}"
                )

    try:
        started = time.monotonic()
        for command in commands:
            processes.append(_Process(command, folder))
        while (missing := address.missing()) is not None:
            check("while starting")
            if time.monotonic() - started > within_s:
                raise RunError(
                    f"{name} is not ready after start_timeout_s={within_s:g}, {missing}: {processes[-1].last_words()}; "
                    f"all it said: {folder}"
                )
            time.sleep(_POLL_S)
        yield time.monotonic() - started
        if (missing := address.missing()) is not None:
            # Connections break before the process that held them is gone.
            until = time.monotonic() + _BREAK_S
            while time.monotonic() < until:
                check("during the run")
                time.sleep(_POLL_S)
            raise RunError(f"{name} did not last, {missing}: {processes[0].last_words()}; all it said: {folder}")
        check("during the run")
    finally:
        # Each knows on its own what to do now, even if what follows is interrupted.
        for each in processes:
            with suppress(OSError):
                each.warden.stdin.close()  # type: ignore[union-attr]
        for each in processes:
            each.warden.wait()


def free_port() -> int:
    """One that nobody listens on. Another may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
