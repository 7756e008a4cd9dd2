"""Tiny checkpoints in the layouts published models have on the hub, written by hand and loaded back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DREAM, dream_layout, dream_weights, write
from support.tiny_models import GQA, MHA

import engines.models.loader
from engines.errors import UserError
from engines.models.checkpoint import read_config
from engines.models.decoder import DreamModel
from engines.models.diffusion_config import DREAM_7B, LLADA_8B, DreamConfig, LLaDAConfig
from engines.models.llada import LLaDAModelLM
from engines.models.loader import PUBLISHED_CONFIGS, build_model, load_model

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
