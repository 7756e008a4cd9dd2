"""``repro report``: all figures and claims of a folder of results as one page."""

from pathlib import Path
from typing import Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import counting, print_json, say
from repro.files import readable_folder, replace_text, writable_file
from repro.paths import IS_INSTALLED, RESULTS


def report(
    *,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of figures by platform, as results/figures is of your own [default: results]."),
    ] = None,
    result_dir: Annotated[
        Path | None, typer.Option(help="Also look up here which versions made the runs behind the figures.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Write all figures beside their claims, as one page that needs no network and no other file."""
    from repro.reports.page import contents, html

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    store = None if result_dir is None else readable_folder("result_dir", result_dir)
    writable_file("out", out)
    with counting("pictures:") as advance:
        shown = contents(root, store, advance)
    size = len((text := html(shown)).encode())
    replace_text(out, text)
    if json:
        papers = {paper.name: [section.name for section in found] for paper, found in shown["papers"]}
        print_json({"file": str(out), "bytes": size, "papers": papers})
        return
    say(f"file: {out}, {size / 1e6:.1f} MB")
