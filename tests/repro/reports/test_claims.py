import csv
import json
import re
from dataclasses import replace

import pytest
from support.tables import data_beside
from typer.testing import CliRunner

from engines.errors import UserError
from repro.cli.main import app
from repro.paths import RESULTS
from repro.reports import claims_file
from repro.reports.claims import (
    Claim,
    Finding,
    Judged,
    Role,
    Tolerance,
    count,
    count_by_role,
    count_facts,
    facts,
    judge,
    judge_all,
    load_claims,
    read_claims,
    tolerance,
)
from repro.reports.claims_file import COLUMNS, as_row, read, rejudged, save
from repro.reports.figures import PAPERS

DATA = data_beside(__file__, "claims")

BOUND = re.compile(r"at least|(?<!no )more than|less than|within a\b")
NO_BOUNDS = {"laps-fig1-interference"}
CLAIMS = {claim.id: claim for claim in load_claims("dllm-serve")}
CARD, L40S = ("rtx4090/livebench", "rtx4090/burst", "rtx4090/osc"), ("l40s/livebench", "l40s/burst", "l40s/osc")


def answer(claim: str, value: float | tuple[float, ...], **more: object) -> Finding:
    own = tuple(value) if isinstance(value, list) else value
    return Finding(claim=claim, value=own, obtained="composed", how="runs", **more)


def judged(claim: str | Claim, value: float | tuple[float, ...], role: Role = "prediction", **more: object) -> Judged:
    stated = replace(CLAIMS[claim] if isinstance(claim, str) else claim, role=role)
    return judge(stated, [answer(stated.id, value, **more)])


@pytest.mark.parametrize(("claim", "value", "of", "met"), DATA["verdicts"])
def test_verdicts(claim, value, of, met):
    found = judged(claim, value, of=of)
    assert found.verdict == ("reproduced" if met else "not reproduced")
    assert (found.reason is None) == met
    assert found.role == "prediction"


INCREMENTS = CLAIMS["dllm-abl-increments"]


@pytest.mark.parametrize(("shift", "met"), [(0.0, True), (0.029, True), (-0.031, False)])
def test_increments_have_sizes(shift, met):
    values = INCREMENTS.expected.value
    assert isinstance(values, tuple)
    found = judged(INCREMENTS, (*values[:4], values[4] + shift), of=INCREMENTS.of)
    assert found.verdict == ("reproduced" if met else "not reproduced")


@pytest.mark.parametrize("role", ["fitted", "implied by the fit", "prediction"])
def test_role_and_verdict_are_apart(role):
    for value, verdict in ((76.6, "reproduced"), (10.0, "not reproduced")):
        found = judged("dllm-4090-burst-peak", value, role)
        assert (found.role, found.verdict) == (role, verdict)


@pytest.mark.parametrize(("claim", "value", "more"), DATA["what_no_run_can_change_is_not_reproduced"])
def test_what_no_run_can_change_is_not_reproduced(claim, value, more):
    found = judged(claim, value, "by construction", **more)
    assert (found.role, found.verdict) == ("by construction", "by construction")


def test_arithmetic_can_disagree():
    found = judged("dllm-headroom-4090", 7.97, "by construction")
    assert found.verdict == "not reproduced"
    assert found.reason is not None
    assert "7.97 for 7 GB" in found.reason
    assert "16.03 GB" in found.reason


def test_where_nothing_is_printed_there_is_nothing_to_test():
    for claim in ("dllm-abs-tail-latency", "dllm-abl-scheduler-livebench"):
        found = judged(claim, CLAIMS[claim].expected.value or 1.5)
        assert (found.verdict, found.role) == ("not testable here", None)
        assert found.reason is not None
        assert "print" in found.reason


def test_orderings_need_to_be_told():
    assert judged("dllm-in-trend", -0.1, holds=True).verdict == "reproduced"
    assert judged("dllm-in-trend", 0.1, holds=False).verdict == "not reproduced"
    with pytest.raises(ValueError, match="must say whether it holds"):
        judged("dllm-in-trend", -0.1)


