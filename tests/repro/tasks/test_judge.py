"""A program cannot make its own verdict: whatever it does, it has to answer what its judge asks."""

import textwrap
from pathlib import Path

import pytest
import yaml
from support.jail import needs_jail

from repro.tasks.sandbox.client import ProgramCheck, SandboxResult, passes, run_program
from repro.tasks.task import TaskProblem

pytestmark = needs_jail

CHECK = ProgramCheck(entry="f", tests="def check(c):\n    assert c(1) == 2\n    assert c(41) == 42\ncheck(f)\n")


def run(program: str, check: ProgramCheck = CHECK, timeout_s: float = 20.0) -> SandboxResult:
    return run_program(textwrap.dedent(program), check, timeout_s=timeout_s, memory_bytes=256 << 20)


PROGRAMS = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text(encoding="utf-8"))
ATTACKS = PROGRAMS["attacks on the judge"]


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_makes_a_verdict(name):
    result = run(ATTACKS[name])
    assert not result.passed
    assert result.reason not in ("ok", "")
    assert run("f = lambda x: x + 1") == SandboxResult(passed=True, reason="ok")


def test_the_tests_are_nowhere_in_the_program():
    program = """
        import gc, sys
        seen, frame = [], sys._getframe()
        while frame:
            seen += [repr(frame.f_locals), repr(frame.f_globals.keys())]
            frame = frame.f_back
        for each in gc.get_objects():
            if type(each) in (dict, list, tuple):
                seen += [value for value in gc.get_referents(each) if type(value) in (str, bytes)]
        text = '|'.join(map(str, seen))
        assert 'import gc, sys' in text, 'the search finds nothing'
        word = 'gues'  # put together here, so that it is not found as a part of this program itself
        assert word + 'sable-answer' not in text, 'found'
        f = lambda x: x + 1
        """
    check = ProgramCheck(
        entry="f", tests="assert f(1) == 2, 'guessable-answer'", given="guessable = 'guessable-answer'"
    )
    for _ in range(2):  # nor what a program before was asked
        assert run(program, check).passed


@pytest.mark.parametrize(("program", "tests", "reason"), PROGRAMS["judged"])
def test_verdicts_are_the_tests(program, tests, reason):
    limit_s = 1.0 if reason.startswith("timed out") else 20.0
    result = run(program, ProgramCheck(entry="f", tests=tests), limit_s)
    assert result == SandboxResult(passed=reason == "ok", reason=reason)


def test_tests_may_use_what_the_problem_defines_and_the_program_cannot_change_it():
    given = 'def helper(x):\n    return x * 2\n\ndef f(x):\n    """Halve, so that helper gives it back."""\n'
    problem = TaskProblem(
        problem_id="x",
        prompt=given,
        user="",
        reference="    return x / 2\n",
        code=given,
        entry="f",
        check="assert helper(f(4)) == 4",
    )
    begun = TaskProblem(
        problem_id="y", prompt="", user="", reference="", code="def f(x):", entry="f", check="assert f(1) == 2"
    )
    texts = [problem.reference, "    return x\nhelper = lambda x: 4\n", " return x + 1"]
    assert passes([problem, problem, begun], texts) == [True, False, True]
