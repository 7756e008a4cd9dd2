"""The notebook of the documents, executed: ``PYTHONPATH=tests python -m support.notebook`` writes its outputs anew."""

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from repro.paths import REPO

PATH = REPO / "docs" / "workbench.ipynb"


def read() -> Any:
    return nbformat.read(PATH, as_version=4)


def executed(notebook: Any, folder: Path) -> Any:
    """From top to bottom, in a folder of its own, without what is said of progress."""
    own = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "REPRO_DATA_DIR")}
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**own, "PYTHONPATH": str(REPO)})
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = {}
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def said(notebook: Any) -> list[str]:
    """What its cells answer in words and numbers; pictures are None of it."""
    return [
        each["text"] if each.output_type == "stream" else each["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for each in cell.outputs
        if each.output_type == "stream" or "image/png" not in each["data"]
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(read(), Path(folder)), PATH)
