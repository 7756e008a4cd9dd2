"""The worker processes of a live run. They are forked from a server that has torch loaded, and stop with their parent."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

from engines.ampd.live.store import Store
from engines.ampd.live.worker import FAULT, WorkerSpec
from engines.errors import RunError
from engines.machine import delay_signals, end_with_parent

STOP_S = 5.0
LOOK_S = 1.0
"""How long it is between two looks in the store for live workers."""
SILENT_S = 30.0
"""How long a role may have no live worker in the store while a process of it still runs: the worker may come back."""
_MODULES = ("engines.ampd.live.prefill", "engines.ampd.live.decode")
_LATER = ("redis", "torch.fx.experimental.symbolic_shapes")
"""Modules that every worker imports when it connects and makes its model. We preload them, which saves a second per worker."""


class Fleet:
    def __init__(self, specs: Sequence[WorkerSpec], store: Store, *, start_s: float = 120.0) -> None:
        """Start all workers. Returns once every worker has joined the run."""
        self.store = store
        self._specs = {spec.worker_id: spec for spec in specs}
        self._of_role: dict[str, set[int]] = {}
        for spec in specs:
            self._of_role.setdefault(spec.role, set()).add(spec.worker_id)
        self._looked_s = 0.0
        self._silent_s: dict[str, float] = {}
        """The roles without a live worker in the store, and since when."""
        self._processes: dict[int, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_MODULES, *_LATER])
        start_server()
        try:
            for spec in specs:
                self.start(spec.worker_id)
            self._wait(start_s)
        except BaseException:
            self.stop()
            raise

    def start(self, worker_id: int) -> None:
        """Start a worker, also again after it died."""
        spec = self._specs[worker_id]
        process = self._context.Process(target=run_worker, args=(spec,), name=f"{spec.role}-{worker_id}", daemon=True)
        with delay_signals():
            process.start()
            self._processes[worker_id] = process

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(self._specs)

    def pid(self, worker_id: int) -> int:
        pid = self._processes[worker_id].pid
        assert pid is not None
        return pid

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the workers whose process has ended."""
        codes = {worker_id: process.exitcode for worker_id, process in self._processes.items()}
        return {worker_id: code for worker_id, code in codes.items() if code is not None}

    def check(self) -> None:
        """Raises RunError if a worker has ended by itself with an error, or if no worker of a role is left. The run survives the
        loss of any other worker."""
        ended = self.exit_codes
        for worker_id, code in ended.items():
            if code > 0:
                if fault := self.store.fields("worker", worker_id).get(FAULT):
                    raise RunError(f"{fault} (worker {worker_id})")
                raise RunError(f"worker {worker_id} ended with exit code {code}: its output says why")
        now = time.monotonic()
        if now > self._looked_s + LOOK_S:
            self._looked_s = now
            alive = {member.role for member in self.store.members()}
            self._silent_s = {role: self._silent_s.get(role, now) for role in self._of_role if role not in alive}
        for role, ids in self._of_role.items():
            if ended.keys() >= ids:
                endings = ", ".join(f"worker {each} {_exit_text(ended[each])}" for each in sorted(ids))
                raise RunError(
                    f"no {role} worker is left ({endings}): see whether memory ran out, and run the command again"
                )
            if now - self._silent_s.get(role, now) > SILENT_S:
                names = ", ".join(map(str, sorted(ids)))
                raise RunError(
                    f"no {role} worker has answered for {SILENT_S:g} s (of {names}): see what stops them, and run the command again"
                )

    def stop(self) -> None:
        """Stop all workers. May be called twice. If interrupted, it kills workers that have not ended yet."""
        try:
            for process in self._processes.values():
                if process.is_alive():
                    process.terminate()
            deadline_s = time.monotonic() + STOP_S
            for process in self._processes.values():
                process.join(max(0.0, deadline_s - time.monotonic()))
        finally:
            for process in self._processes.values():
                if process.is_alive():
                    process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait(self, start_s: float) -> None:
        deadline_s = time.monotonic() + start_s
        while {member.view.worker_id for member in self.store.members()} < set(self._specs):
            for worker_id, code in self.exit_codes.items():
                raise RunError(f"worker {worker_id} {_exit_text(code)} before it took part: its output says why")
            if time.monotonic() > deadline_s:
                raise RunError(f"workers did not start within {start_s:g} s")
            time.sleep(0.02)


def _exit_text(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"


def start_server() -> None:
    """Start the server from which this process forks workers. Ctrl-C in a terminal reaches every process, but only this one must
    handle it, also while the server loads torch."""
    resource_tracker.ensure_running()  # this call removes every block of signals
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def run_worker(spec: WorkerSpec) -> None:
    """Run a worker, in its own process."""
    threading.Thread(target=end_with_parent, args=(0,), name="end with parent", daemon=True).start()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import torch

    from engines.ampd.live.decode import DecodeProcess
    from engines.ampd.live.prefill import PrefillProcess

    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    torch.set_num_threads(1)
    (PrefillProcess if spec.role == "prefill" else DecodeProcess)(spec).run()
