"""Accuracy of each compared configuration on the embedded model, and which one per system solves as much as the model itself."""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.errors import UserError
from repro import paths
from repro.runs.cell import Scalar

Accuracy = Literal["usual", "dense"]
"""usual: each system keeps its usual share; dense: the least share at which it answers like the model without a cache."""
TASKS = ("mini-code", "mini-gsm")
RETENTIONS = (0.5, 0.7, 0.9, 0.95, 0.98, 1.0)
DENSE = "llada"
"""The model without a cache: the reference for every cache rule."""
SINGLE_REFRESH = "single-refresh"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A system with a cache rule. ``contender`` is the system's name, or that of a variant that is compared like a system."""

    contender: str
    system: str
    rule: str
    """The cache rule in words."""
    knobs: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The share of ``n`` problems of a task that were solved. ``low`` and ``high`` are Wilson's 95 % interval."""

    share: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def _retentions(contender: str, system: str, *knobs: tuple[str, Scalar]) -> list[Configuration]:
    return [
        Configuration(
            contender=contender,
            system=system,
            rule=f"{100 * ratio:g} % of the context",
            knobs=(*knobs, ("retention_ratio", ratio)),
        )
        for ratio in RETENTIONS
    ]


CONFIGURATIONS: tuple[Configuration, ...] = (
    *_retentions("dllm-serve", "dllm-serve"),
    *_retentions(SINGLE_REFRESH, "dllm-serve", ("refresh_delay", 0)),
    *_retentions("sparse-dllm", "sparse-dllm"),
    Configuration(contender="fast-dllm", system="fast-dllm", rule="dual cache"),
    Configuration(contender="fast-dllm", system="fast-dllm", rule="prefix cache", knobs=(("cache", "prefix"),)),
    Configuration(contender="dllm-cache", system="dllm-cache", rule="features, response every 7 steps"),
    Configuration(contender=DENSE, system="llada", rule="no cache"),
)
"""Configurations by contender; the one that keeps or computes least comes first."""

_DECIDING = frozenset(
    (
        *("retention_ratio", "refresh_delay", "cache", "selection", "pool_kernel", "whole_layer", "compat"),
        *("threshold", "factor", "settle_after", "full_every", "renew_at", "preset", "prompt_interval", "gen_interval"),
        *("transfer_ratio", "temperature", "remasking", "cfg_scale"),
    )
)
"""Knobs that decide which tokens are committed."""
Table = Mapping[tuple[str, str, str], Solved]
"""(contender, cache rule, task) -> the share that is solved."""


@functools.cache
def accuracies(path: Path = paths.ACCURACY) -> Table:
    """Read the committed table (``repro reproduce accuracy``), by each task's usual criterion."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["is_strict"] == "false"]
        table = {
            (row["contender"], row["rule"], row["task"]): Solved(
                share=float(row["accuracy"]), low=float(row["low"]), high=float(row["high"]), n=int(row["n"])
            )
            for row in rows
        }
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} holds no accuracies ({type(error).__name__}): make it by 'repro reproduce accuracy --out-dir {path.parent}'"
        ) from error
    return table


def solved_by(configuration: Configuration, task: str, table: Table | None = None) -> Solved | None:
    solved = accuracies() if table is None else table
    return solved.get((configuration.contender, configuration.rule, task))


def is_dense(configuration: Configuration, table: Table | None = None) -> bool:
    """Whether the configuration solves, in every task, at least the lower end of dense's interval."""
    solved = accuracies() if table is None else table
    for task in TASKS:
        ours, dense = solved_by(configuration, task, solved), solved.get((DENSE, "no cache", task))
        if ours is None or dense is None or ours.share < dense.low:
            return False
    return True


def at_dense_accuracy(contender: str, table: Table | None = None) -> Configuration:
    """The contender's configuration that keeps least among those that answer like the model without a cache."""
    candidates = [config for config in CONFIGURATIONS if config.contender == contender]
    for config in candidates:
        if is_dense(config, table):
            return config
    raise UserError(
        f"contender={contender!r} has no configuration within the interval of dense: add one to CONFIGURATIONS"
    )


def configuration_of(system: str, knobs: Mapping[str, Scalar]) -> Configuration | None:
    """The configuration of a run's knobs, if its accuracy was measured; else None."""
    deciding = {name: value for name, value in knobs.items() if name in _DECIDING}
    defaults: dict[str, Scalar] = {"retention_ratio": 0.5} if system in ("dllm-serve", "sparse-dllm") else {}
    if deciding.get("refresh_delay") == 1:
        del deciding["refresh_delay"]
    wanted = {**defaults, **deciding}
    return next((config for config in CONFIGURATIONS if config.system == system and dict(config.knobs) == wanted), None)
