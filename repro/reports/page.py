"""One page of figures and claims: everything in a folder of results, as a self-contained HTML file.

The folder is like the repository's ``results``: folders of figures with their tables of runs, verdicts beside these, and maybe ``truth``.
``page.html`` is the template."""

import base64
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import UserError, require
from repro.reports import claims_file
from repro.reports.figures import PAPERS, Paper
from repro.reports.run_table import RunTable, command_of, read_table, tables_in
from repro.runs.clean import clean_text
from repro.runs.provenance import git_state
from repro.runs.store import SUFFIX, UNREADABLE, StoreError, read_run

LABELS: Mapping[str, str] = {
    "measured": "the model ran on the machine that the caption names",
    "composed": "simulated: a step takes the sum of kernel times that others measured on the card",
    "simulated": "simulated: a roofline of the card prices each step",
    "computed": "arithmetic on shapes and settings: nothing was run",
    "paper": "the paper prints it",
}
VERDICTS = ("reproduced", "not reproduced", "undecided by reading", "by construction", "not testable here", "not run")
_WIDTH, _COLOURS = 1000, 24
"""Width in pixels and number of colours of a picture. It is legible in print, and all pictures of the repository stay below 5 MB."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_INTERVAL = re.compile(rf"({_NUMBER}) (?:(\[{_NUMBER}, {_NUMBER}\])|± ({_NUMBER}))")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on one platform, as it was drawn."""

    name: str
    place: str
    caption: str
    image: str = ""
    """The picture as a data URI, if it is drawn."""
    rows: Sequence[Sequence[str]] = ()
    """The cells of a table, its head first."""
    labels: tuple[str, ...]
    """How the figure's runs were obtained."""
    provenance: Mapping[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A figure of a paper with its pictures and claims, or the claims that belong to no figure."""

    name: str
    title: str
    pictures: tuple[Picture, ...] = ()
    claims: tuple[Mapping[str, str], ...] = ()
    labels: frozenset[str] = field(default=frozenset())


def interval_of(row: Mapping[str, str]) -> str:
    """The 95 % interval of the value, as the finding's text states it; a dash if it states none."""
    ours = row["ours"].split()
    if len(ours) != 1:
        return "–"
    for centre, ends, half in _INTERVAL.findall(row["how"]):
        digits = len(centre.partition(".")[2])
        if abs(abs(float(centre)) - abs(round(float(ours[0]), digits))) < 0.5 * 10**-digits:
            return ends or f"± {half}"
    return "–"


def short(text: str) -> str:
    """The text with numbers shortened to four digits."""
    return re.sub(r"-?\d+\.\d{4,}(?:e-?\d+)?", lambda found: f"{float(found[0]):.4g}", text)


def _claim_texts(row: Mapping[str, str]) -> dict[str, str]:
    values = {name: tuple(map(float, row[name].split())) or None for name in ("expected", "ours")}
    texts = {name: claims_file.value_text(value, row["unit"]) for name, value in values.items()}
    if values["ours"] is None or values["expected"] is None:
        texts["ours"] = {"True": "holds", "False": "does not hold"}.get(
            row["holds"], "–" if not row["ours"] else texts["ours"]
        )
    words = {name: short(row[name]) for name in ("reason", "readings", "how")}
    return {**row, **texts, **words, "interval": interval_of(row)}


def rows_of(page: str) -> tuple[list[list[str]], str]:
    """The cells of a page's Markdown table, its head first, and the text around it."""
    lines = [line for line in page.splitlines() if not re.fullmatch(r"[|\s:-]+", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows, "\n".join(line.lstrip("# ") for line in lines if not line.startswith("|"))


# -- pictures ---------------------------------------------------------------------------------------------


def packed(path: Path) -> str:
    """A picture as a data URI, with only as many colours and pixels as a plot needs."""
    from PIL import Image

    with Image.open(path) as image:
        picture = image.convert("RGB")
    if picture.width > _WIDTH:
        picture = picture.resize((_WIDTH, round(picture.height * _WIDTH / picture.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).convert("RGB").save(buffer, "WEBP", lossless=True, quality=60)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _versions(table: RunTable, store: Path | None) -> tuple[str, ...]:
    """Commits of the runs behind a figure, for runs whose files are in the store."""
    if store is None or not table.rows:
        return ()
    keys = {row["key"] for row in table.fixed}
    commits: set[str] = set()
    for file in sorted(store.glob(f"*{SUFFIX}")):
        if file.name.removesuffix(SUFFIX).rpartition("_")[2] in keys:
            try:
                commits.add(str(read_run(file).provenance["git"]["commit"] or "an unknown commit")[:8])
            except (*UNREADABLE, StoreError, UserError):
                continue
    return tuple(sorted(commits))


def _warnings(table: RunTable, versions: Sequence[str]) -> list[str]:
    rows = [*table.fixed]
    texts = [] if table.is_whole else ["its table of runs is not as it was written"]
    for mark in ("other code", "other machine"):
        if count := sum(mark in row["obtained"] for row in rows):
            texts.append(f"{count} of {len(rows)} runs were made by {mark.replace('other', 'another version of the')}")
    if len(versions) > 1:
        texts.append(f"runs come from {len(versions)} versions: {', '.join(versions)}")
    if count := sum(row["valid"] != "true" for row in rows):
        texts.append(f"{count} of {len(rows)} runs are INVALID")
    if count := sum("contended" in row["obtained"] for row in rows):
        texts.append(f"{count} of {len(rows)} runs were measured while the machine was busy with something else")
    return texts


def _picture(table: RunTable, root: Path, store: Path | None) -> Picture:
    stem = table.stem
    png, txt = (stem.with_name(f"{stem.name}{ending}") for ending in (".png", ".txt"))
    page = stem.with_name(f"{stem.name}.md")
    words = txt.read_text(encoding="utf-8") if txt.is_file() else ""
    rows, around = rows_of(page.read_text(encoding="utf-8")) if page.is_file() else ([], "")
    labels = tuple(sorted({row["obtained"].partition(",")[0] for row in table.fixed})) or ("computed",)
    versions = _versions(table, store)
    names = ", ".join(sorted(path.name for path in stem.parent.glob(f"{stem.name}.*")))
    provenance = {
        "command": command_of(table).rpartition(" --out-dir ")[0],
        "runs": str(len(table.rows)),
        "folder": str(stem.parent.relative_to(root.parent if root.name == "results" else root)),
        "files": names,
        "seal": str(table.head["seal"])[:12],
        **({"commits": ", ".join(versions)} if versions else {}),
    }
    return Picture(
        name=stem.name,
        place=table.entry.load().place(table.view.platform),
        caption=clean_text((words or around).strip()),
        image=packed(png) if png.is_file() else "",
        rows=() if png.is_file() else rows,
        labels=labels,
        provenance=provenance,
        warnings=tuple(_warnings(table, versions)),
    )


# -- the page ---------------------------------------------------------------------------------------------


def sections(
    paper: Paper, pictures: Mapping[str, Sequence[Picture]], claims: Sequence[Mapping[str, str]]
) -> list[Section]:
    """A paper's figures in order, each with its claims. Claims without a drawn figure come last."""
    names = [name for name in (entry.name for entry in paper.entries) if pictures.get(name)]
    titles = {entry.name: entry.title for entry in paper.entries}
    parts = []
    for name in names:
        drawn = tuple(pictures[name])
        of_figure = tuple(_claim_texts(row) for row in claims if row["figure"] == name)
        labels = frozenset(label for picture in drawn for label in picture.labels)
        parts.append(Section(name=name, title=titles[name], pictures=drawn, claims=of_figure, labels=labels))
    rest = tuple(_claim_texts(row) for row in claims if row["figure"] not in names)
    if rest:
        parts.append(Section(name=f"{paper.name}/other", title=f"{paper.title}: other claims", claims=rest))
    return parts


def _csv_rows(path: Path) -> list[list[str]]:
    return [*csv.reader(path.read_text(encoding="utf-8").splitlines())] if path.is_file() else []


def contents(root: Path, store: Path | None = None, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The content of the page for a folder of results. ``store`` is a folder of runs in which commits are looked up."""
    tables = [read_table(path) for path in tables_in(root)]
    require(tables != [], f"results={str(root)!r} holds no table of runs: give a folder like the repository's results")
    pictures: dict[str, list[Picture]] = {}
    for table in tables:
        pictures.setdefault(table.entry.name, []).append(_picture(table, root, store))
        advance()
    files = {name: root / f"claims-{name}.csv" for name in PAPERS}
    claims = {name: claims_file.read(path) if path.is_file() else [] for name, path in files.items()}
    papers = [(paper, sections(paper, pictures, claims[name])) for name, paper in PAPERS.items()]
    shown = [row for rows in claims.values() for row in rows]
    num_runs = Counter(row["obtained"].partition(",")[0] for table in tables for row in table.fixed)
    return {
        "papers": [(paper, parts) for paper, parts in papers if parts],
        "labels": LABELS,
        "num_runs": num_runs,
        "verdicts": [
            each for each in (*VERDICTS, "paper's inconsistency") if any(row["verdict"] == each for row in shown)
        ],
        "num_claims": {
            paper.name: Counter(row["verdict"] for row in claims[paper.name]) for paper, parts in papers if parts
        },
        "truth": [(name, _csv_rows(root / "truth" / f"{name}.csv")) for name in ("errors", "truth", "stated")],
        "commit": str(git_state().commit or "unknown")[:8],
    }


def html(content: Mapping[str, Any]) -> str:
    """The HTML page of ``contents``."""
    import jinja2

    from repro import __version__

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").render(version=__version__, **content)
