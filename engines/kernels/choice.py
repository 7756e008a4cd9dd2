"""Which kernels serve a model, and what stands in for those that do not."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engines import kernels
from engines.kernels import host
from engines.models.layers import FusedOps
from engines.runtime.device import Store, store_by_index


@dataclass(frozen=True, kw_only=True)
class TritonKernels:
    """The kernels that serve one device and dtype; none where they are not wanted, and none in float32, which is for
    comparing, operator by operator."""

    device: torch.device
    dtype: torch.dtype
    is_wanted: bool = True

    def serve(self, *names: str) -> bool:
        """Whether all of these do; without names, whether any can."""
        if not self.is_wanted or self.dtype == torch.float32 or not kernels.available(self.device):
            return False
        from engines.kernels.probe import serves

        return all(serves(name, self.device, self.dtype) for name in names)

    @property
    def store(self) -> Store:
        if not self.serve("store"):
            return store_by_index
        from engines.kernels.pack import store

        return store

    def ops(self, otherwise: FusedOps) -> FusedOps:
        """Kernels of a model's layers; ``otherwise`` where none can serve."""
        if not self.serve():
            return otherwise
        from engines.kernels.probe import fused_ops

        return fused_ops(self.device, self.dtype)

    def faults(self) -> Mapping[str, str]:
        """What is wrong with those that do not give their references' numbers."""
        if not self.serve():
            return {}
        from engines.kernels.probe import faults

        return faults(self.device, self.dtype)


@dataclass(frozen=True, kw_only=True)
class HostKernels:
    """The kernels of ``engines.kernels.host``: all of them serve a device and a dtype, or none."""

    device: torch.device
    dtype: torch.dtype

    @property
    def fault(self) -> str | None:
        """Why they do not serve."""
        if self.device.type != "cpu":
            return "they run on CPUs"
        from engines.kernels.probe import host_fault

        return host_fault(self.dtype)

    def serve_heads(self, width: int) -> bool:
        """Whether attention over heads of this width is served."""
        return width <= host.MOST_WIDTH and self.fault is None

    def store(self, otherwise: Store) -> Store:
        return otherwise if self.fault else host.store

    def ops(self, otherwise: FusedOps) -> FusedOps:
        if self.fault:
            return otherwise
        return FusedOps(rms_norm=host.rms_norm, rotate=host.rotate, swiglu=host.swiglu, joins=True)
