"""A paper that is not here: a package of claims, a figure and a policy, found by its entry point (tests/packs/ltr)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from packs.ltr.latency import EXAMPLE, LTR, SETTING, per_token_s
from packs.ltr.policy import ShortestPredicted
from support.command import refused, repro

from engines.policies.views import PrefillQueue


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Beside the package lies what pip writes of ``[project.entry-points."repro.paper"]``."""
    info = tmp_path / "site" / "ltr-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ltr\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[repro.paper]\nltr = packs.ltr.latency:LTR\n")
    monkeypatch.syspath_prepend(info.parent)
    return tmp_path / "runs"


def test_its_figure_is_drawn_and_its_claims_are_judged(installed, monkeypatch):
    monkeypatch.setattr("packs.ltr.latency.SETTING", (*SETTING, ("num_prompts", 80)))
    drawn = repro("reproduce ltr/latency --jobs 1 --json --result-dir", installed)
    assert drawn.code == 0, drawn
    (page,) = json.loads(drawn.out)["figures"]
    assert page["figure"] == "ltr/latency"
    assert f"{installed}/figures/ltr/latency-a100.png" in page["files"]
    told = json.loads(repro("claims --paper ltr --json --result-dir", installed).out)
    claims = {each["id"].removeprefix("ltr-"): each for each in told["claims"]}
    said = {name: (each["verdict"], each["role"]) for name, each in claims.items()}
    assert said.pop("chat-latency") == ("not reproduced", "prediction")
    assert {*said.values()} == {("by construction", "by construction")}
    assert claims["chat-latency"]["command"] == "repro reproduce ltr/latency --platform a100"


def test_without_an_entry_point_its_command_names_its_module():
    assert LTR.entries[0].alias == "packs.ltr.latency:"


def test_its_claims_hold_as_far_as_they_do():
    assert per_token_s(PrefillQueue()) == pytest.approx(20 / 3)
    assert per_token_s(ShortestPredicted(predicted=dict(enumerate(EXAMPLE)))) == pytest.approx(3.8 / 3)


@pytest.mark.usefixtures("installed")
def test_what_it_does_not_have_is_refused():
    assert LTR.entries[0].alias == "ltr/latency"
    refused(repro("reproduce ltr/nosuch"), "figure='ltr/nosuch' is unknown: use one of ltr/latency")
    refused(repro("claims --paper nosuch"), "paper='nosuch' is unknown: use one of dllm-serve, ampd, laps, block, ltr")
