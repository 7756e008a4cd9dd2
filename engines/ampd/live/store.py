"""The shared state of a live cluster: a client of ``operations.lua``, whose operations are atomic and may be sent twice.

While Redis is away callers wait, and after ``outage_s`` they get a RunError. All processes use one clock: Redis's own.

``RedisServer`` is a run's own Redis server. Its state survives a kill, because every acknowledged change is in its append-only file.

The server asks for a new password that no file and no command line holds. Other users of the machine can reach the port, and a
script that they run there would count as the run's.
"""

import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np

from engines.errors import RunError, UserError
from engines.policies.views import WorkerSnapshot

T = TypeVar("T")

_KINDS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    int | None: int,
    float: float,
    float | None: float,
    bool: lambda word: word == "1",
}
"""How to read a field of a dataclass, by its declared type. Fields of other types are texts."""

_RETRY_S = 0.05
ANSWER_S = 5.0
"""A connection that is silent for this long is closed."""


class RedisClock:
    """Redis's time: this machine's monotonic clock plus an offset that is measured once."""

    def __init__(self, client: Any, *, samples: int = 5) -> None:
        readings = []
        for _ in range(samples):
            before = time.monotonic()
            seconds, micros = client.time()
            after = time.monotonic()
            readings.append((after - before, seconds + micros / 1e6 - (before + after) / 2))
        self._offset = min(readings)[1]

    def now(self) -> float:
        """Seconds, the same for every process of the run."""
        return time.monotonic() + self._offset


@dataclass(frozen=True, kw_only=True)
class Member:
    """A live worker: its state as policies see it, and its identity."""

    view: WorkerSnapshot
    role: str
    incarnation: str
    is_suspended: bool
    """Whether it let a lease expire and has finished nothing since."""


class Losses(NamedTuple):
    """The losses of a whole run, including its profile."""

    workers: tuple[int, ...]
    """The ids of lost workers, each as often as it was lost."""
    num_taken_back: int
    """Leases that expired although their worker was alive."""


class Store:
    def __init__(self, client: Any, prefix: str, *, clock: RedisClock | None = None, outage_s: float = 20.0) -> None:
        self.client, self.prefix, self.outage_s = client, prefix, outage_s
        self.num_outages = 0
        errors = load_redis().exceptions
        self._transient = errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError
        self._refused = errors.ResponseError
        self._script = client.register_script(
            "".join((files(__package__) / name).read_text(encoding="utf-8") for name in ("state.lua", "operations.lua"))
        )
        self.clock = clock or self.retry(lambda: RedisClock(client))

    @staticmethod
    def connect(url: str, prefix: str, *, outage_s: float = 20.0) -> "Store":
        return Store(client_of(url, ANSWER_S), prefix, outage_s=outage_s)

    def key(self, *parts: object) -> str:
        return ":".join((self.prefix, *map(str, parts)))

    def call(self, operation: str, *args: Any, now: float | None = None) -> Any:
        """Run an operation of ``operations.lua``, as of ``now`` or of when it gets through. Floats are sent to the last bit."""
        encoded = [_encode(arg) for arg in args]

        def ask() -> Any:
            time_s = self.clock.now() if now is None else now
            return self._script(keys=[self.prefix], args=[operation, repr(time_s), *encoded])

        return self.retry(ask)

    def retry(self, ask: Callable[[], T]) -> T:
        """Return what ``ask`` returns, and ask again while Redis is away. Raises RunError if it stays away or has lost the run."""
        outage_start: float | None = None
        while True:
            try:
                answer = ask()
            except self._transient as error:
                if outage_start is None:
                    outage_start = time.monotonic()
                    self.num_outages += 1
                if time.monotonic() - outage_start > self.outage_s:
                    raise RunError(
                        f"redis has not answered for {self.outage_s:g} s ({error}): start it again"
                    ) from error
                time.sleep(_RETRY_S)
            except self._refused as error:
                if "NORUN" in str(error):
                    raise RunError(
                        "redis has lost the run's state: start it with --appendonly yes, and begin the run anew"
                    ) from error
                raise
            else:
                return answer

    # ---- what is read -------------------------------------------------------------------------------------

    def members(self, now: float | None = None) -> list[Member]:
        """The live workers, sorted by id."""
        members = [
            Member(
                view=from_hash(WorkerSnapshot, fields),
                role=fields["role"],
                incarnation=fields["incarnation"],
                is_suspended=fields["suspended"] == "1",
            )
            for fields in map(decode_hash, self.call("snapshot", now=now))
        ]
        return sorted(members, key=lambda member: member.view.worker_id)

    def read(self, *parts: object) -> bytes:
        """Read a string of bytes."""
        return self.retry(lambda: self.client.get(self.key(*parts))) or b""

    def ids(self, session_id: int, start: int = 0, end: int = 2**28) -> list[int]:
        """The session's token ids from ``start`` to before ``end``, as far as they exist."""
        if end <= start:
            return []
        key = self.key("ids", session_id)
        encoded = self.retry(lambda: self.client.getrange(key, 4 * start, 4 * end - 1))
        ids: list[int] = np.frombuffer(encoded, dtype=np.int32).tolist()
        return ids

    def fields(self, *parts: object) -> dict[str, str]:
        """Read a hash."""
        return decode_hash(self.retry(lambda: self.client.hgetall(self.key(*parts))))

    def log(self) -> list[str]:
        """The decisions in their order. A "+" stands before one that took effect, a "-" before one that came too late."""
        return [line.decode() for line in self.retry(lambda: self.client.lrange(self.key("log"), 0, -1))]

    def follow(self, *parts: object) -> Callable[[float], list[dict[str, str]]]:
        """Return a function, for one thread, that reads the new entries of a stream, and waits up to ``wait_s`` seconds for the first."""
        key, mark = self.key(*parts), "0"

        def new_entries(wait_s: float) -> list[dict[str, str]]:
            nonlocal mark
            block = max(1, int(min(wait_s, ANSWER_S / 2) * 1000))
            streams = self.retry(lambda: self.client.xread({key: mark}, block=block))
            if isinstance(streams, Mapping):
                streams = [
                    (name, entries[0] if isinstance(entries[0], list) else entries) for name, entries in streams.items()
                ]
            entries = [entry for _, entries in streams for entry in entries]
            if entries:
                mark = entries[-1][0].decode()
            return [decode_hash(fields) for _, fields in entries]

        return new_entries

    def losses(self) -> Losses:
        lost = self.retry(lambda: self.client.lrange(self.key("lost"), 0, -1))
        return Losses(tuple(map(int, lost)), int(self.fields("run").get("taken_back", 0)))

    def clear(self) -> None:
        """Forget the run."""
        for name in self.client.scan_iter(match=f"{self.prefix}:*", count=1000):
            self.client.delete(name)


