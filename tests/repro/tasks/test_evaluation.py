"""Tasks, their graders, and cells whose answers are graded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR
from engines.models.tokenizer import load_tokenizer
from repro.cli.main import main
from repro.generation import GenerateOptions, generate
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare, run
from repro.runs.metrics import summarize
from repro.runs.record import RunRecord
from repro.runs.store import Store
from repro.tasks import mini_code, mini_gsm
from repro.tasks.evaluation import decode_answers, grade_run, require_task
from repro.tasks.gsm8k import EXAMPLES, find_number, gsm8k_task, normalize
from repro.tasks.humaneval import humaneval_task
from repro.tasks.mini import INPUTS, mini_code_task, mini_gsm_task
from repro.tasks.registry import TASKS, TaskOptions, load_task
from repro.tasks.task import Origin, Task, TaskProblem, Verdict, cut_at
from repro.workloads.card import HubReference

RIGHT, WRONG = Verdict(correct=True, strict=True), Verdict(correct=False, strict=False)
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


def cell(task: str, system: str = "dllm-serve", **knobs: Scalar) -> Cell:
    executor = str(knobs.pop("executor", "torch"))
    where = str(knobs.pop("platform", "cpu-tiny"))
    return Cell(
        system=system, dataset=task, platform=where, executor=executor, rate=None, seed=3, knobs=tuple(knobs.items())
    )


# ---- the embedded model's tasks -----------------------------------------------------------------


@pytest.mark.parametrize("make", [mini_gsm_task, mini_code_task])
def test_references_are_right_and_numbers_apart_are_not(make: Any) -> None:
    task = make(20, 5)
    references = [problem.reference for problem in task.problems]
    assert task.grade_all(task.problems, references) == [RIGHT] * 20
    off = [re.sub(r"\d(?=\D*$)", lambda found: str((int(found[0]) + 1) % 10), text) for text in references]
    assert all(a != b for a, b in zip(off, references, strict=True))
    assert task.grade_all(task.problems, off) == [WRONG] * 20
    assert task.grade(task.problems[0], "") == WRONG


def test_mini_code_is_judged_by_what_it_computes() -> None:
    task = mini_code_task(1, 5)
    (problem,) = task.problems
    same = problem.reference.replace("return x", "y = x\n    return y")
    assert task.grade(problem, same) == Verdict(correct=True, strict=False)
    for text in ("\n    return x", "\n    raise KeyError", " not python", "\n    import os\n    os.abort()"):
        assert task.grade(problem, text) == WRONG, text


@given(seed=st.integers(0, 10**6), x=st.integers(-50, 50))
def test_the_expected_value_is_the_references(seed: int, x: int) -> None:
    (problem,) = mini_code.generate(seed, 1, "heldout", num_facts=4, num_distractors=0)
    scope: dict[str, Any] = {}
    exec(problem.prompt + problem.answer, scope)
    assert scope["f"](x) == mini_code.apply(problem, x)
    assert len(set(INPUTS)) >= 2


def test_mini_gsm_without_its_mark_counts_by_the_last_number() -> None:
    task = mini_gsm_task(1, 5)
    (problem,) = task.problems
    final = problem.reference.rsplit("#### ", 1)[1]
    assert task.grade(problem, f" It is {final}.") == Verdict(correct=True, strict=False)


def test_generated_problems_are_heldout_and_share_their_beginning() -> None:
    few, many = mini_gsm_task(3, 5), mini_gsm_task(6, 5)
    assert many.prompts() == [problem.prompt for problem in mini_gsm.generate(5, 6, "heldout")]
    assert few.problems == many.problems[:3]
    assert few.problems != mini_gsm_task(3, 6).problems
    assert few.digest != many.digest


# ---- GSM8K --------------------------------------------------------------------------------------


def test_gsm8k_prompt_is_lm_evals(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "gsm8k" / "gsm8k_test.jsonl", *QUESTIONS)
    task = gsm8k_task(2, num_fewshot=0, data_dir=tmp_path)
    assert task is not None
    assert task.prompts() == ["Question: One and one?\nAnswer:", "Question: A thousand and $2?\nAnswer:"]
    assert task.origin.used == "local"
    shots = [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(9)]
    write_jsonl(path.with_name("gsm8k_train.jsonl"), *shots)
    task = gsm8k_task(1, num_fewshot=2, data_dir=tmp_path)
    assert task is not None
    assert task.prompts() == [
        "Question: Q0?\nAnswer: #### 0\n\nQuestion: Q1?\nAnswer: #### 1\n\nQuestion: One and one?\nAnswer:"
    ]
    assert task.origin.description.endswith("1 of 2 problems in order, 2 examples of gsm8k_train.jsonl")
    with pytest.raises(UserError, match="num_fewshot=10 must be between 0 and 9"):
        gsm8k_task(1, num_fewshot=10, data_dir=tmp_path)


def test_gsm8k_has_examples_of_its_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "some.jsonl", *QUESTIONS)
    task = gsm8k_task(1, source="local", dataset_path=str(path))
    assert task is not None
    assert task.prompts()[0].count("Question:") == 6
    assert "examples written for this project" in task.origin.description
    problems = [
        TaskProblem(problem_id=str(i), prompt="", user="", reference=row["answer"]) for i, row in enumerate(EXAMPLES)
    ]
    assert task.grade_all(problems, [row["answer"] for row in EXAMPLES]) == [RIGHT] * 5
    for row in EXAMPLES:  # the calculator's annotations hold
        for formula, value in re.findall(r"<<(.+?)=(.+?)>>", row["answer"]):
            assert eval(formula) == int(value)


def test_gsm8k_from_the_hub() -> None:
    asked = []

    def load(hub: HubReference, columns: Sequence[str]) -> Mapping[str, Sequence[object]]:
        asked.append((hub.id, hub.config, hub.split))
        return {name: [row[name] for row in QUESTIONS] for name in columns}

    task = gsm8k_task(1, num_fewshot=1, source="hub", hub_loader=load)
    assert task is not None
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]
    assert task.origin.used == "hub"
    with pytest.raises(UserError, match="row 0: column 'answer' is 7, expected text"):
        gsm8k_task(
            1,
            source="hub",
            hub_loader=lambda hub, columns: {name: [7 if name == "answer" else "x"] for name in columns},
        )


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3.\n#### 1,234", "1,234", "1,234"),
        ("#### 5 and #### 6", "5", "6"),
        ("It costs $18.", "[invalid]", "$18."),
        ("#### -7", "-7", "-7"),
        ("####5", "[invalid]", "5"),
        ("no number", "[invalid]", "[invalid]"),
        ("a, b.", "[invalid]", "[invalid]"),
        ("... 4 ,", "[invalid]", "4"),
    ],
)
def test_find_number(text: str, strict: str, flexible: str) -> None:
    assert find_number(text) == (strict, flexible)


def test_gsm8k_grades_normalized_numbers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k" / "gsm8k_test.jsonl", *QUESTIONS)
    task = gsm8k_task(2, num_fewshot=0, data_dir=tmp_path)
    assert task is not None
    second = task.problems[1]
    assert task.grade(second, " It is\n#### 1002") == RIGHT
    assert task.grade(second, " It is $1,002.") == Verdict(correct=True, strict=False)
    assert task.grade(second, "#### 1002\nQuestion: And 5?") == RIGHT, "cut before the next question"
    assert task.grade(second, "#### 1002, or 7") == Verdict(correct=False, strict=True)


@given(
    st.text(alphabet="ab #$-.,0159\n", max_size=30)
    | st.builds(lambda a, n, b: f"{a}#### {n}{b}", st.text(max_size=5), st.integers(), st.text(max_size=5))
)
def test_numbers_are_found_as_lm_eval_finds_them(text: str) -> None:
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


# ---- HumanEval ----------------------------------------------------------------------------------


def test_humaneval_runs_the_tests(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "humaneval" / "HumanEval.jsonl", FUNCTION)
    task = humaneval_task(164, data_dir=tmp_path)
    assert task is not None
    (problem,) = task.problems
    assert task.prompts() == [FUNCTION["prompt"]]
    assert task.grade(problem, "    return x + 1\n\nprint(1 / 0)") == Verdict(correct=True), "cut before print"
    assert task.grade(problem, "    return x + 2\n") == Verdict(correct=False)
    assert task.grade(problem, "    return (") == Verdict(correct=False)


def test_humaneval_in_a_conversation(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "humaneval" / "HumanEval.jsonl", FUNCTION)
    task = humaneval_task(1, chat=True, data_dir=tmp_path)
    assert task is not None
    (problem,) = task.problems
    assert problem.user.startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```"
    )
    assert problem.answer_start.endswith(f"```python\n{FUNCTION['prompt']}\n")
    assert task.grade(problem, "    return x + 1\n```\nDone.") == Verdict(correct=True)


@needs_data
def test_published_answers_are_right() -> None:
    assert REAL_DATA is not None
    gsm = gsm8k_task(1319, data_dir=Path(REAL_DATA))
    code = humaneval_task(164, data_dir=Path(REAL_DATA))
    for task, verdict in ((gsm, RIGHT), (code, Verdict(correct=True))):
        assert task is not None
        assert len(task.problems) == TASKS[task.name].num_problems
        assert task.grade_all(task.problems, [problem.reference for problem in task.problems]) == [verdict] * len(
            task.problems
        )


# ---- the registry -------------------------------------------------------------------------------


@given(text=st.text(alphabet="ab\n", max_size=12), until=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3)))
def test_cut_at_ends_before_the_first_stop(text: str, until: list[str]) -> None:
    cut = cut_at(text, until)
    assert text.startswith(cut)
    assert not any(stop in cut for stop in until)
    assert cut == text or any(text[len(cut) :].startswith(stop) for stop in until)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arc", TaskOptions(), "task='arc' is unknown: use one of mini-gsm, mini-code, gsm8k, humaneval"),
        ("mini-gsm", TaskOptions(num_problems=0), "num_problems=0 must be at least 1"),
        ("gsm8k", TaskOptions(num_problems=1320), "num_problems=1320: GSM8K has 1319 problems: ask for fewer"),
        ("humaneval", TaskOptions(num_fewshot=3), "num_fewshot=3 has no effect with dataset='humaneval'"),
        ("mini-code", TaskOptions(source="hub"), "source='hub' has no effect with dataset='mini-code'"),
        ("gsm8k", TaskOptions(source="local"), "source='local': no file for dataset 'gsm8k'"),
    ],
)
def test_options_are_refused(name: str, options: TaskOptions, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_task(name, options)


def test_no_real_problems_no_task() -> None:
    assert load_task("gsm8k", TaskOptions()) is None
    assert load_task("humaneval", TaskOptions(source="embedded")) is None


# ---- cells --------------------------------------------------------------------------------------


def test_prompts_go_in_whole_and_in_order() -> None:
    experiment = prepare(cell("mini-gsm", num_requests=5))
    task = require_task(experiment.task, experiment.cell)
    tokenizer = load_tokenizer(TINY_DIR)
    assert experiment.settings.length_scale != 1.0, "the platform shortens serving workloads"
    assert [tokenizer.decode(r.prompt_ids or ()) for r in experiment.workload.requests] == task.prompts()
    assert [r.request_id for r in experiment.workload.requests] == list(range(5))
    assert {r.arrival_s for r in experiment.workload.requests} == {0.0}
    provenance = experiment.workload.provenance
    assert (provenance.num_clipped, provenance.num_repeated, provenance.length_scale) == (0, 0, 1.0)


def test_default_size_is_the_tasks() -> None:
    assert len(prepare(cell("mini-code")).workload.requests) == TASKS["mini-code"].num_problems == 500


def test_the_key_follows_the_problems(tmp_path: Path) -> None:
    keys = set()
    for answer in ("#### 2", "#### 3"):
        path = write_jsonl(tmp_path / "g.jsonl", {"question": "One and one?", "answer": answer})
        from repro.tasks import evaluation

        evaluation._load.cache_clear()
        keys.add(prepare(cell("gsm8k", num_requests=1, num_fewshot=0, source="local", dataset_path=str(path))).cell.key)
    assert len(keys) == 2, "other answers, other verdicts"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            cell("mini-gsm", executor="roofline", platform="rtx4090"),
            "is graded and a simulated executor cannot answer it",
        ),
        (cell("mini-gsm", weights="random"), "is graded and random weights cannot answer it"),
        (cell("mini-gsm", fixed_prompt_len=32), "fixed_prompt_len=32 has no effect with dataset='mini-gsm'"),
        (cell("mini-gsm", length_scale=0.5), "length_scale=0.5 has no effect with dataset='mini-gsm'"),
        (cell("osc", chat=True), "chat=True has no effect on dataset='osc' here, it is served and not graded"),
        (cell("gsm8k", num_fewshot=3), "its problems are not here: set REPRO_DATA_DIR"),
        (
            cell("mini-gsm", gen_length=600, steps=600),
            "prompt tokens and there is room for 168: lower num_fewshot or gen_length",
        ),
        (cell("mini-gsm", chat=True), "the checkpoint has no chat template"),
    ],
)
def test_cells_are_refused(asked: Cell, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(asked)


def test_published_tasks_can_be_served_without_being_graded() -> None:
    simulated = prepare(cell("humaneval", executor="roofline", platform="rtx4090", num_requests=4))
    assert simulated.task is None
    assert simulated.workload.requests[0].prompt_ids is None
    assert prepare(cell("gsm8k", num_requests=4)).task is None
    with pytest.raises(UserError, match="cannot be graded here, its problems are not here"):
        require_task(None, cell("gsm8k"))
    assert summarize(run(simulated))["accuracy"] is None


def test_a_conversation_is_encoded_with_its_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.models import chat
    from repro.tasks.evaluation import encode_prompts

    monkeypatch.setattr(
        chat.ChatTemplate, "encode", lambda self, tokenizer, messages: tokenizer.encode(f"<{messages[0].content}>")
    )
    origin = Origin(used="embedded", location="", revision=None, description="")
    problem = TaskProblem(problem_id="0", prompt="Mia has 3.", user="Tom has 2.", answer_start=" So", reference="")
    task = Task(name="t", problems=(problem,), origin=origin, grader=lambda problems, texts: [], chat=True)
    tokenizer = load_tokenizer(TINY_DIR)
    assert tokenizer.decode(encode_prompts(task, "tiny", "llada")[0]) == "<Tom has 2.> So"
    assert tokenizer.decode(encode_prompts(replace(task, chat=False), "tiny", "llada")[0]) == "Mia has 3."


QUICK: dict[str, Scalar] = {"gen_length": 40, "block_length": 8, "steps": 40, "num_requests": 6}


@pytest.fixture(scope="module")
def sparse() -> tuple[Any, RunRecord]:
    """A retention at which some answers are wrong."""
    experiment = prepare(cell("mini-gsm", selection="uniform", retention_ratio=0.2, **QUICK))
    return experiment, run(experiment)


def test_answers_are_those_of_one_request_at_a_time(sparse: tuple[Any, RunRecord]) -> None:
    """What the batch answers, and its verdicts, against single requests through ``repro generate``'s path."""
    experiment, record = sparse
    generation = GenerationConfig(gen_length=40, block_length=8, steps=40)
    options = GenerateOptions(
        system="dllm-serve", model="tiny", generation=generation, knobs={"selection": "uniform", "retention_ratio": 0.2}
    )
    outputs = [generate(options, request.prompt_ids).token_ids for request in experiment.workload.requests]
    verdicts = experiment.task.grade_all(experiment.task.problems, decode_answers(outputs, "tiny"))
    assert record.requests["correct"] == [verdict.correct for verdict in verdicts]
    assert record.requests["correct_strict"] == [verdict.strict for verdict in verdicts]
    assert len(set(record.requests["correct_strict"])) == 2, "some right, some wrong"


