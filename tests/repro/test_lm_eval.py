"""The LM Evaluation Harness around the engine: same problems, same texts and same verdicts as without it."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra 'eval')")

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from support.cells import a_cell
from support.jail import needs_jail
from support.refusals import refuses
from support.tables import data_beside

from engines.dllm.config import GenerationConfig
from engines.dllm.engine import Engine
from engines.errors import UserError
from repro.generation import GenerateOptions, generate
from repro.lm_eval import tasks
from repro.lm_eval.model import MODEL_NAME, DiffusionLM
from repro.lm_eval.run import evaluate, main
from repro.prompt import answer_of, tokenizer_of
from repro.runs.experiment import prepare
from repro.tasks.registry import TaskOptions, load_task
from repro.tasks.task import Task

CASES = data_beside(__file__, "cases")

LENGTHS = {"gen_length": 32, "block_length": 16, "steps": 32}

needs_data = pytest.mark.skipif("REPRO_DATA_DIR" not in os.environ, reason="REPRO_DATA_DIR is not set")


@pytest.fixture(autouse=True)
def _no_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness describes its machine beside its results, and asks pip for every package: a third of these tests' time."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


def task_of(name: str, num_problems: int, **options: Any) -> Task:
    loaded = load_task(name, TaskOptions(num_problems=num_problems, **options))
    assert loaded is not None
    return loaded


def run_harness(
    name: str, model: Any, num_problems: int, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(metrics, samples in problem order)."""
    found = evaluate(name, model, options=TaskOptions(num_problems=num_problems, **options))
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return found["results"][name], samples


def answering(texts: Sequence[str]) -> Any:
    """A model that says these things, in this order."""

    class Parrot(LM):
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return list(texts)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

    return Parrot()


# -- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "system", "options"),
    [
        ("mini-gsm", "dllm-serve", {"selection": "dense"}),
        ("mini-gsm", "dllm-serve", {"retention_ratio": 0.5, "threshold": 0.9}),
        ("mini-gsm", "llada", {}),
        pytest.param("mini-code", "dllm-serve", {"selection": "dense"}, marks=needs_jail),
    ],
)
def test_texts_and_verdicts_are_those_without_the_harness(task, system, options):
    problems = task_of(task, 2)
    metrics, samples = run_harness(task, {"system": system, **LENGTHS, **options}, 2)
    assert [sample["arguments"][0][0] for sample in samples] == problems.prompts()

    tokenizer = tokenizer_of("tiny")
    generation = {name: value for name, value in options.items() if name == "threshold"}
    alone = GenerateOptions(
        system=system,
        model="tiny",
        generation=GenerationConfig(**LENGTHS, **generation),
        knobs=options,
        tie_policy="stable",
    )
    texts = [
        answer_of(generate(alone, tuple(tokenizer.encode(prompt))).token_ids, "tiny", tokenizer).text
        for prompt in problems.prompts()
    ]
    assert [sample["resps"][0][0] for sample in samples] == texts
    knobs = {"num_prompts": 2, **LENGTHS, **options}
    cell = a_cell(system, dataset=task, **knobs)
    ours = prepare(cell).run().requests
    assert [sample["correct"] for sample in samples] == [float(correct) for correct in ours["correct"]]
    assert [sample["strict"] for sample in samples] == [float(correct) for correct in ours["correct_strict"]]
    assert metrics["correct,verdict"] == sum(ours["correct"]) / 2
    assert metrics["strict,verdict"] == sum(ours["correct_strict"]) / 2


def test_all_requests_run_together(monkeypatch):
    running: list[int] = []
    step = Engine.step

    def spy(self: Engine) -> Any:
        record = step(self)
        running.append(0 if record is None else record.occupancy.num_running)
        return record

    monkeypatch.setattr(Engine, "step", spy)
    run_harness("mini-gsm", LENGTHS, 4)
    assert max(running) == 4


@pytest.mark.parametrize("options", CASES["systems of lm-eval"])
def test_every_system_can_be_asked(options):
    metrics, samples = run_harness("mini-gsm", {**LENGTHS, **options}, 2)
    assert len(samples) == 2
    assert 0 <= metrics["correct,verdict"] <= 1


def test_the_embedded_model_solves_its_task_through_the_harness():
    metrics, _ = run_harness("mini-gsm", {"selection": "dense", "gen_length": 64}, 8)
    assert metrics["correct,verdict"] > 0.5  # most, not all: a cached context is not the reference sampler's


