"""What is counted once: a number and all that follows from it."""

from repro.reports.claims import Answer, Finding, Role, judge_all
from repro.reports.facts import committed_facts, count_facts, facts, facts_table
from repro.reports.paper import FOLDERS, load_claims

CLAIMS = load_claims("dllm-serve")


def answer(claim: str, value: float, role: Role = "prediction") -> Answer:
    return Answer(finding=Finding(claim=claim, value=value, obtained="simulated", how="runs"), roles=(role,))


def test_a_latency_and_a_speedup_are_no_facts_beside_their_throughput():
    claim = "dllm-t4-burst-fast-dllm"
    values = {
        f"{claim}-tput": 61.0,
        f"{claim}-lat": 3158.0,
        f"{claim}-speedup": 1.79,
        "dllm-t4-burst-sparse-dllm-tput": 34.0,
    }
    judged = judge_all(CLAIMS, [answer(name, value) for name, value in values.items()])
    assert sum(each.verdict == "reproduced" for each in judged) == 4
    assert count_facts(judged) == {"prediction": {"reproduced": 2}}


def test_the_table_has_a_row_a_paper_and_role():
    judged = judge_all(
        CLAIMS,
        [
            answer("dllm-4090-burst-peak", 76.6, "fitted"),
            answer("dllm-4090-burst-fast", 10.0),
            answer("dllm-weights-17gb", 17.0, "by construction"),
        ],
    )
    assert facts_table({"dllm-serve": judged}).splitlines() == [
        "| paper | role | reproduced | not reproduced | undecided by reading |",
        "|---|---|---|---|---|",
        "| dllm-serve | prediction | 0 | 1 | 0 |",
        "| dllm-serve | fitted | 1 | 0 | 0 |",
        "| dllm-serve | by construction | 1 | 0 | 0 |",
    ]


def test_points_of_one_line_are_no_facts():
    names = {each.claim.id for each in facts(judge_all(load_claims("ampd"), []))}
    assert {name for name in names if name.startswith("ampd-f6")} == {"ampd-f6-w-3"}


def test_facts_of_the_committed_files_are_all_counted():
    found = committed_facts()
    assert list(found) == list(FOLDERS)
    for judged in found.values():
        compared = [each for each in facts(judged) if each.role is not None]
        assert sum(number for counts in count_facts(judged).values() for number in counts.values()) == len(compared)
