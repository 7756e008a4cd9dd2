"""The settings of diffusion LLMs that are options, by panel: of their engine, their methods, a generation and a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from repro.cli import options as opt
from repro.cli.spread import Some


def decoding_knobs() -> dict[str, Sequence[type | Some]]:
    """How tokens are generated, and what is cached of their context."""
    from baselines.dllm.options import OPTIONS
    from engines.dllm.config import EngineConfig, GenerationConfig

    return {opt.DECODING: (GenerationConfig, Some(EngineConfig, ("tie_policy",))), opt.METHOD: OPTIONS}


def answer_knobs() -> dict[str, Sequence[type | Some]]:
    """``decoding_knobs``, and the rules of block diffusion, where ``--knob`` is not for all of them."""
    from repro.systems.block.settings import DECODING, BlockKnobs

    own = decoding_knobs()
    return {**own, opt.DECODING: (*own[opt.DECODING], Some(BlockKnobs, DECODING))}


def model_knobs() -> dict[str, Sequence[type | Some]]:
    from repro.systems.dllm.knobs import Device, ModelKnobs

    return {
        opt.WHAT: (Some(ModelKnobs, ("model",)), Some(Device, ("weights",))),
        opt.ENGINE: (Some(ModelKnobs, ("memory_limit",)), Device),
    }


def engine_knobs() -> dict[str, Sequence[type | Some]]:
    """All of a cell."""
    from engines.dllm.config import EngineConfig
    from repro.systems.cost import CostKnobs
    from repro.systems.dllm.knobs import BaselineKnobs, ReplayKnobs, WorkloadKnobs

    decoding, model = decoding_knobs(), model_knobs()
    return {
        opt.WHAT: (*model[opt.WHAT], Some(BaselineKnobs, ("reading",)), CostKnobs),
        opt.WORKLOAD: (WorkloadKnobs, ReplayKnobs),
        **decoding,
        opt.ENGINE: (*model[opt.ENGINE], EngineConfig, BaselineKnobs),
    }


def of_platform() -> Mapping[str, object]:
    """Defaults that the platform says."""
    from repro.systems.platforms import DllmPart

    names = (*(field.name for field in fields(DllmPart)), "memory_limit", "num_prompts")
    return {**dict.fromkeys(names, "the platform's"), "reading": "", "steps": "one a token", "batch_rule": "workload"}
