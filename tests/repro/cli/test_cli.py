"""The command line as a user meets it: what it prints, what it refuses and how, what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.checkpoints import LLADA, MASK, write_llada
from support.command import commands, refused, repro
from support.stored_runs import parts
from support.tables import data_beside
from support.tiny_models import GQA
from typer.main import get_command

from repro.cli.main import _settle_environment, app
from repro.reports.figures import FIGURES
from repro.runs.environment import numeric_variables

pytestmark = pytest.mark.usefixtures("no_data")
SHORT = ("--gen-length", "8", "--block-length", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a tokenizer."""
    return write_llada(tmp_path_factory.mktemp("models") / "llada")


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text("[5, 6, 7]")
    return path


# ---- start-up and surface -----------------------------------------------------------------------

START = """
import sys
from repro.cli import main
def called(*arguments):
    sys.argv = ["repro", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
for arguments in (["--help"], ["bench", "--help"], ["reproduce", "--help"]):
    called(*arguments)
heavy = {"torch", "transformers", "datasets", "pandas", "pyarrow", "matplotlib", "seaborn", "numpy", "tokenizers",
         "safetensors", "yaml", "rich.progress", "rich.table", "vllm", "ray", "pydantic"}
print("LOADED", sorted(name for name in heavy if name in sys.modules))
called("list")
read = {"yaml", "rich.table"}
print("LISTED", sorted(name for name in heavy - read if name in sys.modules))
"""


def test_help_and_a_list_of_what_there_is_load_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage: repro") == 3
    assert {"LOADED []", "LISTED []"} <= set(done.stdout.splitlines())


NO_CUDA = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="has a GPU")

OPTIONS = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))


def test_the_options_are_these():
    found = {}
    for name, command in {"": get_command(app), **commands()}.items():
        options = [o for p in command.params for o in p.opts if o.startswith("--") and p.param_type_name == "option"]
        found[name] = " ".join(sorted(options))
    assert found == OPTIONS


@pytest.mark.parametrize(("given", "told"), [(None, "expandable_segments:True"), ("max_split_size_mb:64", None)])
def test_a_cards_memory_grows_in_segments_unless_somebody_says_otherwise(monkeypatch, given, told):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MPLBACKEND"):
        monkeypatch.setenv(name, "gone")  # restored afterwards, whatever is set meanwhile
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    _settle_environment()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == told


@pytest.mark.parametrize(("given", "told"), [(None, "1"), ("0", "0")])
def test_weights_lie_in_large_pages_unless_somebody_says_otherwise_and_runs_tell(monkeypatch, given, told):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given or "gone")  # restored afterwards
    if given is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    _settle_environment()
    assert numeric_variables()["THP_MEM_ALLOC_ENABLE"] == told


def test_list_names_everything():
    result = repro("list", "--json")
    assert (result.code, result.err) == (0, "")
    entries = json.loads(result.out)["items"]
    assert all(entry.keys() == {"kind", "name", "what"} and entry["what"] for entry in entries)
    names = {
        kind: {entry["name"] for entry in entries if entry["kind"] == kind} for kind in ("system", "platform", "figure")
    }
    assert names["system"] == {
        *("dllm-serve", "fast-dllm", "dllm-cache", "sparse-dllm", "llada", "dream"),
        *("dkv-cache", "d2cache", "dpad", "streaming-dllm", "window-diffusion"),
        "block-diffusion",
        *("ampd", "ampd-live", "dynamo-sim", "vllm-sim", "continuum-sim", "openai-http"),
        *("vllm", "dynamo", "sglang"),
        *("laps", "laps-graphs-only", "laps-disaggregation-only", "reserve", "on-time", "srpt"),
        *("srpt-aging", "edf", "moore-hodgson"),
        *("sglang-pd", "sglang-pd-router", "vllm-pd"),
    }
    assert names["platform"] == {
        *("h20-llada2-mini", "h200-llada2-mini", "h200-sdar-8b", "h100-sdar-8b"),
        *("h100-diffusiongemma", "h200-diffusiongemma"),
        *(
            "cpu-tiny",
            "cpu-long",
            "rtx4090",
            "l40s",
            "a100",
            "h100",
            "h200",
            "b200",
            "h20",
            "h20x32",
            "h200x32",
            "endpoint",
        ),
    }
    assert names["figure"] == set(FIGURES)
    assert "dllm-serve/fig3" in names["figure"]
    assert {"livebench", "burst", "osc"} <= {entry["name"] for entry in entries if entry["kind"] == "dataset"}


