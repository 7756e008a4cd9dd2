"""Networks as names and shapes, whose weights are read or drawn afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

_FILLS = frozenset({init.kaiming_uniform_, init.normal_, init.uniform_, Tensor.normal_, Tensor.uniform_})
"""What ``nn.Linear`` and ``nn.Embedding`` fill their parameters with."""


class _Unfilled(TorchFunctionMode):
    """Leaves parameters as they are. On the meta device ``normal_`` is a decomposition in Python, whose first call
    imports torch's compiler: more than a second of every process that loads a model, to fill nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made in it are on the meta device, without memory, and nothing initialises them."""
    with torch.device("meta"), _Unfilled():
        yield
