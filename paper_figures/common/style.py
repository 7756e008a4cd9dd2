"""One look for all figures, and files that are the same bytes for the same data.

Each system has one colour and one marker everywhere, and its own title. Colours are Okabe and Ito's, which differ in every common form of
colour blindness. Filled markers are our runs, hollow ones the paper's values, and an x is an invalid run. Every figure has a caption that
says how each series was obtained.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from repro.files import csv_text, replace_text
from repro.runs.system import ENTRIES, SYSTEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDEST_INCHES = 7.2
"""Width of a page's text. No picture is wider, so letters keep the size they are drawn in."""
WIDE_INCHES = 4.8
"""Width of a picture with one panel."""
PANEL_HEIGHTS = {1: 2.3, 2: 1.75, 3: 1.5}
"""Panel heights in inches, by the number of panels per row."""
PANELS_INCHES = 6.9
"""Most height of all rows of panels together, so that a picture fits on a page."""
EDGE_INCHES, ROW_GAP_INCHES = 0.08, 0.1
"""Free space at the sides of the canvas, and between rows of panels."""
TITLE_POINTS, LETTER_POINTS, LEAST_POINTS = 10, 8, 7
"""Sizes of the title, of letters, and of the smallest letters: numbers of bars, names of many ticks."""
_LETTERS = "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"
LINE_SPACING = 1.35
CHARACTERS_PER_INCH, TITLE_CHARACTERS_PER_INCH = 16.5, 12
"""Density of caption and title text, with a margin."""
HANDLE_LENGTH, DASHED_HANDLE_LENGTH = 2.0, 3.2
"""Lengths of legend handles, in letters: a dashed line has to show on both sides of its marker."""
GUIDE_COLOR = "#8A8A8A"
"""Color of lines that are no series."""


@dataclass(frozen=True, kw_only=True)
class Look:
    title: str = ""
    color: str
    marker: str
    linestyle: str = "-"

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle}


_OTHER_LOOK = ("#000000", "X")
"""Look of a system that we do not know."""


def system_look(name: str) -> Look:
    entry = ENTRIES.get(name)
    color, marker = (entry.colour, entry.marker) if entry is not None and entry.colour else _OTHER_LOOK
    return Look(title=SYSTEMS.get(name).title, color=color, marker=marker)


