"""The processes among which a model is divided, and how they exchange tensors and plain data.

On one machine the calling process is rank 0 and starts the other ranks. So progress bars, stores and answers stay with the command
line. The other ranks never outlive rank 0.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engines.errors import UserError
from engines.machine import delay_signals, end_with_parent
from engines.models.config import span
from engines.models.loader import check_device

# -- groups -----------------------------------------------------------------------------------------------

T = TypeVar("T")

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer for the others' tensors gives up."""

_IDLE_TIMEOUT = timedelta(days=1)
"""Longest time between two commands of rank 0, which may have no requests. The others notice at once if rank 0 dies."""

# Torch 2.13 has the first name and warns of the second; 2.11 has only the second.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False, kw_only=True)
class TensorParallel:
    """A group of ``size`` ranks, each with a part of a model. Every rank must make the same calls in the same order.

    Tensor calls run on the device's current stream and return without waiting for it, so CUDA graphs can capture
    them. Plain data takes another way, which waits for no device. With one rank, every call is the identity.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    tensors: dist.ProcessGroup | None = None
    """NCCL for CUDA, gloo for the CPU."""
    control: dist.ProcessGroup | None = None
    """gloo"""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place; x must be contiguous. Every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.tensors)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the ranks' tensors, all of one shape, concatenated along ``dim``."""
        if self.size == 1:
            return x
        parts = self._parts(x)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Return [M, width], joined from the ranks' [M, part]; each rank has its ``span`` of the columns."""
        if self.size == 1:
            return x
        widths = [end - start for start, end in (span(width, rank, self.size) for rank in range(self.size))]
        parts = self._parts(F.pad(x, (0, max(widths) - x.shape[1])) if x.shape[1] < max(widths) else x)
        return torch.cat([part[:, :columns] for part, columns in zip(parts, widths, strict=True)], dim=1)

    def _parts(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(out, x.contiguous(), group=self.tensors)
        return out.view(self.size, *x.shape)

    def from_leader(self, value: T | None = None) -> T:
        """Return rank 0's ``value``, which must be picklable; the other ranks' values are ignored."""
        values: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.control, group_src=0)
        return values[0]

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's ``value``, which must be picklable, in the ranks' order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


def rank_device(device: str, rank: int, size: int) -> str:
    """Return the device of one of ``size`` ranks on a machine: its CUDA devices in order, or the CPU, which all share."""
    check_device(device)
    if device == "cuda":
        count = torch.cuda.device_count()
        if size > count:
            raise UserError(
                f"tensor_parallel={size} exceeds the {count} CUDA devices of this machine: use a smaller number"
            )
        return f"cuda:{rank}"
    if device != "cpu" and size > 1:
        raise UserError(f"device={device!r} is one device and tensor_parallel={size} needs {size}: use --device cuda")
    return device


def join(rank: int, size: int, device: str, store: dist.Store) -> TensorParallel:
    """Meet the other ranks, who make the same call.

    torch.distributed's default group becomes this one, so a process is in one group at a time.
    """
    if size == 1:
        return TensorParallel(device=device)
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_COLLECTIVE_TIMEOUT,
        # Makes NCCL connect now, because it must not connect while a graph is being captured.
        device_id=torch.device(device) if on_cuda else None,
    )
    group = TensorParallel(
        rank=rank,
        size=size,
        device=device,
        tensors=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT),
    )
    group.all_reduce(torch.zeros(1, device=device))
    return group


def leave(group: TensorParallel, *, abort: bool = False) -> None:
    """Leave the other ranks, as a process must before it ends. ``abort`` gives up what the device still exchanges with
    ranks that are gone."""
    if group.size == 1:
        return
    if abort and group.device.startswith("cuda"):
        abort_tensors(group)
    # Models keep the group, but gloo's threads must not live until the interpreter ends: the process would abort.
    group.tensors = group.control = None
    dist.destroy_process_group()


def abort_tensors(group: TensorParallel) -> None:
    """End exchanges under way on the device, whose results are then void; may be called from any thread."""
    assert group.tensors is not None
    group.tensors.abort()


# -- processes --------------------------------------------------------------------------------------------

HOST = "127.0.0.1"
_START_TIMEOUT_S = 300.0
"""Seconds for a process to import what it needs, and for all ranks to meet."""
_END_TIMEOUT_S = 60.0
"""Seconds for the others to return once rank 0 has, and to say why if one failed."""

