"""Attention backends against the definition, and how one is chosen."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import CASES, FILL, Case, difference, flash_attn_varlen_forward
from torch import Tensor

from engines.attention import registry
from engines.attention.backends import HostVarlen, Sdpa, SdpaPadded, SpanMetadata, Spans, VarlenAttention, sdpa
from engines.attention.backends import varlen_attention as run_by_run
from engines.attention.flash import (
    AtenVarlenKernel,
    FlashAttnKernel,
    FlashVarlen,
    TorchVarlenKernel,
    flash_attn_kernels,
    parameters_of,
    torch_varlen_kernels,
)
from engines.attention.registry import BACKENDS, Example, attention_backend, availability, probe
from engines.errors import UserError
from engines.kernels import host
from engines.kernels import probe as kernel_probe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EMULATED = FlashAttnKernel(flash_attn_varlen_forward, takes_used_k=True)
LIBRARY: dict[str, VarlenAttention] = {
    "sdpa": Sdpa(),
    "sdpa-padded": SdpaPadded(),
    "sdpa-padded, one at a time": SdpaPadded(memory_limit=1),
    "flash-attn": FlashVarlen("flash-attn", EMULATED),
}
if kernel_probe.host_fault(torch.float32) is None:
    LIBRARY["host"] = HostVarlen()
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Runs in any order, with gaps or shared rows."""
    n = draw(st.integers(0, 5))
    run = st.tuples(st.integers(0, 40), st.integers(1, 20))
    return Case(
        q_len=draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)),
        k_runs=draw(st.lists(run, min_size=n, max_size=n)),
        head_dim=draw(st.sampled_from((4, 8, 20))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        padding_rows=draw(st.integers(0, 3)),
        padding_sequences=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )


# ---- equal numbers ------------------------------------------------------------------------


@settings(max_examples=25)
@given(case=cases())
@pytest.mark.parametrize("name", LIBRARY)
def test_backends_give_the_definition(name, case):
    assert case.error(LIBRARY[name], CPU, torch.float32) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", LIBRARY)
def test_every_dtype(name, case, dtype):
    if name == "host" and dtype not in host.DTYPES:
        pytest.skip("it is not made for it")
    assert case.error(LIBRARY[name], CPU, dtype) <= TOLERANCE[dtype]


def test_a_wrong_backend_is_off():
    """The control of the tests above: a shifted run, and keys of the wrong head."""

    class Shifted(SdpaPadded):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
            return super().__call__(q, k, v, replace(spans, k_len=(spans.k_len - 1).clamp(min=1)), out)

    class Swapped(SdpaPadded):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
            return super().__call__(q, k.flip(1), v.flip(1), spans, out)

    for wrong in (Shifted(), Swapped()):
        assert CASES["ragged"].error(wrong, CPU, torch.float32) > 0.05


@given(case=cases())
def test_sdpa_is_the_loop_over_runs(case):
    """Bit for bit, and each sequence as if it were alone."""
    q, k, v = case.tensors(CPU, torch.float32)
    spans = case.spans(CPU)
    whole, alone = torch.full_like(q, FILL), torch.full_like(q, FILL)
    Sdpa()(q, k, v, spans, whole)
    row = 0
    for length, (start, keys) in zip(case.q_len, case.k_runs, strict=True):
        run = slice(row, row + length)
        own = slice(start, start + keys)
        alone[run] = sdpa(q[None, run], k[None, own], v[None, own])[0]
        row += length
    assert torch.equal(whole, alone)
    again = torch.full_like(q, FILL)
    runs = [(start, start + keys) for start, keys in case.k_runs]
    run_by_run(again, q, k, v, spans.q_runs or (), runs)
    assert torch.equal(whole, again)