def test_another_model_is_not_testable_here():
    found = judged("dllm-gsm-head", 75.1, comparable=False)
    assert (found.verdict, found.role, found.reason) == ("not testable here", None, "runs")


def test_both_cards_are_needed_where_both_are_claimed():
    claim = CLAIMS["dllm-serve-best-tput"]
    card, other = answer(claim.id, (1.0,) * 3, of=CARD), answer(claim.id, (1.0,) * 3, of=L40S)
    alone = judge(claim, [card])
    assert alone.verdict == "not run"
    assert alone.reason == "no stored runs of l40s/livebench, l40s/burst, l40s/osc"
    both = judge(claim, [card, other])
    assert both.verdict == "reproduced"
    slower = answer(claim.id, (1.0, 2.0, 1.0), of=L40S)
    assert judge(claim, [card, slower]).verdict == "not reproduced"
    cap = CLAIMS["dllm-token-cap"]
    parts = [answer(cap.id, 0.0, of=(card,), holds=card != "l40s") for card in ("rtx4090", "l40s")]
    assert judge(cap, parts).verdict == "not reproduced"
    assert judge(cap, parts[:1]).verdict == "not run"


def test_counts_of_values_must_agree():
    with pytest.raises(ValueError, match="states one value"):
        judged("dllm-4090-burst-peak", (1.0, 2.0))
    with pytest.raises(ValueError, match="states 3 values"):
        judged("dllm-n-requests", (2000.0, 2000.0, 128.0, 1.0))


def test_errors_are_relative_and_only_of_single_numbers():
    assert judged("dllm-4090-burst-fast", 21.2).error_percent == pytest.approx(-50)
    assert judged("dllm-4090-burst-peak", 76.6 * 1.1).error_percent == pytest.approx(10.0)
    assert judged("dllm-jitter-others", (56.0, 53.0, 56.0, 53.0)).error_percent is None
    assert judged("dllm-abs-tput-4090", (1.6, 1.8, 1.7), of=CARD).error_percent is None
    assert judged("dllm-4090-burst-base-lat", 5000.0).error_percent is None


def test_every_claim_gets_a_verdict_and_comparable_findings_win():
    claims = load_claims("dllm-serve")
    answers = [
        answer("dllm-gsm-head", 90.0, comparable=False),
        answer("dllm-gsm-head", 75.0),
        answer("dllm-gsm-head", 10.0),
    ]
    found = judge_all(claims, answers)
    assert [each.claim for each in found] == list(claims)
    counts = count(found)
    assert counts["reproduced"] == 1
    assert counts["paper's inconsistency"] == sum(claim.kind == "inconsistency" for claim in claims)
    assert counts["not testable here"] == sum(claim.untestable is not None for claim in claims)
    assert sum(counts.values()) == len(claims)
    assert count_by_role(found) == {"prediction": {"reproduced": 1}}
    with pytest.raises(ValueError, match="unknown claim 'nosuch'"):
        judge_all(claims, [answer("nosuch", 1.0)])


def test_not_run_without_a_finding():
    found = judge(CLAIMS["dllm-gsm-head"])
    assert (found.verdict, found.role, found.finding) == ("not run", None, None)


def test_every_tolerance_says_why():
    for claim in CLAIMS.values():
        assert claim.tolerance.why, claim.id
        named = [label for label in claim.of if label is not None]
        assert len(set(named)) == len(named), claim.id


def test_a_row_says_what_makes_its_runs(tmp_path):
    claim, command = CLAIMS["dllm-4090-burst-peak"], "repro reproduce fig3"
    own = judge(claim, [answer(claim.id, 70.0, command=command)])
    row = as_row(own)
    assert tuple(row) == COLUMNS
    assert (row["obtained"], row["command"]) == ("composed", command)
    assert (row["role"], row["verdict"]) == ("prediction", "reproduced")
    (kept,) = read(save(tmp_path / "claims.csv", [own]))
    assert kept["ours"] == "70"
    (again,) = rejudged([claim], [kept])
    assert again.finding is not None
    assert (again.verdict, again.finding.command) == ("reproduced", command)


