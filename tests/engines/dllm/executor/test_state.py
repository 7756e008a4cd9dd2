"""Slots and token ids of resident requests."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.step_cases import Resident, step_of
from support.tiny_models import GQA

from engines.dllm.config import GenerationConfig
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import Request
from engines.runtime.device import Staging


def request_of(request_id: int, prompt_len: int, **generation: object) -> Request:
    settings = GenerationConfig(gen_length=6, block_length=3, steps=6, **generation)
    ids = tuple(range(1, prompt_len + 1))
    return Request(request_id=request_id, prompt_len=prompt_len, prompt_ids=ids, generation=settings)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 30)), max_size=40))
def test_every_request_has_its_own_slot(events):
    """Whatever comes and goes, nobody's ids are another's; a slot is free again at once."""
    state = RequestState(GQA.config, Staging(), num_slots=3, max_len=40, device=torch.device("cpu"))
    resident: dict[int, Request] = {}
    for enters, request_id, prompt_len in events:
        if enters and request_id not in resident and len(resident) < 3:
            resident[request_id] = request_of(request_id, prompt_len)
            state.admit([resident[request_id]])
        elif not enters and request_id in resident:
            assert state.release(request_id) == (GQA.mask_id,) * 6
            del resident[request_id]
        for request in resident.values():
            row = state.tokens[state._slots[request.request_id]]
            assert tuple(row[: request.prompt_len].tolist()) == request.prompt_ids
            assert (row[request.prompt_len : request.total_len] == GQA.mask_id).all()
        assert state.is_empty == (not resident)


def test_a_request_that_was_never_admitted_has_no_ids():
    state = RequestState(GQA.config, Staging(), num_slots=1, max_len=40, device=torch.device("cpu"))
    assert state.release(4) == ()


def test_special_requests_are_known_while_they_live():
    asked = {
        "guided": {"cfg_scale": 1.0},
        "sampled": {"temperature": 0.5},
        "parallel": {"threshold": 0.9},
        "stopping": {"stop_at_eos": True},
    }
    step = step_of([Resident(generation=generation) for generation in asked.values()])
    for i, name in enumerate(asked):
        assert getattr(step.state, name) == {i}
        step.state.release(i)
        assert getattr(step.state, name) == set()
    also_sampled = [{"alg_temp": 0.5}, {"remasking": "random"}]
    assert step_of([Resident(generation=generation) for generation in also_sampled]).state.sampled == {0, 1}


def test_an_early_end_is_filled_with_end_of_text():
    step = step_of([Resident(committed=4)])
    step.state.end_with(step.items[0])
    assert step.state.release(0) == (5, 6, 7, 8, *[GQA.config.eos_token_id] * 4)


def test_draws_are_counted_for_each_request():
    step = step_of([Resident(), Resident()])
    assert step.state.next_draws(step.items) == [0, 0]
    assert step.state.next_draws(step.items[1:]) == [1]
    assert step.state.next_draws(step.items) == [1, 2]
