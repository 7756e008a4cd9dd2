"""One look for all figures, and files that are the same bytes for the same data.

A system has one colour (Okabe and Ito's palette, told apart in every common form of colour blindness) and one
marker everywhere; its title is the system's own. Filled markers are our runs, hollow ones the paper's values, an x is an
invalid run. Every figure carries a caption that says how each series was obtained.
"""

from __future__ import annotations

import csv
import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repro.files import replace_all, replace_bytes
from repro.runs.system import ENTRIES, SYSTEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
PANEL_INCHES = (3.6, 2.1)
"""Width with its margins, height without."""
WIDE_INCHES = 6.4
"""Width of a figure with one panel."""
EDGE_INCHES, ROW_GAP_INCHES = 0.1, 0.1
"""Free space at the sides of the canvas, and between rows of panels."""
TITLE_POINTS = 11
CAPTION_POINTS, FOOT_POINTS = 7, 6
CAPTION_LINES = 4
LINE_SPACING = 1.35
CHARACTERS_PER_INCH, TITLE_CHARACTERS_PER_INCH = 19, 11
"""Density of caption and title text, with a margin."""
HANDLE_LENGTH, DASHED_HANDLE_LENGTH = 2.0, 3.2
"""In letters, of a legend: a dashed line has to show on both sides of its marker."""
GUIDE_COLOR = "#8A8A8A"
"""Lines that are no series."""


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
"""Look of a system that comes from elsewhere."""


def system_look(name: str) -> Look:
    entry = ENTRIES.get(name)
    color, marker = (entry.colour, entry.marker) if entry is not None and entry.colour else _OTHER_LOOK
    return Look(title=SYSTEMS.get(name).title, color=color, marker=marker)


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


