"""Checkpoints are loaded strictly: nothing missing, nothing extra, nothing guessed.

Tiny checkpoints in the layouts published models have on the hub, written by hand and loaded back.
"""

import builtins
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DREAM, dream_layout, dream_weights, write
from support.forks import forks
from support.refusals import refuses
from support.tiny_models import GQA, MHA

import engines.models.loader
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR, checkpoint_dir, read_config
from engines.models.config import DREAM_7B, LLADA_8B, DreamConfig, LLaDAConfig
from engines.models.decoder import DreamModel
from engines.models.llada import LLaDAModelLM
from engines.models.loader import PUBLISHED_CONFIGS, build_model, load_causal, load_model, parse_dtype, shapes_only
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


# What a published config.json says besides the architecture (LLaDA-8B-Instruct; LLaDA-1.5 is the same class).
LLADA_EXTRAS = {
    "alibi_bias_max": 8.0,
    "attention_layer_norm_with_affine": True,
    "embedding_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    "flash_attention": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "precision": "amp_bf16",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": False,
}
DREAM_EXTRAS = {
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "initializer_range": 0.02,
    "max_window_layers": 2,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "use_mrope": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2",
    "use_cache": True,
}
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
    real, now = engines.models.loader.safe_open, 0

    @contextmanager
    def counted(path: Path, framework: str) -> Iterator[Any]:
        nonlocal now
        opened.append(path.name)
        now += 1
        assert now == 1
        with real(path, framework=framework) as shard:
            yield shard
        now -= 1

    monkeypatch.setattr(engines.models.loader, "safe_open", counted)
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


@pytest.mark.parametrize("config", [LLADA_8B, MHA.config, GQA.config, replace(GQA.config, weight_tying=True)])
def test_llada_config_survives_its_file(config):
    assert LLaDAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("config", [DREAM_7B, DREAM, replace(DREAM, weight_tying=True, pad_token_id=5)])
def test_dream_config_survives_its_file(config):
    assert DreamConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_dream_7b_is_the_published_architecture():
    raw = {
        "model_type": "Dream",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "mask_token_id": 151666,
        "eos_token_id": 151643,
        "pad_token_id": 151643,
    }
    assert DreamConfig.from_dict(raw) == DREAM_7B
    assert DREAM_7B.head_dim == 128


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling="),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_mrope": True}, "use_mrope=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.'sliding_attention'"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"num_attention_heads": 3}, "n_heads=3"),
        ({"num_key_value_heads": 3}, "multiple of n_kv_heads=3"),
        ({"num_key_value_heads": None}, "lacks num_key_value_heads"),
        ({"rope_theta": None, "rms_norm_eps": None}, "lacks rope_theta, rms_norm_eps"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"hidden_size": 2**17 + 2}, "hidden_size=131074"),
        ({"vocab_size": 2**24 + 1}, "vocab_size=16777217"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ({"mask_token_id": 64}, "mask_token_id=64"),
        ({"eos_token_id": [63, 62]}, r"eos_token_id=\[63, 62\]: give one id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ],
)
def test_dream_configs_that_would_be_served_wrongly_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        DreamConfig.from_dict(DREAM.to_dict() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_type": "sequential"}, "block_type='sequential'"),
        ({"rope_full_precision": False}, "rope_full_precision=False"),
        ({"multi_query_attention": True}, "multi_query_attention=True"),
        ({"layer_norm_with_affine": False}, "layer_norm_with_affine=False"),
        ({"attention_layer_norm": True}, "attention_layer_norm=True"),
        ({"include_qkv_bias": True}, "include_qkv_bias=True"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"mask_token_id": 96}, "mask_token_id=96"),
        ({"n_layers": 2.5}, "n_layers=2.5"),
    ],
)
def test_llada_configs_that_would_be_served_wrongly_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        LLaDAConfig.from_dict(MHA.config.to_dict() | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama"}', "model_type='llama'"),
        ('{"model_type": "dream"}', "model_type='dream'.*llada or Dream"),
        ("{}", "model_type=None"),
        ("[1]", "holds a list, not an object"),
        ("{\n", "is not JSON"),
    ],
)
def test_other_config_files_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path))


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"1 missing \(model\.norm\.weight\)"),
        (
            lambda w: w.update({"model.rotary_emb.inv_freq": torch.ones(4)}),
            r"1 unexpected \(model\.rotary_emb\.inv_freq\)",
        ),
        (lambda w: w.update({"lm_head.weight": torch.ones(64, 31)}), r"1 mis-shaped \(lm_head\.weight\)"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"1 not floating-point \(model\.norm",
        ),
        (
            lambda w: (w.pop("lm_head.weight"), w.update({"head.weight": torch.ones(64, 32)})),
            r"1 missing \(lm_head\.weight\), 1 unexpected \(head\.weight\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, spoil, message, shards):
    weights = dream_weights(DREAM)
    spoil(weights)
    write(tmp_path, DREAM.to_dict(), weights, None, shards)
    with pytest.raises(UserError, match=f"do not fit config.json: {message}"):
        load_model(str(tmp_path))


def test_a_checkpoint_of_the_other_family_is_refused(tmp_path):
    write(tmp_path, DREAM.to_dict(), MHA.weights(), torch.float32)
    with pytest.raises(UserError, match=r"do not fit config\.json: \d+ missing \(lm_head\.weight\), \d+ unexpected"):
        load_model(str(tmp_path))


def test_shards_are_held_against_the_index(tmp_path):
    write(tmp_path, DREAM.to_dict(), dream_weights(DREAM), torch.float32, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    original = json.loads(index.read_text())

    moved = original["weight_map"] | {"model.norm.weight": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(UserError, match=r"disagree on model\.norm\.weight"):
        load_model(str(tmp_path))

    outside = original["weight_map"] | {"model.norm.weight": "../model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(UserError, match="outside its directory"):
        load_model(str(tmp_path))

    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(UserError, match="has no weight_map"):
        load_model(str(tmp_path))

    index.write_text(json.dumps(original))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks weights model-00002-of-00003\.safetensors: restore them"):
        load_model(str(tmp_path))


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
    (replace(DREAM, weight_tying=True), dream_weights(DREAM), "model.embed_tokens.weight", "lm_head.weight"),
    (
        replace(MHA.config, weight_tying=True),
        MHA.weights(),
        "model.transformer.wte.weight",
        "model.transformer.ff_out.weight",
    ),
]


@pytest.mark.parametrize(("config", "weights", "embedding", "head"), TIED, ids=["dream", "llada"])
def test_tied_heads_may_be_stored_or_left_out_but_not_differ(tmp_path, config, weights, embedding, head):
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
