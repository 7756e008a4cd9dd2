"""A prefill worker: claims a task, reads its history from the session's home, computes, and sends the increment back.

Three threads overlap this work, as in AMPD §6. While one task computes, another thread chooses the next and reads its history,
and a third sends the increment of the task before.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from engines.ampd.live.wire import Peers, bytes_per_token, gather, scatter
from engines.ampd.live.worker import IDLE_S, Claimed, LiveWorker, LostError, WorkerSpec, executor_of
from engines.ar.torch.rows import PackedWork


class _Staged(NamedTuple):
    claimed: Claimed
    history: bytearray
    """K/V of the session's first tokens, as many as the home still had."""
    have: int


class PrefillProcess:
    def __init__(self, spec: WorkerSpec) -> None:
        self.worker, self.executor = LiveWorker(spec), executor_of(spec)
        self._kv_bytes = bytes_per_token(self.executor)
        self._place = threading.Semaphore(1)
        """Held by the one task that may be staged."""
        self._staged: queue.SimpleQueue[_Staged] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[Claimed, int, int, memoryview, float]] = queue.SimpleQueue()
        """Computed tasks: first token, number of cached tokens, computed K/V and the time."""
        self._is_busy = False
        self._busy_s = 0.0
        self._fault: BaseException | None = None
        """The error that a thread beside the main one raised."""

    def run(self) -> None:
        worker = self.worker
        worker.stop_on_signal()
        worker.join(0)
        worker.start_heartbeat()
        for loop in (self._stage, self._send):
            threading.Thread(target=self._run_loop, args=(loop,), name=loop.__name__, daemon=True).start()
        while not worker.is_stopping.is_set():
            if self._fault is not None:
                raise self._fault
            try:
                staged = self._staged.get(timeout=IDLE_S)
            except queue.Empty:
                staged = None
            try:
                if worker.is_lost.is_set():
                    worker.join(0)
                if staged is not None:
                    self._compute(staged)
            except LostError:
                pass
            finally:
                if staged is not None and not self._is_busy:
                    self._place.release()
                self._is_busy = False
        worker.report()

    def _run_loop(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop. Its error ends the process, which without the thread would be alive and do nothing."""
        try:
            loop()
        except BaseException as error:
            self._fault = error

    def _compute(self, staged: _Staged) -> None:
        worker, claimed, num_cached = self.worker, staged.claimed, staged.have
        task, end = claimed.task, claimed.task.history + claimed.task.tokens
        if worker.call("start", task.task_id, claimed.fence) == b"stale":
            return
        self._is_busy = True
        self._place.release()  # the next one is chosen now
        start_s = time.perf_counter()
        token, payload = self._prefill(staged, end)
        self._busy_s += time.perf_counter() - start_s
        worker.said["busy_prefill_s"] = self._busy_s
        if worker.call("computed", task.task_id, claimed.fence, end - num_cached) == b"ok":
            self._outgoing.put((claimed, token, num_cached, payload, worker.store.clock.now()))

    def _prefill(self, staged: _Staged, end: int) -> tuple[int, memoryview]:
        """Return the first token and the computed K/V."""
        executor, num_cached = self.executor, staged.have
        slot = executor.open()
        try:
            executor.tables.grow(np.array([slot]), np.array([end + 1]))
            executor.write(slot, num_cached, staged.claimed.ids[num_cached:end])
            scatter(executor, slot, 0, staged.history)
            result = executor.run(PackedWork.of([(slot, num_cached, end - num_cached, True)]))
            return int(result.tokens[0]), gather(executor, slot, num_cached, end)
        finally:
            executor.close_slot(slot)

    def _stage(self) -> None:
        """Choose the next task as soon as the one before computes, and read its history meanwhile."""
        worker = self.worker
        peers, next_entries = Peers(patience_s=worker.spec.lease_s), worker.store.follow("wake", worker.spec.worker_id)
        while not worker.is_stopping.is_set():
            self._place.acquire()
            staged = None
            while staged is None and not worker.is_stopping.is_set():
                try:
                    claimed = None if worker.is_lost.is_set() else worker.claim(is_staged=self._is_busy)
                    if claimed is None:
                        next_entries(IDLE_S)
                    else:
                        staged = self._read(peers, claimed)
                except LostError:
                    pass
            if staged is not None:
                self._staged.put(staged)

    def _read(self, peers: Peers, claimed: Claimed) -> _Staged | None:
        """Read the task's history. None if the home is gone: then the session gets another, and the task comes back."""
        task, store = claimed.task, self.worker.store
        if task.history == 0:
            return _Staged(claimed, bytearray(), 0)
        if not claimed.address:
            return None
        start_s = store.clock.now()
        try:
            request = {"what": "read", "session": task.session_id, "epoch": claimed.epoch, "tokens": task.history - 1}
            header, payload = peers.ask(claimed.address, request)
        except OSError:
            return None
        if payload:
            self._record_transfer(claimed, "history", claimed.home, self.worker.spec.worker_id, len(payload), start_s)
        return _Staged(claimed, payload, int(header["have"]))

    def _send(self) -> None:
        torch.set_num_threads(1)
        worker = self.worker
        peers = Peers(patience_s=10 * worker.spec.lease_s)
        while not worker.is_stopping.is_set():
            try:
                claimed, token, num_cached, payload, computed_s = self._outgoing.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            task = claimed.task
            header = {"what": "land", "session": task.session_id, "order": task.order, "epoch": claimed.epoch}
            header |= {"task": task.task_id, "fence": claimed.fence, "start": num_cached, "token": token}
            try:
                peers.ask(claimed.address, header, payload)
            except OSError:
                continue  # the home is gone, and the task with it
            self._record_transfer(claimed, "increment", worker.spec.worker_id, claimed.home, len(payload), computed_s)

    def _record_transfer(
        self, claimed: Claimed, content: str, source: int, target: int, num_bytes: int, start_s: float
    ) -> None:
        store = self.worker.store
        tokens = num_bytes // self._kv_bytes
        row = [claimed.task.task_id, content, source, target, tokens, num_bytes, start_s, store.clock.now()]
        store.retry(lambda: store.client.rpush(store.key("transfers"), json.dumps(row)))
