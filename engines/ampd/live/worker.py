"""The common part of prefill and decode workers: their identity in the store, their heartbeat, and how they claim a prefill."""

import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from engines.ampd.live.decisions import choose, order_line
from engines.ampd.live.store import Store, decode_hash, from_hash
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import PackedWork
from engines.errors import RunError
from engines.models.loader import load_causal, parse_dtype
from engines.models.qwen2_config import CausalConfig
from engines.policies.views import PrefillQueue, PrefillTask
from engines.runtime.rows import Ints

Role = Literal["prefill", "decode"]

IDLE_S = 0.25
"""How long a worker without work sleeps before it checks whether it should stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker process needs to know. It can be pickled."""

    worker_id: int
    role: Role
    url: str
    """The address of Redis."""
    prefix: str
    model: str | CausalConfig
    """A config gets random weights of ``seed``, the same on every worker."""
    make_queue: Callable[[], PrefillQueue]
    num_tokens: int
    """For how many tokens the pool holds K/V."""
    max_len: int
    num_slots: int
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    core: int | None = None
    """The one core of this machine that the worker may run on; None: any."""
    lease_s: float = 2.0
    """A worker without a heartbeat for this long counts as dead."""
    patience: float = 10.0
    """A prefill may take this many times its estimate, or at least ``lease_s``, before another worker gets it."""
    outage_s: float = 30.0


FAULT = "fault"
"""The field of a worker in the store that says why it ended, if a policy is the cause."""


class LostError(RuntimeError):
    """The store counts this incarnation of the worker as dead, and others have its work."""


class Claimed(NamedTuple):
    task: PrefillTask
    fence: str
    epoch: str
    """How often the session has lost its home, as text."""
    home: int
    address: str
    """The address of the home."""
    ids: Ints
    """[history + tokens]"""


class LiveWorker:
    """A worker process as a member of the run."""

    def __init__(self, spec: WorkerSpec, address: str = "") -> None:
        self.spec, self.address = spec, address
        self.store = Store.connect(spec.url, spec.prefix, outage_s=spec.outage_s)
        self.incarnation = ""
        self.is_stopping = threading.Event()
        self.is_lost = threading.Event()
        self.said: dict[str, Any] = {}
        """The fields that it reports with its heartbeat."""
        self._requests = 0
        self._queue: PrefillQueue | None = None
        """The policy's queue as its last choice left it; None before the first choice."""
        self._queue_of = ("", b"")
        """The incarnation and the era that the queue belongs to."""

    def join(self, capacity: int) -> None:
        """Join the run as a new incarnation: nothing of an earlier one counts."""
        self.incarnation = uuid.uuid4().hex
        self.is_lost.clear()
        spec = self.spec
        self.call("register", spec.role, 1, self.address, capacity, spec.lease_s)

    def call(self, operation: str, *args: Any) -> Any:
        """Run an operation in this worker's name. Raises LostError if the store no longer knows this worker."""
        answer = self.store.call(operation, self.spec.worker_id, self.incarnation, *args)
        if answer in (b"lost", [b"lost"]):
            self.is_lost.set()
            raise LostError
        return answer

    def request(self) -> str:
        """Return a new name for a change, under which the change may be sent twice."""
        self._requests += 1
        return f"{self.incarnation}:{self._requests}"

    def claim(self, *, is_staged: bool) -> Claimed | None:
        """Lease and return the prefill that the policy takes next; None if none is queued."""
        spec = self.spec
        while True:
            now = self.store.clock.now()
            version, busy_until, rows, era = self.call("queue")
            if not rows:
                return None
            fields = {int(row["task_id"]): row for row in map(decode_hash, rows)}
            tasks = [from_hash(PrefillTask, row) for row in fields.values()]
            snapshots = [asdict(task) for task in tasks]
            start_s = max(now, float(busy_until))
            queue_of = (self.incarnation, era)
            last = self._queue if queue_of == self._queue_of else None
            try:
                choice = choose(spec.make_queue, last, tasks, start_s)
            except RunError as error:
                self.store.client.hset(self.store.key("worker", spec.worker_id), FAULT, str(error))
                raise
            taken = choice.taken
            # The lease doubles each time the prefill comes back, so that even a slow worker gets it done in the end.
            allowed_s = max(spec.lease_s, spec.patience * taken.estimate_s)
            lease_s = start_s - now + allowed_s * 2 ** int(fields[taken.task_id]["requeued"])
            rest = [part for task in choice.rest for part in (task.task_id, task.postponed)]
            line = order_line(start_s, spec.worker_id, snapshots, choice, is_first=last is None)
            choosing = (version, taken.task_id, taken.postponed, lease_s, is_staged, line)
            answer = self.call("claim", self.request(), *choosing, *rest)
            if answer == b"changed":
                continue
            self._queue, self._queue_of = choice.queue, queue_of
            task, session, address, ids = decode_hash(answer[0]), decode_hash(answer[1]), answer[2].decode(), answer[3]
            tokens = np.frombuffer(ids, dtype=np.int32).astype(np.int64)
            home = int(session["home"] or -1)
            return Claimed(from_hash(PrefillTask, task), task["fence"], session["epoch"], home, address, tokens)

    def start_heartbeat(self) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def stop_on_signal(self) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: self.is_stopping.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its workers

    def report(self) -> None:
        if self.said:
            key = self.store.key("worker", self.spec.worker_id)
            self.store.retry(lambda: self.store.client.hset(key, mapping=self.said))

    def _beat(self) -> None:
        while not self.is_stopping.wait(self.spec.lease_s / 4):
            if not self.is_lost.is_set():
                try:
                    self.call("beat", self.spec.lease_s)
                    self.report()
                except LostError:
                    pass


def executor_of(spec: WorkerSpec) -> PagedExecutor:
    is_named = isinstance(spec.model, str)
    model = load_causal(
        spec.model,
        dtype=parse_dtype(spec.dtype),
        device=spec.device,
        weights="checkpoint" if is_named else "random",
        seed=spec.seed,
    )
    executor = PagedExecutor(model, num_slots=spec.num_slots, max_len=spec.max_len, num_tokens=spec.num_tokens)
    _warm(executor)
    return executor


def _warm(executor: PagedExecutor) -> None:
    """Run a step, because the first one takes longer than any other."""
    slot = executor.open()
    executor.tables.grow(np.array([slot]), np.array([9]))
    executor.write(slot, 0, np.zeros(8, dtype=np.int64))
    executor.run(PackedWork.of([(slot, 0, 8, True)]))
    executor.close_slot(slot)
