"""The wheel, installed where there is no checkout: commands find their data, simulate calibrated, and write where they are
called."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from paper_figures.dllm_serve.frontier import FAST_DLLM, THRESHOLD, followed
from repro.paths import REPO

SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("repro", "engines", "baselines", "paper_figures", "datasets")
RESULTS = ("results/paper", "results/calibration", "results/cpu-tiny/runs")
FILES = ("results/cpu-tiny/accuracy-cpu-tiny.csv", "results/cpu-tiny/frontier-cpu-tiny.csv")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel, and sees the libraries of this one."""
    if find_spec("pip") is None or find_spec("setuptools") is None:
        pytest.skip("builds a wheel without a network: needs pip and setuptools in this environment")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*FOLDERS, *RESULTS):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in (*SOURCES, *FILES):
        shutil.copy(REPO / name, source / name)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    done = call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder).check_returncode()
    own = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    shutil.unpack_archive(wheel, own, "zip")
    # Its libraries, and none of its .pth files: one of them may lead to the checkout.
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin" / "python"


def call(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REPRO_DATA_DIR")}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


IN_TURN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
import repro
from repro.cli.main import main

said = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, code = ["repro", *map(str, arguments)], None
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    said.append((code, out.getvalue(), err.getvalue()))
print(json.dumps([repro.__file__, said]))
"""
"""Commands one after the other: an interpreter and its imports take longer than most of them."""


@pytest.mark.long
def test_from_elsewhere(python, tmp_path):
    done = call(python, "-m", "repro", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    small = ("--platform", "l40s", "--num-prompts", 2, "--json")
    generate = ("generate", "--prompt", "2+2", "--gen-length", 8, "--block-length", 8, "--json")
    replay = ("--replay", followed("mini-gsm in blocks of 32", THRESHOLD, FAST_DLLM), "--replay-drawn")
    lengths = ("--num-prompts", 2, "--gen-length", 64, "--block-length", 32, "--steps", 64)
    bench = ("bench", "--system", "fast-dllm", "--reading", "policy", "--platform", "h200", *replay, *lengths, "--json")
    drawn = ("reproduce", "table4", *small, "--num-runs", 1)
    fine = (("doctor", "--json"), drawn, ("claims", "--json"), generate, bench)
    refused = (("calibrate", "--write"), ("gpu-suite",), ("check-results",), ("reproduce", "--tier", "short"))
    done = call(python, "-c", IN_TURN, json.dumps([*fine, *refused]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, said = json.loads(done.stdout)
    assert str(python.parents[1]) in where
    assert [code for code, _, _ in said] == [0] * len(fine) + [2] * len(refused), said
    doctor, figures, claims, generated, _ = (json.loads(out) for _, out, _ in said[: len(fine)])
    items = {each["item"]: each for each in doctor["items"]}
    assert items["embedded model"]["status"] == "ok"
    assert "fitted on" in items["l40s simulated"]["detail"]
    (drawn,) = figures["figures"]
    assert not [note for note in drawn["notes"] if "ncalibrated" in note]
    assert sorted(drawn["files"])[0] == "results/figures/dllm-serve/table4-l40s.csv"
    assert sum(claims["verdicts"].values()) > 100
    assert len(generated["token_ids"]) == 8
    assert all(err.startswith("error: ") for _, _, err in said[len(fine) :])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["figures", "local"]
    runs = {path.name for path in (tmp_path / "results" / "local").iterdir()} - {"memos"}
    assert len(runs) == 13
