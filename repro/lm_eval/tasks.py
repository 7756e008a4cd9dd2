"""The tasks of ``repro.tasks`` for the LM Evaluation Harness: the same problems, without any download.

The harness's own filters and metric grade GSM8K. The other tasks grade themselves: HumanEval's programs run in the sandbox, not in
``code_eval``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import yaml

from engines.errors import UserError
from repro.tasks import gsm8k
from repro.tasks.task import Grade, Task

try:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    from datasets import Dataset  # type: ignore[attr-defined,unused-ignore]
except ImportError as error:
    raise UserError(f"lm-eval cannot be imported ({error}): pip install 'dllm-serve-repro[eval]'") from error

CONFIGS = Path(__file__).parent / "configs"
SPLIT = "test"
CRITERIA = tuple(field.name for field in fields(Grade))
_FROM_THE_HARNESS = ("metric_list", "filter_list", "generation_kwargs", "repeats", "metadata")


class WithOurTasks(TaskManager):
    """Finds the tasks of ``CONFIGS`` by name, before the harness's own tasks of the same name, and those of ``include_path``."""

    def __init__(
        self, *args: Any, include_path: str | Path | Iterable[str | Path] | None = None, **kwargs: Any
    ) -> None:
        paths = [include_path] if isinstance(include_path, str | Path) else list(include_path or ())
        super().__init__(*args, include_path=[CONFIGS, *paths], **kwargs)


class LocalTask(ConfigurableTask):
    """A harness task whose documents are a task's problems."""

    allow_code_execution: ClassVar[bool] = False
    """Like the field of ``TaskOptions``, for tasks that the harness makes by name."""

    def __init__(self, task: Task) -> None:
        self._problems = task.problems
        super().__init__(config=_config(task))

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = {SPLIT: Dataset.from_list([asdict(problem) for problem in self._problems])}


def _config(task: Task) -> dict[str, Any]:
    settings = {
        "task": task.name,
        "output_type": "generate_until",
        "test_split": SPLIT,
        "num_fewshot": 0,
        "doc_to_text": "user" if task.chat else "prompt",
        "doc_to_target": "reference",
    }
    if task.chat and any(problem.answer_start for problem in task.problems):
        settings["gen_prefix"] = "{{answer_start}}"
    if task.name == gsm8k.NAME:
        # The installed harness grades its own task; its prompts and data are left out.
        config = yaml.safe_load((files("lm_eval.tasks") / "gsm8k/gsm8k.yaml").read_text(encoding="utf-8"))
        return {**settings, **{name: config[name] for name in _FROM_THE_HARNESS if name in config}}
    return {
        **settings,
        "generation_kwargs": {"until": list(task.until), "do_sample": False},
        "filter_list": [{"name": "verdict", "filter": [{"function": "custom", "filter_fn": _Grading(task)}]}],
        "process_results": _metrics,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in CRITERIA],
    }


class _Grading:
    """A filter that grades all answers of the task at once, so that programs run in parallel."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._by_id = {problem.problem_id: problem for problem in task.problems}

    def __call__(self, answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[dict]]:
        problems = [self._by_id[doc["problem_id"]] for doc, texts in zip(docs, answers, strict=True) for _ in texts]
        verdicts = iter(self._task.grade_all(problems, [text for texts in answers for text in texts]))
        return [[asdict(next(verdicts)) for _ in texts] for texts in answers]


def _metrics(doc: Mapping[str, Any], results: Sequence[list[dict[str, bool | None]]]) -> dict[str, float]:
    """Shares of true verdicts over the answers of one problem (one answer, unless the task repeats)."""
    verdicts = results[0]
    shares = {name: [verdict[name] for verdict in verdicts] for name in CRITERIA}
    return {name: sum(map(bool, values)) / len(values) for name, values in shares.items() if None not in values}
