"""A figure as data: its grid of cells, its page, and its findings. This module turns them into files."""

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import TypeVar

from engines.cache import cached_result
from engines.errors import UserError
from paper_figures.common import style
from paper_figures.common.caption import basis_of, invalid_notes, missing_note, origin_of, repeats_line
from paper_figures.common.panel import FLAT_PERCENT, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.words import brief
from repro.families.platforms import Platform
from repro.files import replace_all, replace_bytes
from repro.reports.claims import Finding
from repro.reports.figures import FIGURES, PICTURES, Figure, Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

Item = TypeVar("Item")
Columns = Mapping[str, Callable[[Item], object]]
"""Name of a column -> its entry for an item."""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def table(items: Iterable[Item], columns: Columns[Item]) -> Table:
    return Table(columns=tuple(columns), rows=[tuple(column(item) for column in columns.values()) for item in items])


@dataclass(frozen=True, kw_only=True)
class Picture:
    panels: Sequence[Panel]
    caption: Sequence[str]
    repeats: str | None = None
    """The number of repeats in a few words, for the line under the panels; None counts the seeds of the runs."""
    after_title: str = ""
    columns: int | None = None
    """Panels per row. With None, up to three panels form one row, and more form rows of two."""
    width_inches: float | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a figure shows: a table and notes on the terminal, and as files a picture or the table, and a CSV."""

    table: Table | None = None
    """None shows the picture's numbers."""
    notes: Sequence[str] = ()
    picture: Picture | None = None
    csv: Table | None = None
    """None uses the table itself."""
    after_heading: str = ""
    """Text after the title of the Markdown table. A figure has that table if it draws no picture, or sets this."""


def figure(
    name: str,
    source: str,
    *,
    platforms: tuple[str, ...],
    page: Callable[[Runs], Page],
    paper: str | None = None,
    title: str | None = None,
    cells: Callable[[View], Iterable[Cell]] | None = None,
    in_order: Callable[[Iterable[Cell], View], Iterable[Cell]] = lambda cells, view: cells,
    findings: Callable[[Runs], list[Finding]] = lambda runs: [],
    num_runs: int = 1,
    is_timed: bool = True,
    decides_on: tuple[str, ...] | None = None,
    card: str | tuple[str, ...] | None = None,
    place: Callable[[Platform], str] = lambda where: where.title,
    under_title: Callable[[Runs], str] = basis_of,
    origin: Callable[[Runs], Sequence[str]] = origin_of,
) -> Figure:
    """``name`` is ``paper/figure``, or the bare name if ``paper`` is given; by default the paper lists its title. ``cells`` is None if
    arithmetic is enough. ``card`` is the paper's card, or its cards if it does not say which. Only there, with baselines as published,
    are its numbers comparable. ``origin`` tells, on pictures and the terminal, how the runs came about."""
    cards = card if isinstance(card, tuple) else tuple(filter(None, [card]))
    full_name = name if paper is None else f"{paper}/{name}"
    title, short_name = title or FIGURES[full_name].title, full_name.rpartition("/")[2]

    @_of_last_view
    def asked(view: View) -> list[Cell]:
        ordered = () if cells is None else in_order(cells(view), view)
        return list({cell.key: cell.with_figure(short_name) for cell in ordered}.values())

    def render(stored: Sequence[StoredRun], view: View, out: Path) -> Rendered:
        runs = Runs(stored, view)
        wanted = asked(view)
        if wanted and not stored:
            raise UserError(
                f"figure {short_name} on platform={view.platform.name!r} has no runs: run this first: repro reproduce {short_name} "
                f"--platform {view.platform.name}"
            )
        shown = _with_origin(page(runs), runs, wanted, origin)
        return _write(shown, title, lambda: under_title(runs), out / f"{short_name}-{view.stem}")

    def found(stored: Sequence[StoredRun], view: View) -> list[Finding]:
        if card is not None and (view.platform.name not in cards or view.reading != "published"):
            return []
        label = f"card={view.platform.name}" if len(cards) > 1 else ""
        return [replace(finding, place=label) if label else finding for finding in findings(Runs(stored, view))]

    return Figure(
        title=title,
        source=source,
        platforms=platforms,
        cells=asked,
        render=render,
        findings=found,
        num_runs=1 if cells is None else num_runs,
        is_timed=is_timed,
        decides_on=decides_on if card is None else cards,
        place=place,
    )


