"""Shaped and scored answers of the served engine are those of a plain forward over the whole sequence and a plain loop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.causal import VOCAB, causal_logits, executor, paged_executor, prompt, small_model
from support.tables import data_beside

from engines.ar.sampling import Logprobs
from engines.errors import UserError
from engines.models.decoder import CausalModel
from engines.policies.batching import Chunked
from engines.policies.views import OpenQueue
from engines.server.ar import ArGeneration, ServedAr
from engines.server.protocol import Failed, Finished, PromptScored, Submission, Tokens

ENDS = (5, 11)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return small_model()


def shaped(
    logits: Sequence[float], prompt_ids: Sequence[int], answer: Sequence[int], asked: ArGeneration
) -> list[float]:
    """Token by token, as vLLM words it."""
    found = list(logits)
    for token in range(len(found)):
        if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
            found[token] = -np.inf
    for *opening, last in asked.bad_words:
        if list(answer[len(answer) - len(opening) :]) == opening and len(answer) >= len(opening):
            found[last] = -np.inf
    if len(answer) < asked.min_tokens:
        for token in ENDS:
            found[token] = -np.inf
    for token, bias in asked.logit_bias:
        found[token] += bias
    for token in {*prompt_ids, *answer}:
        penalty = asked.repetition_penalty
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(answer):
        found[token] -= asked.frequency_penalty * list(answer).count(token) + asked.presence_penalty
    return found


def expected(model: CausalModel, ids: Sequence[int], asked: ArGeneration) -> list[int]:
    """Greedy ids of a plain loop."""
    answer: list[int] = []
    while len(answer) < (asked.max_tokens or 0):
        logits = causal_logits(model, [*ids, *answer])[-1].tolist()
        answer.append(int(np.argmax(shaped(logits, ids, answer, asked))))
        if answer[-1] in ENDS and not asked.ignores_eos:
            break
    return answer


class Answered:
    """What the engine told of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prompt: Logprobs | None = None
        self.parts: list[Logprobs] = []

    @property
    def logprobs(self) -> Logprobs:
        return Logprobs.joined(self.parts)


def answered(
    model: CausalModel, requests: Mapping[int, tuple[Sequence[int], ArGeneration]], *, paged: bool = False, **sizes: Any
) -> dict[int, Answered]:
    """One request a step comes."""
    made = paged_executor(model, **sizes) if paged else executor(model, **sizes)
    engine = ServedAr(
        made, Chunked(max_num_batched_tokens=16, max_num_seqs=6), OpenQueue(), end_ids=frozenset(ENDS), budget=16
    )
    told = {i: Answered() for i in requests}
    left = dict(requests)
    while left or engine.has_work:
        if left:
            i = next(iter(left))
            ids, asked = left.pop(i)
            engine.submit(Submission(i, tuple(ids), asked, i % 2 == 0))
        for event in engine.step():
            assert not isinstance(event, Failed)
            if isinstance(event, PromptScored):
                assert not told[event.request_id].ids
                told[event.request_id].prompt = event.logprobs
            if isinstance(event, Tokens | Finished):
                told[event.request_id].ids += event.token_ids
                told[event.request_id].parts += [] if event.logprobs is None else [event.logprobs]
    assert (engine.status().counts["preemptions"] > 0) == bool(sizes)
    return told


def in_tuples(value: Any) -> Any:
    """As settings hold what YAML has in lists."""
    if isinstance(value, dict):
        return {name: in_tuples(each) for name, each in value.items()}
    return tuple(map(in_tuples, value)) if isinstance(value, list) else value


