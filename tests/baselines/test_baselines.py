"""Every published sampler, as a user calls it, against a plain reading of its rules on random checkpoints."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference_samplers import Dims, Sampled, Weights, dream, dream_blocks, llada
from support.tiny_models import DREAM, GQA, MHA, MQA, TinyModel, prompt_of

from engines.dllm.config import GenerationConfig
from engines.dllm.sequence import timestep_quota, timesteps
from engines.runtime.noise import row_keys, uniform
from repro.generation import Generated, GenerateOptions, generate

pytestmark = pytest.mark.usefixtures("models_loaded_once")

MIN_CONFIDENCE, MIN_TOKEN, MIN_SELECTION = 1e-5, 1e-3, 1e-4
"""What is decided by less is a matter of rounding and proves nothing."""

DREAM_DIMS = Dims(
    heads=DREAM.heads,
    kv_heads=DREAM.kv_heads,
    layers=DREAM.layers,
    mask_id=DREAM.mask_id,
    theta=DREAM.config.rope_theta,
    eps=DREAM.config.rms_norm_eps,
)
# (prompt, gen, block, steps)
EVEN = ((5, 16, 8, 16), (13, 24, 8, 12), (1, 12, 12, 12), (9, 16, 4, 8), (20, 16, 16, 24))


Folder = Callable[[str], Path]
DREAM_WEIGHTS = DREAM.weights()
LLADA: Mapping[str, TinyModel] = {model.name: model for model in (MHA, GQA, MQA)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model in LLADA.items():
        model.write(root / name)
    DREAM.write(root / "dream")
    return lambda name: root / name


def source(name: str) -> tuple[Weights, Dims, Callable[[int, int], tuple[int, ...]]]:
    if name == "dream":
        return DREAM_WEIGHTS, DREAM_DIMS, lambda seed, length: prompt_of(MHA, seed, length)
    model = LLADA[name]
    dims = Dims(heads=model.heads, kv_heads=model.kv_heads, layers=model.layers, mask_id=model.mask_id)
    return model.weights(), dims, lambda seed, length: prompt_of(model, seed, length)


def ask(
    path: Path,
    system: str,
    prompt: tuple[int, ...],
    knobs: Mapping[str, Any],
    *,
    tie_policy: str | None = "stable",
    **generation: Any,
) -> Generated:
    """As the command line does it: options of generation that a method knows are in both."""
    shared = {name: knobs[name] for name in ("threshold", "factor", "remasking", "cfg_scale") if name in knobs}
    options = GenerateOptions(
        system=system,
        model=str(path),
        generation=GenerationConfig(**generation, **shared),
        knobs=knobs,
        tie_policy=tie_policy,
    )
    return generate(options, prompt)


class Tally:
    """Compares, and says at the end whether enough was compared for the comparison to mean something."""

    def __init__(self) -> None:
        self.compared, self.undecided, self.outputs = 0, 0, set[tuple[int, ...]]()

    def check(self, expected: Sampled, found: Generated, label: object) -> None:
        least = expected.margins
        if least.confidence < MIN_CONFIDENCE or least.token < MIN_TOKEN or least.selection < MIN_SELECTION:
            self.undecided += 1
            return
        self.compared += 1
        self.outputs.add(expected.token_ids)
        assert found.token_ids == expected.token_ids, label
        assert found.forward_passes == expected.forwards, label

    def finish(self) -> None:
        assert self.compared >= 2 * self.undecided, (self.compared, self.undecided)
        assert self.compared >= 3
        assert len(self.outputs) >= self.compared / 4


# ---- LLaDA's own options ------------------------------------------------------------------------


@cache
def plain_ids(path: Path, prompt: tuple[int, ...], **shape: int) -> tuple[int, ...]:
    """Without any option; asked for by the tests of every option."""
    return ask(path, "llada", prompt, {}, **shape).token_ids


def remasking_draw(seed: int) -> Callable[[int, int], float]:
    def draw(step: int, position: int) -> float:
        keys = row_keys(*(torch.tensor([value]) for value in (seed, step, position)))
        return float(uniform(~keys, 1))

    return draw


@pytest.mark.parametrize("model", LLADA)
@pytest.mark.parametrize(
    "knobs", [{"remasking": "random"}, {"cfg_scale": 2.0}, {"cfg_scale": 1.0, "remasking": "random"}], ids=str
)
def test_random_remasking_and_guidance(folder, model, knobs):
    weights, dims, prompt_for = source(model)
    tally = Tally()
    for n, (p, g, b, steps) in enumerate(EVEN, start=len(EVEN) * list(LLADA).index(model)):
        prompt, shape = prompt_for(200 + n, p), {"gen_length": g, "block_length": b, "steps": steps}
        draw = remasking_draw(n) if "remasking" in knobs else None
        expected = llada(weights, dims, prompt, cfg_scale=knobs.get("cfg_scale", 0.0), draw=draw, **shape)
        found = ask(folder(model), "llada", prompt, knobs, seed=n, **shape)
        tally.check(expected, found, (model, p, shape, knobs))
        assert g < 16 or p < 6 or found.token_ids != plain_ids(folder(model), prompt, **shape)
    tally.finish()


# ---- Dream --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy", "origin"])
@pytest.mark.parametrize(("system", "cache"), [("dream", None), ("fast-dllm", "none")])
def test_dream_without_a_cache(folder, alg, system, cache):
    weights, dims, prompt_for = source("dream")
    tally = Tally()
    knobs = {"alg": alg} if cache is None else {"alg": alg, "cache": cache}
    cases = (*EVEN, (7, 20, 0, 5), (3, 9, 0, 30))
    for n, (p, g, _, steps) in enumerate(cases if cache is None else cases[::2]):
        prompt = prompt_for(300 + n, p)
        expected = dream(weights, dims, prompt, gen_length=g, steps=steps, alg=alg, draw=remasking_draw(n))
        found = ask(folder("dream"), system, prompt, knobs, gen_length=g, steps=steps, seed=n)
        tally.check(expected, found, (p, g, steps, alg))
    tally.finish()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(
    "knobs", [{"threshold": 0.7, "alg": "confidence_threshold"}, {"alg": "confidence_threshold"}], ids=str
)
def test_fast_dllm_on_dream(folder, cache, knobs):
    weights, dims, prompt_for = source("dream")
    tally = Tally()
    rule = {"alg": "confidence_threshold", **knobs} if "threshold" in knobs else knobs
    for n, (p, g, b, steps) in enumerate(EVEN, start=len(EVEN) * ["prefix", "dual"].index(cache)):
        prompt, shape = prompt_for(400 + n, p), {"gen_length": g, "block_length": b, "steps": steps}
        expected = dream_blocks(weights, dims, prompt, cache=cache, **rule, **shape)
        found = ask(folder("dream"), "fast-dllm", prompt, {"cache": cache, **knobs}, **shape)
        tally.check(expected, found, (p, shape, knobs))
    tally.finish()


# ---- Dream's schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [*range(1, 130), 255, 256, 511, 512, 1000, 1024, 4096, 8192])
def test_timesteps_are_torchs_bit_for_bit(steps):
    exact = np.array(timesteps(steps))
    times = exact.astype(np.float32)
    assert np.array_equal(times, exact), "every value is a float32 already"
    assert np.array_equal(times.view(np.int32), torch.linspace(1, 1e-3, steps + 1).numpy().view(np.int32))


@given(st.integers(1, 2048), st.integers(0, 1023), st.integers(1, 1024))
def test_quota_is_the_float32_expression(masks, step, steps):
    step %= steps
    times = torch.linspace(1, 1e-3, steps + 1)
    count = torch.tensor(masks)
    expected = masks if step == steps - 1 else int(count * (1 - times[step + 1] / times[step]))
    assert timestep_quota(masks, step, steps) == expected
