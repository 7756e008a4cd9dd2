"""The tasks of ``repro.tasks`` that the files in this folder name. lm-eval reads ``!function`` from a module in the same folder."""

from dataclasses import replace
from typing import Any, ClassVar

from engines.errors import UserError
from repro.lm_eval.tasks import LocalTask
from repro.tasks import gsm8k, mini_code, mini_gsm
from repro.tasks.registry import TaskOptions, load_task
from repro.tasks.task import Task
from repro.workloads.card import DATA_DIR_VARIABLE


class _Named(LocalTask):
    """A task by name. Its problems are generated, or read from a file below REPRO_DATA_DIR, or else from the hub."""

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(self._loaded())

    def _loaded(self, num_fewshot: int | None = None) -> Task:
        options = TaskOptions(num_fewshot=num_fewshot, allow_code_execution=self.allow_code_execution)
        task = load_task(self.name, options)
        if task is None:
            try:
                task = load_task(self.name, replace(options, source="hub"))
            except UserError as error:
                raise UserError(f"{error}; or set {DATA_DIR_VARIABLE} to a folder that holds its file") from error
        assert task is not None
        return task


class MiniGsm(_Named):
    name = mini_gsm.TASK


class MiniCode(_Named):
    name = mini_code.TASK


class MiniChain(_Named):
    name = mini_gsm.CHAIN


class MiniFar(_Named):
    name = mini_gsm.FAR


class MiniRoll(_Named):
    name = mini_gsm.ROLL


class Gsm8k(_Named):
    name = gsm8k.NAME

    def get_config(self, key: str) -> Any:
        """The few-shot examples are part of the problems' prompts. The harness adds none, but may ask for another number of them."""
        return self._num_fewshot if key == "num_fewshot" else super().get_config(key)

    def set_config(self, key: str, value: Any, update: bool = False) -> None:
        if key != "num_fewshot":
            super().set_config(key, value, update)
            return
        self._num_fewshot = value
        self._problems = self._loaded(value).problems
        self.download()

    _num_fewshot = gsm8k.NUM_FEWSHOT


class HumanEval(_Named):
    name = "humaneval"
