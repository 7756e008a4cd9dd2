"""Diffusion-LLM systems: from a cell to a deployment and its requests."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from baselines.dllm.published import PublishedMethod
from engines.cost.kernels import check_kernels
from engines.cost.roofline import gpu
from engines.dllm.config import GenerationConfig, check_rule, sees
from engines.dllm.method import Method
from engines.dllm.rows import RowRule
from engines.dllm.scheduling import scheduler_of
from engines.dllm.simulated import check_simulated, check_simulated_generation
from engines.errors import UserError, require
from engines.knobs import knobs_of, with_knobs
from engines.knobs import resolve as resolve_knobs
from engines.models.checkpoint import PUBLISHED_CONFIGS, config_of
from engines.models.config import check_division
from repro.families.dllm.deployment import ON_TORCH, DllmDeployment, plan_packed, plan_static
from repro.families.dllm.record import DLLM
from repro.families.dllm.requests import requests_of, task_of, task_workload, traced_requests
from repro.families.dllm.settings import REPLAY, SIMULATED_READING, BaselineKnobs, DllmSettings
from repro.families.platforms import DllmPart, platform
from repro.runs.cell import NOTES, Cell, Scalar
from repro.runs.family import Family
from repro.runs.system import ENTRIES, SYSTEMS, FreeSetting, free_settings
from repro.tasks.registry import TASKS
from repro.workloads.dataset import load_card
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.served import Traced, trace_source, workload_knobs
from repro.workloads.workload import Workload, generation_of_length


def packed(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """with reading=policy, whose steps are packed, as of dllm-serve"""
    return free_settings("dllm-serve")[0].settings if cell.knob_values.get("reading") == "policy" else ()


class DllmSystem:
    """A system that serves a method: with continuous batching for dLLM-Serve, else as the cell's reading says."""

    family: ClassVar[Family] = DLLM

    def __init__(self, method: Method) -> None:
        self.method, self.name, self.title = method, method.name, method.title

    @property
    def free(self) -> tuple[FreeSetting, ...]:
        """The system's settings that no source prints."""
        return free_settings("baseline" if self.has_readings else "dllm-serve")

    @property
    def has_readings(self) -> bool:
        """Whether it has several readings in a comparison, like a baseline."""
        return isinstance(self.method, PublishedMethod)

    @property
    def knobs(self) -> tuple[type, ...]:
        return (DllmSettings, self.method.own, *((BaselineKnobs,) if self.has_readings else ()))

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Knobs that given ones imply: one token per step if ``gen_length`` is given, unscaled prompts if ``input_len`` is given."""
        knobs: dict[str, Any] = {"steps": given["gen_length"]} if "gen_length" in given else {}
        return knobs | ({"length_scale": 1.0} if "input_len" in given else {})

    def prepare(self, cell: Cell) -> tuple[DllmDeployment, Workload]:
        """Raises every UserError that a user can cause, and loads nothing heavy."""
        requested = resolve(cell, self.method)
        settings = self._apply_method(requested, cell)
        recorded = None if settings.replay is None else import_module(REPLAY).recorded(settings.replay)
        task = None if recorded is not None else task_of(cell, settings)
        file = trace_source(cell.dataset, settings.asked, cell.requested)
        if file is not None:
            require(
                recorded is None, "replay follows the requests of its run, or those of a data set: leave workload out"
            )
            return self._prepared_trace(cell, requested, settings, file)
        if recorded is not None and not settings.replay_drawn:
            workload = recorded.workload(cell, settings.generation)
        elif task is None:
            workload = requests_of(cell, settings)
        else:
            workload = task_workload(cell, settings, task)
        # Requests of a file may ask for less than the settings, by which we count the pool's rows per request.
        min_tokens = settings.generation.gen_length + MIN_PROMPT_LEN
        deployment = self.deployment(settings, [max(min_tokens, request.total_len) for request in workload.requests])
        if recorded is not None:
            replayed = recorded.replayed(workload.requests, cell.seed, is_drawn=settings.replay_drawn)
            deployment = deployment.following(replayed)
        return replace(deployment, task=task), workload

    def _prepared_trace(
        self, cell: Cell, base: DllmSettings, settings: DllmSettings, file: Traced
    ) -> tuple[DllmDeployment, Workload]:
        """A deployment planned for the longest answer, and the file's requests. The method denoises each answer as one of its length."""
        of_length = cache(lambda tokens: self._generation(base, generation_of_length(base.generation, tokens)))
        workload = traced_requests(cell, base, file, of_length)
        longest = max((request.generation for request in workload.requests), key=lambda each: each.gen_length)
        settings = replace(
            settings,
            generation=replace(longest, seed=cell.seed),
            asked=replace(settings.asked, num_prompts=len(workload.requests)),
        )
        return self.deployment(settings, [request.total_len for request in workload.requests]), workload

    def check_device(self, cell: Cell) -> None:
        settings = self.settings(cell)
        if not settings.is_simulated and settings.device != "cpu":
            import_module(ON_TORCH).check_machine(settings)

    def settings(self, cell: Cell) -> DllmSettings:
        """The settings of a cell, with the generation as the method runs it."""
        return self._apply_method(resolve(cell, self.method), cell)

    def _apply_method(self, settings: DllmSettings, cell: Cell) -> DllmSettings:
        if (replay := settings.replay) is not None:
            settings = self._with_run_settings(settings, cell, import_module(REPLAY).recorded(replay).cell)
        return replace(settings, generation=self._generation(settings, settings.generation))

    def _generation(self, settings: DllmSettings, requested: GenerationConfig) -> GenerationConfig:
        family = config_of(settings.model).family
        sampler = self.method.sampler(family, settings.options)
        generation = self.method.generation(family, settings.options, requested, tie_policy=settings.engine.tie_policy)
        if settings.is_simulated and settings.replay is None:
            require(
                not ("alg" in settings.options and generation.is_parallel) and sampler.decode.quota != "origin",
                f"alg={settings.options.get('alg', 'origin')!r} cannot be simulated, how many tokens a step commits is not "
                f"known beforehand: use --alg entropy or --executor torch",
            )
            check_simulated_generation(generation)
        return generation

    def _with_run_settings(self, settings: DllmSettings, cell: Cell, run: Cell) -> DllmSettings:
        """The settings with the generation and options of the replayed run, which decided its steps. The cell's own knobs come first."""
        require(
            run.system == cell.system,
            f"system={cell.system!r} is not that of replay={settings.replay!r}: use --system {run.system}",
        )
        replayed, lengths = self.settings(run), ("gen_length", "block_length", "steps")
        require(
            not replayed.generation.cfg_scale,
            f"replay={settings.replay!r} ran with guidance, whose second forward has no cost here: replay a run without",
        )
        overrides = {name: getattr(settings.generation, name) for name in lengths if name in cell.knob_values}
        return replace(
            settings,
            generation=replace(replayed.generation, seed=settings.generation.seed, **overrides),
            options={**replayed.options, **settings.options},
        )

    def deployment(self, settings: DllmSettings, lengths: list[int]) -> DllmDeployment:
        """A deployment that we plan by arithmetic, for requests of these total lengths."""
        sampler = self.method.sampler(config_of(settings.model).family, settings.options)
        config = replace(
            settings.engine,
            sparsity=sampler.sparsity,
            settling=sampler.settling,
            cut=sampler.cut,
            decode=sampler.decode,
            suppress_mask_token=sampler.suppress_mask_token,
        )
        deployment = DllmDeployment(method=self.method, settings=settings, sampler=sampler, config=config)
        check_rule(sampler.rule, settings.generation.steps)
        if settings.is_simulated:
            check_simulated("method", self.method, keeps_state=True)
            if settings.replay is None or isinstance(sampler.rule, RowRule):
                check_simulated("refresh rule", sampler.rule)
            if deployment.is_packed:
                check_simulated("scheduler", scheduler_of(settings.engine.scheduler), keeps_state=True)
        require(
            deployment.is_packed or not sees(sampler.rule),
            f"refresh rule {type(sampler.rule).__name__} decides for each request as it goes, and members of a static batch are in "
            f"step: use reading='policy'",
        )
        sampler.sparsity.check_layers(settings.shape.n_layers)
        return (plan_packed if deployment.is_packed else plan_static)(deployment, lengths)


