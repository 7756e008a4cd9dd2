from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import sys

# Before anything loads numpy or torch. One thread each: test workers share the cores, and sums come out the same.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# A job in the background of a script begins with Ctrl-C ignored, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

import repro  # noqa: F401 - what every door settles, before torch computes

try:
    from hypothesis import settings
except ImportError:
    # A GPU machine may lack it; tests marked gpu do without.
    settings = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FROZEN = pytest.StashKey[tuple[Path, int]]()
"""The test file, and how many modules were loaded, when the objects there were were taken from the garbage collector."""

if settings is not None:
    settings.register_profile("repro", derandomize=True, deadline=None, max_examples=50)
    settings.load_profile("repro")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without hypothesis only files that hold GPU tests are collected: many others cannot be imported."""
    if settings is not None or collection_path.suffix != ".py":
        return None
    return None if "pytest.mark.gpu" in collection_path.read_text(encoding="utf-8") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first: at the end one worker would be at it alone. What needs a CUDA device is skipped where there is
    none; torch is loaded only if some test asks."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device, torch {torch.__version__} sees none"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported is garbage: looking for some takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure() -> None:
    """What tests leave is freed by reference counts, but for little: looking for that after every 700 objects, as
    interpreters do, takes a twentieth of the time. Measured peaks of memory begin with a collection of their own.

    At its end an interpreter takes apart what it can reach, for seconds where torch and all tests are; some libraries report
    the rest as leaks. A worker, which has told all by then, ends at once."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(partial(os._exit, 0) if "PYTEST_XDIST_WORKER" in os.environ else gc.unfreeze)


def pytest_sessionfinish() -> None:
    """pytest ends with five collections of all that there is, for errors of what nobody holds."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is loaded, and what earlier files keep, stays. Without this a collection of garbage, which every measured peak
    of memory begins with, looks through all of torch and all tests: a hundred times the work."""
    at, known = item.config.stash.get(FROZEN, (None, 0))
    if at != item.path or len(sys.modules) - known > 100:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN] = item.path, len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine() -> Iterator[None]:
    """Tests about a busy machine give their sweeps a sitting of their own. Sweeps that are not told how many processes to
    start run here: test workers share the cores."""
    from support.quiet_machine import keep_quiet

    from repro.paths import REPO
    from repro.runs import pool, sweep

    keep_quiet()
    # Names that have moved are errors: without the first, every sweep starts processes that import torch.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "CELLS_PER_WORKER", 10**9)
        # Every sweep asks three processes of git; test_environment asks them too.
        patched.setattr(sweep, "git_state", functools.cache(partial(sweep.git_state, REPO)))
        yield


@pytest.fixture(scope="module")
def models_loaded_once() -> Iterator[None]:
    """For modules whose many cases share a few checkpoints, which nothing changes."""
    from engines.models import loader

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "load_model", functools.cache(loader.load_model))
        yield


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files of the published data sets."""
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn up but their files stay empty, for tests that do not look into those: two thirds of the time goes
    into rendering them. test_layout renders one of every family."""
    from paper_figures.common import style

    draw_again(monkeypatch)
    monkeypatch.setattr(style, "rendered", lambda figure, kind: b"")


def draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's cache has, and leave nothing there."""
    monkeypatch.setattr("paper_figures.common.figure.cached_result", lambda kind, inputs, make: make())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """``test_layout`` draws every figure; here it is the numbers that count."""
    monkeypatch.setattr("paper_figures.common.figure._pictures", lambda *words: (b"", b""))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures handed to ``style.rendered``, to look into them."""
    from paper_figures.common import style

    draw_again(monkeypatch)
    figures: list[Figure] = []
    rendered = style.rendered

    def keep(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
        if kind == "png":
            figures.append(figure)
        return rendered(figure, kind)

    monkeypatch.setattr(style, "rendered", keep)
    return figures
