"""The embedded block-diffusion model behind HTTP: its own answers, alone and in company, streamed by block."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="needs the extra server: starlette is not installed")
pytest.importorskip("uvicorn", reason="needs the extra server: uvicorn is not installed")
pytest.importorskip("prometheus_client", reason="needs the extra server: prometheus_client is not installed")

from support.block_models import write_block
from support.http_client import ask, metrics, streaming
from support.http_server import running_server

from repro.cli.serve import Asked, _served_model
from repro.serving import DllmModel
from repro.systems.block.asked import answer_alone
from repro.systems.block.served import BlockModel
from repro.systems.block.settings import settings_of_requests
from repro.systems.block.text import answer_of, text_of
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


def test_a_conversation_is_a_story(server):
    story = PROBLEMS[0].prompt.removesuffix("Answer:")
    asked = {"model": "mine", "messages": [{"role": "user", "content": story}], "max_tokens": 64}
    assert ask(server.port, CHAT, asked).body["choices"][0]["message"]["content"] == own(0).text


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steps": 5}, "steps=5 has no effect with rule='low-confidence'"),
        ({"rule": "best"}, "rule='best'"),
        ({"max_tokens": 2000}, "max_tokens=2000 is more than 1008"),
        ({"max_tokens": 1000, "prompt": "Story: " * 20}, "max_tokens=1000 make 10"),
        ({"prompt": [5, 600]}, "prompt has the id 600 and the vocabulary 553"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect at temperature=0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(server, asked, says):
    said = ask(server.port, COMPLETIONS, {"model": "mine", "prompt": "Story", **asked})
    assert said.status == 400
    assert says in said.body["error"]["message"]


def test_a_model_s_name_says_what_serves_it(tmp_path):
    folder = str(write_block(tmp_path / "sdar", "sdar"))
    for name in ("tiny-block", "tiny-llada2", "sdar-8b", folder):
        assert Asked(model=name).chosen == "block-diffusion"
    assert Asked(model="tiny").chosen == "dllm-serve"
    assert isinstance(_served_model(Asked(model="tiny-block"), {}, None), BlockModel)
    assert isinstance(_served_model(Asked(model="tiny"), {}, None), DllmModel)
    ids = BlockModel.of(platform="cpu-tiny", knobs={"model": folder}, name=None)
    assert ids.codec().end_ids == frozenset()
    on_card = _served_model(Asked(model="tiny-block", platform="rtx4090"), {}, None)
    assert on_card.settings.knobs.device == "cuda"
    assert on_card.max_model_len == 1024, "the model's positions, fewer than the platform's"
