"""The common base of systems that run policies on simulated workers: how they are named, built, run and recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from engines.cluster.record import repeated
from engines.columns import Values
from engines.cost.roofline import Gpu
from engines.errors import UserError, require
from engines.knobs import knobs_of, resolve
from engines.models.shape import CATALOGUE, DIFFUSION, ModelShape, Precision, model_shape
from engines.policies.own import Kind, Plugin, check_replaced, plugins_in
from repro.families.cost import CostKnobs
from repro.families.platforms import Platform
from repro.runs.cell import Cell, Scalar
from repro.runs.record import Obtained, RunRecord, Table
from repro.runs.system import SYSTEMS, FreeSetting, free_settings
from repro.workloads.served import workload_knobs


@dataclass(frozen=True, kw_only=True)
class PolicySystem:
    name: str
    title: str
    own: type
    """The class of settings whose fields are the system's own knobs."""
    build: Callable[..., Any] | None = None
    """Makes the policies from a run's settings, whose ``own`` are the system's and ``policies`` a user's; None if nothing is served."""
    policies: tuple[Kind, ...] = ()
    """The kinds of policy that a user can replace, each by a knob."""
    replaced: ClassVar[Mapping[str, Sequence[str]]] = {}
    """For each kind of a user's policy, the knobs of the policy that it replaces."""
    run_knobs: ClassVar[type]
    """The class of settings whose fields are knobs of every system of this kind."""

    @property
    def free(self) -> tuple[FreeSetting, ...]:
        return free_settings(self.name)

    @property
    def knobs(self) -> tuple[type, ...]:
        return self.run_knobs, self.own

    def resolved(self, cell: Cell, **other_values: object) -> tuple[Any, dict[str, Plugin], dict[str, Scalar]]:
        """The run's knobs, a user's own policies, and what the cell asks for without these policies' knobs. Raises UserError for knobs
        that no one has, or that have no effect."""
        policies = user_policies(cell.requested, self.policies, self.replaced)
        plugged = {name: knob for policy in policies.values() for name, knob in policy.knobs.items()}
        kinds = (self.own, plugged, workload_knobs(cell.requested))
        knobs: Any = resolve(self.run_knobs, cell.requested, *kinds, system=self.name, other_values=other_values)
        return knobs, policies, {name: value for name, value in cell.requested.items() if name not in plugged}


def user_policies(
    knobs: Mapping[str, Any], kinds: tuple[Kind, ...], replaced: Mapping[str, Sequence[str]]
) -> dict[str, Plugin]:
    """A user's own policies by kind. Raises UserError for knobs of the policies that they replace, which ``replaced`` lists by kind."""
    policies = plugins_in(knobs, kinds)
    check_replaced(policies, replaced, knobs)
    return policies


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Everything a run needs besides its policies."""

    platform: Platform
    own: Any
    """The system's own settings."""
    policies: Mapping[str, Plugin]
    """A user's own policies, by kind."""
    basis: str
    """A digest of what the numbers depend on besides requests and code."""

    @property
    def obtained(self) -> Obtained:
        raise NotImplementedError


SettingsOf = TypeVar("SettingsOf", bound=PolicySettings)


@dataclass(frozen=True, kw_only=True)
class PolicyDeployment(Generic[SettingsOf]):
    """A system's policies on the workers of one cell. It pickles whatever the system is, because the cell names it."""

    cell: Cell
    settings: SettingsOf

    @property
    def basis(self) -> str:
        return self.settings.basis

    @property
    def obtained(self) -> Obtained:
        return self.settings.obtained

    @property
    def system(self) -> Any:
        return SYSTEMS.get(self.cell.system)

    @property
    def modules(self) -> tuple[str, ...]:
        build = getattr(self.system, "build", None)
        return () if build is None else (build.__module__,)

    @property
    def options(self) -> dict[str, Any]:
        """The system's own knobs, and those of a user's policies, that the cell sets."""
        names = {*knobs_of(self.system.own)}.union(*(policy.knobs for policy in self.settings.policies.values()))
        requested = self.cell.requested
        return {name: requested[name] for name in sorted(names & requested.keys())}

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
                "system": self.system.title,
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


def simulated_model(
    model: str, system: str, card: str | Gpu, costs: CostKnobs, precision: Precision
) -> tuple[ModelShape, CostKnobs]:
    """The shape of a model, and how its steps are charged on a card."""
    shape = autoregressive_shape(model, system)
    charged = costs.on(card, shape)
    require(
        precision == "bf16" or charged.framework is not None,
        f"precision={precision!r} is of composed steps, and these are charged by a roofline: use bf16, or cost=composed on a card with "
        "kernel times",
    )
    return (shape if precision == "bf16" else replace(shape, precision=precision)), charged


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
