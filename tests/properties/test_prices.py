"""Seconds of simulated steps, to the last bit: those stored in ``prices.json``.

Every family's steps are priced by both prices on three cards. Prices that are meant to change are stored anew by
``python tests/properties/test_prices.py``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from engines.cluster.hardware import PHYSICAL, TRIAL_R2, Hardware
from engines.cost.kernels import Composed, Kernels
from engines.cost.roofline import DecodeLine, Roofline, StepWork, gpu
from engines.dllm.simulated import with_copies
from engines.laps.cluster import PrefillConstants, cost_of
from engines.models.shape import LLADA2_MINI, LLADA_8B, LLAMA_3_1_70B, MIXTRAL_8X7B, QWEN2_5_14B, QWEN3_32B
from engines.policies.views import FALLBACK, Bucket, Chunk, Rung
from repro.families.cost import load_calibration

STORED = Path(__file__).with_name("prices.json")
WORKS = {
    "refresh of one": StepWork(512, 512 * 512, 32, 512, 154, 1),
    "reuse of 16": StepWork(512, 512 * 300, 500, 4800, 512, 16),
    "mixed, logits in chunks": StepWork(2900, 2_900_000, 2900, 5000, 2100, 9, logit_chunks=2),
    "padded, copied logits": StepWork(4096, 4_194_304, 4096, 4096, 0, 4),
    "rows of some layers": StepWork(
        *(64, 40_000, 64, 600, 64, 2),
        extra_linear_flops=10**12,
        extra_weight_bytes=10**9,
        extra_attention_flops=10**10,
        extra_cache_bytes=10**8,
    ),
    "no rows": StepWork(0, 0, 0, 0, 0, 0),
}
CHUNKS = {
    "one": [Chunk(0, 900)],
    "history": [Chunk(5000, 37)],
    "few": [Chunk(700, 60), Chunk(0, 64), Chunk(4000, 13)],
    "mixed": [Chunk(0, 3000), Chunk(123, 40), Chunk(0, 255)],
    "none": [],
}
DECODING = {"none": (0, 0), "one": (1, 900), "many": (57, 80_123)}
MODES = {"standard": None, "fallback": FALLBACK, "bucket": Bucket(64, 4), "rung": Rung(384)}


def diffusion() -> Iterator[tuple[str, float]]:
    for card in ("rtx4090", "l40s", "h200"):
        for shape in (LLADA_8B, LLADA2_MINI):
            if shape is LLADA2_MINI and card != "h200":
                continue
            calibration = load_calibration(card)
            roofline = Roofline(shape, gpu(card), calibration)
            for name, price in (
                ("roofline", roofline),
                *(
                    (kernels, Composed(Kernels(shape, gpu(card), kernels), calibration))
                    for kernels in ("vllm", "sglang")
                ),
            ):
                for what, work in WORKS.items():
                    copied = with_copies(work, shape, 6 if "copied" in what else 0)
                    yield f"{shape.name} {card} {name} {what}", price.step_time(copied).total_s
            for what, work in WORKS.items():
                yield f"{shape.name} {card} bound {what}", roofline.lower_bound_s(work)


def workers() -> Iterator[tuple[str, float]]:
    for card in ("h20", "h200", "l40s"):
        for shape, constants, degree in (
            (QWEN3_32B, PHYSICAL, 2),
            (LLAMA_3_1_70B, TRIAL_R2, 8),
            (MIXTRAL_8X7B, PHYSICAL, 4),
        ):
            for kernels in (None, "vllm"):
                hardware = Hardware(shape=shape, gpu=gpu(card), constants=constants, kernels=kernels)
                where = f"{shape.name} {card} {kernels or 'roofline'}"
                cost = hardware.cost(degree, is_remote=constants is TRIAL_R2)
                for prompts, chunks in CHUNKS.items():
                    for decodes, (decoding, context) in DECODING.items():
                        if (chunks or decoding) and (prompts in ("few", "none") or decodes == "none"):
                            yield f"{where} {prompts} {decodes}", cost.step_s(chunks, decoding, context)
                for batch in (1, 57):
                    yield from decodes_at(f"{where} {batch} decode", cost.decode_line(batch))


def prefills() -> Iterator[tuple[str, float]]:
    for card in ("h200", "h100", "l40s"):
        for kernels in (None, "sglang"):
            for constants in (PrefillConstants(), PrefillConstants(kappa=0.2, overlap="add")):
                cost = cost_of(QWEN2_5_14B, gpu(card), constants, kernels)
                where = f"prefill {card} {kernels or 'roofline'} {constants.overlap}"
                for prompts in ("one", "history", "few", "mixed"):
                    for way, mode in MODES.items():
                        if mode is None or mode is FALLBACK or prompts == "few":
                            yield f"{where} {prompts} {way}", cost.step_s(CHUNKS[prompts], 0, 0, mode)
                yield f"{where} decodes along", cost.step_s(CHUNKS["few"], 57, 80_123)
                yield from decodes_at(f"{where} 57 decode", cost.decode_line(57))


def decodes_at(name: str, line: DecodeLine) -> Iterator[tuple[str, float]]:
    """Seconds of a decode step at three contexts."""
    base_s, slope_s, floor_s = line
    for context in (0, 5_000, 400_000):
        yield f"{name} at {context}", max(base_s + slope_s * context, floor_s)


def prices() -> dict[str, float]:
    return dict([*diffusion(), *workers(), *prefills()])


@pytest.fixture(scope="module")
def stored() -> dict[str, float]:
    return json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", [diffusion, workers, prefills])
def test_prices_are_the_stored_ones_to_the_last_bit(family, stored):
    found = dict(family())
    assert found == {name: stored[name] for name in found}


def test_every_stored_price_is_asked_for(stored):
    assert set(stored) == set(prices())


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(seconds)}" for name, seconds in prices().items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
