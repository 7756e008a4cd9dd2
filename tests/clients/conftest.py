"""Servers that real clients talk to, one of each kind of model.

Run by ``make test-clients`` in the environment of ``requirements.txt``. ``REPRO_PYTHON`` is the interpreter that serves. Elsewhere nothing
is collected here.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.causal_checkpoints import write_causal
from support.clients import START_S, Served, serving

from repro.paths import REPO

HAS_CLIENTS = all(importlib.util.find_spec(name) for name in ("aiperf", "guidellm", "lm_eval", "pydantic_ai"))
collect_ignore_glob = [] if HAS_CLIENTS else ["test_*.py"]
# LiteLLM would fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
BIN = Path(sys.executable).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="session")
def tiny() -> Iterator[Served]:
    yield from serving("tiny", REPO / "engines" / "models" / "tiny")


@pytest.fixture(scope="session")
def tiny_block() -> Iterator[Served]:
    yield from serving("tiny-block", REPO / "engines" / "models" / "tiny_block")


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_causal(tmp_path_factory.mktemp("causal") / "qwen", max_position_embeddings=8192)
    yield from serving(str(folder), folder)


@pytest.fixture(params=["tiny", "tiny_block", "causal"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    found.mark()
    return found


@pytest.fixture
def run_client(tmp_path: Path) -> Callable[..., str]:
    """Runs a program of the clients' environment in a folder of its own and returns what it printed."""

    def run(program: str | Path, *arguments: str, offline: bool = True) -> str:
        path = BIN / program if isinstance(program, str) else program
        own = OFFLINE if offline else {}
        env = {**os.environ, **own, "OPENAI_API_KEY": "none", "COLUMNS": "200"}
        done = subprocess.run(
            [path, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=START_S
        )
        assert done.returncode == 0, (
            f"{program} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout + done.stderr

    return run
