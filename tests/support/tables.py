"""Cases of a test that are data, in a YAML file beside it, and edits of files."""

from pathlib import Path
from typing import Any

import yaml

from repro.files import yaml_loader


def data_beside(test_file: str, name: str) -> Any:
    """What the YAML file ``name`` beside the test holds."""
    text = Path(test_file).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml_loader())


def edit(path: Path, before: str, after: str) -> None:
    """Replaces the first ``before`` in a text file, which has one."""
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
