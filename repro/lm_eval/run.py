"""Evaluating a system with the LM Evaluation Harness, offline, on the tasks of ``repro.tasks``.

``python -m repro.lm_eval.run`` is lm-eval's own command line with the model registered:

    python -m repro.lm_eval.run run --model dllm-serve --model_args system=sparse-dllm,gen_length=64 --tasks mini_gsm

``--allow-code-execution`` also runs programs where bubblewrap cannot confine them.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engines.errors import RunError, UserError
from repro.tasks.registry import TaskOptions, load_task
from repro.tasks.sandbox.client import CONSENT_OPTION
from repro.workloads.card import DATA_DIR_VARIABLE

if TYPE_CHECKING:
    from lm_eval.api.model import LM


def evaluate(task: str, model: "LM | Mapping[str, Any]", *, options: TaskOptions | None = None) -> dict[str, Any]:
    """Return lm-eval's results, with every prompt and answer under ``samples``. ``model`` is a model, or its ``--model_args``.

    The problems are those of ``repro eval`` with the same options. A conversation (``options.chat``) goes through the checkpoint's chat
    template.
    """
    from repro.lm_eval.model import DiffusionLM
    from repro.lm_eval.tasks import LocalTask

    chosen = options or TaskOptions()
    loaded = load_task(task, chosen)
    if loaded is None:
        raise UserError(f"task={task!r} has no problems here: set {DATA_DIR_VARIABLE} to a folder that holds its file")

    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = simple_evaluate(
        model=DiffusionLM(**model) if isinstance(model, Mapping) else model,
        tasks=[LocalTask(loaded)],
        apply_chat_template=chosen.chat,
        fewshot_as_multiturn=False,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    return results


def main() -> None:
    """lm-eval's command line with our model and tasks registered. Bad input ends it with one sentence, like ``repro``."""
    from repro.cli.main import ending_of

    try:
        import lm_eval.tasks
        from lm_eval.__main__ import cli_evaluate

        import repro.lm_eval.model  # noqa: F401
        from repro.lm_eval.tasks import LocalTask, WithOurTasks

        if CONSENT_OPTION in sys.argv:
            sys.argv.remove(CONSENT_OPTION)
            LocalTask.allow_code_execution = True
        lm_eval.tasks.TaskManager = WithOurTasks  # type: ignore[misc]
        cli_evaluate()
    except (UserError, RunError, ImportError, ConnectionError) as error:
        ending = ending_of(error)
        print(ending.line, file=sys.stderr)
        sys.exit(ending.code)


if __name__ == "__main__":
    main()
