"""A deployment on a real device: the model, the measurements before it serves, and its executor."""

import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.executor import static_batch_bytes
from baselines.dllm.static.scheduler import FoundBatch, base_bytes, largest_batch
from engines.attention.registry import attention_backend
from engines.cost.peaks import datasheet_gpu, measured_gpu
from engines.cost.roofline import Gpu, Roofline
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import MeasuredPeak, measure_worst_step
from engines.dllm.executor.graphs import MAX_ROWS, ROWS
from engines.dllm.executor.torch import LeadingExecutor, TorchExecutor, follow
from engines.dllm.method import Sampler
from engines.dllm.plan import Executor, ExecutorError
from engines.dllm.simulated import BoundedExecutor
from engines.errors import UserError
from engines.machine import machine_memory_bytes
from engines.models.chat import stop_token_ids
from engines.models.checkpoint import checkpoint_dir, config_of
from engines.models.loader import check_device, check_quantization, check_weights, load_model, parse_dtype
from engines.models.protocol import DiffusionModel
from engines.parallel.group import TensorParallel, local_ranks, rank_device
from engines.parallel.shard import load_shard
from engines.runtime.device import check_memory, limit_memory
from repro.families.dllm.deployment import DllmDeployment, batch_facts, member_tokens, most_members, pool_rows, sized
from repro.families.dllm.settings import DllmSettings

ModelKey = tuple[str, str, str, str, str, str]


@contextmanager
def serving(deployment: DllmDeployment) -> Iterator[tuple[Engine, DllmDeployment]]:
    settings = deployment.settings
    if settings.tensor_parallel == 1:
        executor, measured = assemble(deployment)
        with closing(Engine(measured.scheduler(), executor)) as engine:
            yield engine, measured
        return
    rank_deployment = replace(deployment, task=None)
    with local_ranks(settings.tensor_parallel, settings.device, _follow, rank_deployment) as group:
        executor, measured = assemble(deployment, group)
        leader = LeadingExecutor(executor, group)
        with closing(Engine(measured.scheduler(), leader)) as engine:
            yield engine, measured
            # Only without an error. After one the other ranks may be anywhere, and ``local_ranks`` ends them.
            leader.stop()


def _follow(group: TensorParallel, deployment: DllmDeployment) -> None:
    """Runs on the other ranks, which assemble the deployment exactly as rank 0 does."""
    executor, _ = assemble(deployment, group)
    follow(executor, group)


def check_machine(settings: DllmSettings) -> None:
    """Raise UserError, before the first run, for anything that a measured run needs and this machine lacks."""
    name = settings.engine.attention_backend
    check_device(settings.device)
    dtype = parse_dtype(settings.dtype)
    check_weights(settings.weights)
    check_quantization(settings.quantization, dtype, settings.device)
    # Refuse a memory limit above the machine's or the card's memory before we load a model.
    total = machine_memory_bytes()
    if settings.device.startswith("cuda"):
        check_memory(torch.device(settings.device), settings.memory_limit)
    elif total is not None and settings.memory_limit > total:
        raise UserError(
            f"memory_limit={settings.memory_limit} is more than this machine's {total} bytes: give at most "
            f"{total // 10**9}GB"
        )
    if name != "auto":
        shape = config_of(settings.model)
        device = torch.device(rank_device(settings.device, 0, settings.tensor_parallel))
        heads = shape.n_heads // settings.tensor_parallel, shape.n_kv_heads // settings.tensor_parallel
        attention_backend(name, device, dtype, shape.head_dim, *heads)


