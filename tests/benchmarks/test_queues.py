"""Orders of prefills beside each other: loads are what they say, On-time's own ends are its front's, and verdicts count outside noise."""

from dataclasses import replace
from statistics import fmean

import pytest
import queues

PLAIN = queues.TRAFFIC[0]


def test_orders_are_held_against_the_first_over_paired_seeds():
    rows = {row.order: row for row in queues.rows_of(PLAIN.name, 0.95, seeds=(1, 2), num_prompts=300)}
    plain = {"On-time", "SGLang", "SRPT", "Reserve", *queues.ENDS}
    assert set(rows) == {*plain, "LAPS", "SGLang, searched", "SRPT, searched", "Reserve, searched"}
    first, sglang = rows["On-time"], rows["SGLang"]
    assert first.more_late is first.times is None
    assert sglang.more_late == pytest.approx(first.late - sglang.late)
    assert sglang.times == pytest.approx(first.longest_s / sglang.longest_s)
    assert sglang.low < sglang.more_late < sglang.high
    for order in ("LAPS 0", "LAPS 3"):
        assert rows["LAPS"].late <= fmean(queues.served(PLAIN, 0.95, order, seed, 300).late for seed in (1, 2))
    for order in ("SGLang", "SRPT", "Reserve"):
        assert rows[f"{order}, searched"].late <= rows[order].late
    assert first.p99_s < first.longest_s
    assert sglang.p99_low < first.p99_s - sglang.p99_s


def test_steps_by_the_objective_are_those_of_the_usual_one_stretched():
    """0.05 to 0.15 s for 0.4 s, which is what SRPT's and Reserve's are by default."""
    loose = replace(PLAIN, slo_s=4.0)
    for order in ("SRPT", "Reserve"):
        by_objective = f"{order} by objective"
        assert queues.served(PLAIN, 0.95, by_objective, 1, 300) == queues.served(PLAIN, 0.95, order, 1, 300)
        assert queues.served(loose, 0.95, by_objective, 1, 300) != queues.served(loose, 0.95, order, 1, 300)


def test_a_wrong_belief_changes_what_is_decided_and_no_cost():
    """First come, first served asks no model; Reserve does."""
    wrong = replace(PLAIN, belief=0.6)
    for order, is_same in (("SGLang", True), ("Reserve", False)):
        right = queues.served(PLAIN, 1.05, order, 1, 300)
        assert (queues.served(wrong, 1.05, order, 1, 300) == right) is is_same


def test_noise_lengthens_and_shortens_steps():
    noisy = queues.served(replace(PLAIN, noise=0.3), 0.95, "SGLang", 1, 300)
    assert noisy != queues.served(PLAIN, 0.95, "SGLang", 1, 300)
    assert noisy == queues.served(replace(PLAIN, noise=0.3), 0.95, "SGLang", 1, 300)


def test_a_stretch_of_a_file_follows_on_and_has_the_load():
    """Twice the load is half the time; prompts are the file's, in its order."""
    model = queues._prepared(PLAIN, 40.0, "SGLang", 0, 300)[0].settings.step_model(())
    lengths = list(range(1, 2001))
    half, whole = (list(queues._stretch(lengths, load, 3, 300, model).turns) for load in (0.5, 1.0))
    tokens = [turn.tokens for turn in half]
    assert tokens == list(range(tokens[0], tokens[0] + 300)) == [turn.tokens for turn in whole]
    # Rates are rounded to a thousandth of a turn.
    assert half[-1].arrival_s == pytest.approx(2 * whole[-1].arrival_s, rel=1e-4)


def test_verdicts_count_what_is_outside_noise():
    def row(order, **own):
        return queues.Row(
            **{
                "traffic": "T",
                "load": 0.8,
                "order": order,
                "late": 1.0,
                "late_long": 1.0,
                "longest_s": 1.0,
                "more_late": 0.5,
                "low": -0.1,
                "high": 1.1,
                "long_low": None,
                "times": 1.0,
                "p99_s": 1.0,
                "p99_low": -0.1,
                **own,
            }
        )

    said = list(
        queues.verdicts(
            [
                row("SGLang", times=3.1, long_low=0.2),
                row("SGLang, searched", times=3.2),
                row("SRPT", low=0.1, p99_low=0.1),
                row("Moore-Hodgson", low=0.2),
            ]
        )
    )
    assert all(" in 1 of 1 cells: " in line for line in said[:4])
    assert "SRPT" in said[0]
    assert "3.1" in said[1]
    assert "3.2" in said[2]
    assert said[5].endswith("in 1.")
    assert [line for line in said if line.startswith("P99") and line.endswith("in 1 of 1.")] == [
        "P99 TTFT above that of SRPT, outside noise, in 1 of 1."
    ]
    quiet = list(queues.verdicts([row("SGLang"), row("SRPT")]))
    assert all(" in 0 of 1 cells: none" in line for line in quiet[:4])
