"""Compiles for a GPU, on a machine without one, every kernel a wrapper launches. In a process of its own, which imports
this file and no test: triton looks at its variables when it is imported."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.kernel_cases import Drawn, Sizes

from engines.kernels.confidence import confidence, partial
from engines.kernels.pack import pack, store
from engines.kernels.rowwise import rms_norm, rotate, swiglu
from engines.kernels.scores import scores

CANONICAL = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


@contextmanager
def compiling(capability: int, compiled: dict[str, str]) -> Iterator[None]:
    """Launches become compilations for ``capability``; ``compiled`` receives kernel name -> PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        given.update({name: value for name, value in kwargs.items() if name in self.arg_names})
        signature, constants, attributes = {}, {}, {}
        for place, param in enumerate(self.params):
            value = given.pop(param.name)
            special = not param.do_not_specialize
            if param.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
                signature[param.name], constants[place,] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[param.name] = "*" + CANONICAL[value.dtype]
                aligned = True
            elif isinstance(value, float):
                signature[param.name], aligned = "fp32", False
            else:
                signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = value % 16 == 0
            if special and aligned:
                attributes[place,] = [["tt.divisibility", 16]]
        assert not given
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled[self.__name__] = kernel.asm["ptx"]

    launch: Callable[..., Any] = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def compile_everything(capability: int, dtype: str) -> dict[str, str]:
    """PTX of every kernel at LLaDA-8B's widths; nothing runs. For a H100 of every variant of it, too, which differ in
    what is left out."""
    draw = Drawn(0, "cpu")
    building, rows, pool_rows = draw.building([Sizes(prefix=200, block=32, window=32, suffix=100, kept=150)] * 2)
    q, k = draw.normal(rows, 32, 128, dtype=dtype), draw.normal(rows, 8, 128, dtype=dtype)
    pool_k, pool_v = (draw.normal(pool_rows, 8, 128, dtype=dtype) for _ in "kv")
    logits = draw.normal(3, 126464, dtype=dtype)
    x, weight = draw.normal(3, 4096, dtype=dtype), draw.normal(4096, dtype=dtype)
    hidden = draw.normal(3, 12288, dtype=dtype)
    cos, sin = torch.zeros(2, rows, 1, 128).unbind(0)
    compiled: dict[str, str] = {}
    with compiling(capability, compiled):
        if capability == 90:
            pack(pool_k, pool_v, k, k, building, None, 150)
            scores(q, k, building, "head", 3, 32, 300)
            confidence(logits, 126336)
            rms_norm(x, weight, 1e-5)
            rotate(q, k, cos, sin, full_precision=False)
        pack(pool_k, pool_v, k, k, building, torch.zeros(2, 8, 150, dtype=torch.int64), 150)
        scores(q, k, building, "uniform", 3, 32, 300)
        partial(logits, 126336, 126464)
        rms_norm(x, weight, 1e-5, x)
        rotate(q, k, cos, sin, full_precision=True)
        swiglu(hidden, hidden)
        store(pool_k, pool_v, building.kv_start, k[:2], k[:2])
    return compiled
