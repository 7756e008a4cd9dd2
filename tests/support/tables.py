"""Cases of a test that are data, in a YAML file beside it."""

from pathlib import Path
from typing import Any

import yaml


def data_beside(test_file: str, name: str) -> Any:
    """What the YAML file ``name`` beside the test holds."""
    return yaml.safe_load(Path(test_file).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
