"""Stores for tests of the live coordinator, and workers that are the test's own hands."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.ampd.live.store import RedisServer, Store, decode_hash

needs_redis = pytest.mark.skipif(
    find_spec("redis") is None or shutil.which("redis-server") is None,
    reason="needs the redis client and redis-server (pip install 'dllm-serve-repro[redis]', apt-get install redis-server)",
)
needs_store = pytest.mark.skipif(
    find_spec("redis") is None or (shutil.which("redis-server") is None and find_spec("lupa") is None),
    reason="needs the redis client, and redis-server or fakeredis[lua]",
)


class HandClock:
    """Stands still but where it is put forward."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


@contextmanager
def client_of_any(directory: Path) -> Iterator[Any]:
    """A client of a real server where there is one, else of fakeredis."""
    if shutil.which("redis-server") is not None:
        import redis

        with RedisServer(directory) as server:
            client = redis.Redis.from_url(server.url)
            yield client
            client.close()
    else:
        import fakeredis

        yield fakeredis.FakeRedis()


@dataclass(kw_only=True)
class Hand:
    """A worker in the store whose steps a test takes one by one."""

    store: Store
    worker_id: int
    role: str = "prefill"
    incarnation: str = "a"
    lease_s: float = 10.0
    requests: int = 0

    def register(self, capacity: int = 10**6) -> Hand:
        self._call("register", self.incarnation, self.role, 1, "127.0.0.1:1", capacity, self.lease_s)
        return self

    def beat(self) -> bytes:
        found: bytes = self._call("beat", self.incarnation, self.lease_s)
        return found

    def queued(self) -> list[int]:
        found = self._call("queue", self.incarnation)
        return [int(decode_hash(fields)["task_id"]) for fields in found[2]]

    def claim(self, task: int | None = None, *, lease_s: float = 10.0, request: str | None = None) -> dict[str, str]:
        """The first task, or one of them; its fields, and ``epoch`` of its session, or what was ``said`` instead."""
        version, _, tasks, _ = self._call("queue", self.incarnation)
        ids = [int(decode_hash(fields)["task_id"]) for fields in tasks]
        if task is None and not ids:
            return {"said": "empty"}
        task = ids[0] if task is None else task
        rest = [part for each in ids if each != task for part in (each, 0)]
        self.requests += request is None
        request = request or str(self.requests)
        said = self._call("claim", self.incarnation, request, version, task, 0, lease_s, 0, "{}", *rest)
        if isinstance(said, bytes):
            return {"said": said.decode()}
        return {**decode_hash(said[0]), "epoch": decode_hash(said[1])["epoch"], "num_ids": str(len(said[3]) // 4)}

    def start(self, task: dict[str, str]) -> bytes:
        found: bytes = self._call("start", self.incarnation, task["task_id"], task["fence"])
        return found

    def compute(self, task: dict[str, str]) -> bytes:
        found: bytes = self._call("computed", self.incarnation, task["task_id"], task["fence"], task["tokens"])
        return found

    def land(self, task: dict[str, str], token: int = 7) -> list[bytes]:
        sent = np.int32(token).tobytes(), np.float64(self.store.clock.now()).tobytes()
        found: list[bytes] = self._call(
            "land", self.incarnation, task["session_id"], task["epoch"], task["task_id"], task["fence"], *sent, 0
        )
        return found

    def decode(self, *sessions: tuple[int, int], gap_s: float = 0.0, request: str | None = None) -> list[Any]:
        """A step of (session, epoch) each."""
        items: list[Any] = []
        for session, epoch in sessions:
            position = len(self.store.read("ids", session)) // 4
            items += [session, epoch, position, np.int32(position).tobytes()]
        self.requests += request is None
        time = np.float64(self.store.clock.now()).tobytes()
        found: list[Any] = self._call(
            "tokens", self.incarnation, request or str(self.requests), time, 0, 0, gap_s, *items
        )
        return found

    def _call(self, operation: str, *args: Any) -> Any:
        return self.store.call(operation, self.worker_id, *args)


class HandFleet:
    """A ``Fleet`` of two hands, a home 0 and a prefill worker 1, that do what they are given in a thread of this process."""

    worker_ids = (0, 1)

    def __init__(self, url: str, prefix: str, *, longest: int = 10**6) -> None:
        """``longest`` is the length in tokens at which a session's answer stands still."""
        self._longest = longest
        store = Store.connect(url, prefix)
        store.call("create", 10.0)
        self.home = Hand(store=store, worker_id=0, role="decode", lease_s=600.0).register()
        self.prefill = Hand(store=store, worker_id=1, lease_s=600.0).register()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def check(self) -> None:
        assert self._thread.is_alive()

    def __enter__(self) -> HandFleet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _length(self, session: int) -> int:
        return len(self.home.store.read("ids", session)) // 4

    def _work(self) -> None:
        decoding: dict[int, int] = {}
        while not self._is_over.wait(0.001):
            for hand in (self.home, self.prefill):
                task = hand.claim(lease_s=600.0)
                if "said" in task:
                    continue  # nothing waits, or the queue has changed meanwhile
                hand.start(task)
                hand.compute(task)
                if self.home.land(task)[1:2] == [b"decoding"]:
                    decoding[int(task["session_id"])] = int(task["epoch"])
            going = [each for each in decoding.items() if self._length(each[0]) < self._longest]
            if going:
                lost, rounds, ends, _ = self.home.decode(*going)
                for session in (*lost, *rounds, *ends):
                    del decoding[int(session)]
