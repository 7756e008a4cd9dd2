"""``repro report``: write all figures and claims of a results folder as one page, or the commands behind the claims."""

from pathlib import Path
from typing import Annotated

import typer

from engines.errors import UserError, require
from repro.cli import options as opt
from repro.cli.output import print_json, progress_bar, say
from repro.files import readable_folder, replace_text, writable_file
from repro.paths import IS_INSTALLED, RESULTS


def report(
    *,
    out: Annotated[
        Path | None, typer.Option(help="The page to write [default: report.html, with --guide ARTIFACT.md].")
    ] = None,
    guide: Annotated[
        bool,
        typer.Option(
            "--guide", help="Write the guide of an artifact committee instead: every claim's command and cost."
        ),
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of figures by platform, as results/figures is of your own [default: results]."),
    ] = None,
    result_dir: Annotated[
        Path | None, typer.Option(help="Also look up here which versions made the runs behind the figures.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Write all figures beside their claims, as one page that needs no network and no other files."""
    from repro.reports.artifact import guide as guide_of
    from repro.reports.page import contents, html

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    store = None if result_dir is None else readable_folder("result_dir", result_dir)
    require(not (guide and result_dir), f"result_dir={str(result_dir)!r} has no effect on a guide: leave it out")
    out = out or Path("ARTIFACT.md" if guide else "report.html")
    writable_file("out", out)
    papers: dict[str, list[str]] = {}
    if guide:
        text = guide_of(root)
    else:
        with progress_bar("pictures:") as advance:
            page = contents(root, store, advance)
        text = html(page)
        papers = {paper.name: [section.name for section in sections] for paper, sections in page["papers"]}
    size = len(text.encode())
    replace_text(out, text)
    if json:
        print_json({"file": str(out), "bytes": size, "papers": papers})
        return
    say(f"file: {out}, {size / 1e6:.1f} MB")
