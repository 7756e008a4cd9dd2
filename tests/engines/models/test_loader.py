"""Checkpoints are loaded strictly: nothing missing, nothing extra, nothing guessed.

Tiny checkpoints in the layouts published models have on the hub, written by hand and loaded back.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.block_models import RAW
from support.checkpoints import DREAM, dream_layout, dream_weights, write
from support.forks import forks
from support.refusals import refuses
from support.tables import data_beside
from support.tiny_models import GQA, MHA

from engines.errors import UserError
from engines.models import loader
from engines.models.block_config import BlockConfig
from engines.models.checkpoint import TINY_DIR, checkpoint_dir, read_config
from engines.models.config import DREAM_7B, LLADA_8B, DreamConfig, LLaDAConfig
from engines.models.decoder import DreamModel
from engines.models.llada import LLaDAModelLM
from engines.models.loader import (
    PUBLISHED_CONFIGS,
    build_model,
    check_quantization,
    load_block,
    load_causal,
    load_model,
    parse_dtype,
    shapes_only,
)
from engines.models.qwen2_config import tiny_causal

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return MHA.write(tmp_path / "mha")


def refused(folder: Path | str, says: str, **options: Any) -> str:
    with pytest.raises(UserError, match=says) as caught:
        load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- config -------------------------------------------------------------------------------------


def test_unknown_keys_are_ignored(folder):
    further = {"transformers_version": "4.49", "precision": "amp_bf16", "flash_attention": True}
    (folder / "config.json").write_text(json.dumps(MHA.config.to_dict() | further))
    assert load_model(str(folder)).config == MHA.config


def test_a_byte_order_mark_is_no_content(folder):
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding="utf-8-sig")
    assert read_config(folder) == MHA.config


def test_optional_fields_of_a_config():
    raw = MHA.config.to_dict()
    for name in ("n_kv_heads", "pad_token_id", "embedding_size"):
        raw[name] = None
    assert LLaDAConfig.from_dict(raw) == MHA.config
    raw.update(mlp_hidden_size=None, mlp_ratio=3, embedding_size=104, vocab_size=100)
    found = LLaDAConfig.from_dict(raw)
    assert (found.mlp_hidden_size, found.vocab_size) == (96, 104)


def test_the_published_model_has_the_published_size():
    with torch.device("meta"):
        network = LLaDAModelLM(LLADA_8B)
    state = network.state_dict()
    assert len(state) == 291
    assert sum(tensor.numel() for tensor in state.values()) == 8_015_581_184


def load_each(folder: str) -> list[str]:
    load_model(str(TINY_DIR))
    load_model(folder, weights="random")
    load_causal(tiny_causal(), weights="random")
    build_model(DREAM_7B)
    return sorted(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules)


def test_loading_does_not_import_torch_s_compiler(folder):
    """It takes more than a second of every process that loads a model."""
    with ProcessPoolExecutor(1, forks()) as pool:
        assert pool.submit(load_each, str(folder)).result() == []


def test_modules_made_elsewhere_are_initialised_as_ever():
    """``shapes_only`` holds in its block and thread alone."""
    with shapes_only():
        bare = torch.nn.Linear(4, 3)
    torch.manual_seed(0)
    made = torch.nn.Linear(4, 3)
    assert (bare.weight.device.type, made.weight.device.type) == ("meta", "cpu")
    assert 0 < float(made.weight.detach().abs().max()) <= 0.5


# ---- dtype, random weights, where a model is ----------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dtype_of_the_loaded_weights(folder, name):
    dtype = parse_dtype(name)
    for weights in ("checkpoint", "random"):
        network = load_model(str(folder), dtype=dtype, weights=weights)
        assert {tensor.dtype for tensor in network.state_dict().values()} == {dtype}


def test_int8_weights_are_refused_where_nothing_multiplies_with_them(folder, monkeypatch):
    refused(folder, "quantization='int4' is unknown: use one of none, int8", quantization="int4")
    refused(folder, "needs dtype=float32 or bfloat16", quantization="int8", dtype=torch.float16)
    with pytest.raises(UserError, match="needs device='cpu', not 'cuda:1'"):
        check_quantization("int8", torch.bfloat16, "cuda:1")
    with pytest.raises(UserError, match="needs a model without experts"):
        load_block(BlockConfig.from_dict(RAW["llada2"]), weights="random", quantization="int8")
    monkeypatch.setattr(loader, "packed_fault", lambda dtype: "the processor has no AVX2")
    refused(folder, "needs our own kernels, and the processor has no AVX2: leave it out", quantization="int8")


def test_unknown_kind_of_weights_is_refused(folder):
    refused(folder, "weights='guess'", weights="guess")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere-at-all"])
def test_a_folder_that_is_not_there(model):
    refused(
        model,
        r"is not a directory: give a checkpoint directory, a hub id, 'tiny', 'tiny-long', 'tiny-far' or 'tiny-roll'",
    )


def test_a_file_is_not_a_folder(folder):
    refused(folder / WEIGHTS, r"is not a directory")


def test_a_hub_id_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses("model='owner/name'"):
        checkpoint_dir("owner/name")


def test_config_is_read_without_loading_weights(folder):
    (folder / WEIGHTS).unlink()
    assert read_config(folder) == MHA.config


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))
LLADA_EXTRAS, DREAM_EXTRAS = (PUBLISHED[f"{name} besides its architecture"] for name in ("llada-8b", "dream-7b"))
LAYOUTS = {
    "LLaDA-8B-Instruct": (MHA.config.to_dict() | LLADA_EXTRAS | {"n_kv_heads": None}, MHA.weights()),
    "LLaDA-1.5": (GQA.config.to_dict() | LLADA_EXTRAS, GQA.weights()),
    "Dream-v0": (DREAM.to_dict() | DREAM_EXTRAS, dream_weights(DREAM)),
}


def add_other_files(directory: Path) -> None:
    (directory / "README.md").write_text("# card")
    (directory / "modeling.py").write_text("raise RuntimeError('remote code must not run')")
    (directory / "training_args.bin").write_bytes(b"\x80\x04not tensors")
    (directory / "consolidated.safetensors").write_bytes(b"not safetensors either")
    (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("shards", [1, 2, 6])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_loads_back(tmp_path, layout, stored, shards):
    config, weights = LAYOUTS[layout]
    write(tmp_path, config, weights, stored, shards)
    add_other_files(tmp_path)
    wanted = torch.float32 if shards == 2 else torch.bfloat16
    model = load_model(str(tmp_path), dtype=wanted)
    assert isinstance(model, DreamModel if layout == "Dream-v0" else LLaDAModelLM)
    assert model.config == {"LLaDA-8B-Instruct": MHA.config, "LLaDA-1.5": GQA.config, "Dream-v0": DREAM}[layout]
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, tensor in weights.items():
        assert state[name].dtype == wanted
        assert torch.equal(state[name], tensor.to(stored).to(wanted)), name
    assert not model.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_published_names_are_the_modules_own():
    for config, weights in ((DREAM, dream_layout(DREAM)), (MHA.config, MHA.weights()), (GQA.config, GQA.weights())):
        assert build_model(config).state_dict().keys() == weights.keys()
    assert {name: tuple(p.shape) for name, p in build_model(DREAM).named_parameters()} == dream_layout(DREAM)


def test_only_one_shard_is_open_at_a_time_and_nothing_stays_mapped(tmp_path, monkeypatch):
    write(tmp_path, *LAYOUTS["Dream-v0"], torch.float32, shards=4)
    opened: list[str] = []
    real, now = loader.safe_open, 0

    @contextmanager
    def counted(path: Path, framework: str) -> Iterator[Any]:
        nonlocal now
        opened.append(path.name)
        now += 1
        assert now == 1
        with real(path, framework=framework) as shard:
            yield shard
        now -= 1

    monkeypatch.setattr(loader, "safe_open", counted)
    model = load_model(str(tmp_path))
    # Headers first, then the tensors.
    assert opened == sorted(set(opened)) * 2
    # A view of the mapped file would change with it.
    for file in tmp_path.glob("*.safetensors"):
        with file.open("r+b") as raw:
            raw.write(bytes(file.stat().st_size))
    for name, tensor in LAYOUTS["Dream-v0"][1].items():
        assert torch.equal(model.state_dict()[name], tensor), name


# ---- configs -----------------------------------------------------------------------------------


def test_dream_7b_is_the_published_architecture():
    assert DreamConfig.from_dict(PUBLISHED["dream-7b"]) == DREAM_7B
    assert DREAM_7B.head_dim == 128


@pytest.mark.parametrize(
    "config",
    [
        *(LLADA_8B, MHA.config, GQA.config, replace(GQA.config, weight_tying=True, pad_token_id=0)),
        *(DREAM_7B, DREAM, replace(DREAM, weight_tying=True, pad_token_id=5)),
    ],
)
def test_a_config_survives_its_file(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_families_differ_where_decoding_does():
    assert (LLADA_8B.family, LLADA_8B.shifts_logits, LLADA_8B.qkv_bias) == ("llada", False, False)
    assert (DREAM_7B.family, DREAM_7B.shifts_logits, DREAM_7B.qkv_bias) == ("dream", True, True)
    assert "shifts_logits" not in DREAM_7B.to_dict()


def test_dreams_special_tokens_come_from_either_file(tmp_path):
    raw = DREAM.to_dict()
    del raw["mask_token_id"]
    raw["pad_token_id"] = None
    with pytest.raises(UserError, match=r"generation_config\.json lack mask_token_id"):
        DreamConfig.from_dict(raw)
    assert DreamConfig.from_dict(raw, {"mask_token_id": 62, "pad_token_id": None}) == DREAM
    # config.json goes first; the published generation_config.json has a null mask.
    assert DreamConfig.from_dict(DREAM.to_dict(), {"mask_token_id": 7}).mask_token_id == 62
    assert DreamConfig.from_dict(DREAM.to_dict(), {"mask_token_id": None}).mask_token_id == 62
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"mask_token_id": 61, "steps": 512}))
    assert read_config(tmp_path) == replace(DREAM, mask_token_id=61)


def test_dream_fields_that_say_nothing_change_nothing():
    raw = {name: value for name, value in DREAM.to_dict().items() if name != "rope_theta"}
    parameters = {"rope_type": "default", "rope_theta": DREAM.rope_theta}
    assert DreamConfig.from_dict({**raw, "rope_parameters": parameters, "hidden_act": "swish"}) == DREAM
    for scaling in ({"type": "default"}, {"rope_type": "default"}, {}):
        assert DreamConfig.from_dict({**DREAM.to_dict(), "rope_scaling": scaling}) == DREAM


REFUSED = data_beside(__file__, "refused_configs")
HUGE = [
    (MHA.config, {"rope_theta": float("inf")}, "rope_theta=inf"),
    (MHA.config, {"rope_theta": float("nan")}, "rope_theta=nan"),
    (MHA.config, {"rope_theta": 10**400}, "rope_theta"),
    (MHA.config, {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
    (DREAM, {"rope_theta": 10**400}, "rope_theta=1000"),
]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [*((MHA.config, *each) for each in REFUSED["llada"]), *((DREAM, *each) for each in REFUSED["dream"]), *HUGE],
)
def test_configs_that_would_be_served_wrongly_are_refused(config, change, message):
    raw = config.to_dict() | change
    with pytest.raises(UserError, match=message) as caught:
        type(config).from_dict(raw)
    assert "\n" not in str(caught.value)
    absent = {name: value for name, value in raw.items() if value is not None}
    with pytest.raises(UserError, match=message):
        type(config).from_dict(absent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt2"}', r"has model_type='gpt2': give a checkpoint of type llada or Dream"),
        ('{"model_type": "dream"}', "model_type='dream'.*llada or Dream"),
        (json.dumps(MHA.config.to_dict() | {"model_type": "Dream"}), "lacks hidden_size.*: add"),
        ("{}", "model_type=None"),
        ("[1]", "holds a list, not an object"),
        ("{,", r"config\.json is not JSON \(line 1\)"),
        ("[" * 100_000, "is JSON nested too deeply, or with a number too long, to be read: restore the file"),
        ('{"d_model": 1' + "0" * 5000 + "}", "is JSON nested too deeply, or with a number too long"),
        (None, r"has no config\.json: give a LLaDA or Dream checkpoint"),
    ],
    ids=lambda each: None if each is None else each[:20],
)
def test_other_config_files_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refused(tmp_path, message, weights="random")


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("gone", "added", "message"), REFUSED["weights"])
def test_weights_that_do_not_fit_are_refused(tmp_path, gone, added, message, shards):
    added = {name: torch.ones(shape, dtype=getattr(torch, kind)) for name, (kind, *shape) in added.items()}
    weights = {name: tensor for name, tensor in dream_weights(DREAM).items() if name not in gone} | added
    write(tmp_path, DREAM.to_dict(), weights, None, shards)
    refused(tmp_path, f"do not fit config.json: {message}; restore the checkpoint or its config")


def test_a_checkpoint_of_the_other_family_is_refused(tmp_path):
    write(tmp_path, DREAM.to_dict(), MHA.weights(), torch.float32)
    with pytest.raises(UserError, match=r"do not fit config\.json: \d+ missing \(lm_head\.weight\), \d+ unexpected"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), REFUSED["index"])
def test_shards_are_held_against_the_index(tmp_path, change, message):
    write(tmp_path, DREAM.to_dict(), dream_weights(DREAM), torch.float32, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    if isinstance(change, str):
        index.write_text(change)
    else:
        index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | change}))
    if not change:
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, message)


def test_missing_and_damaged_weight_files(tmp_path):
    write(tmp_path, DREAM.to_dict(), dream_weights(DREAM), torch.float32)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load_model(str(tmp_path))
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle is never opened")
    with pytest.raises(UserError, match=r"lacks weights model\.safetensors"):
        load_model(str(tmp_path))
    assert isinstance(load_model(str(tmp_path), weights="random"), DreamModel)


TIED = [
    (DREAM, dream_weights(DREAM), "model.embed_tokens.weight", "lm_head.weight"),
    (MHA.config, MHA.weights(), "model.transformer.wte.weight", "model.transformer.ff_out.weight"),
]


@pytest.mark.parametrize(("config", "weights", "embedding", "head"), TIED, ids=["dream", "llada"])
def test_tied_heads_may_be_stored_or_left_out_but_not_differ(tmp_path, config, weights, embedding, head):
    config = replace(config, weight_tying=True)
    hidden = torch.ones(8, config.d_model)
    without = {name: tensor for name, tensor in weights.items() if name != head}
    repeated = without | {head: weights[embedding].clone()}
    for stored in (without, repeated):
        for shards in (1, 3):
            directory = tmp_path / f"{len(stored)}-{shards}"
            directory.mkdir()
            model = load_model(str(write(directory, config.to_dict(), stored, torch.float32, shards)))
            assert torch.equal(model.logits(hidden), hidden @ weights[embedding].T)
            assert head not in model.state_dict()
    write(tmp_path, config.to_dict(), weights, torch.float32)
    with pytest.raises(UserError, match=f"hold {head} different from {embedding}, but config.json ties them"):
        load_model(str(tmp_path))


# ---- shapes without weights ----------------------------------------------------------------------


def test_full_size_shapes_need_random_weights():
    assert PUBLISHED_CONFIGS == {"llada-8b": LLADA_8B, "dream-7b": DREAM_7B}
    for name in PUBLISHED_CONFIGS:
        with pytest.raises(UserError, match=f"model='{name}' is a shape without weights"):
            load_model(name)


@pytest.mark.parametrize("config", [DREAM, MHA.config], ids=["dream", "llada"])
def test_random_weights_are_seeded_and_leave_norms_alone(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    first, again, other = (
        load_model(str(tmp_path), weights="random", seed=seed, dtype=torch.bfloat16).state_dict() for seed in (1, 1, 2)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if "norm" in name or "ln_f" in name:
            assert torch.all(tensor == 1)
        else:
            assert not torch.equal(tensor, other[name])
            assert tensor.dtype == torch.bfloat16
            assert 0.01 < tensor.float().std() < 0.03