def test_stopping_at_the_end_of_text_changes_no_verdict(sparse: tuple[Any, RunRecord]) -> None:
    _, record = sparse
    early = run(prepare(cell("mini-gsm", selection="uniform", retention_ratio=0.2, stop_at_eos=True, **QUICK)))
    assert sum(early.requests["output_len"]) < sum(record.requests["output_len"])
    for column in ("correct", "correct_strict"):
        assert early.requests[column] == record.requests[column]


def test_accuracy_is_stored(sparse: tuple[Any, RunRecord], tmp_path: Path) -> None:
    experiment, record = sparse
    store = Store(tmp_path)
    store.save(experiment.cell, record, provenance={"finished_utc": "now"})
    stored = store.load(experiment.cell)
    assert stored.record.requests["correct"] == record.requests["correct"]
    accuracy = stored.summary["accuracy"]
    assert accuracy["value"] == sum(record.requests["correct"]) / 6
    assert accuracy["n"] == 6
    assert accuracy["low"] < accuracy["value"] < accuracy["high"] or accuracy["value"] in (0, 1)
    assert stored.summary["accuracy_strict"]["value"] < accuracy["value"]


def test_a_problem_without_an_answer_is_not_solved(sparse: tuple[Any, RunRecord]) -> None:
    experiment, record = sparse
    task = experiment.task
    ids = [tuple(load_tokenizer(TINY_DIR).encode(problem.reference)) for problem in task.problems]
    graded = grade_run(record, task, {place: ids[place] for place in (0, 2)}, "tiny")
    assert graded.requests["correct"] == [True, False, True, False, False, False]
    assert graded.requests["correct_strict"] == [True, False, True, False, False, False]
    assert summarize(graded)["accuracy"]["value"] == 2 / 6


