"""Every option of the commands that check before they work, with values no one means: an answer, or one line."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from support.command import commands, refused, repro
from support.hostile import HOSTILE

VALUES = (
    *HOSTILE,
    "0",
    "-1",
    "-0.0",
    "0.5",
    "inf",
    "--",
    "gen_length=abc",
    "gen_length=99999999999",
    "profile_every=[1]",
)
COMMANDS = {
    "bench": ("bench", "--dry-run", "--platform", "rtx4090", "--num-prompts", "3"),
    "measured": ("bench", "--dry-run", "--num-prompts", "3"),
    "plan": ("plan",),
    "figure": ("figure", "fig3", "--platform", "rtx4090"),
    "claims": ("claims", "--paper", "laps"),
    "ablate": ("ablate", "--component", "nope"),
    "calibrate": ("calibrate",),
    "url": ("bench", "--url", "http://127.0.0.1:1", "--num-prompts", "2", "--dry-run"),
    "serve": ("serve",),
    "serve-ar": ("serve", "--system", "ar", "--model", "tiny-qwen2", "--weights", "random"),
}
EMPTY_PATH = {"--result-dir", "--dataset-path", "--out-dir"}
FOLDERS = {"--result-dir", "--out-dir"}
NO_FOLDERS = ("", "x" * 5000, "a\0b")
"""For commands that judge or draw for seconds what a folder holds, whatever its name."""
SKIPPED = {"--help", "--force", "--json", "--verbose"}


@cache
def options_of(command: tuple[str, ...]) -> list[str]:
    found = commands()[command[0]].params
    return [
        name for each in found if not getattr(each, "is_flag", False) for name in each.opts if name.startswith("--")
    ]


CASES = [(name, option) for name, given in COMMANDS.items() for option in options_of(given) if option not in SKIPPED]


@pytest.mark.parametrize(("command", "option"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_hostile_value(command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run here, so nothing may fail while it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    # A server that is asked for rightly would serve for ever.
    monkeypatch.setattr("engines.server.run.run", lambda *asked: None)
    given = COMMANDS[command]
    where = [] if option in FOLDERS or "--result-dir" not in options_of(given) else ["--result-dir", tmp_path / "runs"]
    if "--out-dir" in options_of(given) and option != "--out-dir":
        where += ["--out-dir", tmp_path / "out"]
    for value in NO_FOLDERS if command in ("claims", "figure") and option in FOLDERS else VALUES:
        result = repro(*given, *where, option, value)
        assert "fault of this program" not in result.err, (value, result.err)
        if result.code != 0:
            refused(result)
        elif option in EMPTY_PATH:
            assert value != ""
    kept = {"runs", "out", " ", "0", "-1", "--"} | {value for value in VALUES if len(value) < 200}
    assert {path.name for path in tmp_path.iterdir()} <= kept


LAPS = ("bench", "--platform", "h200", "--system", "laps")
AMPD = ("bench", "--platform", "h20x32")
BOUNDS = [
    (("generate", "--prompt", "x", "--pool-kernel", "99999999"), "pool_kernel=99999999 is more than 65,535"),
    (("generate", "--prompt", "x", "--gen-length", "99999999999"), "gen_length=99999999999 is more than 131,072"),
    (("reproduce", "fig3", "--num-runs", "999999999999"), "num_runs=999999999999 must be between 1 and 1,000"),
    (
        ("ablate", "--component", "scheduler", "--num-runs", "999999999999"),
        "num_runs=999999999999 must be between 1 and 1,000",
    ),
    (("ablate", "--component", "sparsity", "--limit", "999999999999"), "limit=999999999999 is more than 100,000"),
    (("bench", "--num-prompts", "10000000", "--dry-run"), "num_prompts=10000000 is more than 100,000"),
    (("eval", "--limit", "10000000"), "num_prompts=10000000 is more than 100,000"),
    (("bench", "--max-num-batched-tokens", "2000000000", "--memory-limit", "100000GB"), "is more than 1,048,576"),
    (("bench", "--max-num-seqs", "20000"), "max_num_seqs=20000 is more than 16,384"),
    (("plan", "--memory-limit", "999999999999GB"), "is more than 1,000,000,000,000,000"),
    (("train-tiny", "--out", "t", "--seed", "-1"), "seed=-1 must not be negative"),
    (("train-tiny", "--out", "t", "--seed", "9" * 30), "is more than 9,223,372,036,854,775,807"),
    (("bench", "--jobs", "1000000000"), "jobs=1000000000 is more than 1,024"),
    (("reproduce", "fig3", "--jobs", "-1"), "jobs=-1 must be at least 1"),
    (("train-tiny", "--out", "t", "--steps", "99999999999"), "steps=99999999999 is more than 10,000,000"),
    (("bench", "--request-rate", "1e-300", "--platform", "rtx4090"), "must be at least 1e-06"),
    (("bench", "--request-rate", "1e300", "--platform", "rtx4090"), "request_rate=1e300 is more than 1,000,000"),
    (("bench", "--knob", "gen_length=abc"), "gen_length='abc' must be a whole number"),
    (
        ("bench", "--platform", "rtx4090", "--system", "llada", "--knob", "batch_size=x"),
        "batch_size='x' must be a whole number",
    ),
    (("bench", "--knob", "gen_length=true"), "gen_length=True must be a whole number"),
    (("bench", "--knob", "basis=abc"), "knob='basis=abc' is a note about a run"),
    (("bench", "--knob", "comparison=x"), "knob='comparison=x' is a note about a run"),
    (("bench", "--knob", "length_scale=1e300"), "length_scale=1e+300 is more than 1,000"),
]
MESSAGES = [
    (("bench", "--result-dir", ""), "--result-dir='' is empty"),
    (("bench", "--result-dir="), "--result-dir='' is empty"),
    (("bench", "--dataset-path", "/tmp"), "'/tmp' is a directory: give a file"),
    (("bench", "--burstiness", "2"), "arrivals='gamma' need a rate"),
    (("bench", "--arrivals", "gamma"), "arrivals='gamma' need a rate"),
    (("bench", "--arrivals", "burst", "--request-rate", "3"), "rate=3.0 has no effect when arrivals='burst'"),
    (("bench", "--arrivals", "trace"), "have no timestamps"),
    (
        ("ablate", "--component", "scheduler", "--reading", "policy"),
        "reading='policy' has no effect on component='scheduler'",
    ),
    (
        (
            "figure",
            "fig3",
            "--platform",
            "rtx4090",
            "--reading",
            "policy",
            "--num-runs",
            "2",
            "--request-rate",
            "0.5",
            "--accept-other-code",
            "--out-dir",
            "o",
        ),
        "run this first: repro reproduce fig3 --platform rtx4090 --reading policy --num-runs 2 --request-rate 0.5 "
        "--result-dir r --accept-other-code --out-dir o",
    ),
    (("bench", "--platform", "h20x32", "--system", "llada"), "for this kind of system: use cpu-tiny, rtx4090, l40s,"),
    (("calibrate",), "add --write"),
    (("generate", "--model", "~nosuch", "--prompt", "x"), "model='~nosuch'"),
    (("generate", "--prompt", "\udcff"), "is not UTF-8 text"),
    (("bench", "--reading", "policy"), "reading='policy' has no effect with system='dllm-serve'"),
    (("nope",), "No such command 'nope': see 'repro --help'"),
    (("bench", "--nope"), ": see 'repro bench --help'"),
    (("ablate",), "Missing option '--component': see 'repro ablate --help'"),
    (("bench", "--num-prompts", "x"), "num_prompts='x' must be a whole number: see 'repro bench --help'"),
    (("bench", "--burstiness", "x"), "burstiness='x' must be a number"),
    (("serve", "--host", ""), "host='' is empty: give an address, or 0.0.0.0"),
    (("check-results", "--results", "nope"), "results='nope' does not exist: check the path"),
    ((*LAPS, "--knob", "wait=nope"), "wait='nope' is unknown"),
    ((*LAPS, "--knob", "min_tokens=0"), "min_tokens=0 must be at least 1"),
    ((*AMPD, "--knob", "itl_stat=x"), "itl_stat='x' is unknown"),
    ((*AMPD, "--knob", "deployment=P:TP0x1 D:TP1x1"), "deployment='P:TP0x1 D:TP1x1' is none: write"),
    ((*AMPD, "--request-rate", "1e-300"), "rate=1e-300 must be at least"),
]


@pytest.mark.parametrize(
    ("arguments", "says"), BOUNDS + MESSAGES, ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else ""
)
def test_one_line_names_the_field_and_the_fix(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    commands_with_runs = ("bench", "eval", "ablate", "figure", "reproduce")
    where = (
        ["--result-dir", "r"] if arguments[0] in commands_with_runs and "--result-dir" not in "".join(arguments) else []
    )
    refused(repro(*arguments, *where), says)
    assert list(tmp_path.iterdir()) == []


def test_what_takes_one_value_is_not_given_two() -> None:
    """Every command refuses it before anything else is looked at: the library would take the last in silence."""
    num = 0
    for name, command in commands().items():
        for param in command.params:
            if param.param_type_name == "argument" or param.multiple or (param.is_flag and not param.secondary_opts):
                continue
            option = max(param.opts, key=len)
            first, second = ([option], param.secondary_opts) if param.is_flag else ([option, "1"], [f"{option}=2"])
            refused(repro(name, *first, *second), f"{option} is given 2 times and takes one value: keep one")
            num += 1
    assert num > 150
    assert repro("bench", "--dry-run", "--num-prompts", "2", "--json", "--json").code == 0


def test_a_reading_is_of_the_baselines(tmp_path: Path) -> None:
    both = ("--system", "dllm-serve", "--system", "llada")
    result = repro("bench", "--reading", "policy", *both, "--num-prompts", 2, "--dry-run", "--result-dir", tmp_path)
    assert result.code == 0
