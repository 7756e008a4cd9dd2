"""The command line as a user meets it: what it prints, what it refuses and how, what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.command import commands, instead
from support.run_files import parts
from support.tiny_models import GQA
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from typer.main import get_command

from engines.models.checkpoint import TINY_DIR
from repro.cli.main import app, main
from repro.reports.figures import FIGURES

SHORT = ("--gen-length", "8", "--block-length", "4")


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


Repro = Callable[..., Result]


@pytest.fixture
def repro(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Repro:
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["repro", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a tokenizer: one id a character."""
    folder = GQA.write(tmp_path_factory.mktemp("models") / "gqa")
    vocabulary = {chr(i + 1): i for i in range(GQA.vocab - 2)}
    vocabulary |= {"<mask>": GQA.mask_id, "<eos>": GQA.vocab - 1}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.add_special_tokens(["<mask>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<mask>", "eos_token": "<eos>"}))
    return folder


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text("[5, 6, 7]")
    return path


def refusal(result: Result, says: str) -> str:
    """Bad input: exit code 2 and exactly one line on stderr that names what is wrong."""
    assert result.code == 2, result
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert says in lines[0]
    return lines[0]


# ---- start-up and surface -----------------------------------------------------------------------

START = """
import sys
sys.argv = ["repro", *sys.argv[1:]]
from repro.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "transformers", "datasets", "pandas", "pyarrow", "matplotlib", "seaborn", "numpy", "tokenizers",
         "safetensors", "yaml", "rich.progress", "rich.table", "vllm", "ray"}
print("LOADED", sorted(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["reproduce", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=True)
    assert "Usage: repro" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED []"


NO_CUDA = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="has a GPU")

OPTIONS = {
    "": "--verbose --version",
    "bench": "--address --jobs --pool --alg --alg-temp --cache --cfg-interval --cfg-scale --factor --gen-interval --prompt-interval --remasking "
    "--top-k --top-p --transfer-ratio --goodput --max-concurrency --url "
    "--accept-other-code --arrivals --attention-backend --cuda-graphs --fused-kernels --knob --tensor-parallel "
    "--batch-rule --batch-size --block-length --burstiness --compat --continue-on-error --dataset-name --dataset-path "
    "--dataset-source --device --dry-run --dtype --executor --force --gen-length --input-len --json --logit-rows "
    "--max-num-batched-tokens --max-num-logits --max-num-seqs --memory-limit --model --num-prompts --platform "
    "--plot --pool-kernel --profile --profile-every --reading --refresh-delay --request-rate --result-dir --retention-ratio "
    "--scheduler --seed --selection --steps --stop-at-eos --system --temperature --threshold --tie-policy --weights",
    "ablate": "--knob --address --jobs --pool --accept-other-code --component --dataset --force --json --limit --model --num-runs --platform --plot --reading --request-rate --result-dir",
    "calibrate": "--dry-run --json --keep --platform --result-dir --sensitivity --write",
    "check-results": "--accept --json --results",
    "claims": "--accept-other-code --json --out-dir --paper --result-dir",
    "doctor": "--json",
    "eval": "--address --pool --accept-other-code --alg --alg-temp --batch-size --block-length --cache --cfg-interval --cfg-scale --chat --compat --dataset-path "
    "--dataset-source --device --dtype --factor --force --gen-interval --gen-length --json --limit --memory-limit --model "
    "--num-fewshot --platform --pool-kernel --prompt-interval --refresh-delay --remasking --result-dir --retention-ratio "
    "--seed --selection --steps --stop-at-eos --system --task --temperature --threshold --tie-policy --top-k --top-p "
    "--transfer-ratio",
    "figure": "--accept-other-code --executor --json --num-prompts --num-runs --out-dir --platform --reading --request-rate --result-dir --weights",
    "generate": "--alg --alg-temp --cache --cfg-interval --cfg-scale --chat --factor --gen-interval --prompt-interval "
    "--remasking --system-prompt --top-k --top-p --transfer-ratio "
    "--block-length --compat --device --dtype --gen-length --json --model --pool-kernel --prompt --prompt-ids "
    "--refresh-delay --retention-ratio --seed --selection --steps --stop-at-eos --system --temperature --threshold "
    "--tie-policy --weights",
    "install": "--device --dry-run",
    "list": "--json --knobs",
    "plan": "--input-len --json --max-num-batched-tokens --max-num-logits --memory-limit --platform --retention-ratio",
    "plan-cluster": "--constants --gpus --hardware --json --method --model --num-sessions --rate --slo-itl-s --slo-ttft-s --solver --top "
    "--trace --trace-path",
    "reproduce": "--address --jobs --pool --accept-other-code --executor --force --json --num-prompts --num-runs --out-dir --platform --reading --request-rate --result-dir "
    "--weights",
    "train-tiny": "--out --resume --seed --steps",
    "serve": "--alg --alg-temp --api-key --attention-backend --block-length --cache --cfg-interval --cfg-scale --compat "
    "--cuda-graphs --device --drain-timeout --dtype --factor --fused-kernels --gen-interval --gen-length --host "
    "--keep-kv --kv-tokens --max-model-len --max-num-batched-tokens --max-num-logits --max-num-seqs --max-queue "
    "--memory-limit --model --platform --pool-kernel --port --prompt-interval --refresh-delay --remasking "
    "--request-timeout --retention-ratio --scheduler --selection --served-model-name --steps --stop-at-eos --system --temperature --threshold --tie-policy --top-k --top-p "
    "--transfer-ratio --weights",
    "gpu-suite": "--budget --dry-run --export --first --json --platform --result-dir --stage",
    "verify-baselines": "--device --golden --json",
}
"""Flags are an interface: a change here breaks scripts of users."""


def test_the_options_are_these() -> None:
    found = {}
    for name, command in {"": get_command(app), **commands()}.items():
        options = [o for p in command.params for o in p.opts if o.startswith("--") and p.param_type_name == "option"]
        found[name] = " ".join(sorted(options))
    assert found == {name: " ".join(sorted(options.split())) for name, options in OPTIONS.items()}


def test_list_names_everything(repro: Repro) -> None:
    result = repro("list", "--json")
    assert (result.code, result.err) == (0, "")
    entries = json.loads(result.out)["items"]
    assert all(entry.keys() == {"kind", "name", "what"} and entry["what"] for entry in entries)
    names = {
        kind: {entry["name"] for entry in entries if entry["kind"] == kind} for kind in ("system", "platform", "figure")
    }
    assert names["system"] == {
        *("dllm-serve", "fast-dllm", "dllm-cache", "sparse-dllm", "llada", "dream"),
        *("ampd", "ampd-live", "dynamo-sim", "vllm-sim", "continuum-sim", "openai-http"),
        *("vllm", "dynamo", "sglang"),
        *(
            "laps",
            "laps-graphs-only",
            "laps-disaggregation-only",
            "reserve",
            "sglang-pd",
            "sglang-pd-router",
            "vllm-pd",
        ),
    }
    assert names["platform"] == {"cpu-tiny", "rtx4090", "l40s", "a100", "h100", "h200", "b200", "h20x32", "endpoint"}
    assert names["figure"] == set(FIGURES)
    assert "dllm-serve/fig3" in names["figure"]
    assert {"livebench", "burst", "osc"} <= {entry["name"] for entry in entries if entry["kind"] == "dataset"}


# ---- generate -----------------------------------------------------------------------------------


def test_generate_prints_one_json_object(repro: Repro, model: Path, ids: Path) -> None:
    result = repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer.keys() == {"token_ids", "forward_passes"}
    assert len(answer["token_ids"]) == 8
    assert all(
        isinstance(token, int) and 0 <= token < GQA.vocab and token != GQA.mask_id for token in answer["token_ids"]
    )
    assert answer["forward_passes"] == 8


def test_steps_default_to_the_length(repro: Repro, model: Path, ids: Path) -> None:
    base = ("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json")
    assert repro(*base, "--steps", "8").out == repro(*base).out
    assert json.loads(repro(*base, "--steps", "4").out)["forward_passes"] == 4


@pytest.mark.parametrize("system", ["dllm-serve", "fast-dllm", "dllm-cache", "sparse-dllm", "llada"])
def test_generate_runs_every_system(repro: Repro, model: Path, ids: Path, system: str) -> None:
    result = repro("generate", "--system", system, "--model", model, "--prompt-ids", ids, *SHORT, "--json")
    assert len(json.loads(result.out)["token_ids"]) == 8


def test_a_text_prompt_is_its_ids(repro: Repro, model: Path, ids: Path) -> None:
    ids.write_text(json.dumps([ord(c) - 1 for c in "Hello"]))
    by_text = repro("generate", "--model", model, "--prompt", "Hello", *SHORT)
    by_ids = repro("generate", "--model", model, "--prompt-ids", ids, *SHORT)
    assert by_text.code == 0
    assert by_text == by_ids


@pytest.mark.parametrize("text", ["[5, 6, 7]", "5 6 7", "5,6,7\n", '{"prompt_ids": [5, 6, 7]}'])
def test_forms_of_a_file_of_ids(repro: Repro, model: Path, ids: Path, text: str) -> None:
    expected = repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json")
    ids.write_text(text)
    assert repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json") == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("[]", "is empty"),
        ("[1, true]", "is not a list of integers"),
        ("[1.5]", "is not a list of integers"),
        ("one two", "is not a list of integers"),
        ('{"ids": [1]}', "is not a list of integers"),
        ("null", "is not a list of integers"),
        (f"[{GQA.mask_id}]", f"hold the mask id {GQA.mask_id}: remove it from the prompt"),
        (f"[{GQA.vocab}]", f"outside [0, {GQA.vocab}): use this model's tokenizer"),
        ("[-1]", "outside [0,"),
        (str([1] * 249), "exceeds the model's max_sequence_length=256: shorten the prompt or the generation"),
    ],
)
def test_bad_ids(repro: Repro, model: Path, ids: Path, text: str, says: str) -> None:
    ids.write_text(text)
    refusal(repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--json"), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--system", "nosuch"],
            "system='nosuch' is unknown: use one of dllm-serve, fast-dllm, dllm-cache, sparse-dllm, llada, dream",
        ),
        (["--retention-ratio", "0"], "retention_ratio=0.0 must be in (0, 1]"),
        (["--retention-ratio", "1.01"], "retention_ratio=1.01 must be in (0, 1]"),
        (["--retention-ratio", "nan"], "retention_ratio=nan must be a finite number"),
        (["--pool-kernel", "4"], "pool_kernel=4 must be odd"),
        (["--selection", "best"], "selection='best' is unknown: use one of head, uniform, dense"),
        (["--refresh-delay", "2"], "refresh_delay=2 must be in [0, 1]"),
        (["--compat", "old"], "compat='old' is unknown: use one of paper, upstream"),
        (["--tie-policy", "any"], "tie_policy='any' is unknown: use one of stable, parity"),
        (["--steps", "1"], "steps=1 is fewer than the 2 blocks"),
        (["--block-length", "0"], "block_length=0 must be at least 1"),
        (["--gen-length", "0"], "gen_length=0 must be at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must not be negative"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--threshold", "0"], "threshold=0.0 must be in (0, 1]"),
        (["--dtype", "int8"], "dtype='int8' is unknown: use one of float32, float16, bfloat16"),
        (
            ["--system", "llada", "--retention-ratio", "0.5"],
            "retention_ratio=0.5 has no effect with system='llada' on a llada model: leave it out",
        ),
        (["--system", "llada", "--selection", "head"], "selection='head' has no effect with system='llada'"),
        (["--system", "sparse-dllm", "--threshold", "0.5"], "threshold=0.5 has no effect with system='sparse-dllm'"),
        (
            ["--system", "sparse-dllm", "--compat", "upstream"],
            "compat='upstream' has no effect with system='sparse-dllm'",
        ),
        (["--system", "sparse-dllm", "--gen-length", "9"], "gen_length=9 is not a multiple of block_length=4"),
        (["--system", "llada", "--steps", "7"], "steps=7 is not a multiple of the 2 blocks"),
        (["--prompt", "x"], "give either --prompt TEXT or --prompt-ids FILE, and not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_generate_refuses(repro: Repro, model: Path, ids: Path, options: list[str], says: str) -> None:
    refusal(repro("generate", "--model", model, "--prompt-ids", ids, *instead(SHORT, options), "--json"), says)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--temperature", "inf"], "temperature"),
        (["--weights", "guess"], "weights"),
        (["--device", "tpu"], "device"),
        (["--selection", "dense", "--retention-ratio", "0.5"], "retention_ratio"),
        (["--selection", "dense", "--pool-kernel", "3"], "pool_kernel"),
        (["--threshold", "0.5", "--tie-policy", "parity"], "tie_policy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_generate_refuses_what_it_could_only_ignore_or_fail_on(
    repro: Repro, model: Path, ids: Path, options: list[str], names: str
) -> None:
    refusal(repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, *options, "--json"), names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_gpu_that_is_not_there(repro: Repro, model: Path, ids: Path) -> None:
    refusal(repro("generate", "--model", model, "--prompt-ids", ids, *SHORT, "--device", "cuda", "--json"), "device")


def test_generate_needs_a_prompt(repro: Repro, model: Path) -> None:
    refusal(repro("generate", "--model", model, *SHORT), "give either --prompt TEXT or --prompt-ids FILE")


def test_an_empty_text_is_no_prompt(repro: Repro, model: Path) -> None:
    refusal(repro("generate", "--model", model, "--prompt", "", *SHORT), "prompt")


def test_generate_without_a_model(repro: Repro, tmp_path: Path, ids: Path) -> None:
    refusal(
        repro("generate", "--model", tmp_path / "no", "--prompt-ids", ids),
        "is not a directory: give a checkpoint directory",
    )
    refusal(
        repro("generate", "--model", tmp_path, "--prompt-ids", ids, "--json"),
        "has no config.json: give a LLaDA or Dream checkpoint",
    )
    refusal(repro("generate", "--model", "llada-8b", "--prompt-ids", ids, "--json"), "llada-8b")
    bare = GQA.write(tmp_path / "bare")
    refusal(repro("generate", "--model", bare, "--prompt", "Hello"), "lacks tokenizer_config.json")
    (bare / "model.safetensors").unlink()
    refusal(repro("generate", "--model", bare, "--prompt-ids", ids, "--json"), "lacks weights model.safetensors")


def test_generate_without_a_file(repro: Repro, tmp_path: Path, model: Path) -> None:
    refusal(
        repro("generate", "--model", model, "--prompt-ids", tmp_path / "no.json"),
        "is not a file: give a file of token ids",
    )
    refusal(repro("generate", "--model", model, "--prompt-ids", tmp_path), "is not a file")


@pytest.mark.parametrize(
    "arguments", [["nosuch"], ["generate", "--nosuch", "1"], ["bench", "--num-prompts", "many"], ["reproduce"]]
)
def test_misspelt_commands_and_options_are_one_line_too(repro: Repro, arguments: list[str]) -> None:
    refusal(repro(*arguments), "")


# ---- bench --------------------------------------------------------------------------------------

SIMULATED = ("bench", "--platform", "rtx4090", "--num-prompts", "4")


def test_bench_and_resume(repro: Repro, tmp_path: Path) -> None:
    """The same command again runs nothing, says why, and prints the same numbers."""
    command = (
        *SIMULATED,
        "--request-rate",
        "0.5",
        "--system",
        "dllm-serve",
        "--system",
        "sparse-dllm",
        "--json",
        "--result-dir",
        tmp_path / "r",
    )
    first = repro(*command)
    assert first.code == 0
    runs = json.loads(first.out)["runs"]
    assert [run["cell"]["system"] for run in runs] == ["dllm-serve", "sparse-dllm"]
    for run in runs:
        work = {"reading", "mean_prompt_tokens", "mean_output_tokens", "length_scale"}
        assert run.keys() == {"cell", *work, "obtained", "valid", "reasons", "facts", "file", "summary"}
        assert run["obtained"] == "simulated"
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


def test_another_setting_is_another_run(repro: Repro, tmp_path: Path) -> None:
    for ratio in ("0.5", "0.25"):
        assert repro(*SIMULATED, "--retention-ratio", ratio, "--result-dir", tmp_path, "--json").code == 0
    assert len(list(tmp_path.glob("*.jsonl.gz"))) == 2


def test_dry_run_writes_nothing(repro: Repro, tmp_path: Path) -> None:
    result = repro(*SIMULATED, "--result-dir", tmp_path / "r", "--dry-run", "--json")
    assert result.code == 0
    (run,) = json.loads(result.out)["runs"]
    assert run["why"] == "not stored"
    assert run["run"].startswith("dllm-serve_osc_rtx4090_roofline_s0_")
    assert not (tmp_path / "r").exists()
    refusal(
        repro(*SIMULATED, "--result-dir", tmp_path / "r", "--dry-run", "--retention-ratio", "2"), "retention_ratio=2.0"
    )


def test_bench_measures_a_model(repro: Repro, model: Path, tmp_path: Path) -> None:
    result = repro(
        "bench",
        "--model",
        model,
        "--num-prompts",
        2,
        "--input-len",
        12,
        *SHORT,
        "--max-num-batched-tokens",
        64,
        "--result-dir",
        tmp_path,
        "--json",
    )
    assert result.code == 0, result
    (run,) = json.loads(result.out)["runs"]
    assert (run["obtained"], run["valid"], run["reasons"]) == ("measured", True, [])


def test_a_profile_says_where_the_time_goes(repro: Repro, model: Path, tmp_path: Path) -> None:
    command = (
        "bench",
        "--model",
        model,
        "--num-prompts",
        3,
        "--input-len",
        12,
        *SHORT,
        "--max-num-batched-tokens",
        64,
        "--result-dir",
        tmp_path,
    )
    (plain,) = json.loads(repro(*command, "--json").out)["runs"]
    (run,) = json.loads(repro(*command, "--profile", "--json").out)["runs"]
    assert run["cell"]["knobs"]["profile_every"] == 1
    assert run["file"] != plain["file"]
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--system", "nosuch"],
            "system='nosuch' is unknown: use one of dllm-serve, fast-dllm, dllm-cache, sparse-dllm, llada, dream",
        ),
        (["--dataset-name", "nosuch"], "dataset='nosuch' is unknown: use one of burst"),
        (
            ["--platform", "nosuch"],
            "platform='nosuch' is unknown: use one of cpu-tiny, rtx4090, l40s, a100, h100, h200, b200",
        ),
        (["--executor", "nosuch"], "executor='nosuch' is unknown: use one of torch, roofline"),
        (["--platform", "cpu-tiny", "--executor", "roofline"], "executor='roofline' needs a GPU model"),
        (["--scheduler", "nosuch"], "scheduler='nosuch' is unknown: use one of phase, request, lookahead"),
        (["--logit-rows", "nosuch"], "logit_rows='nosuch' is unknown: use one of decomposed, monolithic"),
        (["--request-rate", "-1"], "request_rate='-1' must be a positive number"),
        (["--request-rate", "fast"], "request_rate='fast' must be a positive number"),
        (["--num-prompts", "0"], "num_prompts=0 must be at least 1"),
        (["--seed", "-1"], "seed=-1 must be an integer of at least 0"),
        (["--retention-ratio", "0"], "retention_ratio=0.0 must be in (0, 1]"),
        (["--temperature", "inf"], "temperature=inf must be finite"),
        (["--memory-limit", "lots"], "memory_limit='lots' is not a size: write it like 24GB or 64MiB"),
        (["--memory-limit", "16GB"], "budget too small for one request"),
        (
            ["--memory-limit", "16GB", "--system", "sparse-dllm", "--reading", "efficient"],
            "budget too small for one request",
        ),
        (["--max-num-logits", "0"], "max_num_logits=0 must be at least 1"),
        (["--profile-every", "2"], "profile_every=2 has no effect without --profile: add it"),
        (["--profile", "--profile-every", "0"], "profile_every=0 must be at least 1"),
        (["--profile"], "profile: a simulated step has no parts to take apart: leave --profile out"),
        (["--max-num-batched-tokens", "100"], "max_num_batched_tokens"),
        (["--input-len", "5000"], "input_len=5000 must be between"),
        (["--system", "llada", "--gen-length", "100"], "gen_length=100 is not a multiple of block_length=32"),
        (["--system", "sparse-dllm", "--steps", "100"], "steps=100 is not a multiple of the 8 blocks"),
        (
            ["--system", "sparse-dllm", "--selection", "head"],
            "selection='head' has no effect with system='sparse-dllm': leave it out",
        ),
        (["--system", "llada", "--retention-ratio", "0.5"], "retention_ratio=0.5 has no effect with system='llada'"),
        (["--batch-size", "4"], "batch_size=4 has no effect with system='dllm-serve'"),
        (["--reading", "policy"], "reading='policy' has no effect with system='dllm-serve'"),
        (
            ["--system", "sparse-dllm", "--reading", "nosuch"],
            "reading='nosuch' is unknown: use one of published, efficient",
        ),
        (["--burstiness", "2"], "arrivals='gamma' need a rate"),
        (["--temperature", "0.7"], "temperature=0.7 has no effect with executor='roofline': leave it out"),
        (["--tie-policy", "parity"], "tie_policy='parity' has no effect with executor='roofline': leave it out"),
        (
            ["--seed", "9223372036854775808"],
            "seed=9223372036854775808 must be an integer of at least 0, and below 2^63",
        ),
        (["--system", "fast-dllm", "--batch-size", "999"], "batch_size=999 is more than max_num_seqs=256 allows"),
        (["--dataset-source", "embedded", "--dataset-path", "x.jsonl"], "has no effect with source='embedded'"),
        (["--dataset-path", "/no/such.jsonl"], "'/no/such.jsonl' does not exist: check the path"),
        (["--model", "/no/such/model"], "model='/no/such/model' is not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_before_anything_runs(repro: Repro, tmp_path: Path, options: list[str], says: str) -> None:
    refusal(repro("bench", *instead(SIMULATED[1:], options), "--result-dir", tmp_path / "r"), says)
    assert not (tmp_path / "r").exists()


def test_a_simulation_cannot_know_how_many_tokens_pass(repro: Repro, tmp_path: Path) -> None:
    refusal(
        repro(*SIMULATED, "--threshold", "0.9", "--result-dir", tmp_path / "r"),
        "threshold=0.9 has no effect with executor='roofline'",
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--attention-backend", "flash-attn"], "attention_backend='flash-attn' runs on CUDA devices"),
        (["--dtype", "int8"], "dtype='int8' is unknown: use one of float32"),
        (["--weights", "foo"], "weights='foo' is unknown: use one of checkpoint, random"),
        (["--device", "cpu:"], "device='cpu:' is unknown: use cpu, cuda or cuda:N"),
        (["--num-prompts", "99999999999999999999999"], "num_prompts=99999999999999999999999 is more than 100,000,"),
        (["--max-num-seqs", "99999999999"], "max_num_seqs=99999999999 is more than 16,384, the most that is taken"),
        (["--attention-backend", "nosuch"], "attention_backend='nosuch' is unknown: use one of auto, flash-attn"),
        (
            ["--tensor-parallel", "3"],
            "tensor_parallel=3 does not divide the model's n_kv_heads=8: use one of 1, 2, 4, 8",
        ),
        (["--tensor-parallel", "0"], "tensor_parallel=0 must be between 1 and 64"),
        (["--tensor-parallel", "2", "--system", "llada"], "tensor_parallel=2 has no effect with reading='efficient'"),
        (["--no-cuda-graphs", "--system", "dllm-cache"], "cuda_graphs=false has no effect with reading='efficient'"),
        (["--no-cuda-graphs"], "cuda_graphs=False has no effect on device='cpu': leave it out"),
        (["--fused-kernels", "--system", "llada"], "fused_kernels=True has no effect on device='cpu': leave it out"),
        (["--platform", "l40s", "--tensor-parallel", "2"], "tensor_parallel=2 has no effect with executor='roofline'"),
        pytest.param(["--device", "cuda"], "this machine has no CUDA device", marks=NO_CUDA),
        pytest.param(
            ["--platform", "h200", "--executor", "torch", "--weights", "random"], "has no CUDA device", marks=NO_CUDA
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_what_a_device_cannot(repro: Repro, tmp_path: Path, options: list[str], says: str) -> None:
    refusal(repro("bench", *options, "--result-dir", tmp_path / "r"), says)
    assert not (tmp_path / "r").exists()


def test_bench_divides_a_model(repro: Repro, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "cuda"], "device='cuda' has no effect with executor='roofline': leave it out"),
        (["--dtype", "float16"], "dtype='float16' has no effect with executor='roofline': leave it out"),
        (["--weights", "random"], "weights='random' has no effect with executor='roofline': leave it out"),
        (
            ["--selection", "dense", "--retention-ratio", "0.3"],
            "retention_ratio=0.3 has no effect with selection='dense'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_what_it_would_ignore(repro: Repro, tmp_path: Path, options: list[str], says: str) -> None:
    """A simulated run has no device, no dtype and no weights; a dense cache keeps everything."""
    refusal(repro("bench", *instead(SIMULATED[1:], options), "--result-dir", tmp_path / "r"), says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt_len": x}', "line 2: field 'line'"),
        ('{"prompt_len": -3}', "line 2: field 'prompt_len' is -3"),
        ('{"prompt_len": 5, "color": 1}', "line 2: field 'color' is 1: unknown key"),
        ('{"arrival_s": 1}', "line 2: field 'prompt_len'"),
        ("[1]", "line 2: field 'line'"),
    ],
)
def test_a_malformed_trace_names_its_line(repro: Repro, tmp_path: Path, line: str, says: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"prompt_len": 9}}\n{line}\n{{"prompt_len": 9}}\n')
    refusal(repro(*SIMULATED, "--dataset-path", trace, "--result-dir", tmp_path / "r"), says)
    assert not (tmp_path / "r").exists()


def test_one_bad_cell_stops_the_whole_sweep_before_it_starts(repro: Repro, tmp_path: Path) -> None:
    refusal(repro(*SIMULATED, "--system", "dllm-serve", "--system", "nosuch", "--result-dir", tmp_path / "r"), "nosuch")
    assert not (tmp_path / "r").exists()


# ---- figures and plans --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["reproduce", "figure"])
def test_unknown_figures_and_platforms(repro: Repro, tmp_path: Path, command: str) -> None:
    out = ("--result-dir", tmp_path / "r", "--out-dir", tmp_path / "o")
    refusal(repro(command, "nosuch", *out), "figure='nosuch' is unknown: use one of dllm-serve/fig2, dllm-serve/fig3")
    refusal(repro(command, "fig3", "--platform", "nosuch", *out), "platform='nosuch' is unknown")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_without_runs(repro: Repro, tmp_path: Path) -> None:
    out = ("--result-dir", tmp_path / "r", "--out-dir", tmp_path / "o")
    refusal(repro("figure", "fig3", "--platform", "rtx4090", *out), "runs behind fig3 are missing")
    assert list(tmp_path.iterdir()) == []


def test_plan_is_labelled_simulated(repro: Repro) -> None:
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--platform", "nosuch"], "platform='nosuch' is unknown"),
        (["--retention-ratio", "3"], "retention_ratio=3.0 must be in (0, 1]"),
        (["--memory-limit", "big"], "memory_limit='big' is not a size"),
        (["--input-len", "0"], "input_len=0"),
        (["--input-len", "100000"], "input_len=100000"),
        (["--max-num-logits", "0"], "max_num_logits=0 must be at least 1"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens=0 must be at least 1"),
        (["--memory-limit", "0.1B"], "memory_limit='0.1B' is not a size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_plan_refuses(repro: Repro, options: list[str], says: str) -> None:
    refusal(repro("plan", *options), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--limit", "-1"], "limit=-1 must not be negative"),
        (["--reading", ""], "reading='' has no effect on component='sparsity'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_ablate_refuses(repro: Repro, tmp_path: Path, options: list[str], says: str) -> None:
    refusal(repro("ablate", "--component", "sparsity", *options, "--result-dir", tmp_path / "r"), says)
    assert not (tmp_path / "r").exists()


# ---- folders that cannot be used ----------------------------------------------------------------

FIG3 = ("fig3", "--platform", "rtx4090", "--request-rate", "0.5", "--num-prompts", "4")
WRITERS = {
    "bench": SIMULATED,
    "eval": ("eval", "--limit", "1"),
    "ablate": ("ablate", "--component", "scheduler", "--platform", "rtx4090", "--dataset", "osc"),
    "reproduce": ("reproduce", *FIG3),
}
READERS = {"figure": ("figure", *FIG3), "claims": ("claims",)}


@pytest.fixture
def no_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        pytest.fail("a cell ran")

    for name in ("run_here", "run_by_workers"):
        monkeypatch.setattr(f"repro.runs.pool.{name}", run)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("kept")
    return path


@pytest.mark.usefixtures("no_cell_runs")
@pytest.mark.parametrize("command", WRITERS)
def test_a_result_dir_that_is_no_folder(repro: Repro, tmp_path: Path, file: Path, command: str) -> None:
    out = ("--out-dir", tmp_path / "o") if command == "reproduce" else ()
    for where in (file, file / "x"):
        refusal(
            repro(*WRITERS[command], "--result-dir", where, *out),
            f"result_dir='{where}' is not a directory: give a folder that can be written",
        )
    assert file.read_text() == "kept"


@pytest.mark.usefixtures("no_cell_runs")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folder")
def test_a_result_dir_that_cannot_be_created(repro: Repro, tmp_path: Path) -> None:
    for where in ("/proc/nope", "/proc", tmp_path / ("x" * 300)):
        refusal(repro(*SIMULATED, "--result-dir", where), f"result_dir='{where}' cannot be written (")


@pytest.mark.parametrize("command", READERS)
def test_a_result_dir_that_cannot_be_read(repro: Repro, tmp_path: Path, file: Path, command: str) -> None:
    for where in (file, file / "x"):
        refusal(
            repro(*READERS[command], "--result-dir", where, "--out-dir", tmp_path / "o"),
            f"result_dir='{where}' is not a directory: give a folder that can be read",
        )
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("no_cell_runs")
@pytest.mark.parametrize("command", [WRITERS["reproduce"], READERS["claims"]], ids=["reproduce", "claims"])
def test_an_out_dir_that_cannot_be_written(repro: Repro, tmp_path: Path, file: Path, command: tuple[str, ...]) -> None:
    for where in (file, file / "x"):
        refusal(
            repro(*command, "--result-dir", tmp_path / "r", "--out-dir", where),
            f"out_dir='{where}' is not a directory: give a folder that can be written",
        )
    assert list(tmp_path.iterdir()) == [file]


def test_redrawing_into_what_is_no_folder(repro: Repro, tmp_path: Path, file: Path) -> None:
    result_dir = ("--result-dir", tmp_path / "r")
    assert repro("reproduce", *FIG3, *result_dir, "--out-dir", tmp_path / "o", "--json").code == 0
    refusal(repro("figure", *FIG3, *result_dir, "--out-dir", file), f"out_dir='{file}' is not a directory")


# ---- as installed -------------------------------------------------------------------------------


def test_as_a_process(tmp_path: Path) -> None:
    """The console script's entry point, exit codes and streams of a real process."""
    call = [sys.executable, "-c", "from repro.cli import main; main()"]
    bad = subprocess.run([*call, "reproduce", "nosuch"], capture_output=True, text=True, check=False, cwd=tmp_path)
    known = ", ".join(FIGURES)
    assert (bad.returncode, bad.stdout, bad.stderr) == (
        2,
        "",
        f"error: figure='nosuch' is unknown: use one of {known}, or a module of your own and a colon\n",
    )
    good = subprocess.run(
        [*call, *SIMULATED, "--result-dir", "r", "--dry-run", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["runs"][0]["why"] == "not stored"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not (TINY_DIR / "model.safetensors").is_file(), reason="the embedded checkpoint is not built")
def test_the_embedded_model_answers(repro: Repro) -> None:
    result = repro("generate", "--prompt", "What is 2 + 3?", "--gen-length", 16, "--block-length", 8)
    assert (result.code, result.err) == (0, "")
    assert result.out.strip()
