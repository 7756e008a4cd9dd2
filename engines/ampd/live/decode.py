"""A decode worker: the home of sessions. It keeps their K/V, lends it to prefill workers, decodes over it, and prefills locally.

Only the main thread runs steps. Other threads answer prefill workers: they lend history while a step runs, and put out a landed
prefill's token at once. Its session joins the batch between two steps. The K/V of a session is held while it decodes or is lent, and
idle between rounds.
"""

import json
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engines.ampd.live.wire import Buffer, Header, Listener, bytes_per_token, gather, scatter
from engines.ampd.live.worker import IDLE_S, Claimed, LiveWorker, LostError, WorkerSpec, executor_of
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import PackedWork
from engines.ar.torch.worker import SessionMemory
from engines.runtime.rows import Ints


@dataclass(slots=True, eq=False, kw_only=True)
class Resident:
    session_id: int
    order: int
    """Rank by arrival; the lower is the older."""
    epoch: str
    slot: int = -1
    computed: int = 0
    """Tokens whose K/V is in the pool."""
    context: int = 0
    """Tokens so far, including the newest, whose K/V is not there yet."""
    token_s: float = 0.0
    """When its newest token came."""
    landed: tuple[int, str] | None = None
    """Task and fence of the prefill that came last."""
    is_idle: bool = False
    is_lent: bool = False
    """Whether a prefill worker reads its K/V, perhaps before this worker has heard that the round is over."""


class Residents:
    """The sessions at home here. The thread that steps and the one that lends use it at once, hence the lock."""

    def __init__(self, executor: PagedExecutor) -> None:
        self.executor = executor
        self.memory = SessionMemory(executor.tables)
        self.kv_bytes = bytes_per_token(executor)
        self.kv_peak = 0
        self._by_session: dict[int, Resident] = {}
        self._by_order: dict[int, Resident] = {}
        self._lock = threading.RLock()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the blocks in use can hold, including idle prefixes."""
        tables = self.executor.tables
        return (tables.num_blocks - tables.num_free) * tables.block_size

    @property
    def evicted(self) -> int:
        """Tokens of idle prefixes evicted so far."""
        return self.memory.evicted * self.executor.tables.block_size

    def find_or_add(self, session_id: int, epoch: str, order: int) -> Resident:
        """Return the session; a new one without K/V if it was not here under this epoch."""
        with self._lock:
            resident = self._by_session.get(session_id)
            if resident is not None and resident.epoch != epoch:
                self.drop(resident)
                resident = None
            if resident is None:
                resident = Resident(session_id=session_id, order=order, epoch=epoch)
                self._by_session[session_id] = self._by_order[order] = resident
            return resident

    def as_list(self) -> list[Resident]:
        with self._lock:
            return list(self._by_session.values())

    def is_known(self, resident: Resident) -> bool:
        return self._by_session.get(resident.session_id) is resident

    def lend(self, session_id: int, epoch: str, tokens: int) -> tuple[Resident | None, int]:
        """Hold the session's K/V for a prefill elsewhere. Return it, or None, and how many of its first ``tokens`` are here."""
        with self._lock:
            resident = self._by_session.get(session_id)
            if resident is None or resident.epoch != epoch or resident.slot < 0:
                return None, 0
            resident.is_lent = True
            return resident, min(self.resume(resident), tokens)

    def resume(self, resident: Resident) -> int:
        """Hold the session's K/V again, and return how many tokens of it were not evicted."""
        with self._lock:
            if resident.is_idle:
                resident.is_idle = False
                resident.computed = min(resident.computed, self.memory.resume(resident.order))
            return resident.computed

    def park(self, resident: Resident) -> None:
        """Let the session's K/V be idle between rounds, unless it is lent."""
        with self._lock:
            if resident.is_lent:
                return
            self.memory.park(resident.order, resident.slot, resident.computed)
            resident.is_idle = True

    def place(self, resident: Resident, tokens: int) -> bool:
        """Give the session a slot, and room for ``tokens`` tokens. False if evicting idle sessions does not make enough."""
        with self._lock:
            self.resume(resident)
            resident.is_lent = False
            if resident.slot < 0:
                if not self.executor.tables.num_free_slots:
                    oldest = self.memory.oldest_idle()
                    if oldest is None:
                        return False
                    self.forget(self._by_order[oldest])
                resident.slot = self.executor.open()
            return self.grow(np.array([resident.slot]), np.array([tokens]))

    def grow(self, slots: Ints, lengths: Ints) -> bool:
        with self._lock:
            is_there = self.memory.grow(slots, lengths)
            self.kv_peak = max(self.kv_peak, self.kv_tokens)
            return is_there

    def forget(self, resident: Resident) -> None:
        """Drop the session's K/V, and keep the session."""
        with self._lock:
            self.memory.drop(resident.order)
            if resident.slot >= 0:
                self.executor.close_slot(resident.slot)
            resident.slot, resident.computed, resident.is_idle, resident.is_lent = -1, 0, False, False

    def drop(self, resident: Resident) -> None:
        """Remove the session. If it has left already, it may be back under another epoch, and stays."""
        with self._lock:
            if self.is_known(resident):
                self.forget(resident)
                del self._by_session[resident.session_id], self._by_order[resident.order]

    def clear(self) -> None:
        with self._lock:
            for resident in self.as_list():
                self.drop(resident)


