"""Fewer rows problem by problem: pairs are counted as they are, and the page states what the committed tables hold."""

import csv
import re
from collections.abc import Iterator
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import rows

from paper_figures.dllm_serve.row_policies import BLOCK_DIFFUSION, FAST_DLLM, PACES, POLICIES
from repro.paths import RESULTS
from repro.runs.statistics import mean_interval, wilson_interval

FRONT, PAGE = (
    (RESULTS.parent / "docs" / name).read_text(encoding="utf-8") for name in ("frontier.md", "frontier-rows.md")
)
SETTINGS = {
    "mini-gsm, 64 tokens in blocks of 32": "mini-gsm in blocks of 32",
    "mini-gsm, 40 tokens in blocks of 8": "mini-gsm in blocks of 8",
    "mini-code, 40 tokens in blocks of 8": "mini-code in blocks of 8",
    "mini-chain, 96 tokens in blocks of 16": "mini-chain in blocks of 16",
    "the same in blocks of 32": "mini-chain in blocks of 32",
}
BLOCK = "block diffusion, tiny-block, blocks of 16"
PACE_OF_BLOCK = dict(zip(PACES, BLOCK_DIFFUSION.paces or {}, strict=True))


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / "cpu-tiny" / name).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def solved() -> dict[tuple[str, str, str, str], dict[str, str]]:
    """By setting, pace, policy and what it is compared with."""
    found = {(row["setting"], row["pace"], row["policy"], row["reference"]): row for row in read("benchmark-rows.csv")}
    assert {row["n"] for row in found.values()} == {"500"}
    return found


