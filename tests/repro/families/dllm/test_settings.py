"""What a platform's measured runs default to, what is refused before one begins, and what runs share."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cells import H200, L40S, RTX4090, a_cell
from support.refusals import refuses

from engines.dllm.method import DLLM_SERVE
from engines.models.checkpoint import TINY_DIR
from repro.families.dllm.on_torch import load, model_key
from repro.families.dllm.settings import DllmSettings
from repro.families.dllm.system import resolve
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare


def cell(platform: str, executor: str = "torch", **knobs: Scalar) -> Cell:
    return a_cell(platform=platform, executor=executor, **knobs)


def resolved(asked: Cell) -> DllmSettings:
    return resolve(asked, DLLM_SERVE)


@pytest.mark.parametrize("where", [H200, L40S, RTX4090], ids=lambda where: where.name)
def test_a_card_is_measured_on_cuda_in_16_bits(where):
    settings = resolved(cell(where.name, weights="random"))
    assert (settings.device, settings.dtype, settings.weights) == ("cuda", "bfloat16", "random")
    asked = resolved(cell(where.name, weights="random", device="cpu", dtype="float32"))
    assert (asked.device, asked.dtype) == ("cpu", "float32")


def test_the_embedded_model_stays_where_it_was():
    settings = resolved(cell("cpu-tiny"))
    assert (settings.device, settings.dtype, settings.weights) == ("cpu", "float32", "checkpoint")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("system", ["dllm-serve", "sparse-dllm"])
def test_without_a_card_a_measured_run_is_refused_in_a_sentence(system):
    asked = replace(cell("h200", weights="random", num_prompts=1), system=system)
    experiment = prepare(asked)
    for refused in (experiment.deployment.check_machine, experiment.run):
        with refuses("device='cuda'"):
            refused()


def test_the_first_token_rule_is_refused_without_an_uncached_step():
    prepare(cell("l40s", executor="roofline", num_prompts=2, refresh_delay=0, compat="paper"))
    with refuses("compat='upstream'"):
        prepare(cell("l40s", executor="roofline", num_prompts=2, refresh_delay=0, compat="upstream"))


@pytest.mark.parametrize("platform", ["h200", "l40s", "rtx4090"])
def test_a_shape_has_no_weights_of_its_own(platform):
    with refuses("model='llada-8b'"):
        resolved(cell(platform))
    assert resolved(cell(platform, model="tiny")).model == "tiny"
    assert resolved(cell(platform, executor="roofline")).executor == "roofline"


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
