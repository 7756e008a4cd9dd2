"""Our systems as a model of the LM Evaluation Harness: ``dllm-serve`` for lm-eval.

Importing this module registers the model, and needs the extra ``eval``. All requests of a task go to the engine's scheduler at once, and
are batched as under load.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from engines.dllm.plan import Request, check_request
from engines.errors import RunError, UserError, require
from engines.knobs import knobs_of
from engines.models.chat import ChatTemplate, load_chat_template, parse_messages
from engines.models.checkpoint import checkpoint_dir, config_of
from repro.families.dllm.settings import DllmSettings, WorkloadKnobs
from repro.families.dllm.system import dllm_system
from repro.prompt import answer_of, tokenizer_of
from repro.runs.cell import Cell
from repro.tasks.task import cut_at

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string
    from tqdm import tqdm
except ImportError as error:
    raise UserError(f"lm-eval cannot be imported ({error}): pip install 'dllm-serve-repro[eval]'") from error

MODEL_NAME = "dllm-serve"
"""Name for ``lm_eval --model``. The model argument ``system`` selects the system."""

_OF_A_WORKLOAD = (*knobs_of(WorkloadKnobs), "basis")
"""Knobs of a cell's workload, which the harness decides."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING = ("temperature", "top_p", "top_k")
_HARNESS_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "batch_size": (None, 1, "1", "auto"),
    "max_batch_size": (None,),
    "device": (None, "cuda:0"),
}
"""Values that lm-eval passes to every model by default."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Stop texts and knobs of a request, from the task's generation_kwargs."""

    until: tuple[str, ...]
    knobs: tuple[tuple[str, int | float], ...]

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Self:
        unused = dict(kwargs)
        until = unused.pop("until", None) or ()
        lengths = [value for name in _LENGTHS if (value := unused.pop(name, None)) is not None]
        knobs = {"gen_length": lengths[0]} if lengths else {}
        sampling = {name: value for name in _SAMPLING if (value := unused.pop(name, None)) is not None}
        if unused.pop("do_sample", bool(sampling.get("temperature"))):
            knobs |= sampling
        for name, value in unused.items():
            raise UserError(f"generation_kwargs: {name}={value!r} has no effect here: leave it out")
        stops = (until,) if isinstance(until, str) else tuple(until)
        return cls(until=tuple(filter(None, stops)), knobs=tuple(sorted(knobs.items())))


@register_model(MODEL_NAME)
class DiffusionLM(LM):
    """``options`` are a cell's knobs (``repro.families.dllm.settings``), under the names of ``repro bench`` and ``repro generate``.

    Options given here hold for every task. A task's own ``max_gen_toks`` and sampling count only for options not given. ``steps`` defaults
    to ``gen_length``, one token per step.
    """

    def __init__(
        self, *, system: str = "dllm-serve", platform: str = "cpu-tiny", seed: int = 0, **options: Any
    ) -> None:
        super().__init__()
        for name in _OF_A_WORKLOAD:
            require(name not in options, f"{name}={options.get(name)!r} has no effect on a task: leave it out")
        self._system = dllm_system(system)
        self._cell = Cell(
            system=system,
            dataset="lm-eval",
            platform=platform,
            executor="torch",
            seed=seed,
            knobs=tuple(options.items()),
        )
        settings = self._settings(Query(until=(), knobs=()), num_prompts=1)
        self._model = settings.model
        self._tokenizer = tokenizer_of(settings.model)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        for name, value in (additional_config or {}).items():
            require(
                value in _HARNESS_DEFAULTS.get(name, (None,)),
                f"{name}={value!r} is not lm-eval's to set here: give it among model_args",
            )
        return cls(**arg_dict)

    # -- what a task asks of a model -----------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        queries = [Query.of(request.args[1]) for request in requests]
        texts: dict[int, str] = {}
        for knobs in dict.fromkeys(query.knobs for query in queries):
            indices = [index for index, query in enumerate(queries) if query.knobs == knobs]
            answers = self._answer(
                [requests[index].args[0] for index in indices], queries[indices[0]], show_progress=not disable_tqdm
            )
            texts |= {index: cut_at(text, queries[index].until) for index, text in zip(indices, answers, strict=True)}
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UserError(_NO_LIKELIHOOD)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise UserError(_NO_LIKELIHOOD)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders the conversation. A final message by the assistant opens the answer, which the model continues."""
        messages = parse_messages(chat_history)
        if add_generation_prompt:
            return self._template.render(messages)
        return self._template.render(messages[:-1]) + messages[-1].content

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source or f"built-in format of {self._template.family}" if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self._model

    # -- through the engine --------------------------------------------------------------------------------

    @property
    def _template(self) -> ChatTemplate:
        return load_chat_template(checkpoint_dir(self._model, weights=False), config_of(self._model).family)

    def _settings(self, asked: Query, num_prompts: int) -> DllmSettings:
        cell_knobs = self._cell.knob_values
        knobs = {**dict(asked.knobs), **cell_knobs, "num_prompts": num_prompts}
        if "gen_length" in knobs and "steps" not in cell_knobs:
            knobs["steps"] = knobs["gen_length"]
        return self._system.settings(replace(self._cell, knobs=tuple(knobs.items())))

    def _answer(self, prompts: Sequence[str], asked: Query, *, show_progress: bool) -> list[str]:
        settings = self._settings(asked, len(prompts))
        requests = self._requests(prompts, settings)
        deployment = self._system.deployment(settings, [request.total_len for request in requests])
        with deployment.serving() as (engine, _):
            for request in requests:
                engine.submit(request)
            # disable=None: only on a terminal.
            with tqdm(total=len(requests), desc="requests", disable=None if show_progress else True) as bar:
                for record in iter(engine.step, None):
                    for request_id, reason in record.done.failed:
                        raise RunError(f"request {request_id} failed: {reason}")
                    bar.update(len(record.done.finished))
            answers = []
            for request in requests:
                ids = engine.take_output(request.request_id)
                assert ids is not None, "only a simulated executor has no tokens"
                answers.append(answer_of(ids, self._model, self._tokenizer).text)
        return answers

    def _requests(self, prompts: Sequence[str], settings: DllmSettings) -> list[Request]:
        """Make requests. A repeated prompt (lm-eval's repeats) gets the next seed; otherwise it would get the same answer."""
        requests, copies = [], Counter[str]()
        for index, (prompt, ids) in enumerate(zip(prompts, self._tokenizer.encode_batch(prompts), strict=True)):
            generation = replace(settings.generation, seed=settings.generation.seed + copies[prompt])
            copies[prompt] += 1
            request = Request(request_id=index, prompt_len=len(ids), prompt_ids=tuple(ids), generation=generation)
            check_request(request, config_of(settings.model))
            requests.append(request)
        return requests


_NO_LIKELIHOOD = (
    "loglikelihood of a diffusion model is a Monte-Carlo estimate, which is not implemented: use tasks that generate "
    "(output_type generate_until)"
)
