"""What the harness asks of a system, the one seam between them; and where systems are found by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from repro.registry import Registry
from repro.runs.cell import Cell
from repro.runs.drivers.steps import OnProgress
from repro.runs.family import Family
from repro.runs.record import Obtained, RunRecord


class Provenance(Protocol):
    """Where requests came from; a dataclass, whose fields go into the run's manifest."""

    @property
    def checksum(self) -> str:
        """A digest of the requests themselves."""


class Workload(Protocol):
    @property
    def provenance(self) -> Any: ...


class Deployment(Protocol):
    """A system configured for one cell, checked, with nothing heavy loaded; it pickles where it is simulated. Has a
    ``device`` besides where its runs are measured on another than the CPU: cuda or cuda:N; and ``is_tied_here`` where they
    drive servers or start processes beside this one, so that no other machine can make them."""

    @property
    def obtained(self) -> Obtained:
        """Measured runs are made alone, simulated ones in parallel."""

    @property
    def basis(self) -> str:
        """A digest of what is behind the numbers besides requests and code: a checkpoint, a calibration."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that decide the run's numbers; what they import counts too (repro.runs.code)."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was learnt by planning."""

    def check_machine(self) -> None:
        """Raise UserError where this machine lacks something that the run needs."""

    def run(self, workload: Any, on_progress: OnProgress | None = None) -> RunRecord:
        """Serve the workload."""


class System(Protocol):
    """One may have besides: ``knobs``, the settings whose fields are its cells' knobs; ``default_dataset(platform)``, the data set where
    none is named; ``implied(given)``, what the knobs that a user gave say of others; and, where cells can ask for a device,
    ``check_device(cell)``, which raises UserError where this machine lacks it, before the cell's requests are looked at."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def summary(self) -> str:
        """What it is, in a clause."""

    @property
    def family(self) -> Family: ...

    def prepare(self, cell: Cell) -> tuple[Deployment, Workload]:
        """Raise UserError for whatever a user can get wrong, before any run."""


_DLLM = "repro.systems.dllm.systems"
_AR = "repro.systems.ar.systems"
_LAPS = "repro.systems.laps.systems"
_SERVERS = "repro.systems.servers.systems"

SYSTEMS: Registry[System] = Registry(
    "system",
    {
        "dllm-serve": f"{_DLLM}:DLLM_SERVE",
        "fast-dllm": f"{_DLLM}:FAST_DLLM",
        "dllm-cache": f"{_DLLM}:DLLM_CACHE",
        "sparse-dllm": f"{_DLLM}:SPARSE_DLLM",
        "llada": f"{_DLLM}:LLADA",
        "dream": f"{_DLLM}:DREAM",
        "ampd": f"{_AR}:AMPD",
        "ampd-live": "repro.systems.live.system:AMPD_LIVE",
        "dynamo-sim": f"{_AR}:DYNAMO_SIM",
        "vllm-sim": f"{_AR}:VLLM_SIM",
        "continuum-sim": f"{_AR}:CONTINUUM_SIM",
        "laps": f"{_LAPS}:LAPS",
        "laps-graphs-only": f"{_LAPS}:LAPS_GRAPHS",
        "laps-disaggregation-only": f"{_LAPS}:LAPS_DISAGGREGATION",
        "reserve": f"{_LAPS}:RESERVE",
        "sglang-pd": f"{_LAPS}:SGLANG_PD",
        "sglang-pd-router": f"{_LAPS}:SGLANG_PD_ROUTER",
        "vllm-pd": f"{_LAPS}:VLLM_PD",
        "openai-http": "repro.systems.http.system:OPENAI_HTTP",
        "vllm": f"{_SERVERS}:VLLM",
        "dynamo": f"{_SERVERS}:DYNAMO",
        "sglang": f"{_SERVERS}:SGLANG",
    },
    having=("name", "title", "summary", "family", "prepare"),
)


def settings_of(name: str) -> tuple[type, ...]:
    """The settings whose fields are the knobs of a system's cells; none where it does not say."""
    return tuple(getattr(SYSTEMS.get(name), "knobs", ()))


def default_dataset(name: str, platform: Any) -> str:
    """What a system serves on a platform where no data set is named."""
    own = getattr(SYSTEMS.get(name), "default_dataset", None)
    return "osc" if own is None else str(own(platform))