def resolve(cell: Cell, method: Method) -> DllmSettings:
    """The settings of a cell for a method. Raises UserError for all that a user can get wrong in them."""
    target = platform(cell.platform)
    requested = {name: value for name, value in cell.knobs if name not in NOTES}
    part, is_measured = target.part(DllmPart), cell.executor == "torch"
    require(
        cell.executor != "roofline" or target.gpu is not None,
        f"executor='roofline' needs a GPU model and platform={target.name!r} has none: use --executor torch or platform "
        f"rtx4090",
    )
    # The reading of a baseline, and the part of it that other knobs depend on. dLLM-Serve has no reading.
    baseline, beside = BaselineKnobs(reading="efficient" if is_measured else SIMULATED_READING), {}
    knob_types: tuple[type, ...] = (method.own, *method.plugged_in(requested))
    if isinstance(method, PublishedMethod):
        knob_types, baseline = (*knob_types, BaselineKnobs), with_knobs(baseline, requested)
        beside = {"reading": baseline.reading}
    scheduler = knobs_of(scheduler_of(str(requested.get("scheduler", "phase"))).knobs)
    settings = resolve_knobs(
        DllmSettings,
        requested,
        *knob_types,
        scheduler,
        workload_knobs(requested),
        system=method.name,
        defaults=_platform_defaults(cell, part),
        other_values={"executor": cell.executor, **beside},
        platform=target,
        executor=cell.executor,
        options=method.options_in(requested),
        scheduler_knobs={name: value for name, value in requested.items() if name in scheduler},
        baseline=baseline,
    )
    if is_measured:
        _check_measured(settings, requested)
        return settings
    assert target.gpu is not None, "refused above"
    charged = settings.charged.on(target.gpu)
    check_kernels(settings.shape, gpu(target.gpu), charged.framework)
    return replace(settings, charged=charged)


