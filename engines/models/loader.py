"""Load a diffusion, block-diffusion or causal model from a directory or a hub id, without executing remote code.

We check the names and shapes of a safetensors checkpoint's tensors before we read any of them.

One shard is open at a time, and we copy each tensor to its final place. So loading holds the model
once, never twice.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from engines.errors import UserError, require
from engines.machine import give_back_freed_memory, keep_freed_memory, machine_memory_bytes
from engines.models.block_config import BLOCK_SHAPES, BlockConfig, CanvasConfig, block_config, read_block_config
from engines.models.checkpoint import (
    INDEX_FILE,
    PUBLISHED_CONFIGS,
    checkpoint_dir,
    config_of,
    read_config,
    weight_files,
)
from engines.models.config import DreamConfig, LLaDAConfig
from engines.models.decoder import BlockModel, CausalModel, DreamModel
from engines.models.gemma import GemmaModel
from engines.models.layers import RMSNorm
from engines.models.llada import LLaDAModelLM
from engines.models.llada2 import LLaDA2Model
from engines.models.packed import PackedModel
from engines.models.product import packed_fault, packs
from engines.models.protocol import DiffusionModel
from engines.models.qwen2_config import CAUSAL_SHAPES, CausalConfig, causal_config, read_causal_config


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    file: str
    shape: tuple[int, ...]
    stored_dtype: str
    """As safetensors spells it: 'BF16', 'F32', 'I8', ..."""


class Slice(NamedTuple):
    """The part [start, end) of a tensor's dimension that a process holds; the whole dimension is ``length`` long."""

    dim: int
    start: int
    end: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a whole tensor, as a view."""
        return tensor.narrow(self.dim, self.start, self.end - self.start)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the whole tensor's shape from the part's."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def slices(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(self.start, self.end))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return name -> place and shape of every stored tensor, read from the files' headers alone."""
    stored: dict[str, StoredTensor] = {}
    for file, promised in weight_files(directory).items():
        try:
            with safe_open(directory / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    part = shard.get_slice(name)
                    if name in stored:
                        raise UserError(
                            f"tensor {name} is in both {stored[name].file} and {file}: restore the checkpoint"
                        )
                    stored[name] = StoredTensor(file=file, shape=tuple(part.get_shape()), stored_dtype=part.get_dtype())
                names = set(shard.keys())
        except SafetensorError as error:
            raise UserError(f"{directory / file} is damaged ({error}): fetch it again") from error
        except OSError as error:
            raise UserError(
                f"{directory / file} cannot be read ({error}): change its permissions, or fetch it again"
            ) from error
        if promised is not None and promised != names:
            raise UserError(
                f"{directory / file} and {INDEX_FILE} disagree on {min(promised ^ names)}: restore the checkpoint"
            )
    return stored


def _check(
    network: PackedModel[Any],
    stored: dict[str, StoredTensor],
    tied_names: dict[str, str],
    parts: Mapping[str, Slice],
    directory: Path,
) -> None:
    """Raise UserError unless the tensors fit. ``tied_names``: names that a checkpoint with tied weights may hold too."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    expected |= {name: part.whole(expected[name]) for name, part in parts.items()}
    problems = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - expected.keys() - tied_names.keys()),
        "mis-shaped": sorted(
            name
            for name in stored.keys() & (expected.keys() | tied_names.keys())
            if stored[name].shape != expected[tied_names.get(name, name)]
        ),
        "not floating-point": sorted(name for name in stored if not stored[name].stored_dtype.startswith(("F", "BF"))),
    }
    faults = [f"{len(names)} {kind} ({names[0]})" for kind, names in problems.items() if names]
    if faults:
        raise UserError(
            f"weights in {directory} do not fit config.json: {', '.join(faults)}; restore the checkpoint or its config"
        )


def load_weights(
    network: PackedModel[Any], directory: Path, dtype: torch.dtype, device: str, parts: Mapping[str, Slice]
) -> None:
    """Fill ``network``, built on the meta device, with the tensors of ``directory``.

    ``parts`` says of which tensors ``network`` holds only a part; we do not read the rest. Weights that stay in float32 must be
    finite. Nothing else would reveal that they are broken, because routers choose among NaN too.
    """
    tied_names, in_float32 = network.tied_weights, network.float32_weights
    tensors = stored_tensors(directory)
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith(network.ignored)}
    _check(network, stored, tied_names, parts, directory)
    redundant: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        fresh: dict[str, Tensor] = {}
        with safe_open(directory / file, framework="pt") as shard:
            for name in sorted(name for name, tensor in stored.items() if tensor.file == file):
                # We copy even if dtype and device fit: the file stays mapped as long as a view of it lives.
                part = parts.get(tied_names.get(name, name))
                tensor = shard.get_tensor(name) if part is None else shard.get_slice(name)[part.slices()]
                wanted = torch.float32 if name in in_float32 else dtype
                tensor = tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)
                if name in in_float32 and not tensor.isfinite().all():
                    raise UserError(
                        f"{name} in {directory / file} has values that are not finite: restore the checkpoint"
                    )
                (redundant if name in tied_names else fresh)[name] = tensor
        # Not strict, because a shard holds a part of the tensors. We have checked all names and shapes.
        network.load_state_dict(fresh, strict=False, assign=True)
    for name, tensor in redundant.items():
        if not torch.equal(tensor, network.get_parameter(tied_names[name])):
            raise UserError(
                f"weights in {directory} hold {name} different from {tied_names[name]}, but config.json ties them: correct one of the two"
            )


_FILLS = frozenset({init.kaiming_uniform_, init.normal_, init.uniform_, Tensor.normal_, Tensor.uniform_})
"""The functions by which ``nn.Linear`` and ``nn.Embedding`` fill their parameters."""


class _Unfilled(TorchFunctionMode):
    """Leaves parameters unfilled. On the meta device ``normal_`` is a decomposition in Python, whose first call imports
    torch's compiler. That would cost every process that loads a model more than a second, to fill nothing."""

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
    """Modules made in this context are on the meta device: they have no memory and are not initialised."""
    with torch.device("meta"), _Unfilled():
        yield


Weights = Literal["checkpoint", "random"]
Quantization = Literal["none", "int8"]
Divide: TypeAlias = Callable[[LLaDAModelLM | DreamModel], Mapping[str, Slice]]
"""Reduces a network to a process's part, in place, and returns name of a tensor -> which part is left."""
_Network = TypeVar("_Network", bound=PackedModel[Any])

ROOM_FOR_COPIES = 4
"""A model on a CPU may keep its weights beside copies for products only if the machine has so many times their memory."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_dtype(name: str) -> torch.dtype:
    require(name in DTYPES, f"dtype={name!r} is unknown: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_device(name: str) -> None:
    """Raise UserError for a device that this machine or this torch does not have, before anything is put on it."""
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise UserError(f"device={name!r} is unknown: use cpu, cuda or cuda:N")
    kind, _, index = name.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name!r}: this machine has no CUDA device that torch can use: use --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices: use a smaller number")


def check_weights(name: str) -> None:
    if name not in get_args(Weights):
        raise UserError(f"weights={name!r} is unknown: use one of {', '.join(get_args(Weights))}")


def check_quantization(name: str, dtype: torch.dtype, device: str, *, has_experts: bool = False) -> None:
    """Raise UserError for int8 weights if no kernel here multiplies with them."""
    if name == "none":
        return
    if name not in get_args(Quantization):
        raise UserError(f"quantization={name!r} is unknown: use one of {', '.join(get_args(Quantization))}")
    prefix = f"quantization={name!r} needs"
    require(device == "cpu", f"{prefix} device='cpu', not {device!r}: leave one of them out")
    require(
        dtype in (torch.float32, torch.bfloat16), f"{prefix} dtype=float32 or bfloat16, not {dtype}: give one of these"
    )
    require(not has_experts, f"{prefix} a model without experts: leave it out")
    fault = packed_fault(dtype)
    require(fault is None, f"{prefix} our own kernels, and {fault}: leave it out")


def load_model(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    weights: Weights = "checkpoint",
    quantization: Quantization = "none",
    keeps_weights: bool = True,
    seed: int = 0,
    divide: Divide | None = None,
) -> DiffusionModel:
    """Load a diffusion model in eval mode, in ``dtype`` whatever the checkpoint's ``torch_dtype`` is.

    ``weights="random"`` builds a shape (a name in PUBLISHED_CONFIGS, or the config of a checkpoint) with small
    random weights: throughput does not depend on their values. With ``divide`` we read only this process's part. Random weights
    are drawn as for the whole model, and only the part is kept. Without ``keeps_weights``, products on a CPU keep only packed
    copies (``layers.reorder``), for which any machine has room.
    """
    check_weights(weights)
    check_device(device)
    check_quantization(quantization, dtype, device)
    directory = None if weights == "random" else _stored_dir(model, model in PUBLISHED_CONFIGS)
    network = build_model(config_of(model) if directory is None else read_config(directory))
    _fill(network, directory, dtype, device, seed, {} if divide is None else divide(network))
    return _prepare(network, quantization, keeps_weights)


def load_causal(
    model: str | CausalConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    weights: Weights = "checkpoint",
    quantization: Quantization = "none",
    keeps_weights: bool = True,
    seed: int = 0,
) -> CausalModel:
    """Like ``load_model``, for a causal model; with random weights ``model`` may be a name of CAUSAL_SHAPES, or a config."""
    check_weights(weights)
    check_device(device)
    check_quantization(quantization, dtype, device)
    if weights == "random":
        directory, config = None, causal_config(model) if isinstance(model, str) else model
    else:
        directory = _stored_dir(model, not isinstance(model, str) or model.lower() in CAUSAL_SHAPES)
        config = read_causal_config(directory)
    network = build_causal(config)
    _fill(network, directory, dtype, device, seed, {})
    return _prepare(network, quantization, keeps_weights)


def load_block(
    model: str | BlockConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    weights: Weights = "checkpoint",
    quantization: Quantization = "none",
    keeps_weights: bool = True,
    seed: int = 0,
) -> BlockModel | LLaDA2Model | GemmaModel:
    """Like ``load_model``, for a block-diffusion model; with random weights ``model`` may be a name of BLOCK_SHAPES, or a config."""
    check_weights(weights)
    check_device(device)
    if weights == "random":
        directory, config = None, block_config(model) if isinstance(model, str) else model
    else:
        directory = _stored_dir(model, not isinstance(model, str) or model.lower() in BLOCK_SHAPES)
        config = read_block_config(directory)
    _check_experts(config, dtype)
    network = build_block(config)
    check_quantization(quantization, dtype, device, has_experts=config.experts is not None)
    _fill(network, directory, dtype, device, seed, {})
    return _prepare(network, quantization, keeps_weights)


def _check_experts(config: BlockConfig, dtype: torch.dtype) -> None:
    """Raise UserError unless rows have a multiple of 16 bytes, without which torch cannot multiply rows of several experts."""
    if config.experts is None:
        return
    for name, size in (("hidden_size", config.d_model), ("moe_intermediate_size", config.experts.expert_hidden)):
        require(
            size * dtype.itemsize % 16 == 0,
            f"config.json: {name}={size} gives rows of {size * dtype.itemsize} bytes in {dtype}, and experts need a multiple of 16: "
            f"give a multiple of {16 // dtype.itemsize}",
        )


def build_block(config: BlockConfig) -> BlockModel | LLaDA2Model | GemmaModel:
    with shapes_only():
        if isinstance(config, CanvasConfig):
            return GemmaModel(config)
        return BlockModel(config) if config.experts is None else LLaDA2Model(config)


def build_model(config: LLaDAConfig | DreamConfig) -> LLaDAModelLM | DreamModel:
    """The module of a config on the meta device: names and shapes, no memory."""
    with shapes_only():
        return DreamModel(config) if isinstance(config, DreamConfig) else LLaDAModelLM(config)


def build_causal(config: CausalConfig) -> CausalModel:
    with shapes_only():
        return CausalModel(config)


def _stored_dir(model: object, is_shape: bool) -> Path:
    """Return a model's directory. Raises UserError for a config or the name of a shape, which have no weights."""
    require(not is_shape, f"model={model!r} is a shape without weights: add --weights random, or give a checkpoint")
    return checkpoint_dir(str(model))


def _fill(
    network: PackedModel[Any],
    directory: Path | None,
    dtype: torch.dtype,
    device: str,
    seed: int,
    parts: Mapping[str, Slice],
) -> None:
    """Read the weights of a directory, or draw them if there is none."""
    if directory is None:
        _draw(network, dtype, device, seed, parts)
    else:
        load_weights(network, directory, dtype, device, parts)


def _draw(network: PackedModel[Any], dtype: torch.dtype, device: str, seed: int, parts: Mapping[str, Slice]) -> None:
    """Draw weights and biases from N(0, 0.02), and set norms to one. Raises UserError if the device has too little memory."""
    needed = _num_bytes(network, dtype)
    total = machine_memory_bytes() if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
    if total is not None and needed > total:
        raise UserError(
            f"device={device!r} has {total / 1e9:.1f} GB and the model's weights take {needed / 1e9:.1f} GB: give a smaller "
            f"model, a narrower dtype or a larger device"
        )
    # ``to_empty`` imports sympy for tensors of the meta device, which takes a second.
    network.to(dtype)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    generator = torch.Generator(device=device).manual_seed(seed)
    ones = {id(module.weight) for module in network.modules() if isinstance(module, RMSNorm)}
    ones |= {id(network.get_parameter(name)) for name in network.unit_weights}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            part = parts.get(name)
            if id(parameter) in ones:
                parameter.fill_(1.0)
            elif part is None:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                whole = parameter.new_empty(part.whole(tuple(parameter.shape)))
                parameter.copy_(part.of(whole.normal_(0.0, 0.02, generator=generator)))


def _prepare(network: _Network, quantization: Quantization, keeps_weights: bool) -> _Network:
    network.requires_grad_(False).eval()
    if network.device.type != "cpu":
        return network
    keep_freed_memory()
    if quantization == "int8":
        network.quantize()
    memory = machine_memory_bytes()
    has_room = memory is not None and ROOM_FOR_COPIES * _num_bytes(network, network.dtype) <= memory
    if has_room or network.is_quantized or (packs(network.dtype) and not keeps_weights):
        joins = isinstance(network, CausalModel | BlockModel | LLaDA2Model | GemmaModel)
        network.reorder(joins=joins, keeps_weights=keeps_weights)
        if not keeps_weights:
            give_back_freed_memory()
    return network


def _num_bytes(network: _Network, dtype: torch.dtype) -> int:
    return sum(parameter.numel() for parameter in network.parameters()) * dtype.itemsize
