"""``repro eval``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from repro.cli.main import main


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["repro", "eval", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--task",
        "mini-code",
        "--limit",
        3,
        "--gen-length",
        40,
        "--block-length",
        8,
        "--selection",
        "dense",
        "--result-dir",
        tmp_path,
    )
    code, out, err = call(monkeypatch, capsys, *asked, "--json")
    assert (code, err.split(",")[0]) == (0, "1 run done")
    result = json.loads(out)
    assert (result["task"], result["criterion"], result["obtained"], result["valid"]) == (
        "mini-code",
        "pass@1",
        "measured",
        True,
    )
    assert result["accuracy"]["value"] == result["accuracy_strict"]["value"] == 1.0
    assert (result["selection"], result["retention"]) == ("dense", 1.0)
    assert Path(result["file"]).is_file()
    code, out, err = call(monkeypatch, capsys, *asked)
    assert (code, "0 runs done, 1 reused" in err) == (0, True)
    assert "100.0 % (43.9 to 100.0 %, n = 3)" in out
    assert "all context rows" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "arc"), "task='arc' is unknown"),
        (("--task", "gsm8k"), "dataset='gsm8k' cannot be graded here, its problems are not here: set REPRO_DATA_DIR"),
        (("--platform", "rtx4090"), "model='llada-8b' is"),
        (
            ("--selection", "dense", "--retention-ratio", "0.5"),
            "retention_ratio=0.5 has no effect with selection='dense'",
        ),
        (("--limit", "0"), "num_prompts=0 must be at least 1"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = call(monkeypatch, capsys, *arguments, "--result-dir", tmp_path / "runs")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "runs").exists()
