"""The requests of a cell, from a data set or a task's problems, and the grading of the engine's answers.

Problems go through the engine like any other requests, all at once unless the cell has a rate. We grade answers after the run, so that
no measured time includes grading.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from engines.dllm.config import GenerationConfig
from engines.errors import UserError, require
from engines.models.checkpoint import TINY_DIR, checkpoint_dir, config_of
from repro.families.dllm.record import graded
from repro.families.dllm.settings import DllmSettings
from repro.files import file_cache
from repro.runs.cell import Cell
from repro.runs.record import RunRecord
from repro.tasks.registry import TASKS, TaskOptions, task_of_cell
from repro.tasks.task import Task
from repro.workloads.card import DATA_DIR_VARIABLE
from repro.workloads.draws import arrivals_of
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.served import Traced
from repro.workloads.workload import Workload, WorkloadConfig, build_workload, fixed_workload, traced_workload

if TYPE_CHECKING:
    from engines.models.tokenizer import TextTokenizer


def room_for_prompt(settings: DllmSettings) -> int:
    """The most prompt tokens that a request can have."""
    engine, gen_length = settings.engine, settings.generation.gen_length
    limit = min(engine.max_model_len, engine.max_num_batched_tokens) - gen_length
    if limit < MIN_PROMPT_LEN:
        name = "max_num_batched_tokens" if engine.max_num_batched_tokens <= engine.max_model_len else "max_model_len"
        raise UserError(
            f"{name}={getattr(engine, name)} leaves {limit} tokens for a prompt beside gen_length={gen_length}: "
            f"raise it to at least {gen_length + MIN_PROMPT_LEN} or lower gen_length"
        )
    return limit


def requests_of(cell: Cell, settings: DllmSettings) -> Workload:
    """The workload of a data set: with token ids if the model runs, else with lengths only."""
    requested = settings.asked
    config = WorkloadConfig(
        dataset=cell.dataset,
        num_requests=requested.num_prompts,
        seed=cell.seed,
        arrivals=arrivals_of(cell.rate, requested),
        source=requested.dataset_source,
        dataset_path=requested.dataset_path,
        time_unit=requested.time_unit,
        length_scale=requested.length_scale,
        max_prompt_len=room_for_prompt(settings),
        min_prompt_len=MIN_PROMPT_LEN,
        fixed_prompt_len=requested.input_len,
        may_replace_arrivals=requested.dataset_path is None or requested.arrivals is not None,
    )
    return _workload_of(config, settings.generation, encode=_encoding(settings))


def _encoding(settings: DllmSettings) -> Callable[[str], list[int]] | None:
    """The tokenizer's encoding; None for a simulation, which needs only lengths."""
    if settings.is_simulated:
        return None
    # Random full-size weights come without a tokenizer; the embedded one's ids are valid for any vocabulary.
    return _encode("tiny" if settings.weights == "random" else settings.model)


