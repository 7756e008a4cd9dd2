"""Every option of the commands that check before they work, with values no one means: an answer, or one line."""

from functools import cache

import pytest
from support.command import commands, refused, repro
from support.hostile import HOSTILE
from support.tables import data_beside

VALUES = (
    *HOSTILE,
    *("0", "-1", "-0.0", "0.5", "inf", "--", "gen_length=abc", "gen_length=99999999999", "profile_every=[1]"),
)
KINDS = (
    *(("", " "), ("1e-320", "1e308"), ("0.5", "-0.0"), ("nan", "-inf", "inf"), ("0", "-1"), ("true", "null")),
    *(("99999999999999999999", "9" * 400, "9" * 5000), ("{}", "[", "profile_every=[1]"), ("é", "a b"), ("/", "..")),
    *(("/dev/null", "~nosuch"), ("\u202e", "%s%n", "\udcff"), ("x" * 5000, "--")),
    ("a=b", "gen_length=abc", "gen_length=99999999999"),
)
"""The same, by what may be wrong with them."""
COMMANDS = {name: tuple(words) for name, words in data_beside(__file__, "options")["commands"].items()}
EMPTY_PATH = {"--result-dir", "--dataset-path", "--out-dir"}
FOLDERS = {"--result-dir", "--out-dir"}
NO_FOLDERS = ("", "x" * 5000, "a\0b")
"""For a command that draws for seconds what a folder holds, whatever its name."""
SKIPPED = {"--help", "--force", "--json", "--verbose"}


@cache
def options_of(command: tuple[str, ...]) -> list[str]:
    found = commands()[command[0]].params
    return [
        name for each in found if not getattr(each, "is_flag", False) for name in each.opts if name.startswith("--")
    ]


def values_of(command: str, option: str) -> tuple[str, ...]:
    """Some of every kind, at least one: the commands that have an option share them out. What takes every knob is given all."""
    commands = [name for name, given in COMMANDS.items() if option in options_of(given)]
    if option == "--knob":
        return VALUES
    place, num = commands.index(command), len(commands)
    return tuple(value for kind in KINDS for value in kind[place::num] or (kind[place % len(kind)],))


def test_every_value_is_of_one_kind():
    assert sorted(value for kind in KINDS for value in kind) == sorted(VALUES)


CASES = [(name, option) for name, given in COMMANDS.items() for option in options_of(given) if option not in SKIPPED]


@pytest.mark.parametrize(("command", "option"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_hostile_value(command, option, tmp_path, monkeypatch):
    """Nothing is run here, so nothing may fail while it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    # A server that is asked for rightly would serve for ever.
    monkeypatch.setattr("engines.server.run.run", lambda *asked: None)
    given = COMMANDS[command]
    where = [] if option in FOLDERS or "--result-dir" not in options_of(given) else ["--result-dir", tmp_path / "runs"]
    if "--out-dir" in options_of(given) and option != "--out-dir":
        where += ["--out-dir", tmp_path / "out"]
    for value in NO_FOLDERS if command == "figure" and option in FOLDERS else values_of(command, option):
        result = repro(*given, *where, option, value)
        assert "fault of this program" not in result.err, (value, result.err)
        if result.code != 0:
            refused(result)
        elif option in EMPTY_PATH:
            assert value != ""
    kept = {"runs", "out", " ", "0", "-1", "--"} | {value for value in VALUES if len(value) < 200}
    assert {path.name for path in tmp_path.iterdir()} <= kept


def test_what_takes_one_value_is_not_given_two():
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


def test_a_reading_is_of_the_baselines(tmp_path):
    both = ("--system", "dllm-serve", "--system", "llada")
    result = repro("bench", "--reading", "policy", *both, "--num-prompts", 2, "--dry-run", "--result-dir", tmp_path)
    assert result.code == 0
