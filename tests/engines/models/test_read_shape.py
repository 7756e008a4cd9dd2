"""Shapes of models that a folder's config.json describes, held against published counts of parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refuses
from support.tables import data_beside

from engines.models.qwen2_config import read_shape
from engines.models.shape import CATALOGUE, ReadShape

DATA = data_beside(__file__, "hub_configs")


def folder(place: Path, name: str, **changes: Any) -> Path:
    (place / name).mkdir()
    (place / name / "config.json").write_text(json.dumps(DATA["read"][name]["config"] | changes))
    return place / name


@pytest.mark.parametrize("name", DATA["read"])
def test_a_config_of_the_hub_makes_the_published_parameters(name, tmp_path):
    found, said = read_shape(folder(tmp_path, name)), DATA["read"][name]
    assert found.name == said.get("name", name)
    assert (found in CATALOGUE) == ("name" in said)
    assert found.weight_bytes == 2 * said["params"]
    assert [found.n_heads, found.n_kv_heads, found.head_dim] == said["heads"]


def test_layers_without_experts_and_a_name_that_is_another_models(tmp_path):
    found = read_shape(folder(tmp_path, "Qwen3-30B-A3B", mlp_only_layers=[0, 1, 1]))
    assert (found.dense_layers, found.dense_hidden) == (2, 6144)
    other = folder(tmp_path, "mistral", vocab_size=1000).rename(tmp_path / "Qwen3-8B")
    assert (type(read_shape(other)), read_shape(other).name) == (ReadShape, "Qwen3-8B (config.json)")


@pytest.mark.parametrize(("name", "change", "said"), DATA["refused"])
def test_what_no_step_knows_is_refused_by_name(name, change, said, tmp_path):
    with refuses(said):
        read_shape(folder(tmp_path, name, **change))
