"""The engine of a deployment on a virtual clock, its steps charged to a card."""

from __future__ import annotations

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.simulated import PoissonSure, SimulatedExecutor
from engines.blockdiffusion.tables import SharedTables
from engines.cost.cards import Gpu, gpu
from engines.cost.composed import Composed
from engines.cost.kernels import Kernels
from engines.cost.roofline import Roofline
from repro.systems.block.settings import MAX_NUM_LOGITS, Settings
from repro.systems.calibration import describe_calibration, load_calibration


def engine_of(settings: Settings, seed: int) -> BlockEngine:
    knobs, block = settings.knobs, settings.block
    size = settings.pool_block
    tables = SharedTables(
        num_slots=knobs.max_num_seqs,
        num_blocks=-(-settings.num_tokens // size),
        block_size=size,
        max_len=settings.max_model_len,
        diffusion_block=block,
        caches=knobs.prefix_cache,
    )
    assert settings.platform.gpu is not None, "settings refuse a platform without a card"
    executor = SimulatedExecutor(
        cost_on(settings, settings.platform.gpu),
        PoissonSure(knobs.tokens_per_forward or 1.0, seed),
        block=block,
        shifts=settings.shifts,
        tables=tables,
        host=knobs.host,
        # SGLang makes logits of all rows that it denoises.
        head_rows="wanted" if knobs.batching == "mixed" else "all",
        max_num_logits=MAX_NUM_LOGITS,
    )
    return BlockEngine(executor, settings.engine)


def cost_on(settings: Settings, card: str | Gpu) -> Roofline:
    framework = settings.knobs.charged.framework
    if framework is None:
        return Roofline(settings.shape, gpu(card), load_calibration(card))
    return Composed(Kernels(settings.shape, gpu(card), framework), load_calibration(card))


def charged_text(settings: Settings, card: str | Gpu) -> str:
    """What steps are charged by, in one sentence."""
    knobs, calibration = settings.knobs, load_calibration(card)
    if knobs.charged.framework is None:
        return describe_calibration(calibration)
    host = knobs.host
    overheads = [f"{1e3 * (calibration.step_overhead_s + host.step_overhead_s):g} ms a step"]
    if host.request_overhead_s:
        overheads.append(f"{1e3 * host.request_overhead_s:g} ms a request of it")
    if host.prefix_overhead_s:
        overheads.append(f"{1e3 * host.prefix_overhead_s:g} ms a 1,000 tokens before its rows")
    return knobs.charged.describe(card, f"{', '.join(overheads)} assumed", settings.shape)
