"""The tiny checkpoint is one that this project's own engine loads, and the same every time."""

from baselines.servers.checkpoint import MAX_MODEL_LEN, tiny_config, write_tiny
from engines.models.loader import load_causal
from engines.models.qwen2_config import read_causal_config


def test_it_is_a_qwen2_of_the_same_bytes_every_time(tmp_path):
    first, second = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b")
    names = {path.name for path in first.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = write_tiny(tmp_path / "c", seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_the_engine_here_loads_it(tmp_path):
    """Which refuses a checkpoint that lacks a tensor, or has one too many."""
    folder = write_tiny(tmp_path / "model")
    config = read_causal_config(folder)
    assert (config.max_sequence_length, config.vocab_size) == (MAX_MODEL_LEN, tiny_config().vocab_size)
    network = load_causal(str(folder))
    assert sum(parameter.numel() for parameter in network.parameters()) == 566_400
