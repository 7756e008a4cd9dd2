"""What is counted once: a number and all that follows from it."""

from repro.reports.claims import Answer, Finding, Role, judge_all
from repro.reports.facts import count_facts, facts
from repro.reports.paper import load_claims

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


def test_points_of_one_line_are_no_facts():
    names = {each.claim.id for each in facts(judge_all(load_claims("ampd"), []))}
    assert {name for name in names if name.startswith("ampd-f6")} == {"ampd-f6-w-3"}
