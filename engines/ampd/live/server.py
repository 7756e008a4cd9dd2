"""A Redis server of a run's own, whose state survives its being killed: every acknowledged change is in its append-only file.

It asks for a password that is made for it and that no file and no command line holds: other users of the machine reach the
port, and a script that they run there would be the run's.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engines.ampd.live.store import client_of, load_redis
from engines.errors import RunError, UserError

START_S = 10.0


def redis_program() -> str:
    """Where it is; UserError where it is not installed."""
    if (found := shutil.which("redis-server")) is None:
        raise UserError("redis-server is not installed: apt-get install redis-server, or give redis=redis://HOST:PORT")
    return found


class RedisServer:
    """On a free loopback port, with its files in ``directory``."""

    def __init__(self, directory: Path) -> None:
        load_redis()
        program = redis_program()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        # Dies with this process, however that ends.
        guard = [found, "--pdeathsig", "TERM"] if (found := shutil.which("setpriv")) is not None else []
        self._command = [*guard, program, "-"]  # what it is told comes by its standard input
        self._directory, self._password = directory, secrets.token_hex(32)
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "requirepass": self._password,
            # A change is written before it is answered; a flush to the disk every second guards against a machine's death.
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "daemonize": "no",
            # Who waits for an event or for the next session to be due is told of the latter so often a second: by default ten times.
            "hz": 200,
        }
        self._settings = "".join(f"{name} {value}\n" for name, value in settings.items()).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """With the password: it is not to be shown."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again over what is in the directory; returns once it answers."""
        none = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=none, stderr=none, cwd=self._directory
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as told:
            told.write(self._settings)
        away = load_redis().exceptions
        until = time.monotonic() + START_S
        while True:
            client = client_of(self.url, START_S)
            try:
                client.ping()
            except (away.ConnectionError, away.BusyLoadingError) as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    self.stop()
                    raise RunError(f"redis-server does not answer on port {self.port}") from error
                time.sleep(0.01)
            else:
                return
            finally:
                client.close()

    def kill(self) -> None:
        """As a crash would: no goodbye, no last flush."""
        self._end(is_crash=True)

    def stop(self) -> None:
        """May be called twice."""
        self._end(is_crash=False)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _end(self, *, is_crash: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if is_crash:
            process.kill()
        else:
            process.terminate()
        process.wait()
