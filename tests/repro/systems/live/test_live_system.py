"""AMPD on live workers, as a system of the harness."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UserError
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS


def cell(**changes: Any) -> Cell:
    given = {"dataset": "toolbench", "platform": "cpu-tiny", "executor": "torch", "rate": 1.0} | {
        name: changes.pop(name) for name in ("dataset", "platform", "executor") if name in changes
    }
    return Cell(system="ampd-live", seed=0, knobs=tuple(changes.items()), **given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"platform": "h20x32", "executor": "roofline"},
            "runs workers on this machine's cores, use cpu-tiny and torch",
        ),
        ({"platform": "cpu-tiny", "executor": "roofline"}, "use cpu-tiny and torch"),
        ({"constants": "physical"}, "constants='physical' has no effect with system='ampd-live'"),
        ({"router": "x:Y"}, "router='x:Y' has no effect"),
        ({"deployment": "TP1x2"}, "has no prefill workers: write P:TP1x1 D:TP1x1"),
        ({"deployment": "P:TP2x1 D:TP1x1"}, "live workers have degree 1"),
        ({"deployment": "P:TP1x9 D:TP1x9"}, "at most 16"),
        ({"lease_s": 0.1}, "lease_s=0.1 must be between 0.5 and 600 s"),
        ({"lease_s": "soon"}, "lease_s='soon' must be a number"),
        ({"window_s": 0.0}, "window_s=0.0 must be above 0 s"),
        ({"dataset": "dureader"}, "a live worker holds 4096: shorten it"),
        ({"kv_tokens": 100}, "a live worker holds 100: shorten it"),
        ({"kv_tokens": 10**14}, "kv_tokens=100000000000000 must be between 1 and 10,000,000"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        SYSTEMS.get("ampd-live").prepare(cell(**changes))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_redis_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    missing = "redis-server" if find_spec("redis") is not None else "redis client"
    with pytest.raises(UserError, match=f"{missing} is not installed"):
        deployment.check_machine()


@pytest.mark.skipif(find_spec("redis") is None, reason="needs the extra redis: the client is not installed")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("x", r"redis='x' is no address \(Redis URL must specify"),
        ("redis://127.0.0.1:1", r"redis='redis://127.0.0.1:1' does not answer \(.*refused"),
        ("redis://:secret@127.0.0.1:1", r"redis='redis://\*\*\*@127.0.0.1:1' does not answer"),
        ("unix:///nonexistent", r"redis='unix:///nonexistent' does not answer"),
    ],
)
def test_a_redis_that_is_not_there_is_seen_before_work(address: str, said: str) -> None:
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, redis=address))
    with pytest.raises(UserError, match=said) as caught:
        deployment.check_machine()
    assert "secret" not in str(caught.value)


def test_redis_scripts_are_part_of_what_is_behind_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    other, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, slo_ttft_s=0.1))
    assert deployment.basis != other.basis
    assert deployment.obtained == "measured"
