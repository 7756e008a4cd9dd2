"""What a system of one's own does wrong is said of it, and never of this program."""

from __future__ import annotations

import re

import pytest

from engines.errors import RunError
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.packing import Packing


def made(name: str, service_s: float = 1.0) -> None:
    cell = Cell(
        system=f"support.lying_systems:{name}",
        dataset="jobs",
        platform="support.md1:WORKSHOP",
        executor="virtual",
        rate=0.1,
        seed=0,
        knobs=(("service_s", service_s), ("num_prompts", 6)),
    )
    made = Packing.of_this_process().make(prepare(cell))
    validity = made.packed.manifest["validity"]
    if not validity["valid"]:
        raise RunError("; ".join(validity["reasons"]))


@pytest.mark.parametrize(
    ("name", "service_s", "said"),
    [
        ("NOTHING", 1.0, "fails (TypeError: cannot unpack non-iterable NoneType object): correct it"),
        ("THREE", 1.0, "fails (ValueError: too many values to unpack"),
        ("LEAVES", 1.0, "fails (GeneratorExit:): correct it"),
        ("NAMELESS", 1.0, "fails (TypeError: its family is no Family, or its title no text): correct it"),
        ("ORPHAN", 1.0, "fails (TypeError: its family is no Family"),
        ("RUNS", 5.0, "says of its run that it is measured, and of itself simulated"),
        ("RUNS", 6.0, "1 of 6 requests have an output_len below 0"),
    ],
)
def test_what_a_system_does_wrong_is_said_of_it(name: str, service_s: float, said: str) -> None:
    with pytest.raises(RunError, match=re.escape(said)) as failed:
        made(name, service_s)
    assert f"system='support.lying_systems:{name}'" in str(failed.value) or "output_len" in said


def test_another_fault_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.systems.dllm.system import DllmSystem

    monkeypatch.setattr(DllmSystem, "prepare", lambda self, cell: None)
    cell = Cell(system="dllm-serve", dataset="osc", platform="rtx4090", executor="roofline", rate=1.0, seed=0, knobs=())
    with pytest.raises(TypeError):
        prepare(cell)