# ---- generate -----------------------------------------------------------------------------------


def test_generate_prints_one_json_object(model, ids):
    asked = ("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json")
    result = repro(*asked)
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer.keys() == {"token_ids", "forward_passes"}
    assert len(answer["token_ids"]) == 8
    assert all(0 <= token < LLADA.vocab and token != MASK for token in answer["token_ids"])
    # Steps default to the length.
    assert answer["forward_passes"] == 8
    assert json.loads(repro(*asked, "--steps", "4").out)["forward_passes"] == 4


@NO_CUDA
def test_a_gpu_that_is_not_there(model, ids):
    refused(repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--device", "cuda", "--json"), "device")


def test_generate_without_a_model(tmp_path, ids):
    refused(
        repro("generate", "--model", tmp_path, "--prompt-ids", ids, "--json"),
        "has no config.json: give a LLaDA or Dream checkpoint",
    )
    bare = GQA.write(tmp_path / "bare")
    refused(repro("generate", "--model", bare, "--prompt", "Hello"), "lacks tokenizer_config.json")
    (bare / "model.safetensors").unlink()
    refused(repro("generate", "--model", bare, "--prompt-ids", ids, "--json"), "lacks weights model.safetensors")


# ---- bench --------------------------------------------------------------------------------------

SIMULATED = ("bench", "--platform", "rtx4090", "--num-prompts", "4")
MEASURED = ("bench", "--input-len", 12, "--max-num-batched-tokens", 64, *SHORT)


def test_bench_and_resume(tmp_path):
    """The same command again runs nothing, says why, and prints the same numbers."""
    both = ("--system", "dllm-serve", "--system", "sparse-dllm")
    command = (*SIMULATED, "--request-rate", "0.5", *both, "--json", "--result-dir", tmp_path / "r")
    first = repro(*command)
    assert first.code == 0
    runs = json.loads(first.out)["runs"]
    assert [run["cell"]["system"] for run in runs] == ["dllm-serve", "sparse-dllm"]
    for run in runs:
        work = {"reading", "mean_prompt_tokens", "mean_output_tokens", "length_scale"}
        assert run.keys() == {"cell", *work, "obtained", "valid", "reasons", "facts", "file", "summary"}
        assert run["obtained"] == "composed"
        assert (run["valid"], run["reasons"]) == (True, [])
        assert run["summary"]["throughput_tok_s"] > 0
        assert list(parts(Path(run["file"]))) == ["cell", "manifest", "summary", "provenance"]
    assert "2 runs done, 0 reused; runs: " in " ".join(first.err.split())

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")}
    second = repro(*command)
    assert second.code == 0
    assert json.loads(second.out)["runs"] == runs
    said = " ".join(second.err.split())
    assert "0 runs done, 2 reused (e.g. done: same cell, finished " in said
    assert "--force runs them again" in said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")} == stamps

    forced = repro(*command, "--force")
    assert "2 runs done, 0 reused" in forced.err
    assert json.loads(forced.out)["runs"] == runs


def test_another_setting_is_another_run(tmp_path):
    for ratio in ("0.5", "0.25"):
        assert repro(*SIMULATED, "--retention-ratio", ratio, "--result-dir", tmp_path, "--json").code == 0
    assert len(list(tmp_path.glob("*.jsonl.gz"))) == 2


def test_dry_run_writes_nothing(tmp_path):
    result = repro(*SIMULATED, "--result-dir", tmp_path / "r", "--dry-run", "--json")
    assert result.code == 0
    (run,) = json.loads(result.out)["runs"]
    assert run["why"] == "not stored"
    assert run["run"].startswith("dllm-serve_osc_rtx4090_roofline_s0_")
    assert not (tmp_path / "r").exists()
    refused(
        repro(*SIMULATED, "--result-dir", tmp_path / "r", "--dry-run", "--retention-ratio", "2"), "retention_ratio=2.0"
    )


def test_a_profile_says_where_the_time_goes(model, tmp_path):
    command = (*MEASURED, "--num-prompts", 3, "--model", model, "--result-dir", tmp_path)
    (plain,) = json.loads(repro(*command, "--json").out)["runs"]
    (run,) = json.loads(repro(*command, "--profile", "--json").out)["runs"]
    assert run["cell"]["knobs"]["profile_every"] == 1
    assert run["file"] != plain["file"]
    assert (plain["obtained"], plain["valid"], plain["reasons"]) == ("measured", True, [])
    assert plain["summary"]["profile"] is plain["summary"]["roofline_share"] is plain["summary"]["host_share"] is None
    assert "bound" not in plain["facts"]
    summary = run["summary"]
    assert sum(summary["profile"]["all"]["seconds"].values()) == pytest.approx(summary["busy_s"])
    assert summary["profile"]["all"]["num_steps"] == summary["num_steps"]
    assert summary["profile"]["reuse"]["seconds"]["selection"] == 0 < summary["profile"]["all"]["seconds"]["selection"]
    assert summary["roofline_share"] > 0
    assert run["facts"]["bound"]["card"] == "this cpu (measured peaks)"
    assert run["facts"]["bound"]["source"].startswith("measured: ")

    shown = repro(*command, "--profile").out
    assert "Where a step's time goes: dLLM-Serve, osc, all at once" in shown
    assert "share of roofline of this cpu (measured peaks): " in shown


@NO_CUDA
@pytest.mark.parametrize(("options", "says"), data_beside(__file__, "cli")["bench_refuses_a_device_that_is_not_there"])
def test_bench_refuses_a_device_that_is_not_there(tmp_path, options, says):
    refused(repro("bench", *options.split(), "--result-dir", tmp_path / "r"), says)
    assert not (tmp_path / "r").exists()


def test_bench_divides_a_model(tmp_path):
    """Two processes on this CPU hold half a model and half a cache each."""
    runs = []
    for options in ([], ["--tensor-parallel", 2]):
        done = repro("bench", "--num-prompts", 3, *SHORT, *options, "--result-dir", tmp_path / "r", "--json")
        assert done.code == 0, done.err
        runs += json.loads(done.out)["runs"]
    whole, divided = (run["facts"]["memory_plan"] for run in runs)
    assert [run["valid"] for run in runs] == [True, True]
    assert [run["summary"]["num_requests"]["ok"] for run in runs] == [3, 3]
    assert divided["weights_bytes"] < 0.6 * whole["weights_bytes"]
    assert divided["kv_rows"] > 1.9 * whole["kv_rows"]


# ---- figures and plans --------------------------------------------------------------------------


def test_plan_is_labelled_simulated():
    result = repro("plan", "--json")
    rows = json.loads(result.out)["plans"]
    assert (result.code, result.err) == (0, "")
    assert [(row["label"], row["logits"]) for row in rows] == [
        ("rtx4090 24 GB", "decomposed"),
        ("rtx4090 24 GB", "monolithic"),
        ("l40s 48 GB", "decomposed"),
        ("l40s 48 GB", "monolithic"),
    ]
    assert {row["obtained"] for row in rows} == {"simulated"}
    for row in rows:
        parts = row["plan"]
        assert parts["total_bytes"] == sum(
            parts[f"{part}_bytes"] for part in ("weights", "activation", "logits", "guard", "kv")
        )


# ---- folders that cannot be used ----------------------------------------------------------------

FIG3 = ("fig3", "--platform", "rtx4090", "--request-rate", "0.5", "--num-prompts", "4")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folder")
def test_a_result_dir_that_cannot_be_created(tmp_path):
    for where in ("/proc/nope", "/proc", tmp_path / ("x" * 300)):
        refused(repro(*SIMULATED, "--result-dir", where), f"result_dir='{where}' cannot be written (")


def test_redrawing_into_what_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    result_dir = ("--result-dir", tmp_path / "r")
    assert repro("reproduce", *FIG3, *result_dir, "--out-dir", tmp_path / "o", "--json").code == 0
    refused(repro("figure", *FIG3, *result_dir, "--out-dir", file), f"out_dir='{file}' is not a directory")


# ---- as installed -------------------------------------------------------------------------------


def test_as_a_process(tmp_path):
    """The console script's entry point, exit codes and streams of a real process."""
    call = [sys.executable, "-c", "from repro.cli import main; main()"]
    bad = subprocess.run([*call, "reproduce", "nosuch"], capture_output=True, text=True, check=False, cwd=tmp_path)
    known = ", ".join(FIGURES)
    said = f"error: figure='nosuch' is unknown: use one of {known}, or a module of your own and a colon\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", said)
    asked = [*call, *SIMULATED, "--result-dir", "r", "--dry-run", "--json"]
    good = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["runs"][0]["why"] == "not stored"
    assert list(tmp_path.iterdir()) == []