def asking(context: str, **kwargs: Any) -> Any:
    return Instance(request_type="generate_until", doc={}, arguments=(context, kwargs), idx=0)


def test_a_task_says_where_to_stop_and_how_long_to_go_on():
    prompt = task_of("mini-gsm", 1).prompts()[0]
    model = DiffusionLM(block_length=16)
    whole, cut, cut_by_list, short = model.generate_until(
        [
            asking(prompt),
            asking(prompt, until=" = "),
            asking(prompt, until=["####", " = ", ""]),
            asking(prompt, max_gen_toks=16, do_sample=False, temperature=0.0),
        ]
    )
    assert " = " in whole
    assert cut == cut_by_list == whole.partition(" = ")[0]
    assert len(tokenizer_of("tiny").encode(short)) <= 16 < len(tokenizer_of("tiny").encode(whole))
    given = DiffusionLM(**LENGTHS).generate_until([asking(prompt, max_gen_toks=16), asking(prompt)])
    assert given[0] == given[1]  # what the user gave holds


def test_repeats_are_drawn_anew():
    prompt = task_of("mini-gsm", 1).prompts()[0]
    drawn = [asking(prompt, do_sample=True, temperature=3.0) for _ in range(3)]
    assert len(set(DiffusionLM(**LENGTHS).generate_until(drawn))) == 3
    assert DiffusionLM(**LENGTHS).generate_until(drawn) == DiffusionLM(**LENGTHS).generate_until(drawn)
    greedy = [asking(prompt, do_sample=False, temperature=3.0) for _ in range(2)]
    assert len(set(DiffusionLM(**LENGTHS).generate_until(greedy))) == 1


def test_what_cannot_be_done_is_refused():
    model = DiffusionLM(**LENGTHS)
    for likelihood in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(UserError, match="Monte-Carlo estimate"):
            likelihood([])
    with pytest.raises(UserError, match="generation_kwargs: num_beams=4"):
        model.generate_until([asking("Story", num_beams=4)])
    with pytest.raises(UserError, match="exceeds"):
        model.generate_until([asking("Story. " * 1000)])
    for options, message in data_beside(__file__, "lm_eval")["refused"]:
        with pytest.raises(UserError, match=message):
            DiffusionLM(**options)


def test_the_harness_finds_it_by_name_and_its_defaults_are_harmless():
    found = get_model(MODEL_NAME)
    defaults = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    model = found.create_from_arg_string("system=sparse-dllm,retention_ratio=0.5,gen_length=32", defaults)
    assert model._cell.knob_values == {"retention_ratio": 0.5, "gen_length": 32}
    assert model._cell.system == "sparse-dllm"
    with refuses("batch_size=8"):
        found.create_from_arg_obj({}, {"batch_size": 8})


def test_conversations_use_the_checkpoints_format():
    model = DiffusionLM()
    history = [{"role": "user", "content": "How many?"}]
    prompt = model.apply_chat_template(history)
    assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    opened = model.apply_chat_template([*history, {"role": "assistant", "content": "Answer:"}], False)
    assert opened == prompt + "Answer:"
    assert model.tokenizer_name == "tiny"
    assert model.chat_template() is None
    assert model.chat_template(True) == "built-in format of llada"


# -- published tasks, from local files ---------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_the_harness_grades_gsm8k_as_we_do(num_fewshot):
    problems = task_of("gsm8k", 8, num_fewshot=num_fewshot)
    right = [problem.reference for problem in problems.problems]
    final = [text.rpartition("#### ")[2] for text in right]
    texts = [
        right[0],
        f" so the answer is {final[1]}",
        f" #### {final[2]}. Question: again? #### 0",
        f" It costs ${final[3]}.00",
        f" #### {final[4]}\n#### 999",
        " no number",
        f" {final[6]} #### 1,000",
        "",
    ]
    # The harness has models cut at the stops.
    metrics, samples = run_harness(
        "gsm8k", answering([text.partition("Question:")[0] for text in texts]), 8, num_fewshot=num_fewshot
    )
    verdicts = problems.grade_all(problems.problems, texts)
    for filter_name, ours in (
        ("flexible-extract", [verdict.correct for verdict in verdicts]),
        ("strict-match", [verdict.strict for verdict in verdicts]),
    ):
        theirs = [bool(sample["exact_match"]) for sample in samples if sample["filter"] == filter_name]
        assert theirs == ours
        assert metrics[f"exact_match,{filter_name}"] == pytest.approx(sum(map(bool, ours)) / 8)
    assert [sample["arguments"][0][0] for sample in samples if sample["filter"] == "strict-match"] == problems.prompts()
    assert samples[0]["arguments"][0][1]["until"] == list(problems.until)


