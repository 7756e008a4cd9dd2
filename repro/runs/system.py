"""What the harness asks of a system, the one seam between them; and where systems are found by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from repro.registry import Registry
from repro.runs.free import Free, TuneKnobs

if TYPE_CHECKING:
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
    none is named; ``implied(given)``, what the knobs that a user gave say of others; ``free``, which of its settings no source prints
    (repro.runs.free); and, where cells can ask for a device, ``check_device(cell)``, which raises UserError where this machine lacks it,
    before the cell's requests are looked at."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def prepare(self, cell: Cell) -> tuple[Deployment, Workload]:
        """Raise UserError for whatever a user can get wrong, before any run."""


_DLLM = "repro.systems.dllm.systems"
_AMPD = "repro.systems.cluster.ampd"
_LAPS = "repro.systems.cluster.laps"
_SERVERS = "repro.systems.servers.systems"

_SYSTEMS: Mapping[str, tuple[str, str]] = {
    "dllm-serve": (
        f"{_DLLM}:DLLM_SERVE",
        "continuous batching by phase, logit decomposition, head-centric sparse KV cache",
    ),
    "fast-dllm": (f"{_DLLM}:FAST_DLLM", "prefix or dual cache, one Refresh per block, parallel decoding"),
    "dllm-cache": (f"{_DLLM}:DLLM_CACHE", "feature caches of prompt and response, partial updates"),
    "sparse-dllm": (f"{_DLLM}:SPARSE_DLLM", "delayed sparse cache, one selection for all heads"),
    "llada": (f"{_DLLM}:LLADA", "the plain LLaDA sampler: no cache, every step a full forward"),
    "dream": (f"{_DLLM}:DREAM", "the plain Dream sampler: no cache, no blocks"),
    "block-diffusion": (
        "repro.systems.block.system:BLOCK_DIFFUSION",
        "block-diffusion models (LLaDA2, SDAR, Fast-dLLM v2), phases mixed in packed steps, a prefix cache of blocks; measured and simulated",
    ),
    "ampd": (f"{_AMPD}:AMPD", "disaggregation with adaptive routing, prefill reordering and a planner, simulated"),
    "ampd-live": (
        "repro.systems.live.system:AMPD_LIVE",
        "AMPD's policies over Redis on prefill and decode processes of this machine, measured",
    ),
    "dynamo-sim": (
        f"{_AMPD}:DYNAMO_SIM",
        "disaggregation, prefills always remote or by Dynamo's conditional rule, simulated",
    ),
    "vllm-sim": (f"{_AMPD}:VLLM_SIM", "co-located prefill and decode with a prefix cache, simulated"),
    "continuum-sim": (
        f"{_AMPD}:CONTINUUM_SIM",
        "vLLM with sessions in flight first and their K/V kept between rounds, simulated",
    ),
    "laps": (f"{_LAPS}:LAPS", "length-aware prefill: classes apart, graphs, adaptive waiting; simulated"),
    "laps-graphs-only": (f"{_LAPS}:LAPS_GRAPHS", "one queue, first come, first served, with LAPS's graphs; simulated"),
    "laps-disaggregation-only": (f"{_LAPS}:LAPS_DISAGGREGATION", "classes apart without graphs or waiting; simulated"),
    "reserve": (
        f"{_LAPS}:RESERVE",
        "shortest remaining prefill first, mixed steps, a share kept for late turns; ours, simulated",
    ),
    "on-time": (
        f"{_LAPS}:ON_TIME",
        "by due time, the fewest given up where not all can be on time, a share kept for those; ours, simulated",
    ),
    "srpt": (f"{_LAPS}:SRPT", "shortest remaining prefill first, Reserve's steps without a share or aging; simulated"),
    "sglang-pd": (f"{_LAPS}:SGLANG_PD", "token-budget batches, first come, first served, instances in turn; simulated"),
    "sglang-pd-router": (
        f"{_LAPS}:SGLANG_PD_ROUTER",
        "the same behind a router to the least loaded instance; simulated",
    ),
    "vllm-pd": (f"{_LAPS}:VLLM_PD", "chunked prefill, first come, first served, instances in turn; simulated"),
    "openai-http": (
        "repro.systems.http.system:OPENAI_HTTP",
        "any server at --url, driven over HTTP and measured at the client",
    ),
    "vllm": (f"{_SERVERS}:VLLM", "vLLM's own server, started here ('repro install vllm') or at --url; measured"),
    "dynamo": (
        f"{_SERVERS}:DYNAMO",
        "Dynamo's own frontend before its mocker or other workers, started here ('repro install dynamo') or at --url; measured",
    ),
    "sglang": (f"{_SERVERS}:SGLANG", "SGLang's own server on a GPU ('repro install sglang') or at --url; measured"),
}
"""Where each is, and what it is, in a clause."""
_MOVED = {"repro.systems.ar.planning:AMPD_PLANNER": "repro.systems.cluster.planning:AMPD_PLANNER"}

SYSTEMS: Registry[System] = Registry(
    "system",
    {name: where for name, (where, _) in _SYSTEMS.items()},
    having=("name", "title", "family", "prepare"),
    moved=_MOVED,
)
SUMMARIES: Mapping[str, str] = MappingProxyType({name: what for name, (_, what) in _SYSTEMS.items()})
"""What the package's own are: importing all of them takes longer than listing them."""


def settings_of(name: str) -> tuple[type, ...]:
    """The settings whose fields are the knobs of a system's cells; none where it does not say."""
    return (*getattr(SYSTEMS.get(name), "knobs", ()), *((TuneKnobs,) if free_of(name) else ()))


def free_of(name: str) -> tuple[Free, ...]:
    """What no source prints of a system; nothing where it does not say."""
    return getattr(SYSTEMS.get(name), "free", ())


def default_dataset(name: str, platform: Any) -> str:
    """What a system serves on a platform where no data set is named."""
    own = getattr(SYSTEMS.get(name), "default_dataset", None)
    return "osc" if own is None else str(own(platform))
