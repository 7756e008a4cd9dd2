"""``repro serve`` in a process of its own, with its counters, for clients of other projects."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from repro.paths import REPO

START_S = 300
VLLM = Path(os.environ.get("REPRO_VLLM", REPO / ".venv-vllm" / "bin" / "vllm"))
"""What ``repro install vllm`` makes; it may be missing."""


@dataclass
class Served:
    address: str
    model: str
    tokenizer: str
    """A folder that transformers' ``AutoTokenizer`` reads."""
    before: dict[str, float] = field(default_factory=dict)

    def counts(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.address}/metrics") as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def mark(self) -> None:
        self.before = self.counts()

    def grown(self, name: str) -> float:
        """How far a counter has grown since ``mark``."""
        return self.counts().get(name, 0.0) - self.before.get(name, 0.0)

    @property
    def refusals(self) -> float:
        """Requests since ``mark`` that the server called wrong."""
        return self.grown('repro_rejections_total{status="400"}')


def serving(model: str, tokenizer: Path, *options: str) -> Iterator[Served]:
    python = os.environ.get("REPRO_PYTHON", sys.executable)
    command = [
        python,
        "-m",
        "repro",
        "serve",
        "--model",
        model,
        "--served-model-name",
        "served",
        "--port",
        "0",
        *options,
    ]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready: "):
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(lines))
    address = lines[-1].split()[1].removesuffix("/v1,")
    yield Served(address, "served", str(tokenizer))
    process.terminate()
    process.communicate(timeout=START_S)
    assert process.returncode == 0
