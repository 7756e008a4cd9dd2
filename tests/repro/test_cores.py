"""Cores that may be used: those the process may run on, and no more than its control groups give time for."""

import os
from pathlib import Path

import pytest
from support.tables import data_beside

from engines.machine import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def cores(tmp_path: Path, own: str, **files: str) -> int:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("0", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    return usable_cores(tmp_path, tmp_path / "own")


def test_the_machine_has_more_than_the_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores(tmp_path, "0::/\n") == 8


LIMITED = data_beside(__file__, "cores")["limited"]


@pytest.mark.parametrize("name", LIMITED)
def test_a_quota_of_a_group_counts(tmp_path, name):
    group, files, expected = LIMITED[name]
    assert cores(tmp_path, f"0::{group}\n", **files) == expected


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_groups_of_the_first_version(tmp_path, controllers):
    own = f"5:memory:/\n4:{controllers}:/job\n"
    files = {f"{controllers}__job__cpu0cfs_quota_us": "200000", f"{controllers}__job__cpu0cfs_period_us": "100000"}
    assert cores(tmp_path, own, **files) == 2
    files[f"{controllers}__job__cpu0cfs_quota_us"] = "-1"
    assert cores(tmp_path, own, **files) == 8
