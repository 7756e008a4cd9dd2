"""A served causal model on a card: its pool fills what memory leaves, decodes replay graphs, nothing is left behind."""

import pytest
import torch
from support.causal import prompt

from engines.server.ar import ServedAr
from engines.server.protocol import Finished, Submission
from repro.serving import ArModel, ArSettings

pytestmark = pytest.mark.gpu

LIMIT = 4 * 10**9


def finished(model: ArModel, engine: ServedAr, lengths: list[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for i, length in enumerate(lengths):
        ids = tuple(prompt(length, i).tolist())
        engine.submit(Submission(i, ids, model.generation({"max_tokens": 16, "ignore_eos": True}), False))
    while engine.has_work:
        found |= {event.request_id: event.token_ids for event in engine.step() if isinstance(event, Finished)}
    return found


@pytest.mark.parametrize("scheduler", ["chunked", "laps", "reserve"])
def test_the_pool_keeps_to_the_memory_limit_and_requests_are_answered(scheduler):
    settings = ArSettings(
        model="tiny-qwen2",
        weights="random",
        device="cuda",
        dtype="bfloat16",
        scheduler=scheduler,
        memory_limit=LIMIT,
        max_num_seqs=16,
    )
    model = ArModel.of(settings, None)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with model.serving() as engine:
        assert isinstance(engine, ServedAr)
        assert torch.cuda.max_memory_allocated() - before <= LIMIT
        # 1,536 bytes of K/V a token: most of the limit is the pool's.
        assert engine.status().pool * 1536 > LIMIT // 2
        found = finished(model, engine, [5, 300, 40, 1000, 17, 64])
        assert {len(ids) for ids in found.values()} == {16}
        assert engine.status().pool_used == 0
        paths = engine._worker.executor.paths()
        # Nothing is captured where no kernel reads blocks.
        assert (paths["num_graphs"] > 0) == (paths["attention_unavailable"] is None)
    assert torch.cuda.memory_allocated() - before < LIMIT // 100
