"""Log probabilities, echoed prompts and shaped answers of a causal model over HTTP, as its clients read them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jinja2", reason="needs the extra hub: jinja2 is not installed")

from support.causal import causal_logits
from support.causal_checkpoints import END, TURN_END, write_causal
from support.http_client import ask, streaming
from support.http_server import Running, running_server
from support.tables import data_beside
from support.tokenizers import BYTES
from tokenizers import pre_tokenizers

from engines.models.decoder import CausalModel
from engines.models.loader import load_causal
from engines.server.settings import ArSettings
from repro.serving import ArModel

CASES = data_beside(__file__, "cases")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = 10
PROMPT = "The sky was 🙂 é green."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_causal(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    settings = ArSettings(model=str(folder), max_num_batched_tokens=32, max_num_seqs=8, kv_tokens=2048, gen_length=16)
    model = ArModel.of(settings, "mine")
    with running_server(model, model.codec()) as running:
        yield running


def encoded(text: str) -> list[int]:
    """Ids of the checkpoint's tokenizer, one a byte."""
    return [
        BYTES.index(each)
        for each in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    ]


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_causal(str(folder))


def body(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "mine", "prompt": prompt, "max_tokens": LENGTH, "seed": 0, "ignore_eos": True, **fields}


def talk(content: str = "what is it?", **fields: Any) -> dict[str, Any]:
    return {**body(**fields), "messages": [{"role": "user", "content": content}], "prompt": None}


def truth(model: CausalModel, ids: list[int]) -> torch.Tensor:
    """[n, V] log probabilities by plain causal attention over all ids."""
    return torch.log_softmax(causal_logits(model, ids), dim=-1)


def one(server: Running, asked: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    answer = ask(server.port, path, asked)
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    return choice


def told(port: int, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    with streaming(port, path, {**asked, "stream": True}) as events:
        return [choice for event in events if event != "[DONE]" for choice in event["choices"]]


def test_what_a_harness_of_likelihoods_reads_is_the_model_s_own(server, model):
    """The body that lm-eval's ``local-completions`` sends, and how it reads the answer."""
    prompts = [encoded(PROMPT)[:9], encoded("hello there"), [5, 6]]
    asked = {
        "model": "mine",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = sorted(ask(server.port, COMPLETIONS, asked).body["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        found, scores = choice["logprobs"], truth(model, prompt)
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert {len(column) for column in found.values()} == {len(prompt) + 1}
        for place in range(1, len(prompt)):
            row, top = scores[place - 1], found["top_logprobs"][place]
            assert found["token_logprobs"][place] == pytest.approx(float(row[prompt[place]]), abs=2e-4)
            assert max(top.values()) == pytest.approx(float(row.max()), abs=2e-4)
            assert (found["token_logprobs"][place] == max(top.values())) == (int(row.argmax()) == prompt[place])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [LENGTH, 0])
def test_an_echoed_prompt_is_told_with_its_scores(server, model, stream, length):
    asked = body(echo=True, logprobs=2, max_tokens=length)
    if stream:
        chunks = told(server.port, COMPLETIONS, asked)
        text = "".join(chunk["text"] for chunk in chunks)
        parts = [chunk["logprobs"] for chunk in chunks]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        choice = one(server, asked)
        text, found = choice["text"], choice["logprobs"]
    plain = one(server, body(return_token_ids=True))
    ids = [*encoded(PROMPT), *(plain["token_ids"] if length else ())]
    assert text == PROMPT + (plain["text"] if length else "")
    assert len(found["tokens"]) == len(ids)
    assert "".join(found["tokens"]).startswith(PROMPT)
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids))]
    scores = truth(model, ids)
    for place in range(1, len(ids)):
        assert found["token_logprobs"][place] == pytest.approx(float(scores[place - 1, ids[place]]), abs=2e-4)
    usage = ask(server.port, COMPLETIONS, body(echo=True, max_tokens=length)).body["usage"]
    assert usage["prompt_tokens"] == len(encoded(PROMPT))


def test_echo_of_ids_is_their_text_and_of_both_the_ids_alone(server):
    ids = encoded("hello")
    assert one(server, body(ids, echo=True))["text"] == "hello" + one(server, body(ids))["text"]
    both = one(server, body("hello", echo=True, return_token_ids=True))
    assert both["text"] == one(server, body("hello"))["text"]


def test_several_prompts_and_answers_each_have_their_own_scores(server):
    asked = body(["hello", "a"], n=2, temperature=1.0, logprobs=1, echo=True, return_tokens_as_token_ids=True)
    choices = ask(server.port, COMPLETIONS, asked).body["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5 + LENGTH] * 2 + [1 + LENGTH] * 2
    ids = [f"token_id:{token}" for token in encoded("hello")]
    assert [choice["logprobs"]["tokens"][:5] for choice in choices[:2]] == [ids] * 2


def test_a_chat_s_scores_are_its_tokens_with_their_bytes(server, model):
    choice = one(server, talk(logprobs=True, top_logprobs=3, return_token_ids=True), CHAT)
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == LENGTH
    assert all(len(each["top_logprobs"]) == 3 for each in content)
    for each in content:
        assert each["bytes"] == list(each["token"].encode())
        assert (
            each["logprob"] == each["top_logprobs"][0]["logprob"] == max(top["logprob"] for top in each["top_logprobs"])
        )
    assert one(server, talk(logprobs=True), CHAT)["logprobs"]["content"][0]["top_logprobs"] == []
    assert one(server, talk(), CHAT)["logprobs"] is None
    chunks = told(server.port, CHAT, talk(logprobs=True, top_logprobs=3))
    parts = [part for chunk in chunks if chunk["logprobs"] for part in chunk["logprobs"]["content"]]
    assert [part["token"] for part in parts] == [part["token"] for part in content]
    # Over K/V that was kept, which other steps made.
    assert [part["logprob"] for part in parts] == pytest.approx([part["logprob"] for part in content], abs=2e-4)


def test_prompt_logprobs_name_tokens_by_id_with_their_ranks(server, model):
    asked = body("hello", prompt_logprobs=2, max_tokens=1)
    first, *others = one(server, asked)["prompt_logprobs"]
    ids = encoded("hello")
    scores = truth(model, ids)
    assert first is None
    assert len(others) == len(ids) - 1
    for place, found in enumerate(others, 1):
        row = scores[place - 1]
        assert {int(token) for token in found} == {ids[place], *row.topk(2).indices.tolist()}
        mine = found[str(ids[place])]
        assert mine["logprob"] == pytest.approx(float(row[ids[place]]), abs=2e-4)
        assert mine["rank"] == int((row >= row[ids[place]]).sum())
        assert mine["decoded_token"] == "hello"[place]
    whole = ask(server.port, CHAT, talk("hello", prompt_logprobs=0, max_tokens=1)).body
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert ask(server.port, CHAT, talk("hello", max_tokens=1)).body["prompt_logprobs"] is None


def test_an_echoed_prompt_tells_as_many_tokens_as_were_asked_for(server):
    choice = one(server, body("hello", echo=True, logprobs=1, prompt_logprobs=4))
    assert all(len(each) <= 2 for each in choice["logprobs"]["top_logprobs"][1:])
    assert all(4 <= len(each) <= 5 for each in choice["prompt_logprobs"][1:])
    assert one(server, body("hello", prompt_logprobs=False))["prompt_logprobs"] is None


def test_an_echo_tells_its_scores_by_id_besides(server):
    """As vLLM does, of a chat too; names there are texts, whatever names the rest has."""
    asked = body("hello", echo=True, logprobs=2, return_tokens_as_token_ids=True)
    choice = one(server, asked)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [found[str(token)]["decoded_token"] for found, token in zip(others, encoded("hello")[1:], strict=True)] == [
        *"ello"
    ]
    own = [found[str(token)]["logprob"] for found, token in zip(others, encoded("hello")[1:], strict=True)]
    assert own == choice["logprobs"]["token_logprobs"][1 : len("hello")]
    assert one(server, body("hello", echo=True))["prompt_logprobs"] is None
    whole = ask(server.port, CHAT, talk("hello", echo=True, max_tokens=1)).body
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]


def test_an_echo_is_the_prompt_as_it_was_given(server):
    """Of one that is cut, too; a stream tells the ids that are left beside it."""
    asked = body("hello", echo=True, truncate_prompt_tokens=2)
    assert one(server, asked)["text"].startswith("hello")
    first, *others = told(server.port, COMPLETIONS, asked)
    assert first["text"].startswith("hello")
    assert first["prompt_token_ids"] == encoded("lo")
    assert {chunk["prompt_token_ids"] for chunk in others} == {None}
    assert told(server.port, COMPLETIONS, body("hello"))[0]["prompt_token_ids"] is None


def test_a_chat_echoes_the_message_that_it_goes_on_from(server):
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "It is"}]
    own = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain, echoed = (one(server, {**talk(), **own, "echo": echo}, CHAT) for echo in (False, True))
    assert echoed["message"]["content"] == "It is" + plain["message"]["content"]
    assert one(server, talk(echo=True), CHAT)["message"] == one(server, talk(), CHAT)["message"]


