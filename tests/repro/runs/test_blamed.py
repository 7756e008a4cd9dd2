"""What a system of one's own does wrong is said of it, and never of this program."""

import logging
import re
from pathlib import Path

import pytest
from support.cells import a_cell

from engines.errors import RunError
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep


def asked(name: str, service_s: float = 1.0) -> Cell:
    return a_cell(
        f"support.lying_systems:{name}",
        dataset="jobs",
        platform="support.md1:WORKSHOP",
        executor="virtual",
        rate=0.1,
        service_s=service_s,
        num_prompts=6,
    )


def made(root: Path, name: str, service_s: float = 1.0) -> None:
    (outcome,) = Sweep([prepare(asked(name, service_s))], Store(root)).run()
    assert outcome.run is not None
    if not outcome.run.validity.valid:
        raise RunError("; ".join(outcome.run.validity.reasons))


@pytest.mark.parametrize(
    ("name", "service_s", "said"),
    [
        ("NOTHING", 1.0, "fails (TypeError: cannot unpack non-iterable NoneType object): correct it"),
        ("THREE", 1.0, "fails (ValueError: too many values to unpack"),
        ("LEAVES", 1.0, "fails (GeneratorExit:): correct it"),
        ("NAMELESS", 1.0, "fails (TypeError: its family is no Family, or its title no text): correct it"),
        ("ORPHAN", 1.0, "fails (TypeError: its family is no Family"),
        ("RUNS", 1.0, "fails (AttributeError: 'NoneType' object has no attribute"),
        ("RUNS", 2.0, "fails (ValueError: table 'work' of a run of family queue is missing): correct it"),
        ("RUNS", 3.0, "fails ("),
        ("RUNS", 4.0, "column 'finished_s' holds a value that is not finite): correct it"),
        ("RUNS", 5.0, "says of its run that it is measured, and of itself simulated"),
        ("RUNS", 6.0, "1 of 6 requests have an output_len below 0"),
    ],
)
def test_what_a_system_does_wrong_is_said_of_it(name, service_s, said, tmp_path):
    with pytest.raises(RunError, match=re.escape(said)) as failed:
        made(tmp_path, name, service_s)
    assert f"system='support.lying_systems:{name}'" in str(failed.value) or "output_len" in said


def test_a_log_keeps_where_a_wrong_run_was_found(tmp_path, caplog):
    experiments = [prepare(asked("RUNS", service_s)) for service_s in (4.0, 7.0)]
    with caplog.at_level(logging.ERROR):
        wrong, unlucky = Sweep(experiments, Store(tmp_path)).run(continue_on_error=True)
    assert wrong.reason.startswith(
        "system='support.lying_systems:RUNS', platform='support.md1:WORKSHOP' fails (ValueError"
    )
    assert unlucky.reason == "KeyError: 'soon'", "it says itself where it was raised"
    kinds = [entry.exc_info[0] for entry in caplog.records if entry.exc_info is not None]
    assert kinds == [ValueError, KeyError]


def test_another_fault_is_raised_as_it_is(monkeypatch):
    from repro.systems.dllm.system import DllmSystem

    monkeypatch.setattr(DllmSystem, "prepare", lambda self, cell: None)
    cell = a_cell(platform="rtx4090", executor="roofline", rate=1.0)
    with pytest.raises(TypeError):
        prepare(cell)
