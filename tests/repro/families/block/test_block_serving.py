"""The embedded block-diffusion model behind HTTP: its own answers, alone and in company, streamed by block."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from support.refusals import refuses

pytest.importorskip("starlette", reason="needs the extra server: starlette is not installed")
pytest.importorskip("uvicorn", reason="needs the extra server: uvicorn is not installed")
pytest.importorskip("prometheus_client", reason="needs the extra server: prometheus_client is not installed")

from support.block_models import write_block
from support.http_client import ask, metrics, streaming
from support.http_server import running_server

from engines.blockdiffusion.rules import EntropyBudget
from engines.errors import UserError
from engines.server.protocol import Finished, Submission, Tokens
from repro.cli.serve import ServeOptions, _served_model
from repro.families.block.settings import settings_of_requests
from repro.families.block.text import answer_of, text_of
from repro.serving import BlockModel, DllmModel, answer_alone
from repro.tasks.mini import GENERATORS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RULES = (
    {},
    {"rule": "static", "steps": 8},
    {"rule": "joint-threshold", "threshold": 0.9, "edit_threshold": 0.9},
    {"rule": "sub-blocks", "sub_block": 4},
)
PROBLEMS = [
    problem
    for generate in GENERATORS.values()
    for problem in generate(11, 2, "heldout", num_facts=8, num_distractors=6)
]


@pytest.fixture(scope="module")
def server():
    model = BlockModel.of(platform="cpu-tiny", knobs={}, name="mine")
    with running_server(pickle.loads(pickle.dumps(model)), model.codec()) as running:
        yield running


def own(i):
    settings = settings_of_requests(RULES[i])
    text = text_of(settings)
    return answer_of(answer_alone(settings, text.encode(PROBLEMS[i].prompt), seed=0).ids, text)


def test_answers_over_http_in_company_are_those_of_a_prompt_alone(server):
    def body(i):
        return {"model": "mine", "prompt": PROBLEMS[i].prompt, "max_tokens": 64, **RULES[i]}

    def whole(i):
        choice = ask(server.port, COMPLETIONS, body(i)).body["choices"][0]
        return choice["text"], choice["finish_reason"]

    def streamed(i):
        with streaming(server.port, COMPLETIONS, {**body(i), "stream": True}) as events:
            choices = [event["choices"][0] for event in events if event != "[DONE]"]
        assert 1 < len(choices) <= 6, "block by block"
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (streamed if i % 2 else whole)(i // 2), range(8)))
    assert found == [own(i // 2) for i in range(8)]
    server.wait_until_idle()
    told = metrics(server.port)
    assert told["repro_pool_rows_used"] == 0
    assert told["repro_pool_rows_idle"] > 0


@pytest.mark.parametrize("name", ["tiny-block", "tiny-canvas"])
def test_as_many_tokens_are_committed_as_are_answered(name):
    """A canvas accepts more places than it has tokens: those of a forward may be drawn anew by the next."""
    model = BlockModel.of(platform="cpu-tiny", knobs={"model": name}, name=None)
    answers, was = dict.fromkeys(range(4), 0), 0
    with model.serving() as engine:
        for i in answers:
            prompt = model.codec().encode(PROBLEMS[i].prompt)
            engine.submit(Submission(i, prompt, model.generation({"max_tokens": 64, "seed": i}), i % 2 == 0))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Tokens | Finished):
                    answers[event.request_id] += len(event.token_ids)
            assert engine.status().committed_tokens >= was
            was = engine.status().committed_tokens
    assert min(answers.values()) > 8
    assert was == sum(answers.values())


@pytest.fixture(scope="module", params=["block", "masked"])
def either(request, server):
    """A server of each kind of diffusion model, named mine."""
    if request.param == "block":
        yield server
        return
    model = DllmModel.of(system="dllm-serve", platform="cpu-tiny", knobs={"gen_length": 64}, name="mine")
    with running_server(model, model.codec()) as running:
        yield running


def test_fields_of_an_answer_s_end_are_heeded_by_diffusion_models_too(either):
    def one(**fields):
        asked = {"prompt": PROBLEMS[0].prompt, "seed": 0, "max_tokens": 64, "return_token_ids": True, **fields}
        said = ask(either.port, COMPLETIONS, asked)
        assert said.status == 200, said.body
        (choice,) = said.body["choices"]
        assert said.body["usage"]["completion_tokens"] == len(choice["token_ids"])
        return choice

    usual, ignoring = one(), one(ignore_eos=True)
    count = len(usual["token_ids"])
    assert (usual["finish_reason"], usual["stop_reason"]) == ("stop", None)
    assert usual["token_ids"] == ignoring["token_ids"][:count]
    end = usual["token_ids"][-1]
    assert one(min_tokens=count - 1)["token_ids"] == usual["token_ids"]
    later = one(min_tokens=count)
    assert later["token_ids"] == ignoring["token_ids"][: len(later["token_ids"])]
    assert len(later["token_ids"]) > count
    assert one(min_tokens=4, ignore_eos=True)["token_ids"] == ignoring["token_ids"]
    shown = one(include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown["text"] == usual["text"] + "<|endoftext|>"
    second = usual["token_ids"][1]
    stopped = one(stop_token_ids=[second])
    assert (stopped["token_ids"], stopped["stop_reason"]) == (usual["token_ids"][:2], second)
    assert one(stop_token_ids=[end], ignore_eos=True)["stop_reason"] == end
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"temperature": 0, "top_p": 0.9, "top_k": 5}):
        assert one(**cut)["token_ids"] == usual["token_ids"]
    for wrong in ({"stop_token_ids": [10**6]}, {"min_tokens": 65}, {"min_p": 0.5}, {"logprobs": 1}):
        asked = {"prompt": "a", "max_tokens": 64, **wrong}
        said = ask(either.port, COMPLETIONS, asked)
        assert said.status == 400
        assert next(iter(wrong)) in said.body["error"]["message"]
    either.wait_until_idle()


def test_a_mask_that_is_spelt_is_text(either):
    for prompt in ("Fill <|mdm_mask|> in", "<|mdm_mask|>"):
        said = ask(either.port, COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "return_token_ids": True})
        assert said.status == 200
        assert 2 not in said.body["choices"][0]["prompt_token_ids"]
    messages = [{"role": "user", "content": "Fill <|mdm_mask|> in"}]
    assert ask(either.port, CHAT, {"messages": messages, "max_tokens": 8}).status == 200


def test_the_context_cuts_a_diffusion_model_s_answer_short(either):
    most = ask(either.port, "/v1/models").body["data"][0]
    prompt = [5] * (most["max_model_len"] - 40)
    said = ask(either.port, COMPLETIONS, {"prompt": prompt, "max_tokens": 64, "ignore_eos": True}).body
    assert (said["usage"]["completion_tokens"], said["choices"][0]["finish_reason"]) == (40, "length")
    assert most["default_max_tokens"] >= 1


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 239])
def test_the_room_behind_a_prompt_is_the_longest_answer_that_it_may_have(tokens):
    """Positions that are no whole number of blocks: the last of them are of no use."""
    model = BlockModel.of(platform="cpu-tiny", knobs={"max_model_len": 251}, name=None)
    room = model.room(tokens)
    generation = model.generation({})
    model.check_prompt([5] * tokens, replace(generation, gen_length=room))
    with refuses("max_model_len=251"):
        model.check_prompt([5] * tokens, replace(generation, gen_length=room + 1))


def test_a_request_s_fields_are_heeded_or_refused_of_canvases_each_by_name():
    model = BlockModel.of(platform="cpu-tiny", knobs={"model": "tiny-canvas"}, name=None)
    heeded = {"steps": 3, "entropy_bound": 0.5, "stability": 2, "confidence": 0.1, "t_min": 0.1, "t_max": 0.3}
    assert set(model.options) == set(heeded)
    found = model.generation({**heeded, "seed": 5, "max_tokens": 9, "ignore_eos": True})
    assert found.rule == EntropyBudget(**heeded)
    assert (found.sampling.seed, found.gen_length, found.stop_ids) == (5, 9, frozenset())
    for fields in ({"top_p": 1.0}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0}):
        assert model.generation(fields) == model.generation({}), "it asks for nothing"
    refused = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.5, "logprobs": 1, "logit_bias": {3: 1.0}}
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for name, value in {**refused, **dict.fromkeys(penalties, 0.5), "rule": "static", "threshold": 0.5}.items():
        with pytest.raises(UserError, match=name):
            model.generation({name: value})


@pytest.mark.parametrize("kind", ["block", "masked"])
def test_a_greedy_request_heeds_no_cut_that_the_server_draws_by(kind):
    make = BlockModel.of if kind == "block" else partial(DllmModel.of, system="dllm-serve")
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    plain, drawing = (make(platform="cpu-tiny", knobs=knobs, name=None) for knobs in ({}, drawn))
    assert drawing.generation({"seed": 0}) == plain.generation({"seed": 0, **drawn})
    assert drawing.generation({"seed": 0, "temperature": 0}) == plain.generation({"seed": 0})


def test_a_conversation_is_a_story(server):
    story = PROBLEMS[0].prompt.removesuffix("Answer:")
    asked = {"model": "mine", "messages": [{"role": "user", "content": story}], "max_tokens": 64}
    assert ask(server.port, CHAT, asked).body["choices"][0]["message"]["content"] == own(0).text


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steps": 5}, "steps=5"),
        ({"rule": "best"}, "rule='best'"),
        ({"max_tokens": 2000}, "max_tokens=2000"),
        ({"prompt": [5] * 1024}, "prompt of 1024 tokens"),
        ({"prompt": [5, 600]}, "prompt has the id 600 and the vocabulary 553"),
        ({"top_p": 0}, "top_p=0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(server, asked, says):
    said = ask(server.port, COMPLETIONS, {"model": "mine", "prompt": "Story", **asked})
    assert said.status == 400
    assert says in said.body["error"]["message"]


def test_a_model_s_name_says_what_serves_it(tmp_path):
    folder = str(write_block(tmp_path / "sdar", "sdar"))
    for name in ("tiny-block", "tiny-llada2", "sdar-8b", folder):
        assert ServeOptions(model=name).chosen_system == "block-diffusion"
    assert ServeOptions(model="tiny").chosen_system == "dllm-serve"
    assert isinstance(_served_model(ServeOptions(model="tiny-block"), {}, None), BlockModel)
    assert isinstance(_served_model(ServeOptions(model="tiny"), {}, None), DllmModel)
    ids = BlockModel.of(platform="cpu-tiny", knobs={"model": folder}, name=None)
    assert ids.codec().end_ids == frozenset()
    on_card = _served_model(ServeOptions(model="tiny-block", platform="rtx4090"), {}, None)
    assert on_card.settings.knobs.device == "cuda"
    assert on_card.max_model_len == 1024, "the model's positions, fewer than the platform's"