CASES = in_tuples(data_beside(__file__, "shaped_answers"))
SHAPES = CASES["shapes"]


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "graphs"])
@pytest.mark.parametrize("sizes", [{}, {"num_tokens": 192, "block_size": 8}], ids=["room-for-all", "preempted"])
def test_shaped_answers_in_company_are_those_of_a_plain_loop(model, sizes, paged):
    requests = {
        i: (prompt(20 + 9 * i % 31, i).tolist(), ArGeneration(max_tokens=14, **fields))
        for i, fields in enumerate(SHAPES.values())
    }
    found = answered(model, requests, paged=paged, **sizes)
    assert {i: each.ids for i, each in found.items()} == {i: expected(model, *each) for i, each in requests.items()}
    plain = [expected(model, ids, ArGeneration(max_tokens=14)) for ids, _ in requests.values()]
    assert sum(each.ids != other for each, other in zip(found.values(), plain, strict=True)) >= len(SHAPES) - 3


def test_bad_words_are_words_of_the_answer_alone(model):
    ids = prompt(24, 3).tolist()
    first, second, *_ = expected(model, ids, ArGeneration(max_tokens=3, ignores_eos=True))
    for bad, is_hit in (((first,), True), ((ids[-1], first), False), ((first, second), True), ((second, first), False)):
        asked = ArGeneration(max_tokens=3, ignores_eos=True, bad_words=(bad,))
        found = answered(model, {0: (ids, asked)})[0].ids
        assert found == expected(model, ids, asked)
        assert (found[:2] != [first, second]) == is_hit


def test_drawn_tokens_are_those_the_cuts_leave_alone_and_in_company(model):
    cut = ArGeneration(max_tokens=12, temperature=1.4, top_k=3, seed=4, ignores_eos=True, frequency_penalty=0.5)
    requests = {
        0: (prompt(30, 1).tolist(), cut),
        1: (prompt(21, 2).tolist(), replace(cut, top_k=0, min_p=0.2)),
        2: (prompt(40, 3).tolist(), replace(cut, top_k=2, min_p=0.1, top_p=0.9)),
        3: (prompt(12, 4).tolist(), replace(cut, top_k=0)),
        4: (prompt(9, 5).tolist(), replace(cut, top_k=1)),
    }
    together = answered(model, requests)
    for i, (ids, asked) in requests.items():
        assert together[i].ids == answered(model, {i: (ids, asked)})[i].ids
    for i, most in ((0, 3), (2, 2), (4, 1)):
        ids, asked = requests[i]
        for n, token in enumerate(together[i].ids):
            logits = np.array(
                shaped(causal_logits(model, [*ids, *together[i].ids[:n]])[-1].tolist(), ids, together[i].ids[:n], asked)
            )
            assert (logits > logits[token]).sum() < most


SCORED = CASES["scored"]


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "graphs"])
@pytest.mark.parametrize("sizes", [{}, {"num_tokens": 192, "block_size": 8}], ids=["room-for-all", "preempted"])
def test_logprobs_are_those_of_a_plain_forward_at_every_place(model, sizes, paged):
    """Prompts go over several chunks, several of a step are scored, and answers are preempted."""
    requests = {
        i: (prompt(61 - 8 * i, i).tolist(), ArGeneration(max_tokens=12, ignores_eos=True, **fields))
        for i, fields in enumerate(SCORED.values())
    }
    answers = answered(model, requests, paged=paged, **sizes)
    for i, (ids, asked) in requests.items():
        found, everything = answers[i], [*ids, *answers[i].ids]
        assert len(found.ids) == 12
        truth = torch.log_softmax(causal_logits(model, everything), dim=-1)
        places = {"prompt": range(1, len(ids)), "answer": range(len(ids), len(everything))}
        assert (found.prompt is None) == (asked.prompt_logprobs is None)
        assert (not found.parts) == (asked.logprobs is None)
        if found.prompt is not None:
            assert_scores(found.prompt, truth, places["prompt"], everything, asked.prompt_logprobs)
        if found.parts:
            assert_scores(found.logprobs, truth, places["answer"], everything, asked.logprobs)


