"""What the command of a figure said when it drew it, kept beside the runs: where nothing it rests on has changed since, nothing is
looked up and nothing drawn.

It rests on its options, every file of these packages and of their data, the files of its runs and the files that it drew: all are
compared by content, not by time. It rests on installed libraries, too: these are compared by their versions, and an edit of one
that keeps its version is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.errors import UserError
from repro.files import replace_text
from repro.paths import ACCURACY, CALIBRATION, DATASETS, PAPER, REPO
from repro.runs.seal import is_whole, sealed

if TYPE_CHECKING:
    from repro.reports.figures import View
    from repro.runs.store import StoredRun

FOLDER = "memos"
_RESTED_ON = (
    *(REPO / name for name in ("engines", "baselines", "repro", "paper_figures")),
    DATASETS,
    PAPER,
    CALIBRATION,
)
_OWN_DATA = "REPRO_DATA_DIR"
"""Where it names a folder a memo says nothing: there may be anything in it."""


class Memo:
    """``asked`` is the command: two commands have a memo each. What it rests on is read when it is made, before the figure is."""

    def __init__(self, root: Path, asked: Sequence[object]) -> None:
        """``root`` holds the runs."""
        self._root = root
        self._path = root / FOLDER / f"{_digest([repr((os.getcwd(), *asked)).encode()])[:24]}.json"
        self._ground = _digest(_ground())

    def recalled(self) -> dict[str, Any] | None:
        """What the command said; None where it may have something else to say now."""
        try:
            memo: dict[str, Any] = json.loads(self._path.read_text("utf-8"))
            runs = ((self._root / name).read_bytes() for name in memo["runs"])
            is_same = (
                is_whole(memo)
                and memo["ground"] == self._ground
                and memo["files"] == {name: _digest([Path(name).read_bytes()]) for name in memo["files"]}
                and memo["made"] == _digest(runs)
            )
            return memo["said"] if is_same and _OWN_DATA not in os.environ else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def keep(self, runs: Iterable[StoredRun], files: Iterable[Path], said: Mapping[str, Any]) -> None:
        """A memo is nothing that one needs: it may be that nothing can be written here."""
        unique = {run.file.name: run.content for run in runs}
        memo = {
            "ground": self._ground,
            "runs": list(unique),
            "made": _digest(unique.values()),
            "files": {str(path): _digest([path.read_bytes()]) for path in files},
            "said": said,
        }
        with suppress(OSError, UserError):
            replace_text(self._path, json.dumps(sealed(memo), ensure_ascii=False) + "\n")


def may_be_kept(module: str, views: Iterable[View], runs: Sequence[StoredRun]) -> bool:
    """Whether a figure rests on nothing that a memo does not read: on no plug-in, and on no machine that it was measured on."""
    from repro.runs.code import PACKAGES
    from repro.systems.platforms import PLATFORMS

    codes = {run.manifest["code"]["digest"]: run.manifest["code"]["modules"] for run in runs}
    modules = {module, *(name for code in codes.values() for name in code)}
    return (
        {name.partition(".")[0] for name in modules} <= {*PACKAGES, "paper_figures"}
        and all(view.platform.name in PLATFORMS and view.is_simulated for view in views)
        and all(run.manifest["obtained"] != "measured" for run in runs)
    )


def _digest(contents: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for content in contents:
        whole.update(b"%d\n" % len(content))
        whole.update(content)
    return whole.hexdigest()


def _ground() -> Iterator[bytes]:
    """Python, libraries, what the environment says of drawing, and all files of the packages and of their data."""
    places = sorted(path for path in sys.path if path.endswith("-packages") and os.path.isdir(path))
    libraries = sorted(name for path in places for name in os.listdir(path) if name.endswith(".dist-info"))
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(("MPL", _OWN_DATA)))
    yield repr((sys.version, libraries, variables)).encode()
    with suppress(OSError):
        yield ACCURACY.read_bytes()
    for root in _RESTED_ON:
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name != "__pycache__")
            for name in sorted(names):
                path = Path(folder, name)
                yield str(path).encode(errors="surrogateescape")
                with suppress(OSError):
                    yield path.read_bytes()
