"""Every choice of ours is tried, a choice that turns a verdict is listed, and one that turns none is not."""

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from support.figure_runs import block_run
from support.stored_runs import stored

from baselines.ar.dynamo import DynamoConfig
from engines.cluster.policies import HistoryRead
from engines.cluster.record import ItlStat, Scope, TtftRule
from engines.laps.batching import Joins, LongDispatch
from repro.families.cluster.ampd_settings import DEFAULT_READING
from repro.families.dllm.settings import BATCH_RULES, ReadingName
from repro.reports.claims import Finding, Flip, judge_all, load_claims, stated
from repro.reports.claims_file import flips_csv, flips_path, read_flips
from repro.reports.evidence import FigureSource, sources
from repro.reports.figures import PAPERS, figure
from repro.reports.flips import SettingChange, changes, figures_of_size, flips, free_settings, runs_below, spec
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.runs.system import ENTRIES, free_of

SPEED = {"dllm-serve": 76.6, "fast-dllm": 42.4}
OF_NO_CLAIM = {"llada", "dream", "srpt", "edf", "moore-hodgson", "on-time", "srpt-aging", "laps-graphs-only"}
OF_NO_CLAIM |= {"d2cache", "dkv-cache", "dpad", "streaming-dllm", "window-diffusion"}
"""Systems that no claim of a paper is of."""
IN_ANOTHER_READING = {(name, "requests running at once") for name in ("fast-dllm", "dllm-cache", "sparse-dllm")}
"""What is free where a reading is not the default."""
TURNED = Path(__file__).with_name("flips.csv")
"""What is turned in the small sizes of this test; ``python tests/repro/reports/test_flips.py`` writes it anew."""
SIZES = spec()["sizes"]
READINGS = [tuple(setting.items()) for setting in spec()["readings"]]
SMALL = {
    "ampd": {**SIZES["ampd"], "figures": ["fig6"]},
    "dllm-serve": {**SIZES["dllm-serve"], "figures": ["table4"], "knobs": {"num_prompts": 8}},
}
"""Every choice that there is in these figures; LAPS's figures have too many runs for a test."""


@cache
def chosen(paper: str) -> list[FigureSource]:
    return figures_of_size(PAPERS[paper], SIZES[paper])


@cache
def tried(paper: str) -> list[SettingChange]:
    return changes([cell for source in chosen(paper) for cell in source.cells])


@pytest.fixture(scope="module")
def source():
    (found,) = (each for each in sources([figure("dllm-serve/fig3")]) if each.view.platform.name == "rtx4090")
    view = replace(found.view, num_runs=1)
    return replace(found, view=view, cells=tuple(view.applied(cell) for cell in found.figure.cells(view)))