def grid_of_panels(titles: Sequence[str], *, columns: int) -> tuple[Figure, list[Axes]]:
    """Row by row; ``publish`` needs the number of rows. Places of the last row that have no title stay empty.

    The figure is unknown to pyplot: nothing has to be closed, no display is needed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    places = list(figure.subplots(-(-len(titles) // columns), columns, squeeze=False).flat)
    panels = places[: len(titles)]
    for axes in places[len(titles) :]:
        axes.remove()
    for axes, text in zip(panels, titles, strict=True):
        axes.set_title(text)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def publish(
    figure: Figure,
    panels: Sequence[Axes],
    out: Path,
    name: str,
    *,
    title: str,
    caption: Sequence[str],
    always: str = "",
    width_inches: float | None = None,
    num_rows: int = 1,
) -> tuple[Path, Path, Path]:
    """PNG, PDF, and the caption beside them: title, one legend for all panels, the panels, and up to ``CAPTION_LINES`` lines of the
    caption.

    Heights and margins are measured in inches, so that no part runs into another or leaves the canvas. A label that
    several panels have is listed once. Under the panels stand as many of the caption's leading sentences as fit, that
    which is ``always`` shown, and the name of the file with all of them.
    """
    text = out / f"{name}.txt"
    columns = -(-len(panels) // num_rows)
    width = width_inches or PANEL_INCHES[0] * columns
    figure.set_size_inches(width, PANEL_INCHES[1] * num_rows + 2)
    lines = shown_caption(caption, text.name, int(width * CHARACTERS_PER_INCH), always)
    heading = "\n".join(
        line for part in title.split("\n") for line in balanced(part, int(width * TITLE_CHARACTERS_PER_INCH))
    )
    suptitle = figure.suptitle(heading, va="top", fontsize=TITLE_POINTS)
    legend = _legend(figure, panels, width)

    left, right, above, below, between = _margins(figure, panels, columns)
    between_rows = above + below + ROW_GAP_INCHES
    title_top = 0.08
    legend_top = title_top + _inches(figure, suptitle)[1] + 0.08
    panel_top = legend_top + (0 if legend is None else _inches(figure, legend)[1] + 0.1) + above
    panel_bottom = panel_top + PANEL_INCHES[1] * num_rows + between_rows * (num_rows - 1)
    caption_top = panel_bottom + below + 0.1
    height = caption_top + len(lines) * CAPTION_POINTS * LINE_SPACING / 72 + 0.08

    figure.set_size_inches(width, height)
    panel_width = (width - left - right - between * (columns - 1)) / columns
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - panel_top / height,
        bottom=1 - panel_bottom / height,
        wspace=between / panel_width,
        hspace=between_rows / PANEL_INCHES[1],
    )
    suptitle.set_y(1 - title_top / height)
    if legend is not None:
        legend.set_bbox_to_anchor((0.5, 1 - legend_top / height))
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
    png, pdf = (out / f"{name}.{kind}" for kind in ("png", "pdf"))
    replace_all({png: rendered(figure, "png"), pdf: rendered(figure, "pdf"), text: caption_file(title, caption)})
    return png, pdf, text


def balanced(text: str, most: int) -> list[str]:
    """As few lines as hold the text, of about one length: no word stands alone on the last."""
    lines = textwrap.wrap(text, most)
    for width in range(len(text) // max(1, len(lines)) + 1, most):
        if len(narrower := textwrap.wrap(text, width)) == len(lines):
            return narrower
    return lines


def shown_caption(sentences: Sequence[str], more: str, characters: int, always: str = "") -> list[str]:
    """The leading sentences that fit whole into ``CAPTION_LINES`` lines, the one that is ``always`` shown, and where all of
    them are."""
    pointer = f"Full caption: {more}."
    for count in range(len(sentences), -1, -1):
        leading = sentences[:count]
        told = [*leading, *([always] if always and always not in leading else []), pointer]
        lines = textwrap.wrap(" ".join(told), characters, break_long_words=False, break_on_hyphens=False)
        if len(lines) <= CAPTION_LINES:
            return lines
    return [pointer]


def _legend(figure: Figure, panels: Sequence[Axes], width: float) -> Any:
    """The legend in as few rows as the width allows, a label with the first handle that has it, in the order of drawing; None
    where there is no label."""
    entries: dict[str, Any] = {}
    for axes in panels:
        drawn = {id(artist): place for place, artist in enumerate(axes.get_children())}
        handles, labels = axes.get_legend_handles_labels()
        places = [drawn[id(_main(handle))] for handle in handles]
        for _, label, handle in sorted(zip(places, labels, handles, strict=True), key=lambda each: each[0]):
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
    """The handle of a line with intervals, or of bars, is a tuple of what is drawn."""
    return handle[0] if isinstance(handle, tuple) else handle


def _is_dashed(handle: Any) -> bool:
    """Whether it is a broken line through markers."""
    from matplotlib.lines import Line2D

    line = _main(handle)
    return isinstance(line, Line2D) and line.get_linestyle() in ("--", ":") and line.get_marker() not in ("None", "")


def _inches(figure: Figure, artist: Any) -> tuple[float, float]:
    """Width and height."""
    box = artist.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    return box.width / figure.dpi, box.height / figure.dpi


def _margins(figure: Figure, panels: Sequence[Axes], columns: int) -> tuple[float, float, float, float, float]:
    """Inches that labels, ticks and titles need left of the rows of panels, right of them, above, below, and between
    two of a row."""
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
        max(side[3] for side in sides),
        between + 0.15,
    )


def log_scale(axes: Axes) -> None:
    """Make the y-axis logarithmic, with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def foot_label(axes: Axes, place: float, value: float | None) -> None:
    """A bar's number below the axis, where neither its interval nor the paper's value can be."""
    text = "no run" if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    axes.annotate(
        text,
        (place, 0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, -3),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=FOOT_POINTS,
        annotation_clip=False,
    )
    axes.tick_params(axis="x", length=0, pad=FOOT_POINTS + 6)


def caption_file(title: str, sentences: Sequence[str]) -> bytes:
    return "\n".join([*title.split("\n"), "", *sentences, ""]).encode()


def rendered(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
    """Without dates or versions in it."""
    without = {"png": {"Software": None}, "pdf": {"Creator": None, "Producer": None, "CreationDate": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=without[kind])
    return buffer.getvalue()


def save_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """None is an empty cell, floats keep every digit, booleans are true and false."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    replace_bytes(path, text.getvalue().encode())
    return path


def save_markdown(
    path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Path:
    """A table to paste into a text, with what is said about it under it."""
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines += ["", *(f"{note}\n" for note in notes)]
    replace_bytes(path, "\n".join(lines).rstrip("\n").encode() + b"\n")
    return path


def _cell(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value
