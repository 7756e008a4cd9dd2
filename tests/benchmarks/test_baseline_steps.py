"""The plain samplers that baselines are timed against: they give the ids our engine gives, so the times compare
equal work; and what every executor counts as its forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baseline_steps import BASELINES, Baseline, prompts_of, time_baseline
from common import table
from support.tiny_models import GQA, MHA, TinyModel, network, prompt_of

from engines.dllm.config import GenerationConfig
from engines.dllm.executor.candidates import CandidateChoice
from engines.dllm.executor.commit import Commit
from engines.dllm.executor.layout import Layouts
from engines.dllm.executor.state import RequestState
from engines.models.llada import LLaDABlock, LLaDAModelLM
from engines.runtime import step_timer as timer

GENERATIONS = (
    GenerationConfig(gen_length=16, block_length=8, steps=16),
    GenerationConfig(gen_length=24, block_length=8, steps=9),
)
NAMES = [baseline.name for baseline in BASELINES]


def ids_of(
    baseline: Baseline, model: TinyModel, lengths: tuple[int, ...], generation: GenerationConfig
) -> tuple[Any, dict[str, Any]]:
    """Token ids of our engine, and of the two plain samplers."""
    prompts = [prompt_of(model, 7 * i + sum(lengths), length) for i, length in enumerate(lengths)]
    engine = baseline.engine(network(model), prompts, generation)
    num_steps = len(engine.run())
    plain = {}
    for name, published in (("bare", False), ("published", True)):
        sampler = baseline.bare(
            network=network(model), prompts=prompts, generation=generation, stable=True, published=published
        )
        with torch.inference_mode():
            kinds = list(sampler.steps())
        assert len(kinds) == num_steps, name
        plain[name] = sampler.token_ids
    return [list(engine.take_output(i) or ()) for i in range(len(lengths))], plain


@pytest.mark.parametrize("baseline", BASELINES, ids=NAMES)
@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_the_plain_samplers_give_our_ids(baseline, model):
    every_step, several_a_step = GENERATIONS
    for generation, lengths in ((every_step, (5, 19, 12)), (several_a_step, (11,)), (several_a_step, (13, 13))):
        ours, plain = ids_of(baseline, model, lengths, generation)
        assert plain == {"bare": ours, "published": ours}, (lengths, generation)


def test_the_baselines_give_different_ids():
    """The control of the test above."""
    found = {}
    for baseline in BASELINES:
        ours, _ = ids_of(baseline, MHA, (19,), GENERATIONS[0])
        found[baseline.name] = str(ours)
    # Without a cache Fast-dLLM is the plain sampler, but for its float64 confidence.
    assert len(set(found.values())) == len(BASELINES) - (found["llada"] == found["fast-dllm-none"])


def test_every_kind_of_step_is_timed():
    kinds = {}
    for baseline in BASELINES:
        prompts = prompts_of(network(MHA), 2, 4, 6)
        rows = time_baseline(baseline, "mha", network(MHA), prompts, GENERATIONS[0], repeats=1)
        kinds[baseline.name] = {row.kind for row in rows}
        assert all(row.ours_ms > 0 and row.bare_ms > 0 and row.published_ms > 0 for row in rows)
        assert all(0 <= row.outside < 1 for row in rows)
        assert sum(row.steps for row in rows if row.kind != "generation") == GENERATIONS[0].steps - 1
    assert kinds == {
        "llada": {"refresh"},
        "fast-dllm-none": {"refresh"},
        "fast-dllm-prefix": {"refresh", "reuse", "generation"},
        "fast-dllm-dual": {"refresh", "reuse", "generation"},
        "sparse-dllm": {"refresh", "build", "reuse", "generation"},
        "dllm-cache": {"partial", "response", "generation"},
        "dllm-serve": {"refresh", "build", "reuse", "generation"},
    }
    assert "to published" in table(rows)


@pytest.mark.parametrize("baseline", BASELINES, ids=NAMES)
def test_the_forward_is_counted_alike(baseline, monkeypatch):
    """On a clock that only what is listed here moves: layers and output head are in, all else is not."""
    now = 0.0

    def takes(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(timer, "perf_counter", lambda: now)
    monkeypatch.setattr(LLaDABlock, "mlp", takes(1, LLaDABlock.mlp))
    monkeypatch.setattr(LLaDAModelLM, "logits", takes(10, LLaDAModelLM.logits))
    outside = ((RequestState, "admit"), (Layouts, "of"), (CandidateChoice, "of"), (CandidateChoice, "sampling"))
    for part, name in (*outside, (Commit, "__call__")):
        monkeypatch.setattr(part, name, takes(1000, getattr(part, name)))
    prompts = [prompt_of(MHA, i, 6) for i in range(2)]
    records = baseline.engine(network(MHA), prompts, GENERATIONS[0]).run()
    assert {record.outcome.forward_s for record in records} == {MHA.layers + 10}
