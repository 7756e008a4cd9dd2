"""What ``repro serve`` answers is what ``repro generate`` prints, for every system, alone and in company."""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from support.checkpoints import write_dream, write_llada
from support.refusals import refuses
from support.tables import data_beside

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from engines.knobs import with_knobs
from engines.models.packed import PackedModel
from engines.server.diffusion import ServedDllm
from engines.server.protocol import Finished, Submission
from engines.server.settings import ArSettings
from repro.families.block.on_torch import _load as load_blocks
from repro.families.dllm.on_torch import load as load_dllm
from repro.families.dllm.system import method
from repro.generation import GenerateOptions, generate
from repro.serving import ArModel, BlockModel, DllmModel

CASES = data_beside(__file__, "cases")

PROMPTS = ("hello", "what is it?", "a")
SHORT = {"gen_length": 16, "block_length": 8, "steps": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {"llada": str(write_llada(root / "llada")), "dream": str(write_dream(root / "dream"))}


def model_of(folder: str, system: str = "dllm-serve", name: str | None = None, **knobs: Any) -> DllmModel:
    return DllmModel.of(system=system, platform="cpu-tiny", knobs={"model": folder, **SHORT, **knobs}, name=name)


def generated(
    model: str, system: str, ids: tuple[int, ...], knobs: Mapping[str, Any], seed: int, **loaded: str
) -> tuple[int, ...]:
    generation, own = with_knobs(GenerationConfig(seed=seed), knobs), method(system).options_in(knobs)
    options = GenerateOptions(
        system=system, model=model, generation=generation, knobs=own, tie_policy="stable", **loaded
    )
    return generate(options, ids).token_ids


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("system", "family", "asked"), CASES["served"])
def test_requests_in_company_get_the_tokens_of_generate(folders, system, family, asked, quantization):
    """What a request asks for itself, over a server with other defaults, and another's default length beside it."""
    folder = folders[family]
    model = model_of(folder, system, tie_policy="stable", quantization=quantization)
    with model.serving() as engine:
        assert isinstance(engine, ServedDllm)
        codec = model.codec()
        prompts = [codec.encode(prompt) for prompt in PROMPTS]
        lengths = [16, 8, 32]
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            generation = model.generation({**asked, "max_tokens": length, "seed": 7 + i, "ignore_eos": True})
            model.check_prompt(prompt, generation)
            engine.submit(Submission(i, prompt, generation, False))
        found = {}
        while engine.has_work:
            found |= {event.request_id: event.token_ids for event in engine.step() if isinstance(event, Finished)}
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        knobs = {"block_length": 8, **asked, "gen_length": length, "steps": length}
        own = generated(folder, system, prompt, knobs, seed=7 + i, quantization=quantization)
        assert found[i] == own, PROMPTS[i]


def test_guidance_may_be_the_server_s_setting(folders):
    model = model_of(folders["llada"], "llada", tie_policy="stable", cfg_scale=1.5)
    prompt = model.codec().encode(PROMPTS[0])
    with model.serving() as engine:
        engine.submit(Submission(0, prompt, model.generation({"max_tokens": 16, "seed": 7, "ignore_eos": True}), False))
        (answer,) = [event.token_ids for _ in range(16) for event in engine.step() if isinstance(event, Finished)]
    knobs = {"block_length": 8, "cfg_scale": 1.5, "gen_length": 16, "steps": 16}
    assert answer == generated(folders["llada"], "llada", prompt, knobs, seed=7)
    assert answer != generated(folders["llada"], "llada", prompt, {**knobs, "cfg_scale": 0.0}, seed=7)


def served(system: str, quantization: str) -> None:
    knobs = {"quantization": quantization}
    if system == "ar":
        model = ArModel.of(ArSettings(model="tiny-qwen2", weights="random", kv_tokens=4096, **knobs), None)
    elif system == "block-diffusion":
        model = BlockModel.of(platform="cpu-tiny", knobs=knobs, name=None)
    else:
        model = DllmModel.of(system=system, platform="cpu-tiny", knobs=knobs, name=None)
    with model.serving():
        pass


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("door", ["ar", "block-diffusion", "dllm-serve", "fast-dllm", "generate"])
def test_weights_become_int8_where_that_is_chosen(monkeypatch, door, quantization):
    made, real = [], PackedModel.quantize
    monkeypatch.setattr(PackedModel, "quantize", lambda model: (made.append(model), real(model)))
    load_blocks.cache_clear()
    load_dllm.cache_clear()
    if door == "generate":
        generated(
            "tiny",
            "llada",
            (5, 6, 7),
            {"gen_length": 8, "block_length": 8, "steps": 8},
            seed=0,
            quantization=quantization,
        )
    else:
        served(door, quantization)
    assert [model.is_quantized for model in made] == ([True] if quantization == "int8" else [])
    load_blocks.cache_clear()
    load_dllm.cache_clear()


def test_a_request_has_the_server_s_steps_per_token_unless_it_says_otherwise(folders):
    model = model_of(folders["llada"], name="mine", gen_length=32)
    assert model.name == "mine"
    assert model.generation({}).steps == 16
    assert model.generation({"max_tokens": 64}).steps == 32
    assert model.generation({"max_tokens": 64, "steps": 64}).steps == 64
    assert model.generation({"max_tokens": 2}).steps == 1
    assert model.generation({}).stop_at_eos
    assert not model.generation({"ignore_eos": True}).stop_at_eos
    assert not model.generation({"max_tokens": 8}).stop_at_eos, "a single block has nothing behind it"
    assert model.generation({"seed": 5}).seed == 5


@pytest.mark.parametrize(("asked", "sentence"), CASES["requests"])
def test_what_a_request_may_not_ask_is_said_in_a_sentence(folders, asked, sentence):
    model = model_of(folders["llada"])
    with pytest.raises(UserError, match=sentence):
        model.generation(asked)


@pytest.mark.parametrize(("ids", "sentence"), data_beside(__file__, "serving")["prompts_that_cannot_run_are_refused"])
def test_prompts_that_cannot_run_are_refused(folders, ids, sentence):
    model = model_of(folders["llada"])
    with pytest.raises(UserError, match=sentence):
        model.check_prompt(ids, model.generation({}))


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_what_the_machine_lacks_is_known_without_the_model(folders, device):
    with refuses(f"device='{device}'"):
        model_of(folders["llada"], device=device).check_machine()


def test_the_model_and_its_settings_pickle(folders):
    model = model_of(folders["llada"])
    model.generation({})
    assert pickle.loads(pickle.dumps(model)) == model
