"""Tensors of a safetensors checkpoint, checked by name and shape before any of them is read.

One shard is open at a time and each tensor is copied to where it stays, so loading holds the model
once, never twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engines.errors import UserError
from engines.models.checkpoint import INDEX_FILE, weight_files


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    file: str
    shape: tuple[int, ...]
    stored_dtype: str
    """As safetensors spells it: 'BF16', 'F32', 'I8', ..."""


class Part(NamedTuple):
    """[start, end) of one dimension of a tensor, ``length`` long: all of it a process holds."""

    dim: int
    start: int
    end: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view."""
        return tensor.narrow(self.dim, self.start, self.end - self.start)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole tensor's shape, from the part's."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def slices(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(self.start, self.end))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name -> place and shape of every stored tensor, from the files' headers alone."""
    found: dict[str, StoredTensor] = {}
    for file, promised in weight_files(directory).items():
        try:
            with safe_open(directory / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    part = shard.get_slice(name)
                    if name in found:
                        raise UserError(
                            f"tensor {name} is in both {found[name].file} and {file}: restore the checkpoint"
                        )
                    found[name] = StoredTensor(file=file, shape=tuple(part.get_shape()), stored_dtype=part.get_dtype())
                held = set(shard.keys())
        except SafetensorError as error:
            raise UserError(f"{directory / file} is damaged ({error}): fetch it again") from error
        except OSError as error:
            raise UserError(
                f"{directory / file} cannot be read ({error}): change its permissions, or fetch it again"
            ) from error
        if promised is not None and promised != held:
            raise UserError(
                f"{directory / file} and {INDEX_FILE} disagree on {min(promised ^ held)}: restore the checkpoint"
            )
    return found


def _check(
    network: nn.Module,
    stored: dict[str, StoredTensor],
    repeated: dict[str, str],
    parts: Mapping[str, Part],
    directory: Path,
) -> None:
    """``repeated``: names that a checkpoint with tied weights may hold besides the module's own."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    expected |= {name: part.whole(expected[name]) for name, part in parts.items()}
    problems = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - expected.keys() - repeated.keys()),
        "mis-shaped": sorted(
            name
            for name in stored.keys() & (expected.keys() | repeated.keys())
            if stored[name].shape != expected[repeated.get(name, name)]
        ),
        "not floating-point": sorted(name for name in stored if not stored[name].stored_dtype.startswith(("F", "BF"))),
    }
    said = [f"{len(names)} {kind} ({names[0]})" for kind, names in problems.items() if names]
    if said:
        raise UserError(
            f"weights in {directory} do not fit config.json: {', '.join(said)}; restore the checkpoint or its config"
        )


def load_weights(
    network: nn.Module,
    directory: Path,
    *,
    repeated: dict[str, str],
    dtype: torch.dtype,
    device: str,
    parts: Mapping[str, Part],
    in_float32: Collection[str] = (),
) -> None:
    """Fill ``network``, built on the meta device, with the tensors of ``directory``.

    ``repeated`` maps a name the checkpoint may hold in vain to the tensor it must equal (tied weights).
    ``parts`` says which tensors ``network`` holds a part of; the rest of those is not read. ``in_float32`` are tensors that
    ``dtype`` is not for, and that nothing else would show to be broken: routers choose among NaN too.
    """
    stored = stored_tensors(directory)
    _check(network, stored, repeated, parts, directory)
    in_vain: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        fresh: dict[str, Tensor] = {}
        with safe_open(directory / file, framework="pt") as shard:
            for name in sorted(name for name, tensor in stored.items() if tensor.file == file):
                # A copy even where dtype and device fit: the file stays mapped as long as a view of it lives.
                part = parts.get(repeated.get(name, name))
                tensor = shard.get_tensor(name) if part is None else shard.get_slice(name)[part.slices()]
                wanted = torch.float32 if name in in_float32 else dtype
                tensor = tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)
                if name in in_float32 and not tensor.isfinite().all():
                    raise UserError(
                        f"{name} in {directory / file} has values that are not finite: restore the checkpoint"
                    )
                (in_vain if name in repeated else fresh)[name] = tensor
        # Not strict: a shard is a part. All names and shapes have been checked.
        network.load_state_dict(fresh, strict=False, assign=True)
    for name, tensor in in_vain.items():
        if not torch.equal(tensor, network.get_parameter(repeated[name])):
            raise UserError(
                f"weights in {directory} hold {name} different from {repeated[name]}, but config.json ties them: correct one of the two"
            )
