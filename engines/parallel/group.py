"""The processes a model is divided among, and how they exchange tensors and plain data."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engines.errors import UserError
from engines.models.config import span
from engines.models.loader import check_device

T = TypeVar("T")

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer for the others' tensors gives up."""

_IDLE_TIMEOUT = timedelta(days=1)
"""Between two commands of rank 0, which may have no requests. A rank 0 that dies is noticed at once."""

# Torch 2.13 has the first name and warns of the second, which is all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False, kw_only=True)
class TensorParallel:
    """``size`` ranks that hold a part of a model each. Every rank must make the same calls in the same order.

    Tensor calls run on the device's current stream and return without waiting for it, so CUDA graphs can capture
    them. Plain data goes by another way, which waits for no device. Alone, every call is the identity.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    tensors: dist.ProcessGroup | None = None
    """NCCL for CUDA, gloo for the CPU."""
    control: dist.ProcessGroup | None = None
    """gloo"""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; x contiguous. Every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.tensors)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors, all of one shape, one behind the other along ``dim``."""
        if self.size == 1:
            return x
        parts = self._parts(x)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """[M, width] of the ranks' [M, part], where each has its ``span`` of the columns."""
        if self.size == 1:
            return x
        widths = [end - start for start, end in (span(width, rank, self.size) for rank in range(self.size))]
        parts = self._parts(F.pad(x, (0, max(widths) - x.shape[1])) if x.shape[1] < max(widths) else x)
        return torch.cat([part[:, :own] for part, own in zip(parts, widths, strict=True)], dim=1)

    def _parts(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(out, x.contiguous(), group=self.tensors)
        return out.view(self.size, *x.shape)

    def from_leader(self, value: T | None = None) -> T:
        """Rank 0's ``value``, picklable; the others' is not looked at."""
        held: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(held, group=self.control, group_src=0)
        return held[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's ``value``, picklable, in the ranks' order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


def rank_device(device: str, rank: int, size: int) -> str:
    """Device of one of a machine's ``size`` ranks: its CUDA devices in order, or the CPU, which all share."""
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
        # Makes NCCL connect now: it must not begin to while a graph is being captured.
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
    """Part from the other ranks; needed before a process ends. ``abort`` gives up what the device still exchanges
    with ranks that are gone."""
    if group.size == 1:
        return
    if abort and group.device.startswith("cuda"):
        abort_tensors(group)
    # Models keep the group, and gloo's threads must not live until the interpreter ends: that would be an abort.
    group.tensors = group.control = None
    dist.destroy_process_group()


def abort_tensors(group: TensorParallel) -> None:
    """End exchanges under way on the device, whose results are then void; may be called from any thread."""
    assert group.tensors is not None
    group.tensors.abort()