Entry = Callable[..., None]


class RankFailed(RuntimeError):
    """A rank ended too early; the message holds its traceback."""


class _Message(NamedTuple):
    what: Literal["ready", "done", "failed"]
    text: str = ""


@contextmanager
def local_ranks(size: int, device: str, entry: Entry, *args: Any) -> Iterator[TensorParallel]:
    """Yield a group of ``size`` ranks on this machine, with the caller as rank 0.

    The others run ``entry(group, *args)``, an importable function with picklable arguments. It must return when the
    body is over (``follow`` does after ``LeadingExecutor.stop``). ``device`` is 'cpu', or 'cuda' for one device per
    rank. If a rank fails, raises RankFailed in place of the error that this caused in the body.
    """
    our_device = rank_device(device, 0, size)
    if size == 1:
        yield TensorParallel(device=our_device)
        return
    # Port 0 lets the system choose a free one, and we tell the others which.
    store = dist.TCPStore(
        HOST, 0, size, is_master=True, timeout=timedelta(seconds=_START_TIMEOUT_S), wait_for_workers=False
    )
    followers = _Followers(size, device, store.port, entry, args)
    group = None
    try:
        followers.wait_for("ready", _START_TIMEOUT_S)
        group = join(0, size, our_device, store)
        followers.watch(group)
        yield group
        followers.wait_for("done", _END_TIMEOUT_S)
    except BaseException as error:
        # A UserError is the same on every rank.
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
    """The processes of ranks 1 and up, and their messages. A thread listens, so that we notice a failure while the
    calling thread waits for a device."""

    def __init__(self, size: int, device: str, port: int, entry: Entry, args: tuple[Any, ...]) -> None:
        context = get_context("spawn")
        self._processes: list[BaseProcess] = []
        pipes: dict[Connection, int] = {}
        for rank in range(1, size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, size, device, port, sender, entry, args), name=f"rank-{rank}", daemon=True
            )
            with delay_signals():
                process.start()
                self._processes.append(process)
            # Only the child holds this end now: it is closed when the child ends, however it does.
            sender.close()
            pipes[receiver] = rank
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
                    message: _Message = pipe.recv()
                except (EOFError, OSError):
                    del pipes[pipe]
                    pipe.close()
                    if rank in self._said["done"]:
                        continue
                    message = _Message("failed", "it ended without a word, as a killed process does")
                with self._heard:
                    if message.what == "failed":
                        self._failures.append(f"rank {rank} failed: {message.text}")
                    else:
                        self._said[message.what].add(rank)
                    group = self._group if message.what == "failed" else None
                    if message.what != "ready":
                        self._group = None
                    self._heard.notify_all()
                if group is not None:
                    # Nothing else ends an exchange that rank 0's device waits for.
                    abort_tensors(group)

    def watch(self, group: TensorParallel) -> None:
        """Give up the device's exchanges once a rank has failed; gloo's exchanges end by themselves."""
        with self._heard:
            if self._failures:
                raise RankFailed(self._failures[0])
            self._group = group if group.device.startswith("cuda") else None

    def wait_for(self, stage: Literal["ready", "done"], timeout_s: float) -> None:
        with self._heard:
            arrived = self._heard.wait_for(
                lambda: self._failures or len(self._said[stage]) == len(self._processes), timeout_s
            )
            if self._failures:
                raise RankFailed(self._failures[0])
            if not arrived:
                late = sorted(set(range(1, len(self._processes) + 1)) - self._said[stage])
                raise RankFailed(f"ranks {late} are not {stage} after {timeout_s:.0f} s")

    def failure(self) -> str | None:
        """Return what the first rank to fail said, after up to a second in which one may fail; None if none did."""
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
    """Run a follower's process."""
    # Ctrl-C reaches every process of the terminal; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    status = 1
    try:
        pipe.send(_Message("ready"))
        store = dist.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=_START_TIMEOUT_S))
        group = join(rank, size, rank_device(device, rank, size), store)
        entry(group, *args)
        pipe.send(_Message("done"))
        leave(group)
        status = 0
    except BaseException:
        # Sent before anything is closed, so that rank 0 hears why before it hears that others are gone.
        pipe.send(_Message("failed", traceback.format_exc()[-20_000:].rstrip()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly end would wait for a device that waits for the other ranks, and torch's threads do not like one.
        os._exit(status)
