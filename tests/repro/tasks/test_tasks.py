import re

import pytest
from support.refusals import refuses

from engines.errors import UserError
from engines.models.checkpoint import checkpoint_dir
from engines.models.tokenizer import load_tokenizer
from repro.tasks import mini_code, mini_gsm
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Problem, extract_flexible, extract_strict, grade, split_of


@pytest.mark.parametrize("task", GENERATORS)
def test_same_seed_gives_same_problems_and_another_seed_others(task):
    generate = GENERATORS[task]
    assert generate(3, 20) == generate(3, 20)
    assert generate(3, 20) != generate(4, 20)
    assert generate(3, 20)[:10] == generate(3, 10)


@pytest.mark.parametrize("task", GENERATORS)
def test_splits_are_disjoint_by_content(task):
    generate = GENERATORS[task]
    # Few facts make repeats across seeds likely, which is what could leak.
    train = {
        p.key for seed in range(4) for p in generate(seed, 300, "train", num_facts=1, num_distractors=0, num_used=1)
    }
    held = {
        p.key for seed in range(4) for p in generate(seed, 60, "heldout", num_facts=1, num_distractors=0, num_used=1)
    }
    assert train
    assert held
    assert not train & held
    assert {split_of(key) for key in train} == {"train"}
    assert {split_of(key) for key in held} == {"heldout"}


@pytest.mark.parametrize("task", GENERATORS)
def test_split_ignores_order_and_distractors(task):
    problem = GENERATORS[task](0, 1)[0]
    shuffled = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    shuffled |= {"facts": problem.facts[::-1], "num_distractors": 0, "prompt": ""}
    assert Problem(**shuffled).key == problem.key


def test_mini_gsm_answers_are_right():
    kinds = set()
    for problem in mini_gsm.generate(1, 400, listing_share=0.1, drill_share=0.1):
        counts = {name: int(value) for name, value in re.findall(r"(\w+) has (\d) \w+\.", problem.prompt)}
        assert len(counts) == len(problem.facts)
        kinds.add(problem.kind.split("-")[0].split()[0])
        recalled = re.findall(r"(\w+) has (\d+)\.", problem.answer)
        assert recalled == [(name, str(counts[name])) for name in problem.used]
        for left, operator, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)\.", problem.answer):
            assert int(result) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        question = problem.prompt.split("Question:")[1]
        if problem.kind.startswith("drill"):
            assert problem.final == str(sum(map(int, re.findall(r"\d+", question))))
            continue
        assert [name for name in re.findall(r"[A-Z][a-z]+", question) if name in counts] == list(problem.used)
        if problem.kind == "difference":
            assert problem.final == str(counts[problem.used[0]] - counts[problem.used[1]])
            assert int(problem.final) > 0
        elif problem.kind.startswith("total"):
            assert problem.final == str(sum(counts[name] for name in problem.used))
            assert problem.answer.endswith(f"#### {problem.final}")
    assert kinds == {"total", "difference", "listing", "drill"}


def test_mini_chain_takes_up_the_total_of_the_step_before():
    drilled = 0
    for problem in mini_gsm.generate_chain(1, 300, drill_share=0.1):
        question = problem.prompt.split("Question:")[1]
        counts = {name: int(value) for name, value in re.findall(r"(\w+) has (\d) \w+\.", problem.prompt)}
        drilled += problem.kind.startswith("drill")
        asked = [counts[name] for name in problem.used] or [int(term) for term in re.findall(r"\d+", question)]
        assert [name for name in re.findall(r"[A-Z][a-z]+", question) if name in counts] == list(problem.used)
        assert re.findall(r"(\w+) has (\d+)\.", problem.answer) == [(name, str(counts[name])) for name in problem.used]
        steps = [tuple(map(int, step)) for step in re.findall(r"(\d+) \+ (\d+) = (\d+)\.", problem.answer)]
        totals = [sum(asked[: place + 1]) for place in range(len(asked))]
        assert steps == list(zip(totals, asked[1:], totals[1:], strict=False))
        assert problem.answer.endswith(f"#### {totals[-1]}")
        assert problem.final == str(totals[-1])
    assert 10 < drilled < 60


def test_mini_roll_asks_everybody_in_turn_in_200_to_256_tokens_and_begins_again_after_20():
    problems = mini_gsm.generate_roll(1, 60, "heldout")
    totals = set()
    for problem in problems:
        facts = dict(re.findall(r"(\w+) has (\d) \w+\.", problem.prompt))
        assert problem.used == mini_gsm.NAMES
        assert {*facts} == {*problem.used}
        answer, before = "", 0
        for name in problem.used:
            more = facts[name]
            total = before + int(more) if before + int(more) <= 20 else before + int(more) - 20
            answer += f" {name} has {more} things." + f" {before} + {more} = {total} in total." * bool(before)
            totals.add(total)
            before = total
        assert problem.answer == f"{answer} #### {total}"
        assert grade(problem, problem.answer).strict
        assert not grade(problem, f"{answer} #### {total % 20 + 1}").strict
    assert totals == {*range(1, 21)}
    answers = load_tokenizer(checkpoint_dir("tiny-roll")).encode_batch([problem.answer for problem in problems])
    assert all(200 <= len(answer) < 256 for answer in answers)


