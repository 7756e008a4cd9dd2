from __future__ import annotations

import os

# Before anything loads numpy or torch. One thread each: test workers share the cores, and sums come out the same.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

settings.register_profile("repro", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repro")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none; torch is loaded only if some test asks."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device, torch {torch.__version__} sees none"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures handed to ``style.save``, to look into them."""
    from paper_figures import style

    figures: list[Figure] = []
    save = style.save

    def keep(figure: Figure, out: Path, name: str) -> tuple[Path, Path]:
        figures.append(figure)
        return save(figure, out, name)

    monkeypatch.setattr(style, "save", keep)
    return figures