def assemble(deployment: DllmDeployment, group: TensorParallel | None = None) -> tuple[Executor, DllmDeployment]:
    """Return the executor, and the deployment as measured. ``group`` are the ranks that share the model; every rank assembles."""
    settings = deployment.settings
    _limit_memory(settings, None)  # a peak above the limit is a result while it is planned, not a failure
    bound = _card_roofline(settings)
    if group is None:
        model = load(*model_key(settings))
    else:
        dtype, weights = parse_dtype(settings.dtype), settings.weights
        model = load_shard(settings.model, group, dtype=dtype, weights=weights)  # type: ignore[arg-type]
    if deployment.is_packed:
        deployment = _with_measured_pool(deployment, model, group)
    else:
        deployment = sized(deployment, {**deployment.facts, **_measured_batch(deployment)})
    facts: dict[str, Any] = {}
    if (allowed := _limit_memory(settings, settings.memory_limit)) is not None:
        facts["enforced_memory_bytes"] = allowed
    real = _executor(deployment, model, stop_ids(settings))
    facts |= real.paths()
    executor: Executor = real
    if bound is not None:
        executor = BoundedExecutor(executor, deployment.charged_to(bound, is_upstream=False))
        card = bound.gpu
        peaks = {"flops_per_s": card.peak_flops, "bytes_per_s": card.bandwidth, "source": card.source}
        facts["bound"] = {"card": card.name, **peaks}
    return executor, replace(deployment, facts={**deployment.facts, **facts})


def _executor(deployment: DllmDeployment, model: DiffusionModel, stops: Collection[int] | None) -> TorchExecutor:
    method, settings = deployment.method, deployment.settings
    if deployment.is_packed:
        return method.packed_torch(
            model,
            deployment.config,
            deployment.kv_rows,
            stop_ids=stops,
            block_length=settings.generation.block_length,
            profile_every=settings.profile_every or 0,
        )
    assert deployment.batch_size is not None
    return deployment.published.static_torch(
        model,
        deployment.config,
        deployment.sampler,
        deployment.kv_rows,
        batch_size=deployment.batch_size,
        stop_ids=stops,
        profile_every=settings.profile_every or 0,
    )


# -- the model ---------------------------------------------------------------------------------------------


def model_key(settings: DllmSettings) -> ModelKey:
    own = settings.dtype, settings.device, settings.weights, settings.checkpoint_digest, settings.quantization
    return settings.model, *own


@lru_cache(maxsize=2)
def load(name: str, dtype: str, device: str, weights: str, _digest: str, quantization: str = "none") -> DiffusionModel:
    """Load a model once for all cells, as long as the checkpoint's files stay the same."""
    return load_model(
        name,
        dtype=parse_dtype(dtype),
        device=device,
        weights=weights,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        keeps_weights=False,
    )


def release(device: str) -> None:
    """Free the memory that we keep on a device for later runs, and lift the limit that the last run set."""
    load.cache_clear()
    gc.collect()
    limit_memory(torch.device(device), None)


def stop_ids(settings: DllmSettings) -> frozenset[int] | None:
    """The checkpoint's stop ids, if generation may end at one. None otherwise, and for random weights, which use the shape's own."""
    if not settings.generation.stop_at_eos or settings.weights == "random":
        return None
    return stop_token_ids(checkpoint_dir(settings.model), config_of(settings.model))


def _limit_memory(settings: DllmSettings, memory_bytes: int | None) -> int | None:
    """Set or lift the device's memory limit. A run does this first, so a device that is missing raises UserError here."""
    check_device(settings.device)
    return limit_memory(torch.device(settings.device), memory_bytes)


# -- the bound of its steps ----------------------------------------------------------------------------------


def _card_roofline(settings: DllmSettings) -> Roofline | None:
    """The roofline of the card at its datasheet peaks. For a device without a datasheet we measure peaks, but only if the run is
    profiled, because this takes a second. None otherwise, and for int8 weights and guided requests: the model has no cost for
    their bytes and second forward."""
    if settings.generation.cfg_scale > 0 or settings.quantization != "none":
        return None
    card = datasheet_gpu(torch.device(settings.device))
    if card is None and settings.profile_every:
        card = _card_by_measuring(settings.device, settings.dtype)
    return None if card is None else Roofline(settings.shape, card)


@lru_cache(maxsize=4)
def _card_by_measuring(device: str, dtype: str) -> Gpu:
    return measured_gpu(torch.device(device), parse_dtype(dtype))


# -- packed steps: the offline profiler (§4.2) ----------------------------------------------------------------


