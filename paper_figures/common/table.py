"""What a table leaves behind: Markdown to paste into a text, and the CSV behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from repro.reports.figures import Rendered


def save_table(
    out: Path,
    stem: str,
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    notes: Sequence[str],
    csv_columns: Sequence[str] | None = None,
    csv_rows: Sequence[Sequence[object]] | None = None,
) -> Rendered:
    """The CSV holds the table itself where nothing else is given for it."""
    return Rendered(
        files=(
            style.save_markdown(out / f"{stem}.md", title, columns, rows, notes),
            style.save_csv(out / f"{stem}.csv", csv_columns or columns, rows if csv_rows is None else csv_rows),
        ),
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes),
    )
