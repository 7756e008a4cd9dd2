"""Worker processes of a live run: started from a server that has torch loaded already, stopped with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType

from engines.ampd.live.store import Store
from engines.ampd.live.worker import WorkerSpec, end_with_parent
from engines.errors import RunError

STOP_S = 5.0
_MODULES = {"prefill": "engines.ampd.live.prefill", "decode": "engines.ampd.live.decode"}
_LATER = ("redis", "torch.fx.experimental.symbolic_shapes")
"""What every worker imports when it connects and makes its model: a second, unless the server it is forked from has."""


class Fleet:
    def __init__(self, specs: Sequence[WorkerSpec], store: Store, *, start_s: float = 120.0) -> None:
        """Returns once every worker takes part."""
        self.store = store
        self._specs = {spec.worker_id: spec for spec in specs}
        self._processes: dict[int, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_MODULES.values(), *_LATER])
        start_server()
        try:
            for spec in specs:
                self.start(spec.worker_id)
            self._wait(start_s)
        except BaseException:
            self.stop()
            raise

    def start(self, worker_id: int) -> None:
        """Also again, after it died."""
        spec = self._specs[worker_id]
        process = self._context.Process(target=run_worker, args=(spec,), name=f"{spec.role}-{worker_id}", daemon=True)
        process.start()
        self._processes[worker_id] = process

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(self._specs)

    def pid(self, worker_id: int) -> int:
        found = self._processes[worker_id].pid
        assert found is not None
        return found

    def check(self) -> None:
        """RunError where a worker has ended by itself with an error; one that was killed is a loss to be survived."""
        for worker_id, process in self._processes.items():
            if process.exitcode is not None and process.exitcode > 0:
                raise RunError(f"worker {worker_id} ended with exit code {process.exitcode}: its output says why")

    def stop(self) -> None:
        """May be called twice, and interrupted: then no worker is waited for."""
        try:
            for process in self._processes.values():
                if process.is_alive():
                    process.terminate()
            until = time.monotonic() + STOP_S
            for process in self._processes.values():
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in self._processes.values():
                if process.is_alive():
                    process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self, start_s: float) -> None:
        until = time.monotonic() + start_s
        while {member.view.worker_id for member in self.store.members()} < set(self._specs):
            self.check()
            if time.monotonic() > until:
                raise RunError(f"workers did not start within {start_s:g} s")
            time.sleep(0.02)


def start_server() -> None:
    """The one that processes of this one are forked from. Ctrl-C in a terminal reaches every process, but it is this one's to
    deal with, also while the server loads torch."""
    resource_tracker.ensure_running()  # which takes every block of signals away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_worker(spec: WorkerSpec) -> None:
    """In the worker's process."""
    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if spec.role == "prefill":
        from engines.ampd.live.prefill import main
    else:
        from engines.ampd.live.decode import main
    main(spec)