@pytest.mark.parametrize("name", LIBRARY)
def test_bounds_may_exceed_the_longest(name):
    case = CASES["grouped"]
    q, k, v = case.tensors(CPU, torch.float32)
    spans = case.spans(CPU)
    out = LIBRARY[name](q, k, v, replace(spans, max_q=32, max_k=100))
    assert difference(out, case.expected(q, k, v)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", [name for name, backend in LIBRARY.items() if not backend.needs_host_runs])
def test_device_backends_need_no_host_runs(name):
    """What a captured graph replays: the same tensors with other numbers in them, and rows to spare."""
    first = Case(q_len=(4, 2), k_runs=((0, 9), (20, 5)), group=2, padding_rows=3, padding_sequences=2)
    second = Case(q_len=(1, 3, 5), k_runs=((11, 3), (0, 8), (14, 1)), group=2)
    buffer = torch.zeros(14, dtype=torch.int32)
    cu_q, k_start, k_len = buffer[:5], buffer[5:10], buffer[10:]
    spans = Spans(cu_q=cu_q, k_start=k_start, k_len=k_len, max_q=5, max_k=9)
    for case in (first, second):
        q, k, v = case.tensors(CPU, torch.float32)
        starts, lengths = zip(*case.k_runs, strict=True)
        arrays = SpanMetadata.of_lengths(np.array(case.q_len), np.array(starts), np.array(lengths), size=4)
        buffer.copy_(torch.from_numpy(np.concatenate(arrays)))
        out = LIBRARY[name](q, k, v, spans)
        assert difference(out, case.expected(q, k, v)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", LIBRARY)
def test_nothing_to_attend(name):
    q, k = torch.randn(3, 2, 8), torch.randn(5, 2, 8)
    none = np.zeros(0, dtype=np.int64)
    for size in (0, 2):
        for queries in (q, q[:0]):
            out = LIBRARY[name](queries, k, k, Spans.of_lengths(none, device=CPU, size=size))
            assert out.shape == queries.shape


# ---- spans --------------------------------------------------------------------------------


def test_spans_of_lengths():
    spans = Spans.of_lengths(np.array([2, 3]), np.array([10, 4]), np.array([7, 5]), device=CPU, size=4)
    assert spans.cu_q.tolist() == [0, 2, 5, 5, 5]
    assert spans.k_start.tolist() == [10, 4, 9, 9, 9]
    assert spans.k_len.tolist() == [7, 5, 0, 0]
    assert (spans.max_q, spans.max_k, spans.size) == (3, 7, 4)
    assert (spans.q_runs, spans.k_runs) == (((0, 2), (2, 5)), ((10, 17), (4, 9)))


def test_spans_refuse_what_kernels_would_misread():
    good = Spans.of_lengths(np.array([2, 3]), device=CPU)
    for wrong in (
        {"cu_q": good.cu_q.long()},
        {"cu_q": good.cu_q[:-1]},
        {"k_start": good.k_start[:2]},
        {"k_len": torch.zeros(4, dtype=torch.int32)[::2]},
        {"k_runs": None},
    ):
        with pytest.raises(AssertionError):
            replace(good, **wrong)
    with pytest.raises(AssertionError, match="do not fit"):
        SpanMetadata.of_lengths(np.array([1, 1]), size=1)
    with pytest.raises(AssertionError, match="host runs"):
        Sdpa()(*(torch.zeros(5, 1, 8),) * 3, replace(good, q_runs=None, k_runs=None), torch.zeros(5, 1, 8))


# ---- kernels and the probe ----------------------------------------------------------------


def keywords(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """The emulated kernel, with its arguments changed first."""

    def function(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        change(arguments)
        return flash_attn_varlen_forward(q, k, v, **arguments)

    return function


def forget_used(arguments: dict[str, Any]) -> None:
    """A kernel that takes seqused_k and ignores it."""
    arguments["seqused_k"] = None


def one_key_less(arguments: dict[str, Any]) -> None:
    if arguments.get("seqused_k") is not None:
        arguments["seqused_k"] = (arguments["seqused_k"] - 1).clamp(min=0)


def one_key_more(arguments: dict[str, Any]) -> None:
    if arguments.get("seqused_k") is not None:
        arguments["seqused_k"] = arguments["seqused_k"] + (arguments["seqused_k"] > 0)
        arguments["max_seqlen_k"] += 1


def refuse_used(arguments: dict[str, Any]) -> None:
    if arguments.get("seqused_k") is not None:
        raise RuntimeError("seqused_k is not supported\nC++ trace")


def refuse(arguments: dict[str, Any]) -> None:
    raise RuntimeError("no kernel image")


def kernel(change: Callable[[dict[str, Any]], None]) -> FlashAttnKernel:
    return FlashAttnKernel(keywords(change), takes_used_k=True)


@pytest.mark.parametrize("change", [forget_used, one_key_less, one_key_more, refuse_used])
def test_the_probe_takes_the_first_kernel_that_is_right(change):
    without = FlashAttnKernel(flash_attn_varlen_forward, takes_used_k=False)
    found = probe("flash-attn", (without, kernel(change), EMULATED), CPU, torch.float32, 16, 4)
    assert found == FlashVarlen("flash-attn", EMULATED)


def test_the_probe_says_what_is_wrong():
    found = probe("flash-attn", (kernel(refuse),), CPU, torch.float32, 16, 1)
    assert found == "FlashAttnKernel: RuntimeError: no kernel image"
    example = Example.make(CPU, torch.float32, 16, 2)
    faults = {
        change: example.fault(FlashVarlen("flash-attn", kernel(change)))
        for change in (forget_used, one_key_less, one_key_more, refuse_used)
    }
    assert faults[refuse_used] == "RuntimeError: seqused_k is not supported"
    assert faults[one_key_more] == "it reads keys outside the runs"
    assert str(faults[one_key_less]).startswith("it is off by")
    assert probe("flash-attn", (), CPU, torch.float32, 16, 1) == "it has no varlen kernel that takes seqused_k"


def test_the_probe_sees_rows_overwritten_that_are_not_its_own():
    @dataclass(frozen=True)
    class Careless:
        takes_used_k: bool = True

        def __call__(self, q: Tensor, *arguments: Any) -> Tensor:
            *metadata, out = arguments
            found = EMULATED(q, *metadata, out)
            if out is not None:
                found.as_strided((1,), (1,), found.storage_offset() - 1).zero_()
            return found

    example = Example.make(CPU, torch.float32, 16, 1)
    assert example.fault(FlashVarlen("x", Careless())) == "it writes outside its output"
    assert example.fault(FlashVarlen("x", EMULATED)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 256])
def test_rounding_is_no_fault(dtype, head_dim):
    example = Example.make(CPU, dtype, head_dim, 2)
    for backend in (FlashVarlen("flash-attn", EMULATED), SdpaPadded()):
        assert example.fault(backend) is None


def test_a_kernel_is_probed_once():
    calls = []
    counted = kernel(lambda arguments: calls.append(arguments))
    for _ in range(3):
        probe("flash-attn", (counted,), CPU, torch.float32, 16, 1)
    assert len(calls) == 2, "for one output of its own, and one that it is given"


def fake_flash_attn(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name, function in functions.items():
        setattr(interface, name, function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


def test_kernels_of_flash_attn(monkeypatch):
    def public(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> Tensor:
        return flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **rest)[0]

    fake_flash_attn(monkeypatch, _flash_attn_varlen_forward=flash_attn_varlen_forward, flash_attn_varlen_func=public)
    kernels = flash_attn_kernels()
    assert [each.takes_used_k for each in kernels] == [True, False]
    assert probe("flash-attn", kernels, CPU, torch.float32, 16, 2) == FlashVarlen("flash-attn", kernels[0])
    assert isinstance(probe("flash-attn", kernels[1:], CPU, torch.float32, 16, 2), str)


def test_a_custom_operator_shows_its_parameters():
    operator = torch.library.custom_op("repro_test::varlen", mutates_args=())(
        _typed  # custom_op reads annotations, which must be types
    )
    assert parameters_of(operator) == {"q", "seqused_k"}
    assert parameters_of(_typed) == {"q", "seqused_k"}


def _typed(q, seqused_k):
    return q.clone()


_typed.__annotations__ = {"q": Tensor, "seqused_k": Tensor, "return": Tensor}


@pytest.mark.parametrize("takes_out", [True, False])
@pytest.mark.parametrize("takes_gqa", [True, False])
def test_kernels_of_torch(takes_out, takes_gqa):
    """Both generations of ``varlen_attn``: told of groups or not, writing to ``out`` or returning it."""

    def function(*tensors: Tensor, seqused_k: Tensor | None = None, **options: bool) -> Tensor | None:
        *out, q, k, v, cu_q, cu_k, max_q, max_k = tensors
        bounds: Any = max_q, max_k
        assert len(out) == takes_out
        assert options == ({"enable_gqa": True} if takes_gqa else {})
        rows, _ = flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *bounds, 0.0, q.shape[-1] ** -0.5, False, seqused_k)
        if not takes_out:
            return rows
        out[0][: cu_q[-1]] = rows[: cu_q[-1]]
        return None

    varlen = TorchVarlenKernel(function, takes_used_k=True, takes_out=takes_out, takes_gqa=takes_gqa)
    backend = FlashVarlen("torch-varlen", varlen)
    assert CASES["grouped"].error(backend, CPU, torch.float32) <= TOLERANCE[torch.float32]


def test_the_kernels_of_this_torch():
    kernels = torch_varlen_kernels()
    assert any(each.takes_used_k for each in kernels), "no varlen kernel of this torch takes seqused_k"
    assert isinstance(kernels[-1], AtenVarlenKernel)
    example = Example.make(CPU, torch.bfloat16, 64, 1)
    for each in kernels:
        # They have no CPU kernel: arguments got through, whatever the signature.
        assert str(example.fault(FlashVarlen("torch-varlen", each))).startswith("NotImplementedError"), each


# ---- choice -------------------------------------------------------------------------------


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """A registry that believes in a GPU whose kernels are all right."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(registry, "probe", lambda name, kernels, *rest: FlashVarlen(name, kernels[0]))


def test_auto_on_a_cpu():
    for name in (None, "auto"):
        for dtype in (torch.float32, torch.bfloat16):
            fault = kernel_probe.host_fault(dtype)
            assert attention_backend(name, CPU, dtype, 16, 4, 2) == (HostVarlen() if fault is None else Sdpa())
        assert attention_backend(name, CPU, torch.float16, 16, 4, 2) == Sdpa()
        assert attention_backend(name, CPU, torch.float32, host.MOST_WIDTH + 1, 4, 2) == Sdpa()
    assert attention_backend("sdpa", CPU, torch.float32, 16, 4, 2) == Sdpa()
    assert attention_backend("sdpa-padded", CPU, torch.float32, 16, 4, 2) == SdpaPadded()


def test_auto_on_a_gpu(monkeypatch):
    on_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    found = availability(CUDA, torch.bfloat16, 128, 8, 8)
    assert str(found["flash-attn"]).startswith("it is not installed")
    assert "extra 'cuda'" in str(found["flash-attn"])
    assert found["torch-varlen"] is None
    assert attention_backend(None, CUDA, torch.float32, 128, 32, 32) == SdpaPadded()
    assert attention_backend(None, CUDA, torch.bfloat16, 20, 8, 8) == SdpaPadded()
    assert attention_backend("auto", CUDA, torch.bfloat16, 128, 32, 32).name == "torch-varlen"
    fake_flash_attn(monkeypatch, flash_attn_varlen_func=flash_attn_varlen_forward)
    assert attention_backend(None, CUDA, torch.float16, 128, 32, 32).name == "flash-attn"
    on_gpu(monkeypatch, (7, 5))
    assert attention_backend(None, CUDA, torch.float16, 128, 32, 32) == SdpaPadded()


def test_what_is_wrong_with_a_kernel_leads_to_the_next(monkeypatch):
    on_gpu(monkeypatch)
    fake_flash_attn(monkeypatch, flash_attn_varlen_func=flash_attn_varlen_forward)

    def only_torch(name: str, kernels: Any, *rest: Any) -> FlashVarlen | str:
        return FlashVarlen(name, kernels[0]) if name == "torch-varlen" else "it is off by 3"

    monkeypatch.setattr(registry, "probe", only_torch)
    assert attention_backend(None, CUDA, torch.bfloat16, 128, 32, 32).name == "torch-varlen"
    assert "it is off by 3" in str(availability(CUDA, torch.bfloat16, 128, 32, 32)["flash-attn"])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "said"),
    [
        (torch.float32, 128, (9, 0), "takes bfloat16 and float16, not float32"),
        (torch.bfloat16, 20, (9, 0), "multiples of 8 up to 256, not 20"),
        (torch.bfloat16, 264, (9, 0), "multiples of 8 up to 256, not 264"),
        (torch.bfloat16, 128, (7, 5), "compute capability 8.0"),
    ],
)
def test_reasons_on_a_gpu(monkeypatch, dtype, head_dim, capability, said):
    on_gpu(monkeypatch, capability)
    found = availability(CUDA, dtype, head_dim, 8, 8)
    assert tuple(found) == BACKENDS
    assert said in str(found["flash-attn"])
    assert said in str(found["torch-varlen"])
    assert found["sdpa-padded"] is found["sdpa"] is None


def test_a_forced_backend_is_taken_or_refused():
    with pytest.raises(UserError, match="'flash-attn' does not serve float32 on cpu: it runs on CUDA devices"):
        attention_backend("flash-attn", CPU, torch.float32, 16, 4, 4)
    with pytest.raises(UserError, match="'flash' is not known: give auto or one of flash-attn, torch-varlen"):
        attention_backend("flash", CPU, torch.float32, 16, 4, 4)
    assert attention_backend("sdpa", CUDA, torch.float32, 16, 4, 4) == Sdpa()
