"""What decides measured numbers is settled once for every door, recorded, and refused where it came too late."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cells import a_cell
from support.command import repro as command
from support.stored_runs import make_provenance, parts
from support.tables import data_beside

import repro
from engines.errors import UserError
from repro.paths import REPO
from repro.runs import environment
from repro.runs.clean import clean_command
from repro.runs.environment import VARIABLES, check_instructions, instructions, settle
from repro.runs.experiment import prepare
from repro.runs.provenance import GitState, collect, differing_facts, git_state, machine_identity
from repro.runs.store import Store
from repro.runs.sweep import Sweep

CASES = data_beside(__file__, "cases")

FLAGS = "sse4_1 avx avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx512_fp16"
AVX512 = frozenset(FLAGS.split())
AMX = AVX512 | {"amx_tile", "amx_int8", "amx_bf16"}
SHORT = {"num_prompts": 1, "gen_length": 4, "block_length": 4, "steps": 4}


@pytest.fixture
def amx(monkeypatch):
    monkeypatch.setattr(environment, "processor_flags", lambda: AMX)


@pytest.mark.parametrize("told", [{}, {"ONEDNN_MAX_CPU_ISA": "ALL"}, {"DNNL_MAX_CPU_ISA": "AVX2"}])
def test_every_door_settles_and_a_users_choice_stays(told):
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = "import repro, os; from repro.runs.environment import VARIABLES; print(*map(os.environ.get, VARIABLES))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**own, "PYTHONPATH": str(REPO), **told}
    ).stdout.split()
    usual = [] if told else ["AVX512_CORE_FP16"]
    assert said == [told.get(name, usual[0] if usual and name == VARIABLES[0] else "None") for name in VARIABLES]


@pytest.mark.parametrize(
    ("flags", "told", "expected"),
    [
        (AMX, "AVX512_CORE_FP16", "AVX512_CORE_FP16"),
        (AMX, "avx10_1_512_amx", "AVX512_CORE_AMX"),
        (AMX, "DEFAULT", "AVX512_CORE_AMX"),
        (AVX512, "ALL", "AVX512_CORE_FP16"),
        (AVX512, "AVX2_VNNI", "AVX2"),
        ({"sse4_1"}, "AVX512_CORE_FP16", "SSE41"),
        ({"asimd"}, "AVX512_CORE_FP16", None),
    ],
)
def test_the_instruction_set_in_force(flags, told, expected, monkeypatch):
    monkeypatch.setattr(environment, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
    assert instructions() == expected
    assert machine_identity("cpu")["instructions"] == expected


def test_what_the_system_first_says_of_a_processor(tmp_path, monkeypatch):
    said = "system type : a\n\nProcessor\t: 0\nModel Name\t: One\nflags\t\t: sse4_1 avx\n\nModel Name\t: Two\nflags : sse4_1\n"
    info = tmp_path / "cpuinfo"
    info.write_text(said)
    monkeypatch.setattr(environment, "Path", lambda _: info)
    facts = environment.processor_facts.__wrapped__()
    assert (facts["model name"], facts["flags"]) == ("One", "sse4_1 avx")
    info.unlink()
    assert environment.processor_facts.__wrapped__() == {}


def test_torch_that_came_before_is_refused_a_measured_run_and_no_simulated_one(amx, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(environment, "_at_start", (environment.limit(), True))
    told = {"rate": None, "result_dir": tmp_path, **SHORT}
    with pytest.raises(UserError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 may have come too late"):
        repro.run("dllm-serve", "burst", **told)
    assert not list(tmp_path.iterdir())
    assert repro.run("dllm-serve", "burst", platform="rtx4090", num_prompts=1, result_dir=tmp_path).validity.valid
    # Without AMX it is all the same.
    monkeypatch.setattr(environment, "processor_flags", lambda: AVX512)
    check_instructions()


def test_a_limit_that_is_changed_beside_torch_is_refused(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(environment, "_at_start", (environment.limit(), False))
    check_instructions()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    with pytest.raises(UserError, match="AVX512_CORE may have come too late"):
        check_instructions()


@pytest.mark.parametrize(("told", "is_late"), [("", True), ("AVX512_CORE", False)])
def test_what_was_set_before_python_began_is_in_time(told, is_late, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(environment, "_at_start", None)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    settle()
    assert environment._at_start == (told or "AVX512_CORE_FP16", is_late)


def test_a_limit_that_onednn_would_not_notice_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512")
    found = command("bench", "--num-prompts", 1, "--result-dir", tmp_path)
    assert (found.code, "ONEDNN_MAX_CPU_ISA" in found.err) == (2, True)


@pytest.mark.parametrize(("name", "value"), CASES["variables"])
def test_a_variable_that_changes_numbers_is_of_the_machine(name, value, tmp_path, monkeypatch):
    experiment = prepare(a_cell(**SHORT))
    monkeypatch.delenv(name, raising=False)
    here = machine_identity("cpu")
    monkeypatch.setenv(name, value)
    there = machine_identity("cpu")
    assert there["environment"][name] == value
    assert differing_facts([here, there]) == {name: ["not set", value]}
    assert experiment.machine == there


def test_a_run_measured_in_another_environment_is_not_reused(tmp_path, monkeypatch):
    store, experiment = Store(tmp_path), prepare(a_cell(**SHORT))
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    (outcome,) = Sweep([experiment], store).run(jobs=1)
    assert outcome.run is not None
    stored = parts(outcome.run.file)["manifest"]["machine"]
    assert stored == machine_identity("cpu")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    state = store.find(experiment)
    assert (state.run, state.reason) == (None, "another machine: KMP_BLOCKTIME not set -> 0")


@pytest.mark.parametrize("name", ["MKL_VERBOSE", "TORCH_HOME", "TORCH_LOGS", "NCCL_VERSION", "HOME", "OMP_NUM_THREADS"])
def test_what_changes_no_number_is_not_told_there(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert name not in machine_identity("cpu")["environment"]


def test_values_hide_secrets_and_folders(monkeypatch):
    monkeypatch.setenv("TORCH_HUB_TOKEN", "s3cr3t")
    monkeypatch.setenv("LD_PRELOAD", "/home/alice/lib/libtcmalloc.so")
    told = machine_identity("cpu")["environment"]
    assert (told["TORCH_HUB_TOKEN"], told["LD_PRELOAD"]) == ("***", ".../libtcmalloc.so")


def test_threads_that_a_script_sets_are_another_machine():
    import torch

    before = torch.get_num_threads()
    here = machine_identity("cpu")
    try:
        torch.set_num_threads(before + 1)
        there = machine_identity("cpu")
    finally:
        torch.set_num_threads(before)
    assert differing_facts([here, there]) == {"torch_threads": ["None", str(before + 1)]}


def test_a_machine_that_says_nothing_of_its_environment_is_held_to_be_alike():
    """Runs that were stored before it was told."""
    here = machine_identity("cpu")
    old = {name: here[name] for name in ("cpu", "cores", "threads", "torch")}
    assert differing_facts([old, here]) == {}
    assert differing_facts([{**old, "cores": -1}, here]) == {"cores": ["-1", str(here["cores"])]}
    # Every machine tells its cores: one that does not is another.
    assert differing_facts([{"cpu": "one"}, {"cpu": "one", "cores": 2}]) == {"cores": ["None", "2"]}


def test_settling_twice_keeps_what_was_first(monkeypatch):
    monkeypatch.setattr(environment, "_at_start", ("AVX2", False))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    settle()
    assert environment._at_start == ("AVX2", False)


# -- provenance -------------------------------------------------------------------------------------------


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
    assert "calibration" not in collect(obtained="measured", argv=[])


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
