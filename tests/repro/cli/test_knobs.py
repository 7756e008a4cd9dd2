"""A knob is one field: where it is declared, and nowhere else, decides what commands take, show and refuse."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import typer
from support.command import commands, repro
from support.refusals import refuses
from typer.main import get_command

from engines.errors import UserError
from engines.knobs import Checked, Memory, Only, Range, knobs_of
from repro.cli.list_command import entries_of
from repro.cli.main import PanelCommand
from repro.cli.options import Given, Knobs, spread
from repro.paths import REPO
from repro.runs.system import SYSTEMS, settings_of

WITH_ONE_MORE = """
import importlib.util, json, sys
from pathlib import Path

own = Path(sys.argv[1])
text = Path("engines/ampd/policies.py").read_text()
head = "class RoutingConfig(Checked):\\n"
assert text.count(head) == 1
field = "    haste: Annotated[float, Range(0, 5)] = 1.5\\n    '''How soon a worker is taken.'''\\n"
place = text.index("    alpha: ")
own.write_text(text[:place] + field + text[place:])
spec = importlib.util.spec_from_file_location("engines.ampd.policies", own)
module = importlib.util.module_from_spec(spec)
sys.modules["engines.ampd.policies"] = module
spec.loader.exec_module(module)

sys.path.insert(0, "tests")
from support.command import repro
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS

asked = ("bench", "--platform", "h20x32", "--num-prompts", 4, "--request-rate", 1, "--dry-run", "--json", "--result-dir", own.parent)
ablated = ("ablate", "--component", "reordering", "--num-runs", 1, "--result-dir", own.parent)
cell = Cell(system="ampd", dataset="gaia", platform="h20x32", executor="roofline", rate=1.0, seed=0, knobs=(("haste", 2), ("num_prompts", 4)))
print(json.dumps({
    "listed": json.loads(repro("list", "--knobs", "ampd", "--json").out)["knobs"],
    "taken": repro(*asked, "--knob", "haste=2.5").code,
    "too much": repro(*asked, "--knob", "haste=9").err,
    "no number": repro(*asked, "--knob", "haste=x").err,
    "without effect": repro(*asked, "--knob", "haste=2", "--knob", "adaptive_routing=false").err,
    "ablated": repro(*ablated, "--knob", "haste=9").err,
    "built": dict(SYSTEMS.get("ampd").prepare(cell)[0].options),
}))
"""


def test_a_field_of_ampds_router_is_all_that_a_knob_takes(tmp_path):
    """In a process in which the router's settings have one field more, in one place."""
    command = [sys.executable, "-c", WITH_ONE_MORE, str(tmp_path / "routing.py")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (listed,) = [each for each in found["listed"] if each["name"] == "haste"]
    assert listed == {
        "name": "haste",
        "takes": "a number, from 0 to 5",
        "default": "1.5",
        "only": "adaptive_routing=true",
        "what": "How soon a worker is taken.",
    }
    assert found["taken"] == 0
    assert found["too much"] == "error: haste=9 must be between 0 and 5\n"
    assert found["no number"] == "error: haste='x' must be a number\n"
    assert found["without effect"].startswith("error: haste=2 has no effect with adaptive_routing=false")
    assert found["ablated"] == "error: haste=9 must be between 0 and 5\n"
    assert found["built"] == {"haste": 2}


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    width: Annotated[int, Range(1, 8)] = 4
    """Rows at once."""
    memory: Memory | None = None
    """Bytes of the device."""
    order: Literal["first", "last"] = "first"
    """Which row comes next."""
    packs: Annotated[bool, Only(order="first")] = True
    """Whether rows share a step."""
    loud: bool = False
    """Say what is done."""


ENGINE = Knobs(lambda: {"Engine": (Engine,)})


def taken(*words: str) -> Given:
    """What a command whose options are the fields of ``Engine`` is given."""
    found: list[Given] = []

    def run(*, given: Annotated[Given, ENGINE]) -> None:
        found.append(given)

    app = typer.Typer(add_completion=False)
    app.command(cls=PanelCommand)(spread(run))
    command = get_command(app)
    with command.make_context("run", [*words]) as context:
        command.invoke(context)
    return found[0]


def test_options_are_of_the_kinds_of_their_fields():
    assert taken() == {}
    assert taken("--width", "3", "--memory", "24GB", "--no-packs") == {"width": 3, "memory": 24 * 10**9, "packs": False}
    assert taken("--packs", "--loud", "--order", "last") == {"packs": True, "loud": True, "order": "last"}
    for size in ("24 apples", "0", "0.5B", "-1GB", "1e400GB"):
        with pytest.raises(UserError, match="is not a size"):
            taken(f"--memory={size}")


@pytest.mark.parametrize("system", [*SYSTEMS])
def test_every_system_says_what_its_knobs_are(system):
    entries = entries_of(system)
    assert {entry.name for entry in entries} == {name for kind in settings_of(system) for name in knobs_of(kind)}
    assert [entry.name for entry in entries if not entry.text] == []


def test_what_a_system_of_ones_own_takes_is_listed():
    """A family that the command line has never heard of."""
    found = json.loads(repro("list", "--knobs", "support.md1:MD1", "--json").out)["knobs"]
    assert [(each["name"], each["takes"], each["default"]) for each in found] == [
        ("service_s", "a number, above 0", "1.0"),
        ("num_prompts", "a whole number, from 1 to 100,000", "200"),
    ]


def test_every_option_of_a_setting_is_explained():
    for name, command in commands().items():
        texts = command.callback.helps()
        missing = [param.name for param in command.params if not (param.help or texts.get(param.name)) and param.name]
        assert [each for each in missing if each != "help"] == [], name


def test_fields_of_groups_of_options_check_themselves():
    with refuses("width=9"):
        Engine(width=9)