@needs_data
@needs_jail
def test_humaneval_is_graded_in_the_sandbox(monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    problems = task_of("humaneval", 164).problems
    texts = [problem.reference if index % 4 else "    open('/etc/passwd')\n" for index, problem in enumerate(problems)]
    metrics, samples = run_harness("humaneval", answering(texts), 164)
    assert [sample["correct"] for sample in samples] == [float(index % 4 != 0) for index in range(164)]
    assert metrics["correct,verdict"] == 0.75
    assert not [name for name in metrics if name.startswith("strict")]


@needs_data
@needs_jail
@pytest.mark.parametrize(("task", "metric"), [("gsm8k", "exact_match,strict-match"), ("humaneval", "correct,verdict")])
def test_published_tasks_run_to_their_end_on_the_embedded_model(task, metric):
    options = {"num_fewshot": 0} if task == "gsm8k" else {}
    metrics, samples = run_harness(task, LENGTHS, 3, **options)
    assert 0 <= metrics[metric] <= 1
    assert len({sample["doc_id"] for sample in samples}) == 3


def test_a_published_task_without_its_file_is_refused(monkeypatch):
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    with pytest.raises(UserError, match="set REPRO_DATA_DIR"):
        run_harness("gsm8k", LENGTHS, 1)


@needs_jail
def test_conversations_reach_the_model(monkeypatch):
    seen: list[str] = []

    def answer(self: DiffusionLM, prompts: Sequence[str], asked: Any, *, show_progress: bool) -> list[str]:
        seen.extend(prompts)
        return ["" for _ in prompts]

    monkeypatch.setattr(DiffusionLM, "_answer", answer)
    run_harness("mini-gsm", LENGTHS, 2, chat=True)
    users = [problem.user for problem in task_of("mini-gsm", 2).problems]
    assert seen == [DiffusionLM().apply_chat_template([{"role": "user", "content": user}]) for user in users]
    if "REPRO_DATA_DIR" in os.environ:
        seen.clear()
        run_harness("humaneval", LENGTHS, 1, chat=True)
        (problem,) = task_of("humaneval", 1, chat=True).problems
        assert seen == [
            DiffusionLM().apply_chat_template([{"role": "user", "content": problem.user}]) + problem.answer_start
        ]


# -- lm-eval's own command line ------------------------------------------------------------------------------


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """(exit code, what was said), without the index of the harness's own fourteen thousand tasks."""

    class Alone(tasks.WithOurTasks):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "include_defaults": False})

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lm_eval.tasks.TaskManager)  # as it was, afterwards
    monkeypatch.setattr(tasks, "WithOurTasks", Alone)
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model", "dllm-serve", *arguments])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("name", ["mini_gsm", "mini-gsm", "mini_code", "mini_chain"])
def test_tasks_are_known_by_name(name, monkeypatch, capsys):
    code, said = command_line(monkeypatch, capsys, "--tasks", name, "--limit", "1")
    assert code == 0
    assert f"|{name}" in said
    assert "correct" in said


def test_a_local_file_is_heard_and_a_long_prompt_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(3)]
    (tmp_path / "gsm8k" / "gsm8k_test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    code, said = command_line(monkeypatch, capsys, "--tasks", "gsm8k", "--limit", "1")
    assert code == 2, "five examples are more than the embedded model takes"
    assert said.splitlines()[-1].startswith("error: ")
    assert said.splitlines()[-1].endswith("shorten the prompt or the generation")
    code, said = command_line(monkeypatch, capsys, "--tasks", "gsm8k", "--limit", "1", "--num_fewshot", "0")
    assert code == 0, said
    assert "exact_match" in said


def test_what_is_nowhere_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, said = command_line(monkeypatch, capsys, "--tasks", "humaneval")
    assert code == 2
    assert "or set REPRO_DATA_DIR to a folder that holds its file" in said.splitlines()[-1]
