"""Which implementation runs each part of a step."""

from dataclasses import replace

import pytest
import torch
from support.tiny_models import GQA, network

from engines.attention.backends import HostVarlen, Sdpa, SdpaPadded
from engines.dllm.config import DecodeConfig, EngineConfig, SparsityConfig
from engines.dllm.denoise import FusedReduction, Reduction
from engines.dllm.executor.step import TorchSelectAndPack, TritonSelectAndPack
from engines.dllm.executor.torch import KernelChoice
from engines.kernels import probe
from engines.models.layers import FusedOps, products_by
from engines.models.llada import LLaDAModelLM

CONFIG = EngineConfig(decode=DecodeConfig(confidence="margin"), suppress_mask_token=False)


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """As where every kernel runs but those in the set that is returned."""
    broken: set[str] = set()
    monkeypatch.setattr(probe, "available", lambda device: True)
    monkeypatch.setattr(probe, "faults", lambda device, dtype: dict.fromkeys(broken, "it is off by 1"))
    return broken


def half() -> LLaDAModelLM:
    return LLaDAModelLM(GQA.config).to(torch.bfloat16).requires_grad_(False)


def test_a_cpu_has_no_choice():
    choice = KernelChoice(network(GQA), CONFIG)
    fault = probe.host_fault(torch.float32)
    assert isinstance(choice.attention, HostVarlen if fault is None else Sdpa)
    assert isinstance(choice.selection, TorchSelectAndPack)
    assert choice.reduction == Reduction(confidence="margin", suppress_id=None)
    assert choice.local is None
    assert choice.recorder() is None
    told = {"attention_backend": choice.attention.name, "host_kernels_unavailable": fault}
    assert choice.report() == told | {"products": products_by(network(GQA))}
    assert isinstance(
        KernelChoice(network(GQA), replace(CONFIG, attention_backend="sdpa-padded")).attention, SdpaPadded
    )


def test_without_a_compiler_torch_attends(monkeypatch):
    monkeypatch.setattr(probe, "host_fault", lambda dtype: "there is no C++ compiler")
    choice = KernelChoice(network(GQA), CONFIG)
    assert choice.attention == Sdpa()
    told = choice.report()
    assert (told["attention_backend"], told["host_kernels_unavailable"]) == ("sdpa", "there is no C++ compiler")


def test_a_cpu_s_kernels_make_its_layers(monkeypatch):
    model = network(GQA)
    KernelChoice(model, CONFIG).fuse_layers()
    serves = probe.host_fault(torch.float32) is None
    for module in (model.blocks[0], model.final_norm):
        assert [op is not None for op in module.fused[:3]] == [serves] * 3
        assert not module.fused.joins
    KernelChoice(model, CONFIG).fuse_layers(host_norms=False)
    assert model.final_norm.fused.rms_norm is None
    assert (model.blocks[0].fused.rotate is not None) == serves
    monkeypatch.setattr(probe, "host_fault", lambda dtype: "there is no C++ compiler")
    KernelChoice(model, CONFIG).fuse_layers()
    assert model.blocks[0].fused == FusedOps()


def test_fused_kernels_serve_16_bit_models(with_triton):
    choice = KernelChoice(half(), EngineConfig())
    assert choice.triton.serve("pack", "scores", "confidence")
    assert isinstance(choice.selection, TritonSelectAndPack)
    assert isinstance(choice.reduction, FusedReduction)
    assert choice.reduction.suppress_id == GQA.mask_id
    for other in (
        KernelChoice(network(GQA), EngineConfig()),  # float32
        KernelChoice(half(), EngineConfig(fused_kernels=False)),
    ):
        assert not other.triton.serve()
        assert isinstance(other.selection, TorchSelectAndPack)
        assert type(other.reduction) is Reduction


def test_a_kernel_that_is_wrong_here_is_passed_over(with_triton):
    with_triton.add("scores")
    choice = KernelChoice(half(), EngineConfig())
    assert isinstance(choice.selection, TorchSelectAndPack)
    assert isinstance(choice.reduction, FusedReduction)
    with_triton.add("confidence")
    assert type(KernelChoice(half(), EngineConfig()).reduction) is Reduction


def test_the_library_s_order_of_ties_needs_the_library(with_triton):
    parity = EngineConfig(tie_policy="parity", sparsity=SparsityConfig(selection="uniform"))
    assert isinstance(KernelChoice(half(), parity).selection, TorchSelectAndPack)


def test_layers_are_fused_and_set_free_again(with_triton):
    model = half()
    with_triton.add("swiglu")
    KernelChoice(model, EngineConfig()).fuse_layers()
    ops = model.blocks[0].fused
    assert ops.rms_norm is not None
    assert ops.rotate is not None
    assert ops.swiglu is None
