"""A refresh rule reuses what it has built, and builds where it says that it caches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engines.dllm.phase import DelayedCache, NoCache, Phase, check_rule
from engines.errors import RunError, UserError


@dataclass(frozen=True)
class Rule:
    phases: Callable[[int], Any]
    caches: Any = True
    window: Any = "block"

    def phase(self, step_in_block: int) -> Any:
        return self.phases(step_in_block)


def built(step: int) -> Phase:
    return Phase.REUSE if step else Phase.BUILD


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(lambda step: Phase.REUSE), "Rule reuses a cache in step 0 of a block, before one was built"),
        (Rule(lambda step: Phase.REUSE if step else Phase.FULL), "reuses a cache in step 1 of a block, before"),
        (Rule(built, caches=False), "builds a cache in step 0 of a block, and says that it has none"),
        (Rule(built, caches=None), "caches=None"),
        (Rule(built, window="nothing"), "window='nothing'"),
        (Rule(lambda step: "build"), "answers 'build' for step 0 of a block, which is no Phase"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule, said):
    with pytest.raises(UserError, match=said):
        check_rule(rule, 8)


def test_what_it_raises_is_said_of_it():
    with pytest.raises(RunError, match=r"policy Rule\.phase fails \(KeyError: 1\): correct it"):
        check_rule(Rule({0: Phase.BUILD}.__getitem__), 8)


class Counts:
    caches, window, num = True, "block", 0

    def phase(self, step_in_block: int) -> Phase:
        self.num += 1
        return built(step_in_block)


class Doubts(Counts):
    needs = frozenset({"confidences"})

    def phase(self, step_in_block: int) -> Phase:
        raise LookupError("there are none yet")


def test_one_that_keeps_state_is_left_as_it_is():
    rule = Counts()
    check_rule(rule, 8)
    assert rule.num == 0
    check_rule(Doubts(), 8)


@pytest.mark.parametrize("rule", [DelayedCache(), DelayedCache(delay=0, window="suffix"), NoCache(), Rule(built)])
def test_a_rule_that_builds_first_is_taken(rule):
    check_rule(rule, 8)
