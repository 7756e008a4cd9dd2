import json
import os
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.store_cases import make_provenance

from repro.paths import REPO
from repro.runs.clean import clean_command
from repro.runs.provenance import GitState, Timing, collect, git_state, machine_identity


def test_secrets_and_machine_paths_leave_the_command():
    home = Path.home()
    argv = [
        *("/usr/local/bin/repro", "bench", "--api-key", "abc123", "--hf-token=xyz", "--seed", "7", "--header"),
        *("Authorization: Bearer s3cr3t", "hf_abcdefgh1234", "--max-num-batched-tokens", "16384"),
        *("--base-url", "http://alice:pw@host:8000/v1"),
        f"--result-dir={REPO}/results/local",
        f"{home}/models/llada",
        "/data/alice/trace.csv",
        "relative/path.yaml",
        f"../..{home}/x",
    ]
    assert clean_command(argv) == [
        *("repro", "bench", "--api-key", "***", "--hf-token=***", "--seed", "7", "--header", "Authorization: ***"),
        *("***", "--max-num-batched-tokens", "16384", "--base-url", "http://***@host:8000/v1"),
        *("--result-dir=results/local", "~/models/llada", ".../trace.csv", "relative/path.yaml", "../..~/x"),
    ]


def test_a_secret_flag_without_a_value_does_not_eat_the_next_flag():
    assert clean_command(["repro", "--token", "--seed", "1"]) == ["repro", "--token", "--seed", "1"]


@given(st.lists(st.text(max_size=30), max_size=6))
def test_any_command_is_accepted(argv):
    assert len(clean_command(argv)) == len(argv)


def test_provenance_names_no_machine_path_and_is_json():
    provenance = make_provenance()
    text = json.dumps(provenance, allow_nan=False)
    assert str(REPO) not in text
    assert str(Path.home()) + "/" not in text
    assert provenance["obtained"] == "simulated"
    assert provenance["calibration"] is None
    timing = Timing(started_utc="a", finished_utc="b", elapsed_s=0.0)
    assert "calibration" not in collect(obtained="measured", timing=timing, argv=[])


def test_provenance_sees_a_gpu_only_where_torch_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert make_provenance()["gpu"] is None
    assert "torch" not in sys.modules


def test_a_process_that_is_moved_to_fewer_cores_is_another_machine(monkeypatch):
    """A script measures on four cores, then on one: the runs of the first are not those of the second."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores in ({0, 1, 2, 3}, {2}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores, raising=False)
        identity = machine_identity("cpu")
        assert (identity["cores"], identity["threads"]) == (len(cores), str(len(cores)))


def test_the_commit_that_is_told_goes_before_the_one_that_is_found(monkeypatch):
    monkeypatch.setenv("REPRO_COMMIT", "abcdef0")
    assert git_state() == GitState(commit="abcdef0", dirty=None)
    monkeypatch.setenv("REPRO_COMMIT", "no commit")
    assert git_state().commit != "no commit"


def test_git_state_of_a_folder_inside_another_checkout_is_unknown(tmp_path):
    assert git_state(tmp_path) == GitState(commit=None, dirty=None)
    assert git_state(REPO / "repro") == GitState(commit=None, dirty=None)
