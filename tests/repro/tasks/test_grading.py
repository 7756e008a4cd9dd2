"""Tasks and their graders."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jail import needs_jail
from support.refusals import refuses
from support.tables import data_beside

from engines.errors import UserError
from repro.tasks import mini_code, mini_gsm
from repro.tasks.gsm8k import EXAMPLES, find_number, gsm8k_task, normalize
from repro.tasks.humaneval import humaneval_task
from repro.tasks.mini import INPUTS, mini_chain_task, mini_code_task, mini_gsm_task
from repro.tasks.registry import TASKS, TaskOptions, load_task
from repro.tasks.task import Grade, TaskProblem, cut_at
from repro.workloads.dataset import HubReference

CASES = data_beside(__file__, "cases")

RIGHT, WRONG = Grade(correct=True, strict=True), Grade(correct=False, strict=False)
REAL_DATA = os.environ.get("REPRO_DATA_DIR")
needs_data = pytest.mark.skipif(REAL_DATA is None, reason="needs GSM8K and HumanEval in REPRO_DATA_DIR")

QUESTIONS = (
    {"question": "One and one?", "answer": "It is 1+1=<<1+1=2>>2.\n#### 2"},
    {"question": "A thousand and $2?", "answer": "That is 1,000+2.\n#### 1,002"},
)
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": 'def inc(x):\n    """Add one."""\n',
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    "entry_point": "inc",
}


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)


def write_jsonl(path: Path, *rows: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [mini_gsm_task, pytest.param(mini_code_task, marks=needs_jail), mini_chain_task])
def test_references_are_right_and_numbers_apart_are_not(make):
    task = make(TaskOptions(num_problems=20, seed=5))
    references = [problem.reference for problem in task.problems]
    assert task.grade_all(task.problems, references) == [RIGHT] * 20
    off = [re.sub(r"\d(?=\D*$)", lambda found: str((int(found[0]) + 1) % 10), text) for text in references]
    assert all(a != b for a, b in zip(off, references, strict=True))
    assert task.grade_all(task.problems, off) == [WRONG] * 20
    assert task.grade(task.problems[0], "") == WRONG


@needs_jail
def test_mini_code_is_judged_by_what_it_computes():
    task = mini_code_task(TaskOptions(num_problems=1, seed=5))
    (problem,) = task.problems
    same = problem.reference.replace("return x", "y = x\n    return y")
    assert task.grade(problem, same) == Grade(correct=True, strict=False)
    for text in ("\n    return x", "\n    raise KeyError", " not python", "\n    import os\n    os.abort()"):
        assert task.grade(problem, text) == WRONG, text


@given(seed=st.integers(0, 10**6), x=st.integers(-50, 50))
def test_the_expected_value_is_the_references(seed, x):
    (problem,) = mini_code.generate(seed, 1, "heldout", num_facts=4, num_distractors=0)
    scope: dict[str, Any] = {}
    exec(problem.prompt + problem.answer, scope)
    assert scope["f"](x) == mini_code.apply(problem, x)
    assert len(set(INPUTS)) >= 2


def test_mini_gsm_without_its_mark_counts_by_the_last_number():
    task = mini_gsm_task(TaskOptions(num_problems=1, seed=5))
    (problem,) = task.problems
    final = problem.reference.rsplit("#### ", 1)[1]
    assert task.grade(problem, f" It is {final}.") == Grade(correct=True, strict=False)


def test_generated_problems_are_heldout_and_share_their_beginning():
    few, many = (mini_gsm_task(TaskOptions(num_problems=num, seed=5)) for num in (3, 6))
    assert many.prompts() == [problem.prompt for problem in mini_gsm.generate(5, 6, "heldout")]
    assert few.problems == many.problems[:3]
    assert few.problems != mini_gsm_task(TaskOptions(num_problems=3, seed=6)).problems
    assert few.digest != many.digest


def test_gsm8k_prompt_is_lm_evals(tmp_path):
    path = write_jsonl(tmp_path / "gsm8k" / "gsm8k_test.jsonl", *QUESTIONS)
    task = gsm8k_task(TaskOptions(num_problems=2, num_fewshot=0), data_dir=tmp_path)
    assert task is not None
    assert task.prompts() == ["Question: One and one?\nAnswer:", "Question: A thousand and $2?\nAnswer:"]
    assert task.origin.source == "local"
    shots = [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(9)]
    write_jsonl(path.with_name("gsm8k_train.jsonl"), *shots)
    task = gsm8k_task(TaskOptions(num_problems=1, num_fewshot=2), data_dir=tmp_path)
    assert task is not None
    assert task.prompts() == [
        "Question: Q0?\nAnswer: #### 0\n\nQuestion: Q1?\nAnswer: #### 1\n\nQuestion: One and one?\nAnswer:"
    ]
    assert task.description.endswith("1 of 2 problems in order, 2 examples of gsm8k_train.jsonl")
    with refuses("num_fewshot=10"):
        gsm8k_task(TaskOptions(num_problems=1, num_fewshot=10), data_dir=tmp_path)


def test_gsm8k_has_examples_of_its_own(tmp_path):
    path = write_jsonl(tmp_path / "some.jsonl", *QUESTIONS)
    task = gsm8k_task(TaskOptions(num_problems=1, source="local", dataset_path=str(path)))
    assert task is not None
    assert task.prompts()[0].count("Question:") == 6
    assert "examples written for this project" in task.description
    problems = [
        TaskProblem(problem_id=str(i), prompt="", user="", reference=row["answer"]) for i, row in enumerate(EXAMPLES)
    ]
    assert task.grade_all(problems, [row["answer"] for row in EXAMPLES]) == [RIGHT] * 5
    for row in EXAMPLES:  # the calculator's annotations hold
        for formula, value in re.findall(r"<<(.+?)=(.+?)>>", row["answer"]):
            assert eval(formula) == int(value)


def test_gsm8k_from_the_hub(monkeypatch):
    asked = []

    def load(hub: HubReference, columns: Sequence[str]) -> Mapping[str, Sequence[object]]:
        asked.append((hub.id, hub.config, hub.split))
        return {name: [row[name] for row in QUESTIONS] for name in columns}

    monkeypatch.setattr("repro.workloads.dataset_rows.load_hub_columns", load)
    task = gsm8k_task(TaskOptions(num_problems=1, num_fewshot=1, source="hub"))
    assert task is not None
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]
    assert task.origin.source == "hub"
    monkeypatch.setitem(QUESTIONS[0], "answer", 7)
    with pytest.raises(
        UserError, match="row 0: field 'answer' is 7: expected text: pin another revision in datasets/gsm8k"
    ):
        gsm8k_task(TaskOptions(num_problems=1, source="hub"))


@pytest.mark.parametrize(("text", "strict", "flexible"), CASES["numbers"])
def test_find_number(text, strict, flexible):
    assert find_number(text) == (strict, flexible)


def test_gsm8k_grades_normalized_numbers(tmp_path):
    write_jsonl(tmp_path / "gsm8k" / "gsm8k_test.jsonl", *QUESTIONS)
    task = gsm8k_task(TaskOptions(num_problems=2, num_fewshot=0), data_dir=tmp_path)
    assert task is not None
    second = task.problems[1]
    assert task.grade(second, " It is\n#### 1002") == RIGHT
    assert task.grade(second, " It is $1,002.") == Grade(correct=True, strict=False)
    assert task.grade(second, "#### 1002\nQuestion: And 5?") == RIGHT, "cut before the next question"
    assert task.grade(second, "#### 1002, or 7") == Grade(correct=False, strict=True)


@given(
    st.text(alphabet="ab #$-.,0159\n", max_size=30)
    | st.builds(lambda a, n, b: f"{a}#### {n}{b}", st.text(max_size=5), st.integers(), st.text(max_size=5))
)
def test_numbers_are_found_as_lm_eval_finds_them(text):
    extraction = pytest.importorskip("lm_eval.filters.extraction")
    metrics = pytest.importorskip("lm_eval.api.metrics")
    strict = extraction.RegexFilter(regex_pattern=r"#### (\-?[0-9\.\,]+)")
    flexible = extraction.RegexFilter(regex_pattern=r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    found = tuple(each.apply([[text]], [{}])[0][0] for each in (strict, flexible))
    assert find_number(text) == found
    for number in found:
        ours = normalize(number) == normalize("steps\n#### 15")
        theirs = metrics.exact_match_hf_evaluate(
            [number], ["steps\n#### 15"], regexes_to_ignore=[",", r"\$", "(?s).*#### ", r"\.$"], ignore_case=True
        )
        assert ours == bool(theirs["exact_match"])


@needs_jail
@pytest.mark.parametrize("chat", [False, True])
def test_humaneval_runs_the_tests(tmp_path, chat):
    write_jsonl(tmp_path / "humaneval" / "HumanEval.jsonl", FUNCTION)
    task = humaneval_task(TaskOptions(num_problems=164, chat=chat), data_dir=tmp_path)
    assert task is not None
    (problem,) = task.problems
    assert task.prompts() == [FUNCTION["prompt"]]
    asked = "Write a solution to the following problem and make sure that it passes the tests:\n```"
    assert problem.user.startswith(asked)
    assert problem.answer_start.endswith(f"```python\n{FUNCTION['prompt']}\n")
    cut = "\n```\nDone." if chat else "\n\nprint(1 / 0)"
    assert task.grade(problem, f"    return x + 1{cut}") == Grade(correct=True)
    assert task.grade(problem, "    return x + 2\n") == Grade(correct=False)
    assert task.grade(problem, "    return (") == Grade(correct=False)


@needs_data
@needs_jail
def test_published_answers_are_right():
    assert REAL_DATA is not None
    gsm = gsm8k_task(TaskOptions(num_problems=1319), data_dir=Path(REAL_DATA))
    code = humaneval_task(TaskOptions(num_problems=164), data_dir=Path(REAL_DATA))
    for task, verdict in ((gsm, RIGHT), (code, Grade(correct=True))):
        assert task is not None
        assert len(task.problems) == TASKS[task.name].num_problems
        assert task.grade_all(task.problems, [problem.reference for problem in task.problems]) == [verdict] * len(
            task.problems
        )


@given(text=st.text(alphabet="ab\n", max_size=12), until=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3)))
def test_cut_at_ends_before_the_first_stop(text, until):
    cut = cut_at(text, until)
    assert text.startswith(cut)
    assert not any(stop in cut for stop in until)
    assert cut == text or any(text[len(cut) :].startswith(stop) for stop in until)


@pytest.mark.parametrize(("name", "options", "message"), CASES["refused options"])
def test_options_are_refused(name, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_task(name, TaskOptions(**options))


def test_no_real_problems_no_task():
    assert load_task("gsm8k", TaskOptions()) is None
    assert load_task("humaneval", TaskOptions(source="embedded")) is None
