"""Numbers in documents: made again from the results where ``repro.checks.quotes`` knows how, and else as they were last
read against the results and accepted (``repro check-results --accept``), in ``results/accepted.json``.

Files below ``results`` that no stamp names are accepted likewise."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.checks.quotes import missing
from repro.checks.results import OTHER_FOLDERS, Checked
from repro.files import replace_text
from repro.runs.seal import is_whole, sealed

NAME = "accepted.json"
READ_WITH: Mapping[str, tuple[str, ...]] = {
    "README.md": ("claims-dllm-serve.csv", "claims-ampd.csv", "claims-laps.csv", "claims-block.csv"),
    "docs/dllm-serve.md": ("cpu-tiny", "l40s", "rtx4090", "h200", "claims-dllm-serve.csv"),
    "docs/ampd.md": ("h20x32", "claims-ampd.csv"),
    "docs/block-diffusion.md": ("h200-sdar-8b", "h20-llada2-mini", "claims-block.csv"),
    "docs/frontier.md": (
        *("cpu-tiny/frontier-cpu-tiny.csv", "h200/frontier-h200.csv", "rtx4090/frontier-rtx4090.csv"),
        *("laps-h200/queues-h200.csv", "laps-h200/benchmark-queues.csv", "h20x32/orders-h20x32.csv"),
    ),
    "docs/frontier-rows.md": ("cpu-tiny/frontier-cpu-tiny.csv", "cpu-tiny/benchmark-rows.csv", "h200", "rtx4090"),
    "docs/frontier-queues.md": (
        *("laps-h200/queues-h200.csv", "laps-h200/benchmark-queues.csv", "h20x32/orders-h20x32.csv"),
    ),
    "docs/laps.md": ("laps-h200", "laps-cpu-tiny", "claims-laps.csv"),
    "docs/semantics.md": ("calibration", "l40s", "rtx4090"),
    "results/README.md": (),
    "docs/metrics.md": (),
    "docs/serving.md": (),
    "docs/using.md": (),
    "docs/gpu.md": (),
}
"""Documents, and the results that their numbers are read against: if these change, the document is read again."""
_NUMBER = re.compile(
    r"[-+±]?\d[\d,]*(?:\.\d+)?|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|twice)\b"
)
COMMAND = "repro check-results --accept"


def check_documents(root: Path, documents: Path) -> list[Checked]:
    """``root`` holds the results, ``documents`` the paths of documents."""
    found = []
    try:
        unsaid = missing(root, documents)
    except (OSError, ArithmeticError, LookupError, ValueError, UserError) as error:
        return [
            _checked(
                "documents", documents / "README.md", f"what it quotes cannot be read ({type(error).__name__}: {error})"
            )
        ]
    try:
        accepted = _read(root / NAME)
    except UserError as error:
        accepted = None
        found.append(_checked("documents", root / NAME, str(error)))
    for name in READ_WITH:
        reasons = [f"it does not say {text!r}, as the results do" for document, text in unsaid if document == name]
        if accepted is not None and not reasons:
            reasons = _unaccepted(name, root, documents, accepted)
        found.append(_checked("documents", documents / name, *reasons))
    files = {} if accepted is None else accepted["files"]
    now = _files(root)
    for path in sorted(files.keys() | now.keys()) if accepted is not None else ():
        if files.get(path) != now.get(path):
            found.append(_checked("files", root / path, "it is not as it was accepted, and has no stamp"))
    return found


def accept(root: Path, documents: Path) -> Path:
    value = {
        "documents": {
            name: {
                "numbers": [number for _, number in _numbers((documents / name).read_text(encoding="utf-8"))],
                "results": _digest_of(root, read_with),
            }
            for name, read_with in READ_WITH.items()
        },
        "files": _files(root),
    }
    return replace_text(root / NAME, json.dumps(sealed(value), ensure_ascii=False) + "\n")


def _checked(what: str, path: Path, *reasons: str) -> Checked:
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return Checked(
        figure=what,
        path=path,
        status="stale" if reasons else "same",
        is_measured=False,
        reason=f"{reasons[0]}{more}" if reasons else "its numbers are those of the results, or accepted",
        command=COMMAND,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"it cannot be read ({type(error).__name__})") from error
    if not is_whole(value):
        raise UserError("it is not as it was written")
    return value


def _unaccepted(name: str, root: Path, documents: Path, accepted: Mapping[str, Any]) -> list[str]:
    own = accepted["documents"].get(name, {"numbers": [], "results": None})
    found = list(_numbers((documents / name).read_text(encoding="utf-8")))
    before, now = own["numbers"], [number for _, number in found]
    reasons = []
    for kind, start, end, first, last in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind != "equal":
            heading = found[min(first, len(found) - 1)][0] if found else ""
            old, new = (" ".join(part) or "nothing" for part in (before[start:end], now[first:last]))
            reasons.append(f"{new} stands under {heading!r}, where {old} was accepted")
    if not reasons and own["results"] != _digest_of(root, READ_WITH[name]):
        reasons.append(f"results that it quotes ({', '.join(READ_WITH[name])}) have changed since it was accepted")
    return reasons


def _numbers(text: str) -> Iterator[tuple[str, str]]:
    """Heading and number, of all that is no code block."""
    heading = ""
    for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        heading = line.strip("# ") if line.startswith("#") else heading
        yield from ((heading, number) for number in _NUMBER.findall(line))


def _digest_of(root: Path, names: Sequence[str]) -> str:
    """One digest of the CSV files named, or in the folders named."""
    paths = [
        path for name in names for path in ([root / name] if name.endswith(".csv") else (root / name).glob("*.csv"))
    ]
    whole = "\n".join(f"{path.relative_to(root)} {_digest(path)}" for path in sorted(paths))
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _files(root: Path) -> dict[str, str]:
    """What was put in, and measurements that no figure draws."""
    put_in = [path for folder in ("paper", "calibration") for path in (root / folder).rglob("*")]
    kept = [path for path in put_in if path.is_file() and not path.name.endswith("-report.json")]
    alone = [
        path
        for path in root.glob("*/*.json")
        if not path.with_suffix(".csv").exists() and path.parent.name not in OTHER_FOLDERS
    ]
    return {str(path.relative_to(root)): _digest(path) for path in sorted([*kept, *alone])}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
