"""Options that several commands take as a group, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

from repro.cli import options as opt

if TYPE_CHECKING:
    from repro.runs.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are generated and what is cached of their context."""

    gen_length: opt.GenLength = None
    block_length: opt.BlockLength = None
    steps: opt.Steps = None
    temperature: opt.Temperature = None
    top_p: opt.TopP = None
    top_k: opt.TopK = None
    threshold: opt.Threshold = None
    retention_ratio: opt.RetentionRatio = None
    pool_kernel: opt.PoolKernel = None
    selection: opt.Selection = None
    refresh_delay: opt.RefreshDelay = None
    compat: opt.Compat = None
    cache: opt.Cache = None
    factor: opt.Factor = None
    alg: opt.Alg = None
    alg_temp: opt.AlgTemp = None
    prompt_interval: opt.PromptInterval = None
    gen_interval: opt.GenInterval = None
    transfer_ratio: opt.TransferRatio = None
    remasking: opt.Remasking = None
    cfg_scale: opt.CfgScale = None
    cfg_interval: opt.CfgInterval = None
    stop_at_eos: opt.StopAtEos = None
    tie_policy: opt.TiePolicy = None

    def given(self) -> dict[str, Any]:
        """Those the user set; one token a step where the length is set and the steps are not."""
        given = opt.given(**{field.name: getattr(self, field.name) for field in fields(self)})
        if "gen_length" in given:
            given.setdefault("steps", given["gen_length"])
        return given


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs are made."""

    pool: opt.PoolName = "local"
    address: opt.Address = None

    def opened(self) -> AbstractContextManager[Pool]:
        from repro.runs.pools import pool_of

        return pool_of(self.pool, self.address, getattr(self, "jobs", None))


@dataclass(frozen=True, kw_only=True)
class Placement(Place):
    """And how many at once, of simulated ones."""

    jobs: opt.Jobs = None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are groups become their fields, each an option of its own, in the same place."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        declared = hints[parameter.name]
        if is_dataclass(declared):
            groups[parameter.name] = declared  # type: ignore[assignment]
            of_fields = get_type_hints(declared, include_extras=True)
            parameters += [
                parameter.replace(name=field.name, default=field.default, annotation=of_fields[field.name])
                for field in fields(declared)
            ]
        else:
            parameters.append(parameter.replace(annotation=declared))

    @wraps(command)
    def spread_out(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    spread_out.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_out
