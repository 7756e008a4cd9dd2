"""What runs share is of the files as they are."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.cells import a_cell

from engines.models.checkpoint import TINY_DIR
from repro.families.dllm.on_torch import load, model_key
from repro.runs.experiment import prepare


def test_a_checkpoint_that_was_written_anew_is_loaded_anew(tmp_path):
    folder = Path(shutil.copytree(TINY_DIR, tmp_path / "model"))
    cell = a_cell(model=str(folder), num_prompts=1)

    def weights() -> dict[str, torch.Tensor]:
        return {
            name: each.clone()
            for name, each in load(*model_key(prepare(cell).deployment.settings)).state_dict().items()
        }

    before = weights()
    (file,) = folder.glob("*.safetensors")
    save_file({name: each + 1 for name, each in load_file(file).items()}, file)
    after = weights()
    assert any(not torch.equal(before[name], after[name]) for name in before)
