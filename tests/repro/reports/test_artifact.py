"""The artifact guide is what the committed claims give, its commands are there, and a tier runs them."""

import csv
import json
import shlex
from pathlib import Path

import pytest
from support.command import refused, repro
from support.documents import parsed

from engines.errors import RunError
from repro.paths import REPO, RESULTS
from repro.reports import artifact
from repro.reports.artifact import commands, read_costs, spend, steps, time_text

GUIDE = REPO / "ARTIFACT.md"


def test_the_guide_is_what_the_claims_give(tmp_path):
    told = json.loads(repro("report --guide --json --out", tmp_path / "guide.md").out)
    assert told["bytes"] == len(GUIDE.read_bytes())
    assert (tmp_path / "guide.md").read_bytes() == GUIDE.read_bytes()


def test_every_claim_stands_in_the_guide_once():
    ids = [line.split(" | ")[0].removeprefix("| ") for line in GUIDE.read_text().splitlines() if line.startswith("| ")]
    for path in RESULTS.glob("claims-*.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            assert ids.count(row["id"]) == 1, row["id"]


@pytest.mark.parametrize("command", commands("all"))
def test_a_command_of_the_guide_parses(command):
    program, name, *words = shlex.split(command)
    assert program == "repro"
    assert parsed(name, words)


def test_every_command_has_its_cost_and_no_other():
    costs = read_costs(RESULTS / "costs.csv")
    assert {*costs} == {*commands("all"), "repro reproduce --tier kick-tires"}
    assert costs["repro reproduce --tier kick-tires"].wall_s < 120
    assert all(each.wall_s > 0 < each.processor_s and each.memory_bytes > 20e6 for each in costs.values())


def test_tiers_take_what_they_are_meant_to():
    costs = read_costs(RESULTS / "costs.csv")
    sums = [sum(costs[each].processor_s for each in commands(name)) for name in artifact.TIERS]
    assert sums[0] <= 30 < sums[1] <= 600 < sums[2]
    assert [*commands("all")][: len(commands("short"))] == [*commands("short")]
    assert all(step.file.startswith("results/figures/") for step in steps() if step.claims)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of what takes a second."""
    chosen = ("repro reproduce ampd/table1 --platform h20x32", "repro claims --paper ampd")
    for place in ("repro.cli.tier.commands", "repro.reports.artifact.commands"):
        monkeypatch.setattr(place, lambda tier, root=RESULTS: dict.fromkeys(chosen, tier))


@pytest.mark.usefixtures("small")
def test_a_tier_runs_its_commands_and_compares(tmp_path):
    told = json.loads(repro("reproduce --tier kick-tires --json --result-dir", tmp_path).out)
    assert {row["claim"] for row in told["claims"]} >= {"ampd-trace-gaia", "ampd-trace-hotpotqa"}
    assert all(row["same"] for row in told["claims"])
    assert (tmp_path / "figures" / "ampd" / "table1-h20x32.csv").is_file()
    assert [*read_costs(Path(told["file"]))] == [each["command"] for each in told["costs"]]


def test_a_command_that_fails_is_told_in_its_words():
    with pytest.raises(RunError, match="repro reproduce nosuch: figure='nosuch' is unknown"):
        spend("repro reproduce nosuch")


def test_what_a_tier_does_not_heed_is_refused():
    refused(repro("reproduce fig3 --tier short"), "figure='fig3' has no effect beside a tier")
    refused(repro("reproduce --tier short --num-runs 3"), "num_runs=3 has no effect on tier short")
    refused(repro("reproduce"), "Missing argument")
    refused(repro("report --guide --result-dir", RESULTS), "result_dir=")


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (89.4, "89 s"), (90, "1.5 min")])
def test_times_are_said_in_seconds_or_minutes(seconds, said):
    assert time_text(seconds) == said
