"""Compiles for a GPU, on a machine without one, every kernel a wrapper launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CANONICAL = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


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
