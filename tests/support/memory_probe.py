"""How much memory logits take while a function runs."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LogitsProbe(TorchDispatchMode):
    """Follows every storage that an operator returns as a tensor whose last dimension is the vocabulary.

    ``peak_bytes`` is the most that such storages took together after any operator. Storages that existed
    before (the embedding, the head) are not operator results and are not seen; what an operator allocates
    and frees inside itself is not seen either, see ``engines.dllm.executor.compose.peak_bytes``.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.vocab:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return result
