"""Checkpoints are loaded strictly: nothing missing, nothing extra, nothing guessed."""

import builtins
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forks import forks
from support.refusals import refuses
from support.tiny_models import GQA, MHA

from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR, checkpoint_dir, read_config
from engines.models.diffusion_config import DREAM_7B, LLADA_8B, LLaDAConfig
from engines.models.llada import LLaDAModelLM
from engines.models.loader import build_model, load_causal, load_model, parse_dtype, shapes_only
from engines.models.qwen2_config import tiny_causal

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.transformer.wte.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return MHA.write(tmp_path / "mha")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path, num: int) -> list[Path]:
    """The single file as ``num`` shards and their index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    place = {name: f"model-{i % num + 1:05}-of-{num:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(place.values())):
        save_file({name: tensors[name] for name in tensors if place[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return [folder / file for file in sorted(set(place.values()))]


def refused(folder: Path | str, says: str, **options: Any) -> str:
    with pytest.raises(UserError, match=says) as caught:
        load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_every_tensor_arrives(model, tmp_path):
    network = load_model(str(model.write(tmp_path / "x")))
    state = network.state_dict()
    weights = model.weights()
    assert state.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), name
    assert network.config == model.config
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_shards_hold_the_same_model(folder):
    whole = load_model(str(folder)).state_dict()
    assert len(shard(folder, 3)) == 3
    sharded = load_model(str(folder)).state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_missing_shard_is_named(folder):
    shards = shard(folder, 3)
    shards[1].unlink()
    assert shards[1].name in refused(folder, r"lacks weights")
    assert shards[0].name not in refused(folder, r"lacks weights")


def test_no_weights_at_all(folder):
    (folder / WEIGHTS).unlink()
    refused(
        folder,
        r"lacks weights model\.safetensors and model\.safetensors\.index\.json: restore them, or use --weights random",
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda tensors: tensors.pop("model.transformer.blocks.1.q_proj.weight"),
            r"1 missing \(model\.transformer\.blocks\.1\.q_proj\.weight",
        ),
        (
            lambda tensors: tensors.update({"model.transformer.extra": torch.zeros(1)}),
            r"1 unexpected \(model\.transformer\.extra",
        ),
        (
            lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][1:].clone()}),
            r"1 mis-shaped \(model\.transformer\.wte\.weight",
        ),
        (
            lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].T.contiguous()}),
            r"1 mis-shaped \(model\.transformer\.wte\.weight",
        ),
        (
            lambda tensors: tensors.pop("model.transformer.ff_out.weight"),
            r"1 missing \(model\.transformer\.ff_out\.weight",
        ),
    ],
    ids=["missing", "unexpected", "too few rows", "transposed", "no head"],
)
def test_tensors_that_do_not_fit_are_named(folder, change, named):
    edit_weights(folder, change)
    refused(folder, rf"do not fit config\.json: {named}\); restore the checkpoint or its config")


def test_tied_weights_have_no_head(folder):
    edit_config(folder, weight_tying=True)
    refused(
        folder,
        r"ff_out\.weight different from model\.transformer\.wte\.weight, but config\.json ties them: correct one",
    )
    edit_weights(folder, lambda tensors: tensors.pop("model.transformer.ff_out.weight"))
    network = load_model(str(folder))
    hidden = torch.randn(2, MHA.width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.logits(hidden), hidden @ MHA.weights()[EMBEDDING].T)


def test_damaged_weights_are_refused_in_a_sentence(folder):
    (folder / WEIGHTS).write_bytes(b"\x00" * 100)
    refused(folder, r"model\.safetensors")


def test_a_damaged_index_is_refused_in_a_sentence(folder):
    shard(folder, 2)
    (folder / INDEX).write_text("{")
    refused(folder, r"index\.json")
    (folder / INDEX).write_text("{}")
    refused(folder, r"index\.json")


# ---- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        *("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rope_theta", "rms_norm_eps"),
        *("mask_token_id", "eos_token_id", "rope", "block_type", "layer_norm_type", "activation_type"),
    ],
)
def test_an_architecture_is_never_guessed(folder, field):
    edit_config(folder, **{field: None})
    refused(folder, rf"config\.json lacks {field}: add")
    config = json.loads((folder / "config.json").read_text())
    del config[field]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, rf"config\.json lacks {field}: add")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("layer_norm_type", "default"),
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("activation_type", "gelu"),
        ("attention_layer_norm", True),
        ("bias_for_layer_norm", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("scale_logits", True),
        ("input_emb_norm", True),
    ],
)
def test_what_is_not_implemented_is_refused(folder, field, value):
    edit_config(folder, **{field: value})
    refused(folder, rf"config\.json has {field}={value!r}; only .* is implemented")


def test_other_model_types_are_refused(folder):
    edit_config(folder, model_type="gpt2")
    refused(folder, r"config\.json has model_type='gpt2': give a checkpoint of type llada or Dream")
    # Read as what it says it is, whose fields have other names.
    edit_config(folder, model_type="Dream")
    refused(folder, r"config\.json lacks hidden_size.*: add")
    with pytest.raises(UserError, match=r"model_type 'Dream' is not 'llada'"):
        LLaDAConfig.from_dict({**MHA.config.to_dict(), "model_type": "Dream"})


def test_unknown_keys_are_ignored(folder):
    edit_config(folder, transformers_version="4.49", precision="amp_bf16", flash_attention=True)
    assert load_model(str(folder)).config == MHA.config


def test_heads_must_divide(folder):
    edit_config(folder, n_heads=5)
    refused(folder, "n_heads=5")
    edit_config(folder, n_heads=4, n_kv_heads=3)
    refused(folder, "n_heads=4")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_heads", 0),
        ("n_kv_heads", 0),
        ("d_model", -32),
        ("n_layers", "many"),
        ("mask_token_id", 10_000),
        ("rope_theta", float("inf")),
        ("rope_theta", float("nan")),
        ("rope_theta", 10**400),
        ("rms_norm_eps", float("inf")),
        ("embedding_size", 0),
        ("embedding_size", "96"),
        ("vocab_size", 0),
        ("vocab_size", "96"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_a_sentence(folder, field, value):
    edit_config(folder, **{field: value})
    refused(folder, rf"{field}={value}" if isinstance(value, float) else field)


def test_config_files_that_cannot_be_read(folder):
    (folder / "config.json").write_text("{,")
    refused(folder, r"config\.json is not JSON \(line 1\)")
    for text in ("[" * 100_000, '{"d_model": 1' + "0" * 5000 + "}"):
        (folder / "config.json").write_text(text)
        refused(
            folder, r"config\.json is JSON nested too deeply, or with a number too long, to be read: restore the file"
        )
    (folder / "config.json").write_text("[]")
    refused(folder, r"config\.json")
    (folder / "config.json").unlink()
    refused(folder, r"has no config\.json: give a LLaDA or Dream checkpoint")


@pytest.mark.parametrize(
    "config", [LLADA_8B, MHA.config, GQA.config, replace(GQA.config, weight_tying=True, pad_token_id=0)]
)
def test_config_round_trip(config):
    raw = json.loads(json.dumps(config.to_dict()))
    assert LLaDAConfig.from_dict(raw) == config


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


def test_unknown_kind_of_weights_is_refused(folder):
    refused(folder, "weights='guess'", weights="guess")


def test_random_weights_follow_their_seed(folder):
    (folder / WEIGHTS).unlink()
    first, again, other = (load_model(str(folder), weights="random", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[EMBEDDING], other[EMBEDDING])
    for name, tensor in first.items():
        if name.endswith(("norm.weight", "ln_f.weight")):
            assert bool((tensor == 1).all()), name
        else:
            assert tensor.std() == pytest.approx(0.02, rel=0.2), name


def test_a_shape_needs_random_weights():
    refused("llada-8b", "model='llada-8b'")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere-at-all"])
def test_a_folder_that_is_not_there(model):
    refused(model, r"is not a directory: give a checkpoint directory, a hub id, 'tiny' or 'tiny-long'")


def test_a_file_is_not_a_folder(folder):
    refused(folder / WEIGHTS, r"is not a directory")


def test_a_hub_id_without_the_hub_library(monkeypatch):
    real = builtins.__import__

    def without_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    with refuses("model='owner/name'"):
        checkpoint_dir("owner/name")


def test_config_is_read_without_loading_weights(folder):
    (folder / WEIGHTS).unlink()
    assert read_config(folder) == MHA.config
