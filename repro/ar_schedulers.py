"""The step schedulers of a served causal model, by name, and the sizes of the executor that runs them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from baselines.ar.sglang import TokenBudget
from engines.ar.torch.executor import MeasuredSteps, PagedExecutor, grid
from engines.errors import UserError, require
from engines.knobs import build, with_knobs
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig, ReserveConfig, share_for
from engines.laps.system import LapsConfig, laps, on_time, reserve
from engines.models.decoder import CausalModel
from engines.policies.batching import Chunked, PrefillFirst
from engines.policies.views import Batching, Bucket, Chunk, OpenQueue, PrefillQueue
from engines.server.ar import AtMost
from engines.server.settings import user_batcher
from repro.families.cluster.instance import CARD, TINY, MeasuredInstance, Setting
from repro.families.cluster.laps_settings import scaled

LONGEST_BUCKET = max(CARD.lengths)
PAPER_SLO_S = 0.4
PAPER_KNEE = 206
"""The roofline's knee on the paper's card, in tokens. The paper's chunk sizes scale with it."""
PROFILE_REPEATS = 3
LEAST_PROFILE = 256
"""Least ``max_model_len``, in tokens, at which we can time steps of several lengths."""


class Scheduled(NamedTuple):
    batching: Batching
    queue: PrefillQueue
    """A queue from which a waiting task can be taken out of turn."""
    estimate_s: Callable[[int, int], float] | None = None


def scheduled(
    name: str,
    executor: PagedExecutor,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    options: tuple[tuple[str, Any], ...] = (),
    *,
    slo_ttft_s: float | None = None,
) -> Scheduled:
    """Return the named scheduler's batching and queue. ``laps``, ``reserve`` and ``on-time`` first time steps on this device. They fit
    their step model to these times, and also their objective if ``slo_ttft_s`` is None. A user's own scheduler gets those of the two sizes
    that it takes, and itself keeps to ``max_num_seqs``. ``options`` holds its knobs, or those of ``on-time``."""
    if (batcher := user_batcher(name, options)) is not None:
        own_batching = batcher.make(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        return Scheduled(own_batching, OpenQueue())
    sizes = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    if name in ("chunked", "prefill-first"):
        return Scheduled((Chunked if name == "chunked" else PrefillFirst)(**sizes), OpenQueue())
    if name == "sglang":
        # The limit of ``TokenBudget`` counts only the prefills of a step.
        return Scheduled(AtMost(batching=TokenBudget(**sizes), max_num_seqs=max_num_seqs), OpenQueue())
    instance = _profiled(executor)
    slo_s = instance.slo_s if slo_ttft_s is None else slo_ttft_s
    time_scale = slo_s / PAPER_SLO_S
    if name == "laps":
        length_scale = instance.boundary / PAPER_KNEE
        defaults = scaled(LapsConfig, length_scale=length_scale, time_scale=time_scale)
        config = build(LapsConfig, {**defaults, "boundary": instance.boundary, "slo_s": slo_s})
        # Without captured graphs a bucket would only add padding.
        system = laps(instance.step_model, replace(config, graphs="cheapest" if instance.captured else "none"))
    elif name == "on-time":
        on_time_config = with_knobs(OnTimeConfig(slo_s=slo_s, max_num_seqs=max_num_seqs), dict(options))
        system = on_time(instance.step_model, on_time_config, graphs="none")
    else:
        defaults = scaled(ReserveConfig, length_scale=1.0, time_scale=time_scale)
        reserve_config = build(ReserveConfig, {**defaults, "slo_s": slo_s, "max_num_seqs": max_num_seqs})
        try:
            share_for(reserve_config, instance.step_model)
        except UserError:
            # If a step's overhead is too large, no share bounds the longest wait: late requests then get all of each step.
            reserve_config = replace(reserve_config, share=1.0)
        system = reserve(instance.step_model, reserve_config, graphs="none")
    queue = system.make_queue()
    assert isinstance(queue, OpenQueue)
    return Scheduled(AtMost(batching=system.make_batching(), max_num_seqs=max_num_seqs), queue, system.work_s)


def _profiled(executor: PagedExecutor) -> MeasuredInstance:
    tables = executor.tables
    max_len, room = tables.max_len, tables.num_blocks * tables.block_size
    require(
        max_len >= LEAST_PROFILE,
        f"max_model_len={max_len} is too short to time steps of several lengths: give at least {LEAST_PROFILE}",
    )
    base = TINY if executor.device.type == "cpu" else CARD
    setting: Setting = replace(
        base,
        max_len=max_len,
        num_tokens=room,
        num_slots=tables.num_slots,
        profile_lengths=tuple(length for length in base.profile_lengths if 2 * length <= max_len),
        profile_histories=tuple(history for history in base.profile_histories if 2 * history <= max_len),
        profile_batches=tuple(
            (batch, length)
            for batch, length in base.profile_batches
            if 2 * batch * length <= room and batch <= tables.num_slots
        ),
    )
    # A replay is timed with a full batch. Graphs larger than the slots or the pool would never be replayed.
    sizes = (
        size
        for size in grid(setting.lengths, setting.batches)
        if size.batch <= tables.num_slots and size.tokens <= room
    )
    shapes = () if executor.graphs is None else tuple(sizes)
    executor.capture(shapes)
    steps = MeasuredSteps(executor, repeats=PROFILE_REPEATS, warmup=1)
    step_model = StepModel.profile(
        steps,
        shapes,
        lengths=setting.profile_lengths,
        histories=setting.profile_histories,
        batches=setting.profile_batches,
    )
    floor_s = steps.step_s([Chunk(0, 1)], 0, 0)
    if not step_model.token_s > 0:
        # No step was long enough to exceed the floor, as with a small model on a card. Take the longest profiled length as its knee.
        step_model = replace(step_model, token_s=floor_s / max(setting.profile_lengths))
    return MeasuredInstance(
        setting=setting, executor=executor, cost=steps, step_model=step_model, floor_s=floor_s, captured=shapes
    )


# -- sizes -----------------------------------------------------------------------------------------------------


def decode_sizes(max_num_seqs: int) -> list[Bucket]:
    """Batch sizes of the captured decode steps: powers of two, and ``max_num_seqs`` itself."""
    widths = [1 << i for i in range(max_num_seqs.bit_length())]
    return [Bucket(1, width) for width in dict.fromkeys([*widths, max_num_seqs])]


def card_kv_tokens(
    model: CausalModel, *, bytes_per_token: int, limit: int | None, share: float, step_tokens: int, max_num_seqs: int
) -> int:
    """Tokens of K/V that fit on a card beside the weights and the largest step. We run such a step once to measure its peak memory."""
    device, longest = model.device, model.config.max_sequence_length
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    num, rest = divmod(step_tokens, longest)
    trial = PagedExecutor(
        model, num_slots=num + 1 + max_num_seqs, max_len=longest, num_tokens=2 * (step_tokens + 16 * max_num_seqs)
    )
    try:
        chunks = [(0, longest)] * num + [(0, rest)] * (rest > 0)
        MeasuredSteps(trial).timed(chunks)
        MeasuredSteps(trial).timed([(0, 1)] * max_num_seqs)
    finally:
        trial.close()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    room = (int(total * share) if limit is None else limit) - peak
    tokens = room // bytes_per_token
    require(
        tokens >= 2,
        f"memory_limit={limit if limit is not None else int(total * share)} leaves no K/V beside the {peak} bytes of "
        f"weights and a step of {step_tokens} tokens: raise it, or lower --max-num-batched-tokens",
    )
    return tokens
