"""Top-1 agreement of two precisions, against what a sampler's own forward says."""

import copy

import pytest
import torch
from support.tiny_models import GQA, MHA, network, request_on

from engines.dllm.config import GenerationConfig
from engines.dllm.plan import Request
from repro.gpu_suite.checks import _masked_logits, load_pair, top1_agreement

GENERATION = GenerationConfig(gen_length=6, block_length=6, steps=6)


def requests(model: object, lengths: tuple[int, ...] = (3, 7)) -> list[Request]:
    return [request_on(model, i, n, GENERATION) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("tiny", [GQA, MHA], ids=lambda tiny: tiny.name)
def test_a_model_agrees_with_itself(tiny):
    model = network(tiny)
    found = top1_agreement(model, model, requests(tiny))
    assert [found[name] for name in ("num_prompts", "n", "agreeing", "share")] == [2, 12, 12, 1.0]
    assert found["median_margin"] > 0
    assert found["high"] == pytest.approx(1.0)


def test_one_other_token_is_one_position_less():
    """A head whose best row is swapped with another's disagrees exactly where that row was best."""
    exact = network(GQA)
    other = copy.deepcopy(exact)
    batch = requests(GQA)
    with torch.inference_mode():
        chosen = [_masked_logits(exact, request).argmax(dim=-1) for request in batch]
    token = int(chosen[0][0])
    head = other.head.weight if not other.config.weight_tying else other.embedding.weight
    unused = next(i for i in range(GQA.vocab) if all(i not in row.tolist() for row in chosen))
    with torch.no_grad():
        head[[token, unused]] = head[[unused, token]]
    differing = sum(int((row == token).sum()) for row in chosen)
    found = top1_agreement(exact, other, batch)
    assert differing > 0
    assert found["n"] - found["agreeing"] == differing


def test_bfloat16_of_the_embedded_model_mostly_agrees():
    exact, rounded = load_pair("tiny", weights="checkpoint", device="cpu")
    assert {p.dtype for p in exact.parameters()} == {torch.float32}
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    prompt = tuple(range(20, 40))
    request = Request(
        request_id=0, prompt_len=20, prompt_ids=prompt, generation=GenerationConfig(gen_length=32, steps=32)
    )
    found = top1_agreement(exact, rounded, [request])
    assert found["n"] == 32
    assert found["share"] > 0.5


def test_random_weights_are_the_same_in_both():
    exact, rounded = load_pair("tiny", weights="random", device="cpu")
    for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(wide, narrow.float())
