"""Block diffusion on CUDA: the ids of a CPU, one wait for the device a step, and K/V that fits beside the weights."""

from typing import Any

import pytest
import torch
from support.block_models import RAW, block_model
from support.block_runs import Recorder, request
from support.on_card import no_waiting

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.rules import LowConfidence, Static
from engines.blockdiffusion.scheduler import Batching, BlockEngineConfig
from engines.models.block_config import BlockConfig
from engines.models.layers import FusedOps, fuse
from engines.models.loader import load_block

pytestmark = pytest.mark.gpu
B = 8


def engine_on(device: str, family: str, dtype: torch.dtype, batching: Batching = "mixed") -> BlockEngine:
    """The CPU's weights on either."""
    model = load_block(BlockConfig.from_dict(RAW[family]), weights="random", dtype=dtype, device=device)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in block_model(family).state_dict().items()})
    fuse(model, FusedOps(joins=False))  # a product of several layers does not see that they were written to
    model.reorder(joins=True)
    executor = Recorder(model, num_slots=8, max_len=160, num_tokens=1280, block=B)
    return BlockEngine(executor, BlockEngineConfig(max_num_batched_tokens=128, batching=batching))


def asked(rule: Any) -> list[Any]:
    return [request(i, length, 2 * B, rule) for i, length in enumerate((3, B, 20, 41, 17))]


@pytest.mark.parametrize("family", ["sdar", "fast-dllm-v2"])
def test_a_card_s_ids_are_a_cpu_s(family):
    found = [engine_on(device, family, torch.float32).run(asked(Static(steps=3))) for device in ("cpu", "cuda")]
    assert [answer.ids for answer in found[0].values()] == [answer.ids for answer in found[1].values()]


@pytest.mark.parametrize("family", ["llada2", "sdar"])
def test_no_layer_waits_for_the_device(family):
    """The grouped products of experts neither: their rows are sorted where they are."""
    engine = engine_on("cuda", family, torch.bfloat16)
    engine.run(asked(LowConfidence(threshold=0.4)))  # what is compiled once
    model, forwards = engine.executor.model, []
    plain = model.hidden

    def hidden(*args: Any) -> torch.Tensor:
        with no_waiting():
            found = plain(*args)
        forwards.append(found.shape)
        return found

    model.hidden = hidden
    answers = engine.run(asked(LowConfidence(threshold=0.4)))
    assert forwards
    assert {len(answer.ids) for answer in answers.values()} == {2 * B}


@pytest.mark.parametrize("batching", ["first-done", "synchronous"])
def test_sglang_s_schedules_end_on_a_card(batching):
    answers = engine_on("cuda", "llada2", torch.bfloat16, batching).run(asked(LowConfidence()))
    assert {len(answer.ids) for answer in answers.values()} == {2 * B}
