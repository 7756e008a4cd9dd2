"""Diffusion-LLM systems: from a cell to a deployment and its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from baselines.dllm.published import PublishedMethod
from engines.dllm.config import GenerationConfig, SeeingRule, check_rule
from engines.dllm.method import Method
from engines.dllm.scheduling import scheduler_of
from engines.dllm.simulated import check_simulated, check_simulated_generation
from engines.errors import UserError, require
from engines.models.checkpoint import config_of
from repro.runs.cell import Cell, Scalar
from repro.runs.family import Family
from repro.runs.system import ENTRIES, SYSTEMS, Free
from repro.systems.dllm.deployment import ON_TORCH, DllmDeployment, plan_packed, plan_static
from repro.systems.dllm.knobs import PACKED_STEPS, READINGS, BaselineKnobs
from repro.systems.dllm.record import DLLM
from repro.systems.dllm.requests import requests_of, room_for_prompt, task_of, task_workload, traced_requests
from repro.systems.dllm.settings import REPLAY, DllmSettings, resolve
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.served import Traced, trace_asked
from repro.workloads.workload import Workload, generation_of_length

_STATIC_BATCH = Free(
    "static batch",
    ({"batch_rule": "batch"}, {"batch_rule": "max_model_len"}, {"batch_rule": "one"}),
    '§6.1: "the maximum static batch size that fits in memory", of which requests is not said. The largest that holds the workload\'s '
    "longest request by default",
)
_PLACES = Free(
    "requests running at once",
    ({"max_num_seqs": 16}, {"max_num_seqs": 64}, {"max_num_seqs": 128}),
    "Table 3 prints budgets of tokens and logits and no number of requests. 256 by default on a card",
)


def _packed(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """with reading=policy, whose steps are packed, as of dllm-serve"""
    return _PLACES.settings if cell.knob_values.get("reading") == "policy" else ()


_PACKED = Free(_PLACES.what, (), "the engine of this reading is dLLM-Serve's", _packed)
_BASELINE = (_STATIC_BATCH, _PACKED)


class DllmSystem:
    """A method, served: packed continuously if it is dLLM-Serve, else as the cell's reading says."""

    family: ClassVar[Family] = DLLM

    def __init__(self, method: Method) -> None:
        self.method, self.name, self.title = method, method.name, method.title

    @property
    def free(self) -> tuple[Free, ...]:
        """Its settings that no source prints."""
        return _BASELINE if self.has_readings else (_PLACES,)

    @property
    def has_readings(self) -> bool:
        """Whether a comparison can take it as more than one thing, as it can a baseline."""
        return isinstance(self.method, PublishedMethod)

    @property
    def knobs(self) -> tuple[type, ...]:
        return (DllmSettings, self.method.own, *((BaselineKnobs,) if self.has_readings else ()))

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """One token a step where a length is given; a length of all prompts is not scaled."""
        found: dict[str, Any] = {"steps": given["gen_length"]} if "gen_length" in given else {}
        return found | ({"length_scale": 1.0} if "input_len" in given else {})

    def prepare(self, cell: Cell) -> tuple[DllmDeployment, Workload]:
        """Every refusal a user can cause is raised here; nothing heavy is loaded."""
        asked = resolve(cell, self.method)
        settings = self._of_method(asked, cell)
        follows = settings.followed
        recorded = None if follows.replay is None else import_module(REPLAY).recorded(follows.replay)
        task = None if recorded is not None else task_of(cell, settings)
        file = trace_asked(cell.dataset, settings.asked, cell.asked)
        if file is not None:
            require(
                recorded is None, "replay follows the requests of its run, or those of a data set: leave workload out"
            )
            return self._prepared_trace(cell, asked, settings, file)
        if recorded is not None and not follows.replay_drawn:
            workload = recorded.workload(cell, settings.generation)
        elif task is None:
            workload = requests_of(cell, settings)
        else:
            workload = task_workload(cell, settings, task, room_for_prompt(settings))
        # A file may ask for less than the settings, which the pool's rows of a request are counted by.
        least = settings.generation.gen_length + MIN_PROMPT_LEN
        deployment = self.deployment(settings, [max(least, request.total_len) for request in workload.requests])
        if recorded is not None:
            replayed = recorded.replayed(workload.requests, cell.seed, is_drawn=follows.replay_drawn)
            deployment = deployment.following(replayed)
        return replace(deployment, task=task), workload

    def _prepared_trace(
        self, cell: Cell, asked: DllmSettings, settings: DllmSettings, file: Traced
    ) -> tuple[DllmDeployment, Workload]:
        """Planned for the longest answer; each is denoised as the method denoises one of its length."""
        of_length = cache(lambda tokens: self._generation(asked, generation_of_length(asked.generation, tokens)))
        workload = traced_requests(cell, asked, file, of_length)
        longest = max((request.generation for request in workload.requests), key=lambda each: each.gen_length)
        settings = replace(
            settings,
            generation=replace(longest, seed=cell.seed),
            asked=replace(settings.asked, num_prompts=len(workload.requests)),
        )
        return self.deployment(settings, [request.total_len for request in workload.requests]), workload

    def check_device(self, cell: Cell) -> None:
        settings = self.settings(cell)
        if not settings.is_simulated and settings.on.device != "cpu":
            import_module(ON_TORCH).check_machine(settings)

    def settings(self, cell: Cell) -> DllmSettings:
        """The settings of a cell, with what the method makes of a generation."""
        return self._of_method(resolve(cell, self.method), cell)

    def _of_method(self, settings: DllmSettings, cell: Cell) -> DllmSettings:
        if (replay := settings.followed.replay) is not None:
            settings = self._as_in(settings, cell, import_module(REPLAY).recorded(replay).cell)
        return replace(settings, generation=self._generation(settings, settings.generation))

    def _generation(self, settings: DllmSettings, asked: GenerationConfig) -> GenerationConfig:
        family = config_of(settings.model).family
        sampler = self.method.sampler(family, settings.options)
        generation = self.method.generation(family, settings.options, asked, tie_policy=settings.engine.tie_policy)
        if settings.is_simulated and settings.followed.replay is None:
            require(
                not ("alg" in settings.options and generation.is_parallel) and sampler.decode.quota != "origin",
                f"alg={settings.options.get('alg', 'origin')!r} cannot be simulated, how many tokens a step commits is not "
                f"known beforehand: use --alg entropy or --executor torch",
            )
            check_simulated_generation(generation)
        return generation

    def _as_in(self, settings: DllmSettings, cell: Cell, run: Cell) -> DllmSettings:
        """With what the requests of a run were asked, besides what the cell asks itself: it decides how their steps went."""
        require(
            run.system == cell.system,
            f"system={cell.system!r} is not that of replay={settings.followed.replay!r}: use --system {run.system}",
        )
        there, lengths = self.settings(run), ("gen_length", "block_length", "steps")
        require(
            not there.generation.cfg_scale,
            f"replay={settings.followed.replay!r} ran with guidance, whose second forward has no cost here: replay a run without",
        )
        own = {name: getattr(settings.generation, name) for name in lengths if name in cell.knob_values}
        return replace(
            settings,
            generation=replace(there.generation, seed=settings.generation.seed, **own),
            options={**there.options, **settings.options},
        )

    def deployment(self, settings: DllmSettings, lengths: list[int]) -> DllmDeployment:
        """Planned by arithmetic for requests of these total lengths."""
        sampler = self.method.sampler(config_of(settings.model).family, settings.options)
        # dLLM-Serve is packed, whatever the baselines stand for.
        batching = READINGS[settings.baseline.reading].batching if self.has_readings else PACKED_STEPS
        require(lengths != [], "the workload has no requests: ask for at least one")
        check_rule(sampler.rule, settings.generation.steps)
        if settings.is_simulated:
            check_simulated("method", self.method, keeps_state=True)
            if settings.followed.replay is None:
                check_simulated("refresh rule", sampler.rule)
            if batching.kind == "packed":
                check_simulated("scheduler", scheduler_of(settings.engine.scheduler), keeps_state=True)
        require(
            batching.kind == "packed" or not isinstance(sampler.rule, SeeingRule),
            f"refresh rule {type(sampler.rule).__name__} decides for each request as it goes, and members of a static batch are in "
            f"step: use reading='policy'",
        )
        sampler.sparsity.check_layers(settings.shape.n_layers)
        config = replace(
            settings.engine,
            sparsity=sampler.sparsity,
            settling=sampler.settling,
            decode=sampler.decode,
            suppress_mask_token=sampler.suppress_mask_token,
        )
        stands_for_one = self.has_readings and settings.is_simulated
        deployment = DllmDeployment(
            method=self.method,
            settings=settings,
            sampler=sampler,
            batching=batching,
            config=config,
            defaults={"reading": settings.baseline.reading} if stands_for_one else {},
        )
        return (plan_packed if batching.kind == "packed" else plan_static)(deployment, lengths)


def dllm_system(name: str) -> DllmSystem:
    """A system for commands that serve no other; raises UserError for another's name."""
    found = SYSTEMS.get(name)
    if not isinstance(found, DllmSystem):
        able = [each for each, entry in ENTRIES.items() if entry.made_by is not None]
        raise UserError(f"system={name!r} is no diffusion-LLM system: use one of {', '.join(able)}")
    return found


def method(name: str) -> Method:
    """The method of a system by its name."""
    return dllm_system(name).method