def _platform_defaults(cell: Cell, part: DllmPart) -> dict[str, Any]:
    """A platform's defaults for a cell, by name. A workload file has its own lengths and number of requests."""
    is_traced, is_measured = "workload" in cell.requested, cell.executor == "torch"
    names = ("gen_length", "block_length", "steps", "max_num_batched_tokens", "max_num_logits", "max_num_seqs")
    defaults = {name: getattr(part, name) for name in (*names, "max_model_len", "model")}
    defaults |= {"device": part.device, "dtype": part.dtype} if is_measured else {}
    sizes = {**{task.name: task.num_problems for task in TASKS.values()}, **part.num_requests}
    if cell.dataset not in sizes and "num_prompts" not in cell.requested and not is_traced:
        load_card(cell.dataset)  # refuses what is no data set at all, by name
        raise UserError(
            f"dataset={cell.dataset!r} has no default size on platform={cell.platform!r}: give --num-prompts"
        )
    return defaults | {
        "seed": cell.seed,
        "memory_limit": part.memory_bytes,
        "num_prompts": 1 if is_traced else sizes.get(cell.dataset, 1),
        "length_scale": 1.0 if is_traced else part.length_scale,
    }


def _check_measured(settings: DllmSettings, knobs: Mapping[str, Any]) -> None:
    check_division(config_of(settings.model), settings.tensor_parallel)
    backend = knobs.get("attention_backend")
    if backend in ("flash-attn", "torch-varlen") and settings.device == "cpu":
        raise UserError(f"attention_backend={backend!r} runs on CUDA devices: add --device cuda, or leave it out")
    if settings.model in PUBLISHED_CONFIGS and settings.weights != "random":
        raise UserError(
            f"model={settings.model!r} is a shape without weights: add --weights random, or give a checkpoint with --model"
        )


def dllm_system(name: str) -> DllmSystem:
    """The diffusion-LLM system of this name. Raises UserError for any other name."""
    system = SYSTEMS.get(name)
    if not isinstance(system, DllmSystem):
        usable = [system_name for system_name, entry in ENTRIES.items() if entry.made_by]
        raise UserError(f"system={name!r} is no diffusion-LLM system: use one of {', '.join(usable)}")
    return system


def method(name: str) -> Method:
    return dllm_system(name).method