def traced_requests(
    cell: Cell, settings: DllmSettings, file: Traced, generation_of: Callable[[int], GenerationConfig]
) -> Workload:
    """One request per row of a file. Answers are rounded up to whole blocks, which published samplers need."""
    requested, engine = settings.asked, settings.engine
    max_tokens = min(engine.max_model_len, engine.max_num_batched_tokens)
    require(
        requested.input_len is None or requested.input_len < max_tokens,
        f"input_len={requested.input_len} must be below the {max_tokens} tokens that a request may have here: change it",
    )
    block = settings.generation.block_length
    return traced_workload(
        file,
        arrivals_of(cell.rate, requested),
        cell.seed,
        lambda tokens: generation_of(-(-tokens // block) * block),
        most=max_tokens,
        num=requested.num_prompts if "num_prompts" in cell.requested else None,
        length_scale=requested.length_scale,
        fixed_prompt_len=requested.input_len,
        encode=_encoding(settings),
    )


_workload_of = file_cache(maxsize=64)(build_workload)
"""Builds a workload, which we keep so that all systems of a comparison serve the same requests."""


@file_cache(maxsize=2)
def _encode(model: str) -> Callable[[str], list[int]]:
    """A cached encoding, because cells that differ only in their rate, for example, ask the same texts."""
    from engines.models.tokenizer import load_tokenizer

    return lru_cache(maxsize=1 << 14)(load_tokenizer(TINY_DIR if model == "tiny" else checkpoint_dir(model)).encode)


_ASKING = ("num_fewshot", "chat", "allow_code_execution")


def task_of(cell: Cell, settings: DllmSettings) -> Task | None:
    """The task whose problems the cell asks; None for a workload that is only served."""
    requested, obstacle = settings.asked, None
    if cell.executor == "roofline":
        obstacle = "a simulated executor"
    elif settings.weights == "random":
        obstacle = "random weights"
    options = TaskOptions(
        num_problems=requested.num_prompts,
        seed=cell.seed,
        num_fewshot=requested.num_fewshot,
        chat=requested.chat,
        source=requested.dataset_source,
        dataset_path=requested.dataset_path,
        allow_code_execution=requested.allow_code_execution,
    )
    task = task_of_cell(cell, options, obstacle)
    for name in _ASKING if task is None else ():
        if value := cell.knob_values.get(name):
            raise UserError(f"{name}={value!r} has no effect on dataset={cell.dataset!r} here, {_why_not_graded(cell)}")
    return task


def require_task(task: Task | None, cell: Cell) -> Task:
    """The task, for commands that measure accuracy. Raises UserError if there is none."""
    if task is None:
        raise UserError(f"dataset={cell.dataset!r} cannot be graded here, {_why_not_graded(cell)}")
    return task


def task_workload(cell: Cell, settings: DllmSettings, task: Task) -> Workload:
    """One request per problem, in problem order. Raises UserError for a prompt that does not fit; we never cut prompts."""
    limit = room_for_prompt(settings)
    prompts = encode_prompts(task, settings.model, config_of(settings.model).family)
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    if len(prompts[longest]) > limit:
        raise UserError(
            f"problem {task.problems[longest].problem_id} has {len(prompts[longest])} prompt tokens and there is room for "
            f"{limit}: lower num_fewshot or gen_length (--num-fewshot 0 asks without examples), or raise max_model_len and "
            f"max_num_batched_tokens (--knob max_model_len=N) as far as the model goes"
        )
    return fixed_workload(
        task.name,
        prompts,
        settings.generation,
        arrivals=arrivals_of(cell.rate, settings.asked),
        seed=cell.seed,
        origin=task.origin,
        description=task.description,
    )


def encode_prompts(task: Task, model: str, family: str) -> list[tuple[int, ...]]:
    """Ids of the raw prompts, or of the conversations up to the point where the model continues."""
    tokenizer = _tokenizer(model)
    if not task.chat:
        return [tuple(ids) for ids in tokenizer.encode_batch(task.prompts())]
    from engines.models.chat import Message, load_chat_template

    template = load_chat_template(checkpoint_dir(model, weights=False), family)
    return [
        (
            *template.encode(tokenizer, [Message(role="user", content=problem.user)]),
            *tokenizer.encode(problem.answer_start),
        )
        for problem in task.problems
    ]


def decode_answers(outputs: Sequence[Sequence[int]], model: str) -> list[str]:
    """The text of each answer, up to the first end of text or end of turn."""
    from repro.prompt import answer_of

    tokenizer = _tokenizer(model)
    return [answer_of(ids, model, tokenizer).text for ids in outputs]


def grade_run(record: RunRecord, task: Task, outputs: Mapping[int, Sequence[int]], model: str) -> RunRecord:
    """The record with verdicts. ``outputs`` are by request id, the index of a problem. A problem without an output is not solved."""
    texts = decode_answers(list(outputs.values()), model)
    return graded(record, task, dict(zip(outputs, texts, strict=True)))


def _why_not_graded(cell: Cell) -> str:
    entry = TASKS.get(cell.dataset)
    if entry is None:
        return f"it is served and not graded: use one of {', '.join(TASKS)}"
    if cell.executor == "roofline" or cell.knob_values.get("weights") == "random":
        return "nothing answers it: use --executor torch and a checkpoint"
    return f"its problems are not here: set {DATA_DIR_VARIABLE} to a folder that has them, or use --dataset-source hub"


@file_cache(maxsize=2)
def _tokenizer(model: str) -> "TextTokenizer":
    from engines.models.tokenizer import load_tokenizer

    return load_tokenizer(checkpoint_dir(model, weights=False))
