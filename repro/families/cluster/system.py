"""The common base of systems that run policies on simulated workers: how they are named, built, run and recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from engines.cluster.record import repeated
from engines.columns import Values
from engines.errors import UserError, require
from engines.knobs import Knob, knobs_of
from engines.models.shape import CATALOGUE, DIFFUSION, ModelShape, Precision, model_shape
from engines.policies.own import Kind, plugins_in
from repro.runs.cell import Cell
from repro.runs.record import Obtained, RunRecord, Table
from repro.runs.system import SYSTEMS, FreeSetting, free_settings

Options = tuple[tuple[str, Any], ...]
"""The system's own knobs that a cell sets, as (name, value) pairs."""


Build = TypeVar("Build")
SettingsOf = TypeVar("SettingsOf")


@dataclass(frozen=True, kw_only=True)
class PolicySystem(Generic[Build]):
    name: str
    title: str
    own: type
    """The class of settings whose fields are the system's own knobs."""
    build: Build
    """Makes the policies from the settings and the system's own knobs."""
    policies: tuple[Kind, ...] = ()
    """The kinds of policy that a user can replace, each by a knob."""

    @property
    def free(self) -> tuple[FreeSetting, ...]:
        return free_settings(self.name)

    def options_of(self, cell: Cell) -> Options:
        option_names = {*knobs_of(self.own), *self.plugged_in(cell)}
        return tuple((name, value) for name, value in sorted(cell.requested.items()) if name in option_names)

    def plugged_in(self, cell: Cell) -> Mapping[str, Knob]:
        knobs: dict[str, Knob] = {}
        for plugin in plugins_in(cell.requested, self.policies).values():
            knobs |= plugin.knobs
        return knobs


@dataclass(frozen=True, kw_only=True)
class PolicyDeployment(Generic[Build, SettingsOf]):
    system: str
    title: str
    build: Build
    settings: SettingsOf
    options: Options
    basis: str
    obtained: Obtained
    modules: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        """A lambda cannot be pickled, so another process looks ``build`` up by the system's name."""
        is_named = getattr(self.build, "__name__", "") != "<lambda>"
        return {name: value for name, value in vars(self).items() if is_named or name != "build"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        build = {} if "build" in state else {"build": SYSTEMS.get(state["system"]).build}  # type: ignore[attr-defined]
        vars(self).update(state | build)

    def check_machine(self) -> None:
        """Accepts any machine: these runs are simulated, or measured on a CPU."""

    def record(
        self, tables: Mapping[str, Table], *, platform: str, provenance: Any, facts: Mapping[str, Any], **manifest: Any
    ) -> RunRecord:
        return RunRecord(
            tables=tables,
            manifest={
                "obtained": self.obtained,
                **manifest,
                "dataset": asdict(provenance),
                "platform": platform,
                "system": self.title,
                "facts": facts,
            },
        )


def shape_named(model: str) -> ModelShape:
    """The shape of this name, or of the config.json in this folder."""
    try:
        is_folder = Path(model).is_dir()
    except (OSError, ValueError):  # a name too long, or no name
        is_folder = False
    if is_folder and model.lower() not in {shape.name.lower() for shape in CATALOGUE}:
        from engines.models.qwen2_config import read_shape

        return read_shape(Path(model))
    require("/" not in model, f"model={model!r} is no folder: give one with a config.json, or a model by its name")
    return model_shape(model)


def autoregressive_shape(model: str, system: str) -> ModelShape:
    shape = shape_named(model)
    if shape in DIFFUSION:
        usable = ", ".join(other.name for other in CATALOGUE if other not in DIFFUSION)
        raise UserError(
            f"model={shape.name!r} is a diffusion model, which system={system!r} cannot serve: use {usable}"
        )
    return shape


def in_precision(shape: ModelShape, precision: Precision, framework: str | None) -> ModelShape:
    require(
        precision == "bf16" or framework is not None,
        f"precision={precision!r} is of composed steps, and these are charged by a roofline: use bf16, or cost=composed on a card with "
        "kernel times",
    )
    return shape if precision == "bf16" else replace(shape, precision=precision)


def request_table(
    *,
    request_id: Sequence[int],
    arrival_s: Sequence[float],
    admitted_s: Sequence[float | None],
    first_output_s: Sequence[float | None],
    finished_s: Sequence[float | None],
    prompt_len: Sequence[int],
    output_len: Sequence[int],
    status: Sequence[str],
    **family_columns: Sequence[Any],
) -> Table:
    """The table of requests that were all submitted when due and did not fail. ``family_columns`` are the family's columns."""
    num = len(request_id)
    is_ok = (
        status.where("ok") if isinstance(status, Values) else np.array([state == "ok" for state in status], dtype=bool)
    )
    return {
        "request_id": request_id,
        "arrival_s": arrival_s,
        "submit_lag_s": Values(np.broadcast_to(0.0, num)),
        "admitted_s": admitted_s,
        "first_output_s": first_output_s,
        "finished_s": finished_s,
        "prompt_len": prompt_len,
        "output_len": Values(np.where(is_ok, np.asarray(output_len), -1), missing=-1),
        "status": status,
        "error": repeated(None, num),
        **family_columns,
    }
