"""The requests that docs/serving.md gives to copy, sent to a bare ``repro serve`` as they stand there, but for the port."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.stored_runs import parts

from repro.cli.main import main
from repro.paths import REPO

ANSWER = " Ben has 3. Ida has 5. 3 + 5 = 8. #### 8"


class Bare(NamedTuple):
    pid: int
    address: str
    log: Iterator[str]
    """Its lines behind those of its start, as they come."""


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    command = [sys.executable, "-m", "repro", "serve", "--port", "0"]
    own = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPO, env=own, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    ready = next(line for line in process.stderr if line.startswith("ready: "))
    yield Bare(process.pid, ready.split()[1].removesuffix("/v1,"), process.stderr)
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 0


def given(address: str, kind: str, first: str) -> str:
    """The documentation's block of that kind that begins so, asked of ``address``."""
    text = (REPO / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.partition("## Three requests to copy")[2].partition("\n## ")[0]
    (block,) = (each for each in re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) if each.startswith(first))
    assert "http://127.0.0.1:8000" in block
    return str(block.replace("http://127.0.0.1:8000", address))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_request_of_curl_is_answered(bare):
    done = subprocess.run(["bash", "-c", given(bare.address, "sh", "curl ")], capture_output=True, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")


def test_the_request_of_the_official_client_is_answered(bare, capsys):
    exec(given(bare.address, "python", "from openai"), {})
    assert capsys.readouterr().out == ANSWER


def test_the_benchmark_runs(bare, tmp_path, monkeypatch, capsys):
    """Its verdict is the machine's affair."""
    command = shlex.split(given(bare.address, "sh", "repro bench").replace("\\\n", ""))
    monkeypatch.setattr(sys, "argv", [*command, "--result-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, 1)
    out, err = capsys.readouterr()
    assert "OpenAI-compatible" in out, out
    assert "warning" not in err
    (path,) = tmp_path.rglob("*.jsonl.gz")
    assert parts(path)["summary"]["e2el_s"]["n"] == 10


def test_an_engine_s_end_is_in_the_log_with_its_time(bare):
    tasks = Path(f"/proc/{bare.pid}/task").iterdir()
    (engine,) = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    os.kill(engine, signal.SIGKILL)
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    said = rf"{when} engine {engine} was lost \(.*killed by signal 9\): 0 requests fail\n"
    assert re.fullmatch(said, next(bare.log))