def _of_last_view(cells: Callable[[View], list[Cell]]) -> Callable[[View], list[Cell]]:
    """Keep the cells of the last view, as drawing asks for the same cells again."""
    last: tuple[View, list[Cell]] | None = None

    def asked(view: View) -> list[Cell]:
        nonlocal last
        if last is None or last[0] is not view:
            last = view, cells(view)
        return [*last[1]]

    return asked


def seed_by_seed(cells: Iterable[Cell], view: View) -> list[Cell]:
    """Order all cells of one seed before the next, so that a stopped sweep has whole repeats."""
    unique = list(dict.fromkeys(cells))
    return [cell.with_seed(seed) for seed in view.seeds for cell in unique]


def cell_by_cell(cells: Iterable[Cell], view: View) -> list[Cell]:
    """Order all repeats of one cell before the next cell."""
    return [cell.with_seed(seed) for cell in cells for seed in view.seeds]


def _with_origin(page: Page, runs: Runs, asked: Sequence[Cell], origin: Callable[[Runs], Sequence[str]]) -> Page:
    """Add to the page what is wrong with the runs, and to a picture how its runs came about."""
    notes = [*page.notes, *invalid_notes(runs.all), *missing_note(runs, asked)]
    if page.picture is None:
        return replace(page, notes=notes)
    repeats = repeats_line(runs.all) if page.picture.repeats is None else page.picture.repeats
    sentences = origin(runs) if runs.all else ()
    picture = replace(page.picture, caption=[*page.picture.caption, *sentences], repeats=repeats)
    return replace(page, notes=[*notes, *sentences], picture=picture)


def _write(page: Page, title: str, under: Callable[[], str], place: Path) -> Rendered:
    """Write the files, and return them with the text for the terminal."""
    out, stem, files = place.parent, place.name, list[Path]()
    shown = page.table
    if shown is None:
        assert page.picture is not None, "a page has a table or a picture"
        shown = in_numbers(page.picture.panels)
    columns, notes = tuple(shown.columns), tuple(page.notes)
    rows = tuple(tuple(map(_in_brief, row)) for row in shown.rows)
    if page.picture is not None:
        files += _draw(page.picture, f"{title}\n{under()}{page.picture.after_title}", out, stem)
    if page.picture is None or page.after_heading:
        files.append(style.save_markdown(out / f"{stem}.md", title + page.after_heading, columns, rows, notes))
    csv = page.csv or shown
    files.append(style.save_csv(out / f"{stem}.csv", csv.columns, csv.rows))
    return Rendered(files=tuple(files), columns=columns, rows=rows, notes=notes)


def _in_brief(value: object) -> str:
    """Format a value for the terminal."""
    if value is None:
        return "-"
    return brief(value) if isinstance(value, float) else str(value)


