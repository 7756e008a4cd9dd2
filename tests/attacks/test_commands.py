"""Every command with any of its options, several at once, of any value: an answer, or one line. What would take long is left
out, and only where it begins: everything that is checked before is checked here."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import commands, refused
from support.command import repro as run
from support.hostile import HOSTILE
from support.tables import data_beside

from repro.families.platforms import PLATFORMS
from repro.reports.ablation import COMPONENTS
from repro.reports.figures import FIGURES
from repro.runs.system import SYSTEMS
from repro.tasks.registry import TASKS
from repro.workloads.conversations import known_conversation_cards
from repro.workloads.dataset import known_datasets
from repro.workloads.sessions import known_session_cards

TOLD = data_beside(__file__, "words")
NAMES = (
    *SYSTEMS,
    *TASKS,
    *PLATFORMS,
    *FIGURES,
    *known_datasets(),
    *known_session_cards(),
    *known_conversation_cards(),
    *COMPONENTS["ampd"],
    *COMPONENTS["laps"],
    *TOLD["words"],
)
VALUES = (*HOSTILE, "x" * 300, "x:y", ":", "os:path", "[red]", "\x1b[31m", "a\nb", "\0")
FILES = {"file.json": "[1, 2, 3]", "file.jsonl": '{"prompt": "one two three"}\n', "empty": ""}
values = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    st.integers(-3, 5000).map(str),
    st.floats().map(str),
    st.text(max_size=12),
)
CASES: dict[str, int] = TOLD["examples"]
ARGUMENTS = {"reproduce": sorted(FIGURES), "figure": sorted(FIGURES)}


few = values.filter(lambda word: not (word.isdecimal() and 9 < int(word) <= 1000))
"""Hundreds of repeats are as many workloads to make; more are refused."""


def words_of(asked: str) -> st.SearchStrategy[list[str]]:
    command, *before = asked.split()
    params = commands()[command].params
    flags = [st.just([param.opts[0]]) for param in params if getattr(param, "is_flag", False)]
    options = [
        st.tuples(st.just(param.opts[0]), few if param.opts[0] == "--num-runs" else values).map(list)
        for param in params
        if param.param_type_name == "option" and not getattr(param, "is_flag", False)
    ]
    given = st.lists(st.one_of(*options, *options, *flags) if options else st.one_of(*flags), max_size=5).map(
        lambda parts: [*before, *(word for part in parts for word in part)]
    )
    if command not in ARGUMENTS:
        return given
    name = st.one_of(st.sampled_from(ARGUMENTS[command]), st.sampled_from(ARGUMENTS[command]), values)
    return st.tuples(name, given).map(lambda both: [both[0], *both[1]])


def stop(*_: Any, **__: Any) -> None:
    raise typer.Exit(0)


@contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """Files to name, a folder to write into, and nothing that takes long."""
    import repro.checks.goldens
    import repro.checks.results
    import repro.families.cluster.ampd_settings
    import repro.families.dllm.on_torch  # takes the loader by name: not the one that is put in its place below
    import repro.gpu_suite.suite
    import repro.reports.fitting
    import repro.runs.sweep
    import repro.training.loop
    from engines.models import loader

    def load(*arguments: Any, **options: Any) -> None:
        whole(*arguments, **options)
        stop()

    whole, before = loader.load_model, Path.cwd()
    folder.mkdir(exist_ok=True)
    (folder / "folder").mkdir(exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    calibration = folder / "calibration"
    shutil.copytree(repro.paths.CALIBRATION, calibration, dirs_exist_ok=True)
    results = {
        "RESULTS": folder,
        "LOCAL": folder / "local",
        "LOCAL_FIGURES": folder / "figures",
        "CALIBRATION": calibration,
    }
    with (
        mock.patch.multiple(repro.paths, **results),
        mock.patch.object(repro.runs.sweep.Sweep, "run", stop),
        mock.patch.object(repro.gpu_suite.suite.Suite, "run", stop),
        mock.patch.object(repro.reports.fitting, "fit", stop),
        mock.patch.object(repro.checks.goldens, "verify", stop),
        mock.patch.object(repro.checks.results, "check_results", stop),
        mock.patch.object(repro.training.loop, "build_trainer", stop),
        mock.patch.object(loader, "load_model", load),
        mock.patch.object(repro.families.cluster.ampd_settings, "performance_of", stop),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("REPRO_DATA_DIR", None)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@pytest.mark.parametrize("command", CASES)
def test_a_command(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")

    @settings(max_examples=CASES[command], suppress_health_check=list(HealthCheck), deadline=None)
    @given(words_of(command))
    def check(words: Sequence[str]) -> None:
        result = run(command.partition(" ")[0], *words)
        assert "fault of this program" not in result.err, result.err
        assert "Traceback" not in result.err
        assert result.code in (0, 1, 2), result
        if result.code == 2:
            refused(result)

    with workplace(folder):
        check()