def _with_measured_pool(
    deployment: DllmDeployment, model: DiffusionModel, group: TensorParallel | None
) -> DllmDeployment:
    """The deployment with a pool that takes the memory left by the measured worst step."""
    settings, config, graph_bytes = deployment.settings, deployment.config, 0
    if group is None:
        peak = _measured_peak(model_key(settings), config, settings.generation)
    else:
        # Take the rank with the highest peak, because all ranks must lay out the same pool.
        peaks = group.gather_objects(measure_worst_step(model, config, settings.generation))
        peak = max(peaks, key=lambda peak: (peak.activation_bytes, peak.logits_bytes))
    # If logits take more than the plan counts, the excess must not come out of the guard band.
    excess_bytes = max(0, peak.logits_bytes - deployment.facts["logits_bytes"])
    if config.cuda_graphs and settings.device.startswith("cuda"):
        # Captured graphs keep the activations of the largest, whose memory the others share, and the output of each.
        rows = min(MAX_ROWS + sum(ROWS) // 2, config.max_num_batched_tokens)
        graph_bytes = peak.activation_bytes * rows // config.max_num_batched_tokens
    kv_rows, plan = pool_rows(deployment, activations_measured_bytes=peak.activation_bytes + excess_bytes + graph_bytes)
    facts = {
        "kv_rows": kv_rows,
        "measured_activation_bytes": peak.activation_bytes,
        "measured_logits_bytes": peak.logits_bytes,
        "memory_plan": asdict(plan),
    }
    return replace(deployment, kv_rows=kv_rows, facts={**deployment.facts, **facts})


@lru_cache(maxsize=8)
def _measured_peak(key: ModelKey, config: EngineConfig, generation: GenerationConfig) -> MeasuredPeak:
    """The peak memory of the worst step, measured once per sweep."""
    return measure_worst_step(load(*key), config, generation)


# -- static batches: "preliminary profiling" (§6.1) -------------------------------------------------------------


_Batch = tuple[PublishedMethod, ModelKey, EngineConfig, Sampler, GenerationConfig, int]
"""All that a batch's memory depends on. The last item is the tokens of its longest request."""


def _measured_batch(deployment: DllmDeployment) -> Mapping[str, Any]:
    settings = deployment.settings
    max_members = most_members(deployment)
    batch = _largest_measured(
        (
            deployment.published,
            model_key(settings),
            replace(deployment.config, max_num_batched_tokens=settings.engine.max_num_batched_tokens),
            deployment.sampler,
            settings.generation,
            member_tokens(deployment),
        ),
        memory_bytes=settings.memory_limit,
        fixed_bytes=base_bytes(settings.shape, settings.memory_limit),
        limit=max_members,
    )
    return batch_facts(batch, deployment, max_members)


@lru_cache(maxsize=32)
def _largest_measured(batch: _Batch, *, memory_bytes: int, fixed_bytes: int, limit: int) -> FoundBatch:
    """The largest batch that fits, searched once per sweep."""

    def peak(size: int) -> int:
        held_bytes = _batch_bytes(batch, size, memory_bytes)
        return memory_bytes + 1 if held_bytes is None else fixed_bytes + held_bytes

    # Warm up, so that no batch is charged for what the model keeps from its first step, such as its table of rotations.
    _batch_bytes.__wrapped__(batch, 1, memory_bytes)
    return largest_batch(peak, memory_bytes, fixed_bytes=fixed_bytes, most=limit)


@lru_cache(maxsize=256)
def _batch_bytes(batch: _Batch, size: int, memory_bytes: int) -> int | None:
    """Bytes that a batch takes, or None if it does not run within the limit that it will serve with. Running it also counts fragments of
    freed memory, which no sum of held bytes would. We do this once per sweep, because the rates of a figure ask for the same sizes."""
    method, key, config, sampler, generation, longest = batch
    model = load(*key)
    device = torch.device(key[2])
    try:
        limit_memory(device, memory_bytes)
        return static_batch_bytes(
            model,
            config,
            sampler,
            generation,
            longest=longest,
            rows_per_request=sampler.rows_of_request(longest, generation),
            batch_size=size,
            make_executor=lambda kv_rows: method.static_torch(model, config, sampler, kv_rows, batch_size=size),
        )
    except ExecutorError:
        return None
    finally:
        limit_memory(device, None)
