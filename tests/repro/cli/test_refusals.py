"""What every command refuses, in one line that names the field, and before anything is written: refusals.txt."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from support.checkpoints import write_dream, write_llada
from support.command import commands, refused, repro
from support.own_cards import CARD, write_card

from repro.capacity.sites import ClusterSite

SEPARATOR = "=> "
REFUSED_FILES = yaml.safe_load(Path(__file__).with_name("refused_files.yaml").read_text(encoding="utf-8"))
SESSIONS = [{"rounds": [[800 + 50 * n, 60], [300, 40]]} for n in range(12)]
TIMES = [{"timestamp": n, "ContextTokens": 100 + n, "GeneratedTokens": 16} for n in range(24)]
FILES = {
    "ids.json": "[5, 6, 7]",
    "card.yaml": CARD,
    "grid.yaml": "platform: l40s\nseed: 3",
    "steps.csv": "",
    "mine.jsonl": "".join(json.dumps(each) + "\n" for each in SESSIONS),
    "times.jsonl": "".join(json.dumps(each) + "\n" for each in TIMES),
}
"""What is there: token ids, a card, a grid, no timed steps, sessions, and requests."""


def rows() -> list[tuple[str, str, str]]:
    """A command, options that are given with it or in the place of its own, and what is said of them."""
    text = (
        Path(__file__)
        .with_name("refusals.txt")
        .read_text(encoding="utf-8")
        .replace(f"\n    {SEPARATOR}", f" {SEPARATOR}")
    )
    found, command = [], ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            command = line.strip("[]")
        else:
            options, _, says = line.partition(SEPARATOR)
            found.append((command, options, says))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {"LLADA": str(write_llada(root / "llada")), "DREAM": str(write_dream(root / "dream"))}


def in_place_of(defaults: list[str], options: list[str]) -> list[str]:
    """The options behind the defaults, pairs of a name and a value, that they do not name; a knob's name is its own."""

    def names(words: list[str]) -> list[str]:
        return [value.partition("=")[0] if name == "--knob" else name for name, value in pairwise([*words, ""])]

    own = names(options)
    kept = [place for place, name in list(enumerate(names(defaults)))[::2] if name not in own]
    return [*(word for place in kept for word in defaults[place : place + 2]), *options]


@pytest.mark.parametrize(("command", "options", "says"), rows())
def test_a_refusal(command, options, says, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    monkeypatch.setattr("engines.server.run.run", lambda *_: pytest.fail("a server was begun"))
    for name in ("run_here", "run_by_workers"):
        monkeypatch.setattr(f"repro.runs.pool.{name}", lambda *_: pytest.fail("a cell ran"))
    monkeypatch.setattr(ClusterSite, "run", lambda *_: pytest.fail("a plan was simulated"))
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)
    name, *defaults = [models.get(word, word) for word in shlex.split(command)]
    asked = [name, *in_place_of(defaults, shlex.split(options))]
    known = {
        option for each in [commands().get(name)] if each is not None for param in each.params for option in param.opts
    }
    if "--result-dir" in known and "--result-dir" not in options:
        asked += ["--result-dir", "r"]
    refused(repro(*asked), says)
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}


@pytest.mark.parametrize(
    ("table", "text", "says"), [(name, *row) for name, table in REFUSED_FILES.items() for row in table["refused"]]
)
def test_a_refused_file(table, text, says, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_card(tmp_path)
    name = REFUSED_FILES[table]["file"]
    (tmp_path / name).write_text(text, encoding="utf-8")
    asked = REFUSED_FILES[table]["asked"].replace("FILE", name).replace("LLADA", models["LLADA"])
    refused(repro(asked), says)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", name}


def test_bytes_that_are_no_text():
    refused(repro("generate", "--prompt", "\udcff"), "is not UTF-8 text")
