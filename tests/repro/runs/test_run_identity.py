"""What makes two measured runs the same run: every file of the checkpoint that the loader, the tokenizer or a chat reads."""

import json
import shutil
from pathlib import Path

import pytest
from support.cells import a_cell

from engines.models.checkpoint import TINY_DIR
from repro.runs.experiment import prepare


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_DIR, tmp_path / "model"))


def key_of(model: Path) -> str:
    cell = a_cell(model=str(model), num_prompts=2)
    return prepare(cell).cell.key


def change_config(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 123.0}))


def change_weights(model: Path) -> None:
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def add_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize("change", [change_config, change_weights, add_chat_template])
def test_another_checkpoint_is_another_run(model, change):
    before = key_of(model)
    assert callable(change)
    change(model)
    assert key_of(model) != before


def test_files_that_nobody_reads_make_no_difference(model):
    before = key_of(model)
    (model / "consolidated.safetensors").write_bytes(b"left over")
    (model / "README.md").write_text("about it")
    assert key_of(model) == before