def made(planted: tuple[str, object] | None):
    def make(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        runs = []
        for cell in cells:
            is_planted = planted is not None and dict(cell.knobs).get(planted[0]) == planted[1]
            speed = SPEED.get(cell.system, 30.0) * (2.0 if is_planted and cell.system == "fast-dllm" else 1.0)
            runs.append(stored(cell, tok_s=speed))
        return runs

    return make


def found_with(source: FigureSource, planted: tuple[str, object] | None) -> list[Flip]:
    make_runs = made(planted)
    return list(flips(load_claims("dllm-serve"), [(source, make_runs(source.cells))], changes(source.cells), make_runs))


def test_a_planted_flip_is_listed(source):
    found = found_with(source, ("reading", "policy"))
    assert {each.change for each in found} == {"reading=policy"}
    fast = {each.claim: each for each in found}["dllm-4090-burst-fast"]
    assert flips_csv([fast]).splitlines()[1] == (
        "reading,reading=policy,dllm-4090-burst-fast,reproduced,not reproduced,42.4,84.8"
    )


def test_nothing_is_listed_where_nothing_flips(source):
    assert not found_with(source, None)


def of_sglang(cells: Sequence[Cell]) -> Sequence[StoredRun]:
    """As published by the default schedule, half of it by the others: readings differ. Half by all where prompts share nothing."""
    runs = []
    for cell in cells:
        knobs = cell.knob_values
        long = "long-" if "shared_len" not in knobs else ""
        published = stated("block", f"block-sglang-{long}{knobs['max_num_seqs']}")
        is_met = knobs["batching"] == "first-done" and knobs.get("shared_len") != 0
        runs.append(block_run(cell, tok_s=published if is_met else published / 2))
    return runs


def test_flips_from_and_to_undecided_are_listed_and_so_is_what_is_no_longer_judged():
    (source,) = figures_of_size(PAPERS["block"], {**SIZES["block"], "num_runs": 1})
    whole = source.figure.findings

    def findings(runs, view):
        return [each for each in whole(runs, view) if each.claim != "block-sglang-8" or each.value > 1000]

    source = replace(source, figure=replace(source.figure, findings=findings))
    tried = [SettingChange(setting=(("shared_len", 0),))]
    drawn = [(source, of_sglang(source.cells))]
    found = {each.claim: each for each in flips(load_claims("block"), drawn, tried, of_sglang)}
    turned = {claim: (each.default, each.changed) for claim, each in found.items() if "-long-" not in claim}
    gone = ("undecided by reading", "not reproduced")
    assert turned == {
        **{f"block-sglang-{n}": gone for n in (1, 32, 64, 128)},
        "block-sglang-8": ("undecided by reading", "not run"),
    }
    assert (found["block-sglang-8"].default_value, found["block-sglang-8"].changed_value) == ("1923", "")


def test_a_claim_that_is_judged_on_neither_side_is_no_flip():
    """By default no finding answers it; under the change one does that cannot be compared."""
    (source,) = figures_of_size(PAPERS["block"], {**SIZES["block"], "num_runs": 1})
    whole = source.figure.findings

    def findings(runs, view):
        slow = [each for each in whole(runs, view) if each.claim == "block-sglang-8" and each.value < 1000]
        return [replace(each, comparable=False) for each in slow]

    source = replace(source, figure=replace(source.figure, findings=findings))
    drawn, halved = [(source, of_sglang(source.cells))], [SettingChange(setting=(("shared_len", 0),))]
    assert not list(flips(load_claims("block"), drawn, halved, of_sglang))


def test_assumed_lengths_are_changed_and_published_ones_are_not():
    cells = [cell for each in chosen("block") for cell in each.cells]
    short = next(cell for cell in cells if cell.knob_values.get("shared_len") == 832)
    long = next(cell for cell in cells if cell.knob_values["input_len"] == 4096)
    lengths = [each for each in tried("block") if "input_len" in each.text or "gen_length" in each.text]
    assert len(lengths) == 4
    for change in lengths:
        setting, fitted = dict(change.setting), {"tokens_per_forward": dict(change.setting)["tokens_per_forward"]}
        assert change.of(short).knob_values == {**short.knob_values, **setting}
        assert change.of(long).knob_values == {**long.knob_values, **fitted}
    others = [cell for paper in SIZES if paper != "block" for each in chosen(paper) for cell in each.cells]
    assert not any(change.of(cell) != cell for change in lengths for cell in others)
    assert not any("length_scale" in each.text for each in tried("block"))


# -- every choice -------------------------------------------------------------------------------------------


def test_what_any_system_declares_free_is_tried_or_no_claim_is_of_it():
    free = {name for name in ENTRIES if free_of(name)}
    cells = [cell for paper in SIZES for each in chosen(paper) for cell in each.cells]
    compared = {cell.system for cell in cells}
    assert free - compared == OF_NO_CLAIM & free
    texts = {each.text for paper in SIZES for each in tried(paper)}
    for name in free & compared:
        own = [cell for cell in cells if cell.system == name]
        for each in (each for each in free_of(name) if each.has_default):
            found = {SettingChange(setting=setting, system=name).text for cell in own for setting in each.among(cell)}
            assert found & texts or (name, each.what) in IN_ANOTHER_READING
            said = {SettingChange(setting=tuple(setting.items()), system=name).text for setting in each.settings}
            assert said <= texts


def test_every_reading_is_tried():
    texts = {each.text for paper in SIZES for each in tried(paper)}
    assert {SettingChange(setting=setting).text for setting in READINGS} <= texts


KINDS: dict[str, tuple[Any, Any]] = {
    "reading": (ReadingName, "published"),
    "history_read": (HistoryRead, DynamoConfig.history_read),
    "slo_scope": (Scope, DEFAULT_READING.scope),
    "ttft_rule": (TtftRule, DEFAULT_READING.ttft),
    "joins": (Joins, "all"),
    "long_dispatch": (LongDispatch, "pack"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_value_of_a_reading_but_the_default_is_tried(name):
    kind, default = KINDS[name]
    values = {dict(setting)[name] for setting in READINGS if name in dict(setting)}
    assert values == set(get_args(kind)) - {default}


def test_every_batch_rule_and_percentile_is_a_reading():
    """Of thirty gaps the 99th percentile is the largest, and ``p95-higher`` the next."""
    values = {value for setting in READINGS for name, value in setting}
    assert set(BATCH_RULES) - {"workload"} <= values
    assert set(get_args(ItlStat)) - {DEFAULT_READING.itl, "p99", "max"} <= values


def test_a_choice_is_made_only_where_it_is_free():
    cells = [cell for each in chosen("laps") for cell in each.cells]
    chunk = next(each for each in tried("laps") if each.text == "laps: chunk_tokens=8192")
    ours, theirs = (next(cell for cell in cells if cell.system == name) for name in ("laps", "sglang-pd"))
    assert dict(chunk.of(ours).knobs)["chunk_tokens"] == 8192
    assert chunk.of(theirs) == theirs
    said = replace(ours, knobs=(*ours.knobs, ("chunk_tokens", 512)))
    assert chunk.of(said) == said
    searched = replace(ours, knobs=(*ours.knobs, ("tune", "search")))
    assert chunk.of(searched) == searched
    assert not any(dict(setting).get("chunk_tokens") for setting in free_settings(said))


# -- what is turned -----------------------------------------------------------------------------------------


def turned(paper: str, root: Path) -> list[Flip]:
    make_runs, chosen = runs_below(root, jobs=1), figures_of_size(PAPERS[paper], SMALL[paper])
    tried = changes([cell for source in chosen for cell in source.cells])
    drawn = [(source, make_runs(source.cells)) for source in chosen]
    return list(flips(load_claims(paper), drawn, tried, make_runs))


@pytest.mark.parametrize("paper", SMALL)
def test_claims_that_a_choice_turns_are_as_listed(paper, tmp_path):
    with TURNED.open(encoding="utf-8", newline="") as file:
        listed = [row for row in csv.DictReader(file) if row["claim"].startswith(paper.partition("-")[0] + "-")]
    assert list(csv.DictReader(flips_csv(turned(paper, tmp_path)).splitlines())) == listed


@pytest.mark.parametrize("paper", SIZES)
def test_committed_flips_are_of_the_choices_there_are(paper):
    found = [each for own in read_flips(paper).values() for each in own]
    assert {(each.kind, each.change) for each in found} <= {(each.kind, each.text) for each in tried(paper)}
    assert {each.claim for each in found} <= {claim.id for claim in load_claims(paper)}


# -- what becomes of a verdict ------------------------------------------------------------------------------


def flip(claim: str, default: str, changed: str) -> dict[str, tuple[Flip, ...]]:
    given = Flip(
        kind="free",
        change="fast-dllm: batch_rule=one",
        claim=claim,
        default=default,
        changed=changed,
        default_value="42",
        changed_value="30",
    )
    return {claim: (given,)}


def judged(value: float, flips: dict[str, tuple[Flip, ...]], claim: str = "dllm-4090-burst-fast") -> Any:
    finding = Finding(claim=claim, value=value, obtained="composed", how="runs")
    return {each.claim.id: each for each in judge_all(load_claims("dllm-serve"), [finding], flips)}[claim]


@pytest.mark.parametrize(("value", "verdict"), [(42.4, "reproduced"), (10.0, "not reproduced")])
def test_a_verdict_that_a_choice_turns_is_undecided(value, verdict):
    claim = "dllm-4090-burst-fast"
    other = {"reproduced": "not reproduced", "not reproduced": "reproduced"}[verdict]
    assert judged(value, {}).verdict == verdict
    found = judged(value, flip(claim, verdict, other))
    assert found.verdict == "undecided by reading"
    assert "fast-dllm: batch_rule=one (30)" in found.reason
    assert judged(value, flip("dllm-4090-burst-peak", verdict, other)).verdict == verdict


def test_a_flip_of_runs_that_judged_otherwise_by_themselves_turns_nothing():
    assert judged(42.4, flip("dllm-4090-burst-fast", "not reproduced", "reproduced")).verdict == "reproduced"


def test_flips_are_read_back(tmp_path):
    flips = flip("dllm-4090-burst-fast", "reproduced", "not reproduced")
    flips_path("dllm-serve", tmp_path).write_text(flips_csv([each for own in flips.values() for each in own]))
    assert read_flips("dllm-serve", tmp_path) == flips
    assert read_flips("laps", tmp_path) == {}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        found = [each for paper in SMALL for each in turned(paper, Path(place))]
    TURNED.write_text(flips_csv(found), encoding="utf-8")
