"""Ranks on one machine: the calling process is rank 0, the others are processes it starts.

So progress bars, stores and answers stay where the command line is. The other ranks never outlive it.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from engines.errors import UserError
from engines.machine import held
from engines.parallel.group import TensorParallel, abort_tensors, join, leave, rank_device

HOST = "127.0.0.1"
_START_TIMEOUT_S = 300.0
"""For a process to import what it needs, and for all to meet."""
_END_TIMEOUT_S = 60.0
"""For the others to return once rank 0 has, and to say why where one failed."""

Entry = Callable[..., None]


class RankFailed(RuntimeError):
    """A rank ended before its time; the message holds its traceback."""


class _Said(NamedTuple):
    what: Literal["ready", "done", "failed"]
    text: str = ""


@contextmanager
def local_ranks(size: int, device: str, entry: Entry, *args: Any) -> Iterator[TensorParallel]:
    """The group of ``size`` ranks on this machine, whose rank 0 is the caller.

    ``entry(group, *args)``, an importable function with picklable arguments, is what the others run; it must return
    when the body is over (``follow`` does after ``LeadingExecutor.stop``). ``device`` is 'cpu', or 'cuda' for one
    device per rank. Raises RankFailed in place of what the end of a rank made of the body.
    """
    own = rank_device(device, 0, size)
    if size == 1:
        yield TensorParallel(device=own)
        return
    # Port 0: the system chooses a free one, and the others are told which.
    store = dist.TCPStore(
        HOST, 0, size, is_master=True, timeout=timedelta(seconds=_START_TIMEOUT_S), wait_for_workers=False
    )
    followers = _Followers(size, device, store.port, entry, args)
    group = None
    try:
        followers.wait_for("ready", _START_TIMEOUT_S)
        group = join(0, size, own, store)
        followers.watch(group)
        yield group
        followers.wait_for("done", _END_TIMEOUT_S)
    except BaseException as error:
        # What a user is told is the same on every rank.
        failure = followers.failure() if isinstance(error, Exception) and not isinstance(error, UserError) else None
        followers.kill()
        if group is not None:
            leave(group, abort=True)
        if failure is not None and not isinstance(error, RankFailed):
            raise RankFailed(failure) from error
        raise
    leave(group)
    followers.end()


class _Followers:
    """The processes of ranks 1 and up, and what they have said. A thread listens, so that a failure is noticed
    while this one waits for a device."""

    def __init__(self, size: int, device: str, port: int, entry: Entry, args: tuple[Any, ...]) -> None:
        context = get_context("spawn")
        self._processes: list[BaseProcess] = []
        pipes: dict[Connection, int] = {}
        for rank in range(1, size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, size, device, port, there, entry, args), name=f"rank-{rank}", daemon=True
            )
            with held():
                process.start()
                self._processes.append(process)
            # Only the child holds this end now: it is closed when the child ends, however it does.
            there.close()
            pipes[here] = rank
        self._heard = threading.Condition()
        self._said: dict[str, set[int]] = {"ready": set(), "done": set()}
        self._failures: list[str] = []
        self._group: TensorParallel | None = None
        threading.Thread(target=self._listen, args=(pipes,), daemon=True).start()

    def _listen(self, pipes: dict[Connection, int]) -> None:
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                try:
                    said: _Said = pipe.recv()
                except (EOFError, OSError):
                    del pipes[pipe]
                    pipe.close()
                    if rank in self._said["done"]:
                        continue
                    said = _Said("failed", "it ended without a word, as a killed process does")
                with self._heard:
                    if said.what == "failed":
                        self._failures.append(f"rank {rank} failed: {said.text}")
                    else:
                        self._said[said.what].add(rank)
                    group = self._group if said.what == "failed" else None
                    if said.what != "ready":
                        self._group = None
                    self._heard.notify_all()
                if group is not None:
                    # Nothing else ends what rank 0's device waits for.
                    abort_tensors(group)

    def watch(self, group: TensorParallel) -> None:
        """Give up the device's exchanges once a rank has failed; gloo's end by themselves."""
        with self._heard:
            if self._failures:
                raise RankFailed(self._failures[0])
            self._group = group if group.device.startswith("cuda") else None

    def wait_for(self, what: Literal["ready", "done"], timeout_s: float) -> None:
        with self._heard:
            heard = self._heard.wait_for(
                lambda: self._failures or len(self._said[what]) == len(self._processes), timeout_s
            )
            if self._failures:
                raise RankFailed(self._failures[0])
            if not heard:
                late = sorted(set(range(1, len(self._processes) + 1)) - self._said[what])
                raise RankFailed(f"ranks {late} are not {what} after {timeout_s:.0f} s")

    def failure(self) -> str | None:
        """What the first rank to fail said; it may be about to."""
        with self._heard:
            self._heard.wait_for(lambda: self._failures, 1.0)
            return self._failures[0] if self._failures else None

    def kill(self) -> None:
        with self._heard:
            self._group = None
        for process in self._processes:
            process.terminate()
        self.end(5.0)

    def end(self, timeout_s: float = _END_TIMEOUT_S) -> None:
        for process in self._processes:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()


def _run(rank: int, size: int, device: str, port: int, pipe: Connection, entry: Entry, args: tuple[Any, ...]) -> None:
    """A follower's process."""
    # Ctrl-C reaches every process of the terminal; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    status = 1
    try:
        pipe.send(_Said("ready"))
        store = dist.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=_START_TIMEOUT_S))
        group = join(rank, size, rank_device(device, rank, size), store)
        entry(group, *args)
        pipe.send(_Said("done"))
        leave(group)
        status = 0
    except BaseException:
        # Before anything is closed: rank 0 hears why first, and then that the others are gone.
        pipe.send(_Said("failed", traceback.format_exc()[-20_000:].rstrip()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly end would wait for a device that waits for the other ranks, and torch's threads do not like one.
        os._exit(status)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