def table_below(words: str) -> Iterator[list[str]]:
    """Cells of the rows of the page's first table behind these words."""
    lines = PAGE[PAGE.index(words) :].split("\n| ", 1)[1].split("\n\n")[0].splitlines()
    for line in lines[2:]:
        yield [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def policy_of(label: str) -> str:
    if label == BLOCK:
        return BLOCK_DIFFUSION.name
    if label.endswith("(`balanced`)"):
        return "balanced"
    return re.sub(r", no cache$| \(`.*`\)$|`", "", label)


def share(row: dict[str, str]) -> str:
    """Solved, as the page has it."""
    solved = int(row["solved"])
    low, high = wilson_interval(solved, 500)
    texts = (f"{100 * x:.1f}".replace("100.0", "100") for x in (solved / 500, low, high))
    return "{} [{}, {}]".format(*texts)


def test_pairs_are_counted_as_they_are(monkeypatch):
    monkeypatch.setattr(rows, "rows_per_request", lambda run: 2.5)

    def ran(text):
        return SimpleNamespace(record=SimpleNamespace(requests={"correct": [letter == "1" for letter in text]}))

    row = rows.Row.of(("setting", "pace", "policy"), ran("0001110111"), "every row", ran("1111110000"))
    assert (row.solved, row.n, row.rows, row.lost, row.won) == (6, 10, 25, 3, 3)
    assert row.points == 0 == row.points_low + row.points_high
    assert row.points_high == pytest.approx(100 * 1.96 * 6**0.5 / 10, rel=1e-4)
    row = rows.Row.of(("setting", "pace", "policy"), ran("0000"), "every row", ran("0111"))
    assert (row.points, row.p_value) == (-75.0, 0.25)
    assert (row.lost, row.won) == (3, 0)
    assert row.points_low == pytest.approx(-75 - 100 * 1.96 * (3 / 16 * 4) ** 0.5 / 4, rel=1e-3)


def test_every_setting_asks_all_of_it_and_few_of_less_context():
    for setting in rows.WHERE:
        cells = list(rows.cells_of(setting, 500, 1))
        assert len({cell for _, _, cell in cells}) == len(cells)
        kept = [policy for _, policy, _ in cells if policy in rows.KEPT]
        assert len(kept) == (len(rows.KEPT) if setting.endswith(" 8") else 0)
        assert {pace for pace, policy, _ in cells if policy == rows.EVERY} == set(PACES)


@pytest.fixture(scope="module")
def timed() -> dict[tuple[str, str, str, str], float]:
    """Processor seconds by setting, pace, policy and seed."""
    rows = read("frontier-cpu-tiny.csv")
    return {(row["setting"], row["pace"], row["policy"], row["seed"]): float(row["processor_s"]) for row in rows}


def test_the_page_states_what_is_solved_and_how_fast(solved, timed):
    setting, count = "", 0
    for answers, label, *cells in table_below("intervals, in one run of"):
        setting = SETTINGS.get(answers, setting)
        assert not answers or answers in SETTINGS
        policy = policy_of(label)
        for pace, (said, computed, times) in zip(PACES, (cells[:3], cells[3:]), strict=True):
            at = PACE_OF_BLOCK[pace] if label == BLOCK else pace
            row = solved[setting, at, policy, rows.EVERY]
            assert said == f"{share(row)} %", (setting, at, policy)
            assert computed == f"{int(row['rows']) / 500:,.0f}", (setting, at, policy)
            own = {seed: timed.get((setting, at, policy, seed)) for seed in "012"}
            if times in ("", "1"):
                assert policy == FAST_DLLM.name if times else policy == rows.EVERY or None in own.values()
                continue
            ratios = mean_interval([timed[setting, pace, FAST_DLLM.name, seed] / taken for seed, taken in own.items()])
            assert times == f"{ratios.mean:.2f} ± {ratios.half_width:.2f}", (setting, at, policy)
            count += 1
    assert count > 25


def test_both_pages_state_in_words_what_the_tables_hold(solved, timed):
    once, (one, threshold) = "settled, renewed, prompt once", PACES

    def times(setting: str, pace: str, policy: str = once, *, beside: str = "", digits: int = 2) -> str:
        pairs = [timed[setting, beside or pace, FAST_DLLM.name, x] / timed[setting, pace, policy, x] for x in "012"]
        found = mean_interval(pairs)
        return f"{found.mean:.{digits}f} ± {found.half_width:.{digits}f}"

    def fewer(setting: str, pace: str) -> str:
        theirs, own = (int(solved[setting, pace, name, rows.EVERY]["rows"]) for name in (FAST_DLLM.name, once))
        return f"{theirs / own:.2f}"

    wide, gsm, code, chain = rows.SETTINGS
    at_one, at_threshold = ([times(each, pace) for each in (gsm, code, chain)] for pace in (one, threshold))
    left, left_by_threshold = ([fewer(each, pace) for each in (gsm, code, chain)] for pace in (one, threshold))
    front, page = (" ".join(text.split()) for text in (FRONT, PAGE))
    assert "by threshold {}, {} and {} times (mini-gsm".format(*at_threshold) in front
    said = (
        "one token a step {}, {} and {}, where rows are {}, {} and {} times fewer. In blocks of 32 mini-gsm is {} and"
    )
    assert said.format(*at_one, *left, times(wide, one)) in front
    said = f"by threshold {times(wide, threshold)} times as fast, with {fewer(wide, one)} and {fewer(wide, threshold)} times"
    assert said in front
    block = [times(each, PACE_OF_BLOCK[threshold], BLOCK_DIFFUSION.name, beside=one, digits=1) for each in (wide, code)]
    assert "{} times (mini-gsm, 64 tokens) and {} (mini-code)".format(*block) in front
    said = "mini-gsm {}, mini-code {} and mini-chain {} times, where rows are {}, {} and {} times fewer"
    assert said.format(*at_threshold, *left_by_threshold) in page
    assert f"rows are only {fewer(wide, threshold)} times fewer" in page
    assert f"in blocks of 32 are {fewer(wide, one)} times fewer and mini-chain's {left[2]} times" in page
    said = "rows are {} times fewer and mini-gsm's in blocks of 8 {} times, and they are {} and {} times as fast"
    assert said.format(left[1], left[0], at_one[1], at_one[0]) in page


def test_the_page_states_what_rows_do_not_account_for():
    names = {policy.name for policy in POLICIES if policy.is_fixed}
    per_row, left = [], []
    for setting in rows.SETTINGS:
        runs = [
            (float(row["rows_per_request"]) * int(row["n"]), float(row["processor_s"]), row["policy"])
            for row in read("frontier-cpu-tiny.csv")
            if (row["setting"], row["pace"]) == (setting, next(iter(PACES))) and row["policy"] in names
        ]
        assert len(runs) == 18
        slope, rest_s = np.polyfit(*zip(*((computed, taken) for computed, taken, _ in runs), strict=True), 1)
        per_row.append(slope * 1e6)
        left.append(100 * rest_s / fmean(taken for _, taken, name in runs if name.endswith("prompt once")))
    assert f"has {min(per_row):.0f} to {max(per_row):.0f} us a row, and {min(left):.0f} to {max(left):.0f} %" in PAGE


def test_the_page_states_what_is_lost_and_won(solved):
    chain, wide = SETTINGS["mini-chain, 96 tokens in blocks of 16"], "mini-chain in blocks of 32"
    one, threshold = PACES
    columns = [(chain, one, rows.EVERY), *((where, pace, rows.REFRESH) for pace in PACES for where in (chain, wide))]
    for label, *cells in table_below("of mini-chain, those lost"):
        policy = policy_of(label.replace("`balanced`", "(`balanced`)"))
        for (where, pace, reference), cell in zip(columns, cells, strict=True):
            if cell:
                row = solved[where, pace, policy, reference]
                points = [f"{float(row[name]):+.1f}" for name in ("points", "points_low", "points_high")]
                lost = f"{row['lost']} lost, {row['won']} won"
                assert cell == "{}: {} [{}, {}]".format(lost, *points), (where, pace, policy)
    for policy, counts in (("settled", (20, 8, "0.04")), ("settled, renewed, prompt once", (18, 8, "0.08"))):
        row = solved[chain, one, policy, rows.EVERY]
        assert (int(row["lost"]), int(row["won"]), f"{float(row['p_value']):.2f}") == counts
    assert threshold in PACES


def test_the_page_states_what_less_context_costs(solved):
    for rule, ratio, _, code, gsm, is_dense in table_below("read are the share of the context"):
        policy = rows.REFRESH if rule == "`dense`" else re.sub(r" \(.*\)", "", rule).replace("`", "")
        if rule != "`dense`":
            name, _, more = policy.partition(", ")
            policy = ", ".join(filter(None, (f"{name} {ratio}", more)))
        own = [
            solved[f"{task} in blocks of 8", next(iter(PACES)), policy, rows.EVERY]
            for task in ("mini-code", "mini-gsm")
        ]
        assert [code, gsm] == [share(row) for row in own], policy
        dense = [
            solved[f"{task} in blocks of 8", next(iter(PACES)), rows.REFRESH, rows.EVERY]
            for task in ("mini-code", "mini-gsm")
        ]
        within = all(
            int(a["solved"]) / 500 >= wilson_interval(int(b["solved"]), 500)[0] for a, b in zip(own, dense, strict=True)
        )
        assert is_dense == ("" if policy == rows.REFRESH else "yes" if within else "no"), policy