def assert_scores(found: Logprobs, truth: torch.Tensor, places: range, ids: Sequence[int], most: int | None) -> None:
    assert [len(column) for column in found] == [len(places)] * 4
    assert found.top.shape[1] == most
    for i, place in enumerate(places):
        row = truth[place - 1]
        assert found.chosen[i] == pytest.approx(float(row[ids[place]]), abs=2e-4)
        assert found.top[i] == pytest.approx(row.topk(most or 0).values.tolist(), abs=2e-4)
        assert found.top[i] == pytest.approx([float(row[token]) for token in found.top_ids[i]], abs=2e-4)
        likelier = int((row > row[ids[place]] + 1e-3).sum()), int((row > row[ids[place]] - 1e-3).sum())
        assert likelier[0] < found.rank[i] <= likelier[1]
        if found.rank[i] <= (most or 0):
            assert found.chosen[i] in found.top[i]


def test_a_prompt_that_goes_on_from_kept_kv_is_scored_whole(model):
    asked = ArGeneration(max_tokens=8, ignores_eos=True)
    ids = prompt(40).tolist()
    engine = ServedAr(
        executor(model), Chunked(max_num_batched_tokens=64, max_num_seqs=6), OpenQueue(), end_ids=frozenset(), budget=64
    )
    told: list[Any] = []

    def ask(i: int, ids: Sequence[int], asked: ArGeneration) -> None:
        engine.submit(Submission(i, tuple(ids), asked, False))
        while engine.has_work:
            told.extend(engine.step())

    ask(0, ids, asked)
    turn = [*ids, *told[-1].token_ids, 4, 9]
    ask(1, turn, replace(asked, prompt_logprobs=2))
    assert engine.status().counts["reused_tokens"] == 0
    (scored,) = (event for event in told if isinstance(event, PromptScored))
    assert_scores(scored.logprobs, torch.log_softmax(causal_logits(model, turn), dim=-1), range(1, len(turn)), turn, 2)
    turn = [*turn, *told[-1].token_ids, 1]
    ask(2, turn, replace(asked, logprobs=1, repetition_penalty=1.5))
    assert engine.status().counts["reused_tokens"] > 0
    assert list(told[-1].token_ids) == expected(model, turn, replace(asked, repetition_penalty=1.5))
    whole = [*turn, *told[-1].token_ids]
    truth = torch.log_softmax(causal_logits(model, whole), dim=-1)
    assert_scores(told[-1].logprobs, truth, range(len(turn), len(whole)), whole, 1)


def test_a_prompt_of_one_token_has_nothing_to_score(model):
    found = answered(model, {0: ([3], ArGeneration(max_tokens=2, prompt_logprobs=1, logprobs=1, ignores_eos=True))})[0]
    assert found.prompt is None
    assert len(found.logprobs.chosen) == 2


def test_scores_of_a_long_prompt_are_made_few_rows_at_a_time(model, monkeypatch):
    from engines.ar.torch import executor as module

    rows = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden), raising=False)
    monkeypatch.setattr(module, "_SCORED_LOGITS", 10 * VOCAB)
    asked = ArGeneration(max_tokens=1, prompt_logprobs=4)
    found = answered(model, {0: (prompt(64).tolist(), asked)})[0]
    assert max(rows) == 10
    monkeypatch.undo()
    assert all(map(np.array_equal, found.prompt, answered(model, {0: (prompt(64).tolist(), asked)})[0].prompt))


@pytest.mark.parametrize("fields", CASES["refused"], ids=lambda fields: next(iter(fields)))
def test_what_cannot_be_is_refused_by_its_name(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        ArGeneration(**fields)


@pytest.mark.parametrize(
    "fields", [{"logit_bias": ((VOCAB, 1.0),)}, {"allowed_token_ids": (1, -1)}, {"bad_words": ((1, VOCAB),)}]
)
def test_ids_that_the_vocabulary_lacks_are_refused_by_their_field(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        ArGeneration(**fields).check_ids(VOCAB)


def test_an_end_beyond_the_vocabulary_ends_nothing(model):
    batching = Chunked(max_num_batched_tokens=16, max_num_seqs=6)
    engine = ServedAr(executor(model), batching, OpenQueue(), end_ids=frozenset({VOCAB}), budget=16)
    engine.submit(Submission(0, (1, 2), ArGeneration(max_tokens=4, min_tokens=3), False))
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    assert len(events[-1].token_ids) == 4