@contextmanager
def drawing() -> Iterator[None]:
    """Apply our matplotlib settings inside the block, and restore the old ones after it."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()  # ignore a user's own settings
        mpl.rc_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
        settings: Any = {"figure.dpi": DPI, **dict.fromkeys(_LETTERS, LETTER_POINTS)}
        mpl.rcParams.update(settings)
        yield


def grid_of_panels(titles: Sequence[str], *, columns: int) -> tuple[Figure, list[Axes]]:
    """Lay out panels row by row; ``compose`` needs the number of columns too. Places of the last row without a title stay empty.

    The figure is unknown to pyplot, so nothing has to be closed, and no display is needed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    places = list(figure.subplots(-(-len(titles) // columns), columns, squeeze=False).flat)
    panels = places[: len(titles)]
    for axes in places[len(titles) :]:
        axes.remove()
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def compose(
    figure: Figure,
    panels: Sequence[Axes],
    *,
    title: str,
    line: str,
    columns: int | None = None,
    width_inches: float | None = None,
) -> None:
    """Place the title, one legend for all panels, the panels, and a caption line; an empty title or line is left out.

    Heights and margins are in inches, so that no part overlaps another or leaves the canvas. The legend lists a label once, even if
    several panels have it. A name that neighbours' axes share is shown only at the outermost axis.
    """
    columns = columns or len(panels)
    width = width_of(columns, width_inches)
    num_rows = -(-len(panels) // columns)
    panel_height = min(PANEL_HEIGHTS[min(columns, 3)], PANELS_INCHES / num_rows)
    figure.set_size_inches(width, panel_height * num_rows + 2)
    heading = "\n".join(
        part for row in title.split("\n") for part in balanced(row, int(width * TITLE_CHARACTERS_PER_INCH))
    )
    suptitle = figure.suptitle(heading, va="top", fontsize=TITLE_POINTS) if heading else None
    _name_once(panels, columns)
    legend = _legend(figure, panels, width)

    left, right, above, below, between, inner = _margins(figure, panels, columns)
    between_rows = above + inner + ROW_GAP_INCHES
    top = 0.08
    legend_top = top + (0 if suptitle is None else _inches(figure, suptitle)[1] + 0.08)
    panel_top = legend_top + (0 if legend is None else _inches(figure, legend)[1] + 0.1) + above
    panel_bottom = panel_top + panel_height * num_rows + between_rows * (num_rows - 1)
    line_top = panel_bottom + below + 0.1
    height = line_top + (LETTER_POINTS * LINE_SPACING / 72 + 0.06 if line else 0)

    figure.set_size_inches(width, height)
    panel_width = (width - left - right - between * (columns - 1)) / columns
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - panel_top / height,
        bottom=1 - panel_bottom / height,
        wspace=between / panel_width,
        hspace=between_rows / panel_height,
    )
    if suptitle is not None:
        suptitle.set_y(1 - top / height)
    if legend is not None:
        legend.set_bbox_to_anchor((0.5, 1 - legend_top / height))
    for axes in panels:
        _move_labels(figure, axes)
    if line:
        placement: Any = {"x": 0.1 / width, "y": 1 - line_top / height, "ha": "left", "va": "top"}
        figure.supxlabel(line, **placement, fontsize=LETTER_POINTS, color="#404040")


def width_of(columns: int, asked: float | None = None) -> float:
    """Width in inches of a picture with so many panels per row."""
    return min(WIDEST_INCHES, asked or (WIDE_INCHES if columns == 1 else WIDEST_INCHES))


def _name_once(panels: Sequence[Axes], columns: int) -> None:
    """Hide an axis name if the panel below, or the one to the left, has the same."""
    above = [i for i in range(len(panels) - columns) if _names(panels, i)[0] == _names(panels, i + columns)[0]]
    right = [i for i in range(len(panels)) if i % columns and _names(panels, i)[1] == _names(panels, i - 1)[1]]
    for i in above:
        panels[i].set_xlabel("")
    for i in right:
        panels[i].set_ylabel("")


def _names(panels: Sequence[Axes], at: int) -> tuple[str, str]:
    return panels[at].get_xlabel(), panels[at].get_ylabel()


def balanced(text: str, most: int) -> list[str]:
    """Split text into the fewest lines, of similar length, so that no word stands alone on the last."""
    lines = textwrap.wrap(text, most)
    for width in range(len(text) // max(1, len(lines)) + 1, most):
        if len(narrower := textwrap.wrap(text, width)) == len(lines):
            return narrower
    return lines


def caption_line(repeats: str, more: str, characters: int) -> str:
    """The line under the panels: the number of repeats, if that fits, and the file with the whole caption."""
    pointer = f"Full caption: {more}."
    line = f"{repeats} {pointer}".strip()
    return line if len(line) <= characters else pointer


def _legend(figure: Figure, panels: Sequence[Axes], width: float) -> Any:
    """Draw a legend in as few rows as the width allows, or return None without labels. Each label has its first handle, in the order of
    drawing."""
    entries: dict[str, Any] = {}
    for axes in panels:
        draw_order = {id(artist): index for index, artist in enumerate(axes.get_children())}
        handles, labels = axes.get_legend_handles_labels()
        positions = [draw_order[id(_main(handle))] for handle in handles]
        for _, label, handle in sorted(zip(positions, labels, handles, strict=True), key=lambda each: each[0]):
            entries.setdefault(label, handle)
    legend = None
    for rows in range(1, len(entries) + 1):
        legend = figure.legend(
            entries.values(),
            entries.keys(),
            loc="upper center",
            ncols=-(-len(entries) // rows),
            frameon=False,
            handlelength=DASHED_HANDLE_LENGTH if any(map(_is_dashed, entries.values())) else HANDLE_LENGTH,
            borderaxespad=0,
            borderpad=0,
        )
        if rows == len(entries) or _inches(figure, legend)[0] <= width - 2 * EDGE_INCHES:
            break
        legend.remove()
    return legend


def _main(handle: Any) -> Any:
    """Return the main part of a handle, as lines with intervals, and bars, have tuples."""
    return handle[0] if isinstance(handle, tuple) else handle


def _is_dashed(handle: Any) -> bool:
    """Whether the handle is a broken line with markers."""
    from matplotlib.lines import Line2D

    line = _main(handle)
    return isinstance(line, Line2D) and line.get_linestyle() in ("--", ":") and line.get_marker() not in ("None", "")


def _inches(figure: Figure, artist: Any) -> tuple[float, float]:
    """Return width and height in inches."""
    box = artist.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    return box.width / figure.dpi, box.height / figure.dpi


def _margins(figure: Figure, panels: Sequence[Axes], columns: int) -> tuple[float, float, float, float, float, float]:
    """Return the inches that labels, ticks and titles need: left of the rows, right of them, above, below, between two panels of a row,
    and below all rows except the last."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    sides = []
    for axes in panels:
        inner, outer = axes.get_window_extent(renderer), axes.get_tightbbox(renderer)
        assert outer is not None
        sides.append(
            [
                max(0.0, inches) / figure.dpi
                for inches in (inner.x0 - outer.x0, outer.x1 - inner.x1, outer.y1 - inner.y1, inner.y0 - outer.y0)
            ]
        )
    rows = [sides[start : start + columns] for start in range(0, len(sides), columns)]
    between = max((a[1] + b[0] for row in rows for a, b in itertools.pairwise(row)), default=0.0)
    return (
        max(row[0][0] for row in rows) + EDGE_INCHES,
        max(row[-1][1] for row in rows) + EDGE_INCHES,
        max(side[2] for side in sides) + 0.04,
        max(side[3] for side in rows[-1]),
        between + 0.12,
        max((side[3] for row in rows[:-1] for side in row), default=0.0),
    )


def log_scale(axes: Axes, name: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of every decade; if there are many decades, at 1 only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    class PlainLocator(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            self.set_params(subs=(1, 2, 5) if vmax <= MOST_FOLD * max(vmin, vmax * 1e-12) else (1,))
            return super().tick_values(vmin, vmax)

    {"x": axes.set_xscale, "y": axes.set_yscale}[name]("log")
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    axis.set_major_locator(PlainLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


MOST_FOLD = 300
"""The largest ratio of an axis's ends that leaves room for three names per decade."""


def foot_label(axes: Axes, place: float, value: float | None) -> None:
    """Write a bar's number below the axis, where it meets neither an interval nor a paper's value."""
    text = "no run" if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    axes.annotate(
        text,
        (place, 0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, -3),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=LEAST_POINTS,
        annotation_clip=False,
    )
    axes.tick_params(axis="x", length=0, pad=LEAST_POINTS + 6)


BESIDE = "beside"
"""Marks texts that ``compose`` moves to free places."""
DIRECTIONS = ((1, 1), (1, 0), (1, -1), (-1, 1), (-1, 0), (-1, -1), (0, 1.3), (0, -1.3))
OFFSETS = tuple((distance * x, distance * y) for distance in (4, 8, 13, 19, 26, 34, 43) for x, y in DIRECTIONS)
"""Offsets of a text from its point, in points, the best first."""


def label_beside(axes: Axes, text: str, place: float, value: float, color: str) -> None:
    offset: Any = {"xytext": OFFSETS[0], "textcoords": "offset points", "gid": BESIDE}
    note = axes.annotate(text, (place, value), **offset, fontsize=LEAST_POINTS, color=color, annotation_clip=False)
    note.set_zorder(11)
    note.set_in_layout(False)  # it will lie inside the panel, so it needs no margin


def _move_labels(figure: Figure, axes: Axes) -> None:
    """Move each text beside a point to the first free place in the panel, off all markers, lines and other texts. A text without a free
    place is left out."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken = _boxes(axes, figure.dpi)
    texts: list[Any] = [text for text in axes.texts if text.get_gid() == BESIDE]
    for text in texts:
        text.set_visible(False)
        for x, y in OFFSETS:
            text.xyann = (x, y)
            text.set_ha("left" if x > 0 else "right" if x < 0 else "center")
            text.set_va("bottom" if y > 0 else "top" if y < 0 else "center")
            text.set_visible(True)
            box = text.get_window_extent(renderer)
            is_in = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if is_in and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.set_visible(False)


def _boxes(axes: Axes, dpi: float) -> list[Any]:
    """Return a box around each marker, and small boxes along the lines that join markers."""
    from matplotlib.transforms import Bbox

    boxes = []
    for line in axes.get_lines():
        points = line.get_transform().transform(line.get_xydata())
        if line.get_marker() not in ("", "None", None, "|", "_"):
            half = line.get_markersize() * dpi / 144
            boxes += [Bbox([point - half, point + half]) for point in points]
        if "None" not in (line.get_linestyle(), line.get_marker()):
            for start, end in itertools.pairwise(points):
                boxes += [Bbox([point, point + 1]) for point in np.linspace(start, end, BOXES_A_PIECE)]
    return boxes


BOXES_A_PIECE = 12


def caption_file(title: str, sentences: Sequence[str]) -> bytes:
    return "\n".join([*title.split("\n"), "", *sentences, ""]).encode()


def rendered(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
    """Render the figure without dates or versions in the file."""
    metadata = {"png": {"Software": None}, "pdf": {"Creator": None, "Producer": None, "CreationDate": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata[kind])
    return buffer.getvalue()


def save_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """Write a CSV: None is an empty cell, floats keep every digit, booleans are true and false."""
    return replace_text(path, csv_text(columns, (map(_cell, row) for row in rows)))


def save_markdown(
    path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Path:
    """Write a Markdown table to paste into a text, with notes below it."""
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines += ["", *(f"{note}\n" for note in notes)]
    return replace_text(path, "\n".join(lines).rstrip("\n") + "\n")


def _cell(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
