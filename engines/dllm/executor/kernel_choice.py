"""Which implementation runs each part of a step on a device, and what was passed over."""

from dataclasses import replace
from typing import Any

from torch import nn

from engines.attention import VarlenAttention, attention_backend, availability
from engines.attention.flash import FlashVarlen
from engines.dllm.config import EngineConfig, SparsityConfig
from engines.dllm.denoise import FusedReduction, Reduction, VocabularyReduction, vocabulary_reduction
from engines.dllm.executor.layout import SelectingLayers
from engines.dllm.executor.step import SelectAndPack, TorchSelectAndPack, TritonSelectAndPack
from engines.kernels.probe import HostKernels, TritonKernels
from engines.models.layers import FusedOps, fuse
from engines.models.protocol import DiffusionModel, Ranks
from engines.runtime.graphs import CudaRecorder, Recorder


class KernelChoice:
    """For one model and configuration. ``attention`` is the backend of a system that has no choice of one."""

    def __init__(
        self, model: DiffusionModel, config: EngineConfig, *, attention: VarlenAttention | None = None
    ) -> None:
        weight, shape, kv_heads = next(model.parameters()), model.config, model.kv_heads_here
        self._config = config
        self._device, self._dtype = weight.device, weight.dtype
        self.triton = TritonKernels(device=self._device, dtype=self._dtype, is_wanted=config.fused_kernels)
        self._host = HostKernels(device=self._device, dtype=self._dtype)
        self._heads = shape.head_dim, shape.n_heads * kv_heads // shape.n_kv_heads, kv_heads
        self.attention = attention or attention_backend(
            config.attention_backend, self._device, self._dtype, *self._heads
        )
        decode, kind = config.decode, FusedReduction if self.triton.serve("confidence") else Reduction
        self.reduction = kind(
            confidence=decode.confidence,
            confidence_of=decode.confidence_of,
            dtype=decode.confidence_dtype,
            suppress_id=shape.mask_token_id if config.suppress_mask_token else None,
        )
        self.local: VocabularyReduction | None = vocabulary_reduction(
            self.reduction, model, is_fused=self.triton.serve("partial")
        )
        """Reduction over this rank's vocabulary shard; None without tensor parallelism."""
        sparsity, ranks = config.sparsity, model.tensor_parallel
        self.selection = self._select_and_pack(config, ranks)
        self.selecting: SelectingLayers | None = None
        """How layers select where one keeps every row, which ``selection`` then packs."""
        if sparsity.whole_layer is not None:
            self.selecting = SelectingLayers(sparsity, self.selection)
            dense = SparsityConfig(selection="dense", refresh_delay=sparsity.refresh_delay)
            self.selection = self._select_and_pack(replace(config, sparsity=dense), ranks)
        self.store = self._host.store(self.triton.store)

    def _select_and_pack(self, config: EngineConfig, ranks: Ranks | None) -> SelectAndPack:
        # Kernels sum in another order, and of a rank's heads alone; none scores attention probabilities.
        selection = config.sparsity.selection
        needs_torch = config.tie_policy == "parity" or selection == "attended" or (ranks and selection == "uniform")
        if not needs_torch and self.triton.serve("pack", "scores"):
            return TritonSelectAndPack(config)
        return TorchSelectAndPack(config, ranks)

    def fuse_layers(self, model: DiffusionModel, *, host_norms: bool = True) -> None:
        """Have the model's layers use the kernels that serve; one that another executor used may have others.
        ``host_norms`` says that a CPU's may normalise."""
        assert isinstance(model, nn.Module)
        # A CPU's copies of weights, for its products, are of one layer each.
        ops = self._host.ops(FusedOps())._replace(joins=False)
        fuse(model, self.triton.ops(ops if host_norms else ops._replace(rms_norm=None)))

    def recorder(self) -> Recorder | None:
        """How forwards are captured; None where they are not: a graph's layers all read the same runs."""
        if self.selecting is not None:
            return None
        if self._device.type != "cuda" or not self._config.cuda_graphs or not isinstance(self.attention, FlashVarlen):
            return None
        return CudaRecorder(self._device)

    def report(self) -> dict[str, Any]:
        """What serves, and what was passed over and why, as JSON."""
        if self._device.type == "cpu":
            return {"attention_backend": self.attention.name, "host_kernels_unavailable": self._host.fault}
        found = availability(self._device, self._dtype, *self._heads)
        return {
            "attention_backend": self.attention.name,
            "attention_unavailable": {name: why for name, why in found.items() if why is not None},
            "fused_kernels": self.triton.serve(),
            "kernel_faults": dict(self.triton.faults()),
        }