def test_a_request_that_is_stopped_tells_the_scores_of_the_tokens_it_tells(server):
    text = one(server, body())["text"]
    choice = one(server, body(stop=text[4:6], logprobs=0, return_token_ids=True))
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


def test_shapes_of_an_answer_reach_the_engine(server):
    plain = one(server, body(return_token_ids=True))
    first = plain["token_ids"][0]
    for fields in (
        {"logit_bias": {str(first): -100}},
        {"bad_words": [next(each for each in plain["text"] if each.isascii())]},
        {"allowed_token_ids": [65, 66]},
        {"repetition_penalty": 5.0, "prompt": [first] * 3},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {"65": 100, "66": 99.9, "67": 99.5}},
    ):
        other = one(server, body(**{"return_token_ids": True, **fields}))["token_ids"]
        assert other != one(server, body(return_token_ids=True, prompt=fields.get("prompt", PROMPT)))["token_ids"]
        assert "allowed_token_ids" not in fields or {*other} <= {65, 66}
    for neutral in (
        {"logit_bias": {}},
        {"bad_words": []},
        {"min_p": 0},
        {"top_k": -1},
        {"top_p": 0.3, "temperature": 0},
    ):
        assert one(server, body(return_token_ids=True, **neutral))["token_ids"] == plain["token_ids"]
    drawn = one(server, body(temperature=1.5, top_k=1, return_token_ids=True))
    assert drawn["token_ids"] == plain["token_ids"]
    assert one(server, body(temperature=1.5, min_p=1, return_token_ids=True))["token_ids"] == plain["token_ids"]


def test_no_end_is_chosen_before_the_least_number_of_tokens(server):
    ends = {str(END): 100, str(TURN_END): 99}
    assert one(server, body(ignore_eos=False, logit_bias=ends))["finish_reason"] == "stop"
    choice = one(server, body(ignore_eos=False, logit_bias=ends, min_tokens=6, return_token_ids=True))
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) > 6
    assert not {END, TURN_END} & {*choice["token_ids"][:6]}


@pytest.mark.parametrize(("fields", "name"), CASES["scores of a chat"])
def test_a_chat_s_scores_that_cannot_be_are_refused_by_their_field(server, fields, name):
    answer = ask(server.port, CHAT, talk(**fields))
    assert (answer.status, answer.body["error"]["param"]) == (400, name)
