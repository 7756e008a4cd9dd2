"""Processes of a server: we start them together, wait until they answer, and stop them together whatever happens. Their pages are read
whole, in bounded time and size, from the named address only: neither proxies nor redirects see our headers."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from engines.errors import RunError
from engines.machine import our_variables

# -- pages ------------------------------------------------------------------------------------------------

ASK_S = 5.0
"""Seconds for a whole page, even if it trickles in."""
MOST_BYTES = 1 << 24
_LONGEST_SHOWN = 100
_MOST_DIGITS = 18
"""A longer Content-Length is not parsed, so the end of the body is unknown."""


class NoPage(OSError):
    """Why a page cannot be read, in a few words; ``status`` is None if the server sent none."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirects)


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return the body of an answer with status 200; raises NoPage."""
    replies: list[bytes | NoPage] = []

    def read() -> None:
        try:
            replies.append(_read(url, headers))
        except NoPage as error:
            replies.append(error)

    # A connection's timeout applies to each piece, not to the whole page.
    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(ASK_S)
    answer = replies[0] if replies else NoPage(f"no answer within {ASK_S:g} s")
    if isinstance(answer, NoPage):
        raise answer
    return answer


def _read(url: str, headers: Mapping[str, str]) -> bytes:
    try:
        with _OPENER.open(Request(url, headers=dict(headers)), timeout=ASK_S) as response:
            if response.status != 200:
                raise NoPage(f"status {response.status}", response.status)
            if refusal := reason_not_read(lambda name: response.headers.get_all(name, [])):
                raise NoPage(refusal)
            content: bytes = response.read(MOST_BYTES + 1)
            missing = response.length
    except NoPage:
        raise
    except HTTPError as error:
        is_redirect = 300 <= error.code < 400
        text = redirect(error.code, error.headers.get("Location")) if is_redirect else f"status {error.code}"
        raise NoPage(text, error.code) from None
    except IncompleteRead:
        raise NoPage("its body broke off") from None
    except (HTTPException, ValueError) as error:
        raise NoPage(f"what it says is no HTTP: {type(error).__name__}") from None
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = f"no answer within {ASK_S:g} s" if isinstance(reason, TimeoutError) else str(reason)
        raise NoPage(text or type(reason).__name__) from None
    if len(content) > MOST_BYTES:
        raise NoPage(f"its body is longer than {MOST_BYTES} bytes")
    if missing:
        raise NoPage(f"its body broke off, {missing} bytes before its Content-Length")
    return content


def redirect(status: int, location: str | None) -> str:
    """Describe a redirect. We never follow it, as another host may be anybody's."""
    try:
        host = urlsplit(location or "").netloc.rpartition("@")[2]
    except ValueError:
        host = "?"
    target = f"the host {host[:_LONGEST_SHOWN]!r}" if host else "another path of this host" if location else "nowhere"
    return f"status {status}, a redirect to {target}, which is not followed"


def reason_not_read(values_of: Callable[[str], Sequence[str]]) -> str | None:
    """Return why we do not read a body, judged by its header fields. Either its end is unknown, or it is compressed although we did not
    ask for that, so its size has no bound."""
    coding = ", ".join(values_of("Content-Encoding")).strip().lower()
    if coding not in ("", "identity"):
        return f"its body is compressed ({coding[:_LONGEST_SHOWN]!r}), which was not asked for"
    lengths = {*values_of("Content-Length")}
    if len(lengths) > 1 or not all(text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS for text in lengths):
        return "its Content-Length is no length"
    if [text.strip().lower() for text in values_of("Transfer-Encoding")] not in ([], ["chunked"]):
        return "its Transfer-Encoding is not known here"
    return None


# -- processes --------------------------------------------------------------------------------------------

WARDEN = Path(__file__).with_name("warden.py")
GRACE_S = 20.0
"""Seconds between asking a server to end and killing it."""
_POLL_S = 0.1
_BREAK_S = 5.0
"""Most seconds between the break of a process's connections and its end."""
_TOLD_LINES = 3
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""Our variables that would change what a server does, besides those that we ``settled``."""


@dataclass(frozen=True, kw_only=True)
class Command:
    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides the inherited ones."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """``url`` is ready once ``/v1/models`` lists ``model``, all ``paths`` return 200, and ``/health`` lists ``num_workers`` instances of
    ``endpoint``."""

    url: str
    model: str
    paths: tuple[str, ...] = ()
    num_workers: int | None = None
    """None if the server lists no workers."""
    endpoint: str = "generate"

    def missing(self) -> str | None:
        """Return what the server still lacks, in a few words; None if it is ready."""
        try:
            for path in self.paths:
                ask(f"{self.url}{path}")
            if all(card.get("id") != self.model for card in json.loads(ask(f"{self.url}/v1/models"))["data"]):
                return f"it lists no model {self.model!r}"
            if self.num_workers is not None:
                workers = json.loads(ask(f"{self.url}/health"))["instances"]
                num_ready = len({worker["instance_id"] for worker in workers if worker["endpoint"] == self.endpoint})
                if num_ready < self.num_workers:
                    return f"{num_ready} of {self.num_workers} workers are there"
        except NoPage as error:
            return f"it does not answer ({error})"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "it does not answer as such servers do"
        return None


class _Process:
    def __init__(self, command: Command, folder: Path) -> None:
        self.name, self.log = command.name, folder / f"{command.name}.log"
        removed = {*_OURS, *our_variables(os.environ)}
        inherited = {name: value for name, value in os.environ.items() if name not in removed}
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
        """The last lines of its log that mention an error, or else its last lines."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line]
        return " | ".join((errors or lines)[-_TOLD_LINES:]) or "nothing"


@contextmanager
def running(
    name: str, commands: Sequence[Command], address: Address, *, folder: Path, within_s: float
) -> Iterator[float]:
    """Run the processes around the body. Yields the seconds until the server was ready; logs go into ``folder``. Raises RunError if a
    process ends early, or if ``within_s`` is over."""
    processes: list[_Process] = []

    def check(phase: str) -> None:
        for process in processes:
            if process.warden.poll() is not None:
                raise RunError(
                    f"{name} ended {phase} (exit code {process.warden.returncode}): {process.last_words()}; all it said: {process.log}"
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
            # Connections break before their process is gone.
            until = time.monotonic() + _BREAK_S
            while time.monotonic() < until:
                check("during the run")
                time.sleep(_POLL_S)
            raise RunError(f"{name} did not last, {missing}: {processes[0].last_words()}; all it said: {folder}")
        check("during the run")
    finally:
        # Each warden now ends its server on its own, even if what follows is interrupted.
        for process in processes:
            with suppress(OSError):
                process.warden.stdin.close()  # type: ignore[union-attr]
        for process in processes:
            process.warden.wait()


def free_port() -> int:
    """Return a port that nobody listens on. Another process may take it before we use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
