"""One look for all figures, and files that are the same bytes for the same data.

A system has one colour (Okabe and Ito's palette, told apart in every common form of colour blindness) and one
marker everywhere; its title is the system's own. Filled markers are our runs, hollow ones the paper's values, an x is an
invalid run. Every figure carries a caption that says how each series was obtained.
"""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from repro.runs.system import SYSTEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
PANEL_INCHES = (3.6, 2.1)
"""Width with its margins, height without."""
WIDE_INCHES = 6.4
"""Width of a figure with one panel."""
TITLE_INCHES, LEGEND_INCHES = 0.2, 0.19
"""Height of one line."""
CAPTION_POINTS = 7
LINE_SPACING = 1.35
CHARACTERS_PER_INCH = 17
"""Density of caption text, with a margin."""

GUIDE_COLOR = "#8A8A8A"
"""Lines that are no series."""


@dataclass(frozen=True, kw_only=True)
class SystemLook:
    title: str
    color: str
    marker: str


_LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "dllm-serve": ("#0072B2", "o"),
        "sparse-dllm": ("#D55E00", "s"),
        "fast-dllm": ("#009E73", "^"),
        "dllm-cache": ("#CC79A7", "D"),
        "llada": ("#56B4E9", "v"),
        "dream": ("#E69F00", "P"),
    }
)
_OTHER_LOOK = ("#000000", "X")
"""Look of a system that comes from elsewhere."""


def system_look(name: str) -> SystemLook:
    color, marker = _LOOKS.get(name, _OTHER_LOOK)
    return SystemLook(title=SYSTEMS.get(name).title, color=color, marker=marker)


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings inside the block; nothing stays changed after it."""
    import matplotlib as mpl
    import seaborn as sns

    own: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        "figure.dpi": DPI,
        "pdf.fonttype": 42,
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(), sns.axes_style("ticks"):
        mpl.rcParams.update(own)
        yield


def row_of_panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure of its own, unknown to pyplot: nothing has to be closed, no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, text in zip(panels, titles, strict=True):
        axes.set_title(text)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def compose(
    figure: Figure,
    panels: Sequence[Axes],
    *,
    title: str,
    caption: Sequence[str],
    legend_columns: int,
    width_inches: float | None = None,
) -> None:
    """Title, one legend for all panels, the panels, and the caption, a paragraph per sentence.

    Heights are counted in inches, so that no part can run into another whatever the caption's length. A label that
    several panels have is listed once.
    """
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    width = width_inches or PANEL_INCHES[0] * len(panels)
    characters = int(width * CHARACTERS_PER_INCH)
    lines = [line for sentence in caption for line in textwrap.wrap(sentence, characters)]

    legend_top = 0.1 + TITLE_INCHES * (1 + title.count("\n"))
    panel_top = legend_top + LEGEND_INCHES * -(-len(entries) // legend_columns) + 0.4
    panel_bottom = panel_top + PANEL_INCHES[1]
    caption_top = panel_bottom + 0.5
    height = caption_top + len(lines) * CAPTION_POINTS * LINE_SPACING / 72 + 0.08

    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=0.55 / width,
        right=1 - 0.15 / width,
        top=1 - panel_top / height,
        bottom=1 - panel_bottom / height,
        wspace=0.22,
    )
    figure.suptitle(title, y=1 - 0.08 / height, va="top", fontsize=11)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - legend_top / height),
        ncols=min(legend_columns, len(entries)),
        frameon=False,
        borderaxespad=0,
    )
    figure.supxlabel(
        "\n".join(lines),
        x=0.1 / width,
        y=1 - caption_top / height,
        ha="left",
        va="top",
        fontsize=CAPTION_POINTS,
        linespacing=LINE_SPACING,
        color="#404040",
    )


def save(figure: Figure, out: Path, name: str) -> tuple[Path, Path]:
    """<name>.png and <name>.pdf, without dates or versions in them."""
    metadata = {"png": {"Software": None}, "pdf": {"Creator": None, "Producer": None, "CreationDate": None}}
    paths = []
    for kind, without in metadata.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=without)
        paths.append(out / f"{name}.{kind}")
        _replace(paths[-1], buffer.getvalue())
    png, pdf = paths
    return png, pdf


def save_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """None is an empty cell, floats keep every digit, booleans are true and false."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    _replace(path, text.getvalue().encode())
    return path


def save_markdown(
    path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Path:
    """A table to paste into a text, with what is said about it under it."""
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines += ["", *(f"{note}\n" for note in notes)]
    _replace(path, "\n".join(lines).rstrip("\n").encode() + b"\n")
    return path


def _cell(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