def test_a_comparison_by_the_fitted_roofline_has_a_role_of_its_own():
    claim = CLAIMS["dllm-4090-burst-peak"]
    by_roofline = replace(answer(claim.id, 76.6), obtained="simulated")
    assert judge(claim, [by_roofline]).role == "fitted"
    assert judge(claim, [answer(claim.id, 76.6)]).role == "prediction"


def test_command_without_runs(tmp_path):
    where = ["--result-dir", str(tmp_path / "runs"), "--out-dir", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["claims", *where, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {each["id"] for each in report["claims"]} == set(CLAIMS)
    assert {each["role"] for each in report["claims"] if not each["committed"]} == {"by construction", None}
    with (tmp_path / "out" / "claims-dllm-serve.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(CLAIMS)
    assert sum(row["verdict"] == "not run" for row in rows) > 40
    table = CliRunner().invoke(app, ["claims", *where], env={"COLUMNS": "80"})
    assert "The paper's own inconsistencies" in table.stdout
    tables, file, _ = table.stdout.rpartition("\nfile:")  # which is as long as the file's name
    assert file
    assert max(map(len, tables.splitlines())) <= 80


def test_a_fresh_clone_shows_what_is_committed_and_says_so(tmp_path):
    asked = ["claims", "--paper", "laps", "--result-dir", str(tmp_path / "none")]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    rows = {row["id"]: row for row in claims_file.read(RESULTS / "claims-laps.csv")}
    borrowed = {each["id"]: each for each in found["claims"] if each["committed"]}
    assert borrowed
    for name, each in borrowed.items():
        assert (each["verdict"], each["role"]) == (rows[name]["verdict"], rows[name]["role"] or None)
    assert "not run" not in found["verdicts"]
    said = CliRunner().invoke(app, asked, env={"COLUMNS": "250"}).stdout
    assert said.count("reproduced (committed)") == sum("reproduced" in each["verdict"] for each in borrowed.values())
    assert f"committed: {len(borrowed)} verdicts of no run here, from results/claims-laps.csv" in said
    own = claims_file.read(tmp_path / "none" / "figures" / "claims-laps.csv")
    assert {row["verdict"] for row in own if row["id"] in borrowed} == {"not run"}


@pytest.mark.parametrize(("values", "reason"), DATA["a_reason_names_two_values_and_counts_the_others"])
def test_a_reason_names_two_values_and_counts_the_others(values, reason):
    claim = replace(CLAIMS["dllm-jitter-others"], gap=None)
    assert judged(claim, values, of=claim.of).reason == reason
    if reason is not None:
        assert judged(replace(claim, gap="why not"), values, of=claim.of).reason == f"{reason}: why not"


@pytest.mark.parametrize(("values", "reason"), DATA["one_value_is_held_against_the_nearer_end_of_a_range"])
def test_one_value_is_held_against_the_nearer_end_of_a_range(values, reason):
    claim = replace(CLAIMS["dllm-abs-tput-l40s"], gap=None, of=())
    found = judged(claim, values[0])
    assert (found.reason, found.error_percent) == (reason, None)


def test_values_beyond_a_range_that_names_no_data_sets_are_named_by_theirs():
    claim = replace(CLAIMS["dllm-abs-tput-l40s"], gap=None, of=())
    assert "livebench 1.4 for 1.6" in (judged(claim, (1.4, 1.74), of=("livebench", "osc")).reason or "")


def test_tolerances_in_words():
    claim = CLAIMS["dllm-4090-burst-peak"]
    for stated, words in (
        (Tolerance(type="relative", value=0.125), "12.5 % allowed"),
        (Tolerance(type="absolute", value=3, unit="pp"), "3 pp allowed"),
        (Tolerance(type="absolute", value=3), "3 tok/s allowed"),
        (Tolerance(type="one_sided"), "a bound"),
        (Tolerance(type="ordering"), "an ordering"),
        (Tolerance(type="exact"), "exact"),
    ):
        assert tolerance(replace(claim, tolerance=stated)) == words
    bare = replace(claim, tolerance=Tolerance(type="absolute", value=3), expected=replace(claim.expected, unit=None))
    assert tolerance(bare) == "3 allowed"


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_a_bound_is_met_on_its_side(direction):
    claim = replace(CLAIMS["dllm-4090-burst-peak"], tolerance=Tolerance(type="one_sided"), direction=direction)
    for value, verdict in ((76.6, "reproduced"), (80.0, "higher"), (70.0, "lower")):
        found = judged(claim, value)
        assert found.verdict == ("reproduced" if verdict in ("reproduced", direction) else "not reproduced")
        assert found.error_percent is None


def test_values_of_one_finding_are_as_many_as_what_they_are_of():
    for fits in ((), ("a", "b")):
        answer("x", (1.0, 2.0), of=fits)
    for of in (("a",), ("a", "b", "c")):
        with pytest.raises(ValueError, match=f"2 values of {len(of)} things"):
            answer("x", (1.0, 2.0), of=of)


def test_answers_of_different_things_are_one_and_orderings_hold_together():
    stated = CLAIMS["dllm-serve-best-tput"]
    claim = replace(stated, expected=replace(stated.expected, value=None))
    for left, right in ((True, True), (True, False), (False, True)):
        verdict = "reproduced" if left and right else "not reproduced"
        parts = [answer(claim.id, (1.0,) * 3, of=of, holds=holds) for of, holds in ((CARD, left), (L40S, right))]
        assert judge(claim, parts).verdict == verdict
    for left, right in ((None, True), (True, None), (False, None)):
        parts = [answer(claim.id, (1.0,) * 3, of=of, holds=holds) for of, holds in ((CARD, left), (L40S, right))]
        with pytest.raises(ValueError, match="must say whether it holds"):
            judge(claim, parts)


def test_a_claim_of_nothing_in_particular_takes_the_first_answer():
    claim = replace(CLAIMS["dllm-4090-burst-peak"], of=())
    parts = [answer(claim.id, value, of=of) for value, of in ((76.6, ("a",)), (1.0, ("b",)))]
    assert (judge(claim, parts).verdict, judge(claim, parts[::-1]).verdict) == ("reproduced", "not reproduced")


# -- readings and facts -------------------------------------------------------------------------------------

LAPS = {claim.id: claim for claim in load_claims("laps")}
READ = {"points": 10.0, "percent": 32.0}


def test_a_claim_that_some_readings_meet_is_undecided():
    claim = LAPS["laps-slo-single-dp"]  # 30, 8 allowed
    found = judged(claim, 10.0, readings=tuple(READ.items()))
    assert (found.verdict, found.role) == ("undecided by reading", "prediction")
    assert found.reason == "holds with percent 32; not with points 10"
    assert judged(claim, 31.0, readings=(("percent", 32.0),)).verdict == "reproduced"
    assert judged(claim, 10.0, readings=(("points", 10.0), ("at 0.8", 12.0))).verdict == "not reproduced"


@pytest.mark.parametrize(
    ("other", "verdict"), [(2.6, "reproduced"), (4.5, "undecided by reading")], ids=("both", "one alone")
)
def test_cards_that_a_paper_leaves_open_are_readings_of_it(other, verdict):
    claim = CLAIMS["dllm-in-long"]  # 2.45, 15 % allowed
    found = [answer(claim.id, value, place=f"card={card}") for card, value in (("rtx4090", 2.55), ("l40s", other))]
    (first,) = (each for each in judge_all([claim], found) if each.claim.id == claim.id)
    assert (first.verdict, first.finding.value) == (verdict, 2.55)
    assert first.finding.readings == (("card=rtx4090", 2.55), ("card=l40s", other))
    # An ordering has no number to be met: it holds on both, or is open.
    trend = CLAIMS["dllm-in-trend"]
    found = [answer(trend.id, -1.0, holds=holds, place=f"card={holds}") for holds in (True, other < 3)]
    (first,) = judge_all([trend], found)
    assert first.verdict == verdict


def test_what_lies_between_two_loads_is_met_between_them():
    readings = (("load 0.7", 4.0), ("load 1", 61.0))
    claim = LAPS["laps-slo-single-dp"]
    assert judged(claim, 20.0, readings=readings).verdict == "not reproduced"
    assert judged(claim, 20.0, readings=readings, is_between=True).verdict == "undecided by reading"
    above = (("load 0.7", 44.0), ("load 1", 61.0))
    assert judged(claim, 45.0, readings=above, is_between=True).verdict == "not reproduced"


def test_what_the_papers_other_numbers_give_is_another_reading():
    """76.6 tok/s are 0.299 requests/s of 256 tokens, and "linear up to 0.4" is stated."""
    assert judged("dllm-wall-025", 0.166).verdict == judged("dllm-wall-025", 0.25).verdict == "undecided by reading"


def test_an_order_of_magnitude_is_no_prediction():
    for value in (3.0, 30.0):
        assert judged("dllm-concurrency-target", value).verdict == "not testable here"


def test_what_follows_from_a_number_that_is_not_reproduced_is_not_either():
    base, ratio = "dllm-t4-burst-serve-tput", "dllm-t4-burst-serve-speedup"
    others = [answer("dllm-t4-burst-sparse-dllm-tput", 34.2), answer(ratio, 3.12)]

    def verdict(tok_s: float) -> str:
        found = judge_all(list(CLAIMS.values()), [answer(base, tok_s), *others])
        return next(each.verdict for each in found if each.claim.id == ratio)

    assert (verdict(106.0), verdict(80.0)) == ("reproduced", "not reproduced")


def test_an_ordering_does_not_follow_from_numbers():
    sizes = [answer("dllm-in-short", 9.0), answer("dllm-in-long", 8.0)]
    found = judge_all(list(CLAIMS.values()), [*sizes, answer("dllm-in-trend", -1.0, holds=True)])
    assert next(each.verdict for each in found if each.claim.id == "dllm-in-trend") == "reproduced"


def test_what_was_chosen_to_meet_a_claim_makes_it_no_prediction(tmp_path):
    claim = next(claim for claim in load_claims("ampd") if claim.id == "ampd-disagg-others")
    assert judge(claim, [answer(claim.id, 40.0, holds=True)]).role == "fitted"
    text = PAPERS["ampd"].claims.read_text(encoding="utf-8").replace("role: fitted", "role: prediction")
    path = tmp_path / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="role"):
        read_claims(path, "ampd")


@pytest.mark.parametrize("role", ["by construction", "implied by the fit"])
def test_facts_are_counted_once_and_by_role(role):
    claim = "dllm-t4-burst-fast-dllm"
    values = {f"{claim}-tput": 61.0, f"{claim}-lat": 3158.0, f"{claim}-speedup": 1.79, "dllm-weights-17gb": 17.0}
    claims = [replace(each, role=role) if each.id == "dllm-weights-17gb" else each for each in CLAIMS.values()]
    judged = judge_all(claims, [answer(name, value) for name, value in values.items()])
    assert count_facts(judged) == {"prediction": {"reproduced": 1}, role: {"reproduced": 1}}


def test_points_of_one_line_are_no_facts():
    names = {each.claim.id for each in facts(judge_all(load_claims("ampd"), []))}
    assert {name for name in names if name.startswith("ampd-f6")} == {"ampd-f6-w-3"}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_bound_in_words_is_one_in_its_tolerance(paper):
    bounds = [claim for claim in load_claims(paper) if claim.kind == "stated" and BOUND.search(claim.statement)]
    assert {claim.id for claim in bounds if claim.tolerance.type not in ("one_sided", "ordering", "exact")} <= NO_BOUNDS


def test_readings_and_facts_are_kept_in_the_file(tmp_path):
    claim = LAPS["laps-slo-single-dp"]
    for is_between, readings in ((False, tuple(READ.items())), (True, (("load 0.7", 4.0), ("load 1", 61.0)))):
        before = judged(claim, 20.0, readings=readings, is_between=is_between)
        (row,) = read(save(tmp_path / "claims.csv", [before]))
        (after,) = rejudged([claim], [row])
        assert (after.verdict, after.reason) == (before.verdict, before.reason)
        assert row["fact"] == claim.id