def in_numbers(panels: Sequence[Panel]) -> Table:
    """Return the drawn numbers as a table: a row for each place of each panel, a column for each label."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    measure = ""
    for panel in panels:
        measure = panel.y.label or measure  # only the first panel of a row has the label
        title = f"{panel.title}, {measure}".replace("\n", " ")
        for place, label, value in panel.numbers():
            rows.setdefault((title, place), {})[label] = value
    labels = dict.fromkeys(label for row in rows.values() for label in row)
    return Table(
        columns=("panel", "at", *labels),
        rows=[(*key, *(row.get(label, "-") for label in labels)) for key, row in rows.items()],
    )


def _draw(picture: Picture, title: str, out: Path, stem: str) -> tuple[Path, ...]:
    """Write PNG, PDF and caption; only the caption if no pictures are wanted."""
    panels, caption = drawn_panels(picture)
    if PICTURES.get() == "none":
        path = out / f"{stem}.txt"
        replace_bytes(path, style.caption_file(title, caption))
        return (path,)
    files = tuple(out / f"{stem}.{kind}" for kind in ("png", "pdf", "txt"))
    png, pdf = _pictures(panels, picture, title, files[-1].name)
    replace_all(dict(zip(files, (png, pdf, style.caption_file(title, caption)), strict=True)))
    return files


def _pictures(panels: Sequence[Panel], picture: Picture, title: str, text: str) -> tuple[bytes, bytes]:
    """Draw PNG and PDF, or take them from the user's cache if the same code drew the same panels with the same libraries."""
    columns = min(len(panels), picture.columns or (len(panels) if len(panels) <= MOST_IN_A_ROW else 2))
    width, is_plain = picture.width_inches, PICTURES.get() == "plain"
    characters = int(style.width_of(columns, width) * style.CHARACTERS_PER_INCH)
    line = style.caption_line(picture.repeats or "", text, characters)
    above, below = ("", "") if is_plain else (title, line)

    def drawn() -> bytes:
        with style.drawing():
            figure, all_axes = style.grid_of_panels([panel.title for panel in panels], columns=columns)
            for panel, axes in zip(panels, all_axes, strict=True):
                panel.draw(axes)
            style.compose(figure, all_axes, title=above, line=below, columns=columns, width_inches=width)
            png, pdf = style.rendered(figure, "png"), style.rendered(figure, "pdf")
        return len(png).to_bytes(8, "little") + png + pdf

    inputs = _known_by((panels, columns, width, above, below))
    if inputs is None:
        content = drawn()
    else:
        code = (path.read_bytes() for path in sorted(_HOME.rglob("*")) if path.suffix in (".py", ".mplstyle"))
        versions = (f"{name} {version(name)}".encode() for name in ("matplotlib", "fonttools", "numpy", "pillow"))
        content = cached_result("pictures", (*inputs, *versions, *code), drawn)
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content)
        self.modules = set[str]()

    def persistent_id(self, value: object) -> None:
        """Refuse code that cannot identify a picture, and note the modules of the rest."""
        if isinstance(value, type | FunctionType):
            if value.__module__.partition(".")[0] not in _KNOWN:
                raise pickle.PicklingError(value.__module__)
            self.modules.add(value.__module__)


def _known_by(values: object) -> list[bytes] | None:
    """Return the values and the code of their classes, to identify a picture. None if some are a user's own, or functions without a name:
    they might draw something else next time."""
    pickler = _Pickler(content := io.BytesIO())
    try:
        pickler.dump(values)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    files = (
        getattr(sys.modules[name], "__file__", None) for name in sorted(pickler.modules) if name.startswith("repro.")
    )
    return [content.getvalue(), *(Path(file).read_bytes() for file in files if file)]


_KNOWN = frozenset({"paper_figures", "repro", "builtins", "numpy"})
_HOME = Path(__file__).resolve().parents[1]


MOST_IN_A_ROW = 3


def drawn_panels(picture: Picture) -> tuple[list[Panel], list[str]]:
    """Return the panels that show something, and a caption that names those left out because they are flat."""
    panels = [panel for panel in picture.panels if not panel.is_flat] or list(picture.panels[:1])
    left_out = [panel.title for panel in picture.panels if panel not in panels]
    if not left_out:
        return panels, list(picture.caption)
    return panels, [
        *picture.caption,
        f"Panels left out, as all that they show lies at {FLAT_PERCENT:g} to 100 %: {', '.join(left_out)}.",
    ]
