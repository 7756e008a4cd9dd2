"""Cells whose answers are graded: their requests, their verdicts, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.cells import a_cell
from support.jail import needs_jail

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR
from engines.models.tokenizer import load_tokenizer
from repro.families.dllm.record import DLLM
from repro.families.dllm.requests import decode_answers, encode_prompts, grade_run, require_task
from repro.generation import GenerateOptions, generate
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord
from repro.runs.store import Store, pack
from repro.tasks import registry
from repro.tasks.registry import TASKS
from repro.tasks.task import Task, TaskProblem
from repro.workloads.card import Origin

pytestmark = pytest.mark.usefixtures("no_data", "models_loaded_once")


def cell(task: str, system: str = "dllm-serve", **knobs: Scalar) -> Cell:
    executor = str(knobs.pop("executor", "torch"))
    where = str(knobs.pop("platform", "cpu-tiny"))
    return a_cell(system, dataset=task, platform=where, executor=executor, seed=3, **knobs)


def test_prompts_go_in_whole_and_in_order():
    experiment = prepare(cell("mini-gsm", num_prompts=5))
    task = require_task(experiment.deployment.task, experiment.cell)
    tokenizer = load_tokenizer(TINY_DIR)
    assert experiment.deployment.settings.asked.length_scale != 1.0, "the platform shortens serving workloads"
    assert [tokenizer.decode(r.prompt_ids or ()) for r in experiment.workload.requests] == task.prompts()
    assert [r.request_id for r in experiment.workload.requests] == list(range(5))
    assert {r.arrival_s for r in experiment.workload.requests} == {0.0}
    provenance = experiment.workload.provenance
    assert (provenance.num_clipped, provenance.num_repeated, provenance.length_scale) == (0, 0, 1.0)


@needs_jail
def test_default_size_is_the_tasks():
    assert len(prepare(cell("mini-code")).workload.requests) == TASKS["mini-code"].num_problems == 500


def test_the_key_follows_the_problems(tmp_path):
    keys = set()
    for answer in ("#### 2", "#### 3"):
        path = tmp_path / "g.jsonl"
        path.write_text(json.dumps({"question": "One and one?", "answer": answer}) + "\n")
        registry._load.cache_clear()
        keys.add(
            prepare(
                cell("gsm8k", num_prompts=1, num_fewshot=0, dataset_source="local", dataset_path=str(path))
            ).cell.key
        )
    assert len(keys) == 2, "other answers, other verdicts"


def test_published_tasks_can_be_served_without_being_graded():
    simulated = prepare(cell("humaneval", executor="roofline", platform="rtx4090", num_prompts=4))
    assert simulated.deployment.task is None
    assert simulated.workload.requests[0].prompt_ids is None
    assert prepare(cell("gsm8k", num_prompts=4)).deployment.task is None
    with pytest.raises(UserError, match="cannot be graded here, its problems are not here"):
        require_task(None, cell("gsm8k"))
    assert DLLM.summarize(simulated.run())["accuracy"] is None


def test_a_conversation_is_encoded_with_its_opening(monkeypatch):
    from engines.models import chat

    monkeypatch.setattr(
        chat.ChatTemplate, "encode", lambda self, tokenizer, messages: tokenizer.encode(f"<{messages[0].content}>")
    )
    origin = Origin(source="embedded", location="", revision=None)
    problem = TaskProblem(problem_id="0", prompt="Mia has 3.", user="Tom has 2.", answer_start=" So", reference="")
    task = Task(
        name="t", problems=(problem,), origin=origin, description="", grader=lambda problems, texts: [], chat=True
    )
    tokenizer = load_tokenizer(TINY_DIR)
    assert tokenizer.decode(encode_prompts(task, "tiny", "llada")[0]) == "<Tom has 2.> So"
    assert tokenizer.decode(encode_prompts(replace(task, chat=False), "tiny", "llada")[0]) == "Mia has 3."


QUICK: dict[str, Scalar] = {"gen_length": 40, "block_length": 8, "steps": 40, "num_prompts": 6}


@pytest.fixture(scope="module")
def sparse() -> tuple[Any, RunRecord]:
    """A retention at which some answers are wrong."""
    experiment = prepare(cell("mini-gsm", selection="uniform", retention_ratio=0.2, **QUICK))
    return experiment, experiment.run()


def test_answers_are_those_of_one_request_at_a_time(sparse):
    """What the batch answers, and its verdicts, against single requests through ``repro generate``'s path."""
    experiment, record = sparse
    generation = GenerationConfig(gen_length=40, block_length=8, steps=40)
    options = GenerateOptions(
        system="dllm-serve", model="tiny", generation=generation, knobs={"selection": "uniform", "retention_ratio": 0.2}
    )
    outputs = [generate(options, request.prompt_ids).token_ids for request in experiment.workload.requests]
    task = experiment.deployment.task
    verdicts = task.grade_all(task.problems, decode_answers(outputs, "tiny"))
    assert record.requests["correct"] == [verdict.correct for verdict in verdicts]
    assert record.requests["correct_strict"] == [verdict.strict for verdict in verdicts]
    assert len(set(record.requests["correct_strict"])) == 2, "some right, some wrong"


def test_stopping_at_the_end_of_text_changes_no_verdict(sparse):
    _, record = sparse
    early = prepare(cell("mini-gsm", selection="uniform", retention_ratio=0.2, stop_at_eos=True, **QUICK)).run()
    assert sum(early.requests["output_len"]) < sum(record.requests["output_len"])
    for column in ("correct", "correct_strict"):
        assert early.requests[column] == record.requests[column]


def test_accuracy_is_stored(sparse, tmp_path):
    experiment, record = sparse
    store = Store(tmp_path)
    provenance = {"finished_utc": "now", "git": {"commit": None, "dirty": False}, "inputs": {}}
    store.put(pack(experiment, record, provenance))
    stored = store.load(experiment)
    assert stored.record.requests["correct"] == record.requests["correct"]
    accuracy = stored.summary["accuracy"]
    assert accuracy["value"] == sum(record.requests["correct"]) / 6
    assert accuracy["n"] == 6
    assert accuracy["low"] < accuracy["value"] < accuracy["high"] or accuracy["value"] in (0, 1)
    assert stored.summary["accuracy_strict"]["value"] < accuracy["value"]


def test_a_problem_without_an_answer_is_not_solved(sparse):
    experiment, record = sparse
    task = experiment.deployment.task
    ids = [tuple(load_tokenizer(TINY_DIR).encode(problem.reference)) for problem in task.problems]
    some = grade_run(record, task, {place: ids[place] for place in (0, 2)}, "tiny")
    assert some.requests["correct"] == [True, False, True, False, False, False]
    assert some.requests["correct_strict"] == [True, False, True, False, False, False]
    assert DLLM.summarize(some)["accuracy"]["value"] == 2 / 6


@pytest.mark.parametrize("system", ["llada", "sparse-dllm"])
def test_baselines_answer_too(system):
    record = prepare(cell("mini-gsm", system, gen_length=32, block_length=16, steps=32, num_prompts=3)).run()
    accuracy = DLLM.summarize(record)["accuracy"]
    assert accuracy["n"] == 3
    assert system != "llada" or accuracy["value"] == 1