def one_more(problem: Problem) -> str:
    """The answer where the first person had one thing more: every total is one higher."""
    first, rest = problem.answer.split(". ", 1)
    head, count = first.rsplit(" ", 1)
    totals = re.sub(r"(\d+) \+ (\d+) = (\d+)", lambda at: f"{int(at[1]) + 1} + {at[2]} = {int(at[3]) + 1}", rest)
    totals = re.sub(r"#### (\d+)", lambda at: f"#### {int(at[1]) + 1}", totals)
    return f"{head} {int(count) + 1}. {totals}"


@pytest.mark.parametrize("block", [8, 16, 32])
def test_every_block_of_a_mini_chain_answer_hangs_on_the_first(block):
    tokenizer = load_tokenizer(checkpoint_dir("tiny-long"))
    for problem in mini_gsm.generate_chain(4, 200, "heldout"):
        one, other = tokenizer.encode_batch([problem.answer, one_more(problem)])
        assert len(one) == len(other)
        starts = range(0, len(one), block)
        assert len(starts) >= 46 / block
        assert all(one[start : start + block] != other[start : start + block] for start in starts)


def test_facts_of_mini_far_stand_in_the_middle_of_long_prompts():
    tokenizer = load_tokenizer(checkpoint_dir("tiny-far"))
    problems = mini_gsm.generate_far(4, 60, "heldout")
    lengths = [len(prompt) for prompt in tokenizer.encode_batch([problem.prompt for problem in problems])]
    assert min(lengths) >= 512
    assert max(lengths) <= 2048
    assert min(lengths) < 800 < 1700 < max(lengths)
    for problem in problems:
        sentences = problem.prompt.split(" Question: ")[0].split(". ")
        places = [at for at, each in enumerate(sentences) if " has " in each]
        assert len(places) == len(problem.facts)
        assert 0.3 * len(sentences) < places[0] <= places[-1] < 0.7 * len(sentences)


def test_mini_code_answers_run_and_agree_with_the_glossary():
    for problem in mini_code.generate(2, 200):
        scope: dict = {}
        exec(problem.prompt + problem.answer, scope)
        words = re.findall(r"\w+", problem.prompt.split('"""Apply')[1].replace("then", ""))
        assert tuple(words) == problem.used
        glossary = dict(problem.facts)
        for start in (-3, 0, 7):
            value = start
            for word in words:
                _, name, operand = glossary[word].split()
                value = {"+=": value + int(operand), "-=": value - int(operand), "*=": value * int(operand)}[name]
            assert scope["f"](start) == value


@pytest.mark.parametrize("task", GENERATORS)
def test_default_problems_need_several_of_many_facts(task):
    for problem in GENERATORS[task](0, 100, "heldout"):
        some, all_ = (16, 16) if task == "mini-roll" else (8, 12)
        assert some <= len(problem.facts) <= all_
        fewest, others = {"mini-far": (90, 391), "mini-roll": (0, 8)}.get(task, (6, 20))
        assert fewest <= problem.num_distractors <= others
        spans = {
            "mini-gsm": (2, 3),
            "mini-code": (2, 5),
            "mini-chain": (5, 8),
            "mini-far": (3, 5),
            "mini-roll": (16, 16),
        }
        least, most = spans[task]
        assert least <= len(problem.used) <= most
        assert len({name for name, _ in problem.facts}) == len(problem.facts)


@pytest.mark.parametrize("task", GENERATORS)
def test_bad_arguments_are_refused(task):
    with refuses("split='test'"):
        GENERATORS[task](0, 1, "test")
    with pytest.raises(UserError, match="num_facts"):
        GENERATORS[task](0, 1, num_facts=(5, 3))
    with pytest.raises(UserError, match="num_used"):
        GENERATORS[task](0, 1, num_used=99)


def test_extraction():
    assert extract_strict(" 3 + 4 = 7. #### 7") == "7"
    assert extract_strict(" it is 7") is None
    assert extract_flexible(" it is -7 apples") == "-7"
    assert extract_flexible("no number") is None


def test_grades():
    gsm = next(p for p in mini_gsm.generate(0, 50) if p.kind == "total-2")
    assert grade(gsm, gsm.answer + " ").exact
    only_final = grade(gsm, f"#### {gsm.final}")
    assert (only_final.exact, only_final.strict, only_final.flexible) == (False, True, True)
    no_marker = grade(gsm, f"the total is {gsm.final}")
    assert (no_marker.strict, no_marker.flexible) == (False, True)
    assert not grade(gsm, f"#### {int(gsm.final) + 1}").flexible
    code = mini_code.generate(0, 1)[0]
    assert grade(code, code.answer + "\n").strict
    assert not grade(code, code.answer.replace("return x", "return")).flexible