_STEPS_AT_ONCE = 64
"""How many decode steps are logged together."""


class _Landed(NamedTuple):
    """A finished prefill of a session. ``payload`` is K/V from elsewhere; None if it was computed here."""

    resident: Resident
    start: int
    payload: Buffer | None
    token: int
    state: str
    at_s: float


class DecodeProcess:
    def __init__(self, spec: WorkerSpec) -> None:
        self.executor = executor_of(spec)
        self.residents = Residents(self.executor)
        self._listener = Listener(self._answer)
        self.worker = LiveWorker(spec, self._listener.address)
        self._inbox: queue.SimpleQueue[_Landed | str] = queue.SimpleQueue()
        """Landed prefills, and the words with which this worker was woken."""
        self._batch: list[Resident] = []
        self._pending: Claimed | None = None
        """A claimed local prefill for which there was no room yet."""
        self._may_claim = True
        self._busy = {"busy_prefill_s": 0.0, "busy_decode_s": 0.0}
        self._steps: list[tuple[int, int, float]] = []
        """(batch, context, seconds) of steps not yet in the store."""

    def run(self) -> None:
        worker = self.worker
        worker.stop_on_signal()
        self._join()
        worker.start_heartbeat()
        threading.Thread(target=self._listen, name="wake", daemon=True).start()
        while not worker.is_stopping.is_set():
            try:
                if worker.is_lost.is_set():
                    self._join()
                self._turn()
            except LostError:
                pass
        self._listener.close()
        worker.report()

    def _join(self) -> None:
        """Join the run as a new incarnation, without any session."""
        self._batch.clear()
        self._pending, self._may_claim = None, True
        self.residents.clear()
        tables = self.executor.tables
        self.worker.join(tables.num_blocks * tables.block_size)

    def _turn(self) -> None:
        """Admit landed prefills, then run a local prefill or else a decode step: prefills go first (AMPD §3, footnote 3)."""
        while not self._inbox.empty():
            self._take(self._inbox.get())
        if self._prefill_locally():
            return
        if self._batch:
            self._step()
            return
        with suppress(queue.Empty):
            self._take(self._inbox.get(timeout=IDLE_S))

    # ---- what comes in -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        worker = self.worker
        next_entries = worker.store.follow("wake", worker.spec.worker_id)
        while not worker.is_stopping.is_set():
            for entry in next_entries(IDLE_S):
                self._inbox.put(entry["word"])

    def _take(self, item: _Landed | str) -> None:
        if isinstance(item, _Landed):
            self._admit(item)
            return
        self._may_claim = True
        if item == "left":
            self._drop_strangers()

    def _drop_strangers(self) -> None:
        """Drop sessions that have no home here any longer, as their clients have left, and tell the store how much K/V is in use."""
        while True:
            residents = self.residents.as_list()
            args = [arg for resident in residents for arg in (resident.session_id, resident.epoch)]
            strangers = {int(session) for session in self.worker.call("strangers", self.residents.kv_tokens, *args)}
            if not strangers:
                return
            self._leave(strangers, set(), set())
            for resident in residents:
                if resident.session_id in strangers:
                    self.residents.drop(resident)

    def _answer(self, header: Header, payload: bytearray) -> tuple[Header, Buffer]:
        """Answer a prefill worker that asks for history, or brings an increment."""
        torch.set_num_threads(1)
        session, epoch = int(header["session"]), str(header["epoch"])
        if header["what"] == "read":
            resident, cached = self.residents.lend(session, epoch, int(header["tokens"]))
            history = gather(self.executor, resident.slot, 0, cached) if resident is not None and cached else b""
            return {"have": cached}, history
        task, fence, token = (header[name] for name in ("task", "fence", "token"))
        at_s = self.worker.store.clock.now()
        try:
            answer = self._land(session, epoch, str(task), fence, token, at_s)
        except LostError:
            return {"said": "lost"}, b""
        if answer[0] == b"stale":  # an earlier fence or epoch, which may change nothing here
            return {"said": "stale"}, b""
        resident = self.residents.find_or_add(session, epoch, int(header["order"]))
        if self._is_landed(resident, answer, fence, task):
            self._inbox.put(_Landed(resident, int(header["start"]), payload, token, answer[1].decode(), at_s))
        return {"said": answer[0].decode()}, b""

    def _land(self, session: int, epoch: str, task: str, fence: str, token: int, at_s: float) -> list[bytes]:
        encoded = np.int32(token).tobytes(), np.float64(at_s).tobytes()
        answer: list[bytes] = self.worker.call("land", session, epoch, task, fence, *encoded, self.residents.kv_tokens)
        return answer

    def _is_landed(self, resident: Resident, answer: list[bytes], fence: str, task: int) -> bool:
        """Whether the store has the prefill, and this worker has not taken it in. "again" may answer a first landing, which is sent
        twice if Redis falls silent."""
        landed = (task, fence)
        if answer[0] not in (b"ok", b"again") or resident.landed == landed:
            return False
        resident.landed = landed
        return True

    def _admit(self, landed: _Landed) -> None:
        """Store the K/V that landed. The session then decodes, waits for its next round, or is over."""
        resident = landed.resident
        if not self.residents.is_known(resident):
            return
        if landed.payload is not None:
            tokens = landed.start + len(landed.payload) // self.residents.kv_bytes
            if not self._make_place(resident, tokens + 1):
                if landed.state == "decoding":
                    self._preempt(resident)
                else:
                    self.residents.forget(resident)
                return
            scatter(self.executor, resident.slot, landed.start, landed.payload)
            resident.computed = tokens
        resident.context, resident.token_s = resident.computed + 1, landed.at_s
        self.executor.write(resident.slot, resident.computed, [landed.token])
        if landed.state == "decoding":
            self._batch.append(resident)
        elif landed.state == "round":
            self.residents.park(resident)
        else:
            self.residents.drop(resident)

    # ---- local prefills -------------------------------------------------------------------------------------

    def _prefill_locally(self) -> bool:
        """Run a local prefill if one waits and has room. Return whether it did."""
        if self._pending is None and self._may_claim:
            self._pending = self.worker.claim(is_staged=False)
            self._may_claim = self._pending is not None
        if self._pending is None:
            return False
        claimed = self._pending
        task, end = claimed.task, claimed.task.history + claimed.task.tokens
        resident = self.residents.find_or_add(task.session_id, claimed.epoch, task.order)
        if not self._make_place(resident, end + 1):
            return False
        self._pending = None
        if self.worker.call("start", task.task_id, claimed.fence) == b"stale":
            self._drop_strangers()
            return True
        start_s = time.perf_counter()
        # If its lease ran out after it was computed, reuse all but the last token, whose row gives the first answer token.
        num_cached = min(self.residents.resume(resident), end - 1)
        self.executor.write(resident.slot, num_cached, claimed.ids[num_cached:end])
        result = self.executor.run(PackedWork.of([(resident.slot, num_cached, end - num_cached, True)]))
        token = int(result.tokens[0])
        resident.computed = end
        self._count_busy("busy_prefill_s", time.perf_counter() - start_s)
        self.worker.call("computed", task.task_id, claimed.fence, end - num_cached)
        at_s = self.worker.store.clock.now()
        answer = self._land(task.session_id, claimed.epoch, str(task.task_id), claimed.fence, token, at_s)
        if self._is_landed(resident, answer, claimed.fence, task.task_id):
            self._admit(_Landed(resident, num_cached, None, token, answer[1].decode(), at_s))
        elif answer[0] == b"stale":
            self._drop_strangers()
        return True

    # ---- decoding ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Run a decode step: every member of the batch gets a token."""
        batch = self._batch_with_room()
        if not batch:
            return
        start_s = time.perf_counter()
        slots, contexts = np.array([(resident.slot, resident.context) for resident in batch], dtype=np.int64).T
        ones = np.ones(len(batch), dtype=np.int64)
        tokens = self.executor.run(PackedWork(slots, contexts - 1, ones, ones.astype(bool))).tokens.tolist()
        now = self.worker.store.clock.now()
        ids = np.array(tokens, dtype=np.int32)
        items: list[Any] = []
        for index, resident in enumerate(batch):
            items += [resident.session_id, resident.epoch, resident.context, ids[index].tobytes()]
        gap_s = sum(now - resident.token_s for resident in batch)
        args = (self.worker.request(), np.float64(now).tobytes(), self.residents.kv_tokens, len(batch), gap_s)
        lost, rounds, ends, num_queued = self.worker.call("tokens", *args, *items)
        for resident in batch:
            resident.computed, resident.context, resident.token_s = resident.context, resident.context + 1, now
        self._may_claim |= num_queued > 0
        if lost or rounds or ends:
            self._leave({int(one) for one in lost}, {int(one) for one in rounds}, {int(one) for one in ends})
        if lost:
            self._drop_strangers()  # the word that woke it for them may have come before they were here
        self._count_busy("busy_decode_s", time.perf_counter() - start_s)
        self._steps.append((len(batch), int(contexts.sum()), time.perf_counter() - start_s))
        if len(self._steps) >= _STEPS_AT_ONCE or not self._batch:
            store, line = self.worker.store, json.dumps(self._steps)
            store.retry(lambda: store.client.rpush(store.key("steps", self.worker.spec.worker_id), line))
            self._steps.clear()

    def _leave(self, lost: set[int], rounds: set[int], ends: set[int]) -> None:
        remaining = []
        for resident in self._batch:
            if resident.session_id in rounds:
                self.residents.park(resident)
            elif resident.session_id in ends or resident.session_id in lost:
                self.residents.drop(resident)
            else:
                remaining.append(resident)
        self._batch = remaining

    def _batch_with_room(self) -> list[Resident]:
        """Return the batch, without the youngest members if memory does not hold another token for all."""
        while self._batch:
            slots, contexts = np.array([(member.slot, member.context) for member in self._batch], dtype=np.int64).T
            if self.residents.grow(slots, contexts):
                return self._batch
            self._preempt(self._youngest())
        return []

    def _make_place(self, resident: Resident, tokens: int) -> bool:
        """Give the session a slot and room for ``tokens`` tokens, preempting younger sessions. Return whether there was room."""
        while not self.residents.place(resident, tokens):
            youngest = self._youngest() if self._batch else resident
            if youngest.order <= resident.order:
                return False
            self._preempt(youngest)
        return True

    def _youngest(self) -> Resident:
        return max(self._batch, key=lambda each: each.order)

    def _preempt(self, resident: Resident) -> None:
        """Drop the session's K/V; all its tokens are prefilled again later."""
        self._batch = [member for member in self._batch if member is not resident]
        self.residents.drop(resident)
        self.worker.call("preempt", resident.session_id, resident.epoch)

    def _count_busy(self, activity: str, seconds: float) -> None:
        self._busy[activity] += seconds
        self.worker.said.update(self._busy, kv_peak=self.residents.kv_peak, kv_evicted=self.residents.evicted)
