"""Which requests a static batch takes together."""

from __future__ import annotations

import pytest

from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.request import Request
from engines.dllm.scheduling.phase import NoCache

PLAIN = GenerationConfig(gen_length=16, block_length=8, steps=16)


@pytest.mark.parametrize(
    ("other", "together"),
    [
        (PLAIN, 3),
        (GenerationConfig(gen_length=16, block_length=8, steps=8), 1),
        (GenerationConfig(gen_length=16, block_length=16, steps=16), 1),
        (GenerationConfig(gen_length=32, block_length=8, steps=16), 1),
    ],
    ids=["same", "steps", "block_length", "gen_length"],
)
def test_members_stay_in_step(other: GenerationConfig, together: int) -> None:
    """First come, first served: what does not match waits for the next batch, and so does what is behind it."""
    scheduler = StaticBatchScheduler(EngineConfig(), KvPool(0), NoCache(), batch_size=8)
    for i, generation in enumerate((PLAIN, other, PLAIN)):
        scheduler.submit(Request(request_id=i, prompt_len=10 + i, generation=generation))
    plan = scheduler.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == list(range(together))
    assert plan.pad_to == 10 + together - 1 + PLAIN.gen_length
