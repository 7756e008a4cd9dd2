"""The causal decoder on a card: flash attention through block tables, captured buckets and rungs, memory given back."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from support.causal import VOCAB, pooled, prompt, run, start
from support.on_card import no_waiting

from engines.ar.torch.attention import DeviceKernel, PagedAttention, kernels, probe
from engines.ar.torch.executor import PagedExecutor, grid
from engines.ar.torch.rows import PackedWork
from engines.models.decoder import CausalModel
from engines.models.loader import load_causal
from engines.models.qwen2_config import tiny_causal
from engines.policies.views import Bucket, Rung

pytestmark = pytest.mark.gpu

SIZES = {"num_slots": 24, "max_len": 512, "num_tokens": 16384, "longest_bucket": 64}
ROUNDING = 6e-2
"""Tolerance for K and V of order 1 in bfloat16 after two layers."""


@pytest.fixture(scope="module")
def model() -> CausalModel:
    config = tiny_causal(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB)
    return load_causal(config, weights="random", dtype=torch.bfloat16, device="cuda")


def on_cpu(model: CausalModel) -> CausalModel:
    return deepcopy(model).to("cpu", torch.float32)


@pytest.fixture
def flash(model) -> DeviceKernel:
    """Skips where nothing reads blocks; a kernel that is there has to be right."""
    if not list(kernels()):
        pytest.skip("no kernel with a block table is installed: install flash-attn or torch 2.12")
    found = probe(torch.device("cuda"), torch.bfloat16, model.config.head_dim, 2)
    assert isinstance(found, DeviceKernel), found
    return found


def test_a_flash_kernel_serves(model, flash):
    assert PagedExecutor(model, **SIZES).paths()["attention"] == flash.name


def mixed_step(worker: PagedExecutor) -> tuple[list[int], list[torch.Tensor]]:
    """A decode, a re-prefill over history and two fresh prompts in one step, and all K and V."""
    parts = [(90, 1), (80, 33), (0, 9), (0, 170)]
    slots = [start(worker, prompt(history + tokens, i)) for i, (history, tokens) in enumerate(parts)]
    for slot, (history, _) in zip(slots, parts, strict=True):
        if history:
            run(worker, (slot, 0, history, False))
    tokens = run(worker, *((slot, *part, True) for slot, part in zip(slots, parts, strict=True)))
    kv = [x.float().cpu() for slot, part in zip(slots, parts, strict=True) for x in pooled(worker, slot, sum(part))]
    return tokens, kv


def test_steps_give_the_cpus_numbers_within_rounding(model):
    _, expected = mixed_step(PagedExecutor(on_cpu(model), **SIZES))
    _, found = mixed_step(PagedExecutor(model, **SIZES))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=ROUNDING, rtol=ROUNDING)


def test_replays_give_what_eager_steps_give(model, flash):
    eager = PagedExecutor(model, **SIZES, uses_graphs=False)
    graphed = PagedExecutor(model, **SIZES)
    assert isinstance(graphed.attention, PagedAttention)
    costs = graphed.capture([*grid((16, 64), (1, 4)), Bucket(1, 8), Rung(128)])
    assert all(cost.seconds > 0 for cost in costs.values())
    steps = [
        ([(0, 64), (0, 20), (0, 3)], Bucket(64, 4)),
        ([(64, 16), (20, 5), (3, 1), (0, 11)], Bucket(16, 4)),
        ([(80, 1), (25, 1), (4, 1), (11, 1)], Bucket(1, 8)),
        ([(81, 60), (26, 40), (5, 1)], Rung(128)),
    ]
    results = []
    for worker in (eager, graphed):
        slots = [start(worker, prompt(200, seed), room=220) for seed in range(4)]
        for parts, mode in steps:
            entries = [(slot, *part, True) for slot, part in zip(slots, parts, strict=False)]
            ran = worker.run(PackedWork.of(entries), mode if worker is graphed else None)
            assert ran.size == (mode if worker is graphed else None)
            for seed, slot in enumerate(slots):
                worker.write(slot, 0, prompt(200, seed))
        results.append([pooled(worker, slot, n) for slot, n in zip(slots, (141, 66, 6, 12), strict=True)])
    for mine, theirs in zip(results[1], results[0], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=ROUNDING, rtol=ROUNDING)


def test_closing_gives_the_memory_back(model):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    worker = PagedExecutor(model, **SIZES)
    worker.capture([Bucket(64, 4), Rung(128)])
    run(worker, (start(worker, prompt(50)), 0, 50, True))
    assert torch.cuda.memory_allocated() >= before + 2 * worker.pool.k.nbytes
    worker.close()
    assert torch.cuda.memory_allocated() - before < 2**20


def test_a_step_waits_for_nothing_on_the_host(model):
    """No copy to the host and no wait between a step's launches."""
    worker = PagedExecutor(model, **SIZES)
    slot = start(worker, prompt(60))
    work = PackedWork(np.array([slot]), np.array([0]), np.array([60]), np.array([True]))
    worker.run(work)
    torch.cuda.synchronize()
    with no_waiting():
        worker.run(work)