def load_redis() -> Any:
    try:
        import redis
    except ImportError:
        raise UserError("the redis client is not installed: pip install 'dllm-serve-repro[redis]'") from None
    return redis


def client_of(url: str, answer_s: float) -> Any:
    """A client that asks once, and waits ``answer_s`` seconds for an answer."""
    redis = load_redis()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    timeouts = {"socket_timeout": answer_s, "socket_connect_timeout": answer_s}
    try:
        return redis.Redis.from_url(url, **timeouts, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise UserError(f"redis={without_password(url)!r} is no address ({error}): write redis://HOST:PORT") from None


def without_password(url: str) -> str:
    """The address as it may be shown: without its password."""
    return re.sub(r"(?<=://).*@", "***@", re.sub(r"(?<=password=)[^&]*", "***", url))


def decode_hash(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[str, str]:
    """Decode a hash as Lua or the client returns it."""
    if isinstance(flat, Mapping):
        return {name.decode(): value.decode() for name, value in flat.items()}
    return {flat[index].decode(): flat[index + 1].decode() for index in range(0, len(flat), 2)}


def from_hash(kind: type[T], words: Mapping[str, str]) -> T:
    """Build a dataclass from a hash. Each field is read by its name and declared type; fields that the hash lacks have their defaults."""
    readers = _readers(kind)  # type: ignore[arg-type]
    return kind(**{name: read(words[name]) for name, read in readers.items() if name in words})


@cache
def _readers(kind: type[Any]) -> Mapping[str, Callable[[str], Any]]:
    return {name: _KINDS.get(hint, str) for name, hint in get_type_hints(kind).items()}


def _encode(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return repr(value) if isinstance(value, float) else value


START_S = 10.0


def redis_program() -> str:
    """The path of redis-server. Raises UserError if it is not installed."""
    if (path := shutil.which("redis-server")) is None:
        raise UserError("redis-server is not installed: apt-get install redis-server, or give redis=redis://HOST:PORT")
    return path


class RedisServer:
    """A Redis server on a free loopback port, with its files in ``directory``."""

    def __init__(self, directory: Path) -> None:
        load_redis()
        program = redis_program()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        # The server dies with this process, however that ends.
        guard = [setpriv, "--pdeathsig", "TERM"] if (setpriv := shutil.which("setpriv")) is not None else []
        self._command = [*guard, program, "-"]  # it reads its settings from standard input
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
            # How often per second Redis ends waits that are over, as for the next session's due time: by default ten times.
            "hz": 200,
        }
        self._settings = "".join(f"{name} {value}\n" for name, value in settings.items()).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """The address with the password. Do not show it."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again with the state in the directory. Returns once the server answers."""
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull, cwd=self._directory
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self._settings)
        errors = load_redis().exceptions
        deadline_s = time.monotonic() + START_S
        while True:
            client = client_of(self.url, START_S)
            try:
                client.ping()
            except (errors.ConnectionError, errors.BusyLoadingError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    self.stop()
                    raise RunError(f"redis-server does not answer on port {self.port}") from error
                time.sleep(0.01)
            else:
                return
            finally:
                client.close()

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
