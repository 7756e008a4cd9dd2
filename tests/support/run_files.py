"""What is in the files of stored runs."""

from pathlib import Path
from typing import Any

from repro.runs.store import PROVENANCE, SUFFIX, part_of, parts_of


def parts(file: Path) -> dict[str, Any]:
    """By name."""
    found = parts_of(file.read_bytes())
    return {name: part_of(found, name) for name in found}


def lines(file: Path) -> dict[str, bytes]:
    """All but those of its times and machine."""
    return {name: line for name, line in parts_of(file.read_bytes()).items() if name != PROVENANCE}


def contents(root: Path) -> dict[str, dict[str, bytes]]:
    """All that is stored, but for times and machines."""
    return {str(path.relative_to(root)): lines(path) for path in root.rglob("*") if path.name.endswith(SUFFIX)}