@pytest.mark.parametrize("system", ["llada", "sparse-dllm"])
def test_baselines_answer_too(system: str) -> None:
    record = run(prepare(cell("mini-gsm", system, gen_length=32, block_length=16, steps=32, num_requests=3)))
    accuracy = summarize(record)["accuracy"]
    assert accuracy["n"] == 3
    assert system != "llada" or accuracy["value"] == 1


# ---- the command --------------------------------------------------------------------------------


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["repro", "eval", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--task",
        "mini-code",
        "--limit",
        3,
        "--gen-length",
        40,
        "--block-length",
        8,
        "--selection",
        "dense",
        "--result-dir",
        tmp_path,
    )
    code, out, err = call(monkeypatch, capsys, *asked, "--json")
    assert (code, err.split(",")[0]) == (0, "1 runs done")
    result = json.loads(out)
    assert (result["task"], result["criterion"], result["obtained"], result["valid"]) == (
        "mini-code",
        "pass@1",
        "measured",
        True,
    )
    assert result["accuracy"]["value"] == result["accuracy_strict"]["value"] == 1.0
    assert (result["selection"], result["retention"]) == ("dense", 1.0)
    assert Path(result["folder"]).is_dir()
    code, out, err = call(monkeypatch, capsys, *asked)
    assert (code, "0 runs done, 1 reused" in err) == (0, True)
    assert "100.0 % (43.9 to 100.0 %, n = 3)" in out
    assert "all context rows" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "arc"), "task='arc' is unknown"),
        (("--task", "gsm8k"), "dataset='gsm8k' cannot be graded here, its problems are not here: set REPRO_DATA_DIR"),
        (("--platform", "rtx4090"), "model='llada-8b' is"),
        (
            ("--selection", "dense", "--retention-ratio", "0.5"),
            "retention_ratio=0.5 has no effect with selection='dense'",
        ),
        (("--limit", "0"), "num_problems=0 must be at least 1"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = call(monkeypatch, capsys, *arguments, "--result-dir", tmp_path / "runs")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "runs").exists()
