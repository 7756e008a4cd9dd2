"""What the benchmark of vLLM's orders makes of its repeats."""

import sys
from argparse import Namespace

import vllm_policies
from vllm_policies import Found, table


def found(policy: str, repeat: int, ms: float) -> Found:
    short = {"n": 200, "mean": ms, "p50": ms, "p90": 2 * ms, "p99": 4 * ms}
    return Found(policy, repeat, 0, short, {"n": 10, "mean": 600.0}, cores_of_others=0.5 + repeat)


def test_means_have_intervals_and_ratios_are_taken_within_repeats():
    rows = [found("vllm", 0, 100.0), found("vllm", 1, 300.0), found("laps", 0, 50.0), found("laps", 1, 150.0)]
    lines = table(rows, ["vllm", "laps"]).splitlines()
    # t(1) = 12.706: of 100 and 300 the interval is 200 +- 12.706 * 100.
    assert lines[2] == "| vllm | 2 | 200 ± 1271 | 400 ± 2541 | 800 ± 5082 | 600 ± 0 |"
    assert lines[4] == "| laps / vllm | 2 | 0.50 ± 0.00 | 0.50 ± 0.00 | 0.50 ± 0.00 | 1.00 ± 0.00 |"
    assert lines[5].startswith("cores busy with something else: 0.50 to 1.50 of ")
    alone = table(rows[:1], ["vllm", "laps"]).splitlines()
    assert alone[2] == "| vllm | 1 | 100 | 200 | 400 | 600 |", "one repeat has no interval"
    assert alone[3] == "| laps | 0 | - | - | - | - |"


def test_policies_take_turns_at_being_the_first(tmp_path, monkeypatch):
    ran: list[tuple[int, str]] = []

    def measure(policy: str, repeat: int, options: Namespace) -> Found:
        ran.append((repeat, policy))
        return found(policy, repeat, 1.0)

    monkeypatch.setattr(vllm_policies, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["vllm_policies.py", "--policies", "a", "b", "c", "--repeats", "4", "--seed", "7"])
    vllm_policies.main()
    assert ["".join(policy for number, policy in ran if number == repeat) for repeat in range(7, 11)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]
