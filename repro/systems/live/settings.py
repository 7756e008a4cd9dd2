"""A live cell's knobs, resolved: workers, model, objectives, policies, workload."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from engines.ampd.system import AmpdConfig
from engines.ar.deployment import Deployment
from engines.ar.slo import Reading, Slo
from engines.errors import UserError, require
from engines.models.qwen2_config import CausalConfig, read_causal_config, tiny_causal
from repro.runs.cell import Cell
from repro.systems.ar.knobs import AMPD, COMMON, NOTES, Kind, check_knobs, pick
from repro.systems.ar.plans import parse_deployment
from repro.systems.ar.settings import DEFAULT_READING
from repro.systems.platforms import platform
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.sessions import SessionWorkloadConfig

TINY = "tiny"
TINY_CONFIG = tiny_causal(d_model=256, n_layers=8)
"""A Qwen2 of 8 M parameters, random weights: large enough that a step's work outweighs what surrounds it."""
MAX_WORKERS = 16
MOST_KV_TOKENS = 10**7
"""Of a worker."""
NUM_SESSIONS = 20
FRONTENDS = ("dynamo",)

KNOBS: Mapping[str, Kind] = {
    **{name: kind for name, kind in AMPD.items() if name != "router"},
    **{name: COMMON[name] for name in ("model", "deployment", "slo_ttft_s", "slo_itl_s", "transient")},
    **{name: COMMON[name] for name in ("num_prompts", "arrivals", "burstiness", "delay_mean_s")},
    **{name: COMMON[name] for name in ("dataset_path", "dataset_source")},
    "frontend": str,
    "redis": str,
    "kv_tokens": int,
    "lease_s": float,
    "pin": bool,
}
"""``deployment``: P:TP1x1 D:TP1x1, as many workers as the machine has cores for. ``frontend``: dynamo, for
requests over HTTP to Dynamo's frontend, of which the coordinator is the router; without it the coordinator is called. ``redis``: the address of a server that is
there; by default one is started. ``kv_tokens``: of each worker. ``pin``: each worker on a core of its own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str
    deployment: Deployment
    slo: Slo
    reading: Reading
    policies: AmpdConfig
    workload: SessionWorkloadConfig
    frontend: str | None
    redis: str | None
    kv_tokens: int
    lease_s: float
    is_pinned: bool
    is_transient: bool

    @property
    def num_homes(self) -> int:
        return sum(pool.replicas for pool in self.deployment.decode)

    @property
    def num_prefills(self) -> int:
        return sum(pool.replicas for pool in self.deployment.prefill)

    @property
    def roles(self) -> dict[int, str]:
        """Homes first, as in a simulation."""
        found = dict.fromkeys(range(self.num_homes), "decode")
        return found | dict.fromkeys(range(self.num_homes, self.num_homes + self.num_prefills), "prefill")

    @property
    def config(self) -> str | CausalConfig:
        return TINY_CONFIG if self.model == TINY else self.model

    @property
    def vocab_size(self) -> int:
        found = self.config
        return (found if isinstance(found, CausalConfig) else read_causal_config(Path(found))).vocab_size

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers besides Python and the workload: model, objectives, Redis's scripts."""
        scripts = [(files("engines.ampd.live") / name).read_text() for name in ("state.lua", "operations.lua")]
        text = repr((self.config, self.slo, self.reading, scripts))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve(cell: Cell, system: str) -> Settings:
    """Everything a user can get wrong is refused here."""
    given = {name: value for name, value in cell.knob_values.items() if value is not None}
    where = platform(cell.platform)
    require(
        cell.executor == where.executor == "torch" and where.gpu is None,
        f"platform={where.name!r}, executor={cell.executor!r}: system={system!r} runs workers on this machine's cores, use "
        "cpu-tiny and torch",
    )
    for name, value in given.items():
        if name not in KNOBS and name not in NOTES:
            raise UserError(
                f"{name}={value!r} has no effect with system={system!r}: leave it out, or use one of {', '.join(KNOBS)}"
            )
    check_knobs(system, KNOBS, given)
    deployment = parse_deployment(str(given.get("deployment", "P:TP1x1 D:TP1x1")))
    pools = (*deployment.prefill, *deployment.decode)
    require(
        all(pool.degree == 1 for pool in pools) and sum(pool.replicas for pool in pools) <= MAX_WORKERS,
        f"deployment={str(deployment)!r}: live workers have degree 1 and are at most {MAX_WORKERS}: write P:TP1x1 D:TP1x1",
    )
    require(bool(deployment.prefill), f"deployment={str(deployment)!r} has no prefill workers: write P:TP1x1 D:TP1x1")
    kv_tokens, lease_s = int(given.get("kv_tokens", 32768)), float(given.get("lease_s", 5.0))
    require(1 <= kv_tokens <= MOST_KV_TOKENS, f"kv_tokens={kv_tokens} must be between 1 and {MOST_KV_TOKENS:,}")
    require(0.5 <= lease_s <= 600, f"lease_s={lease_s:g} must be between 0.5 and 600 s")
    model, frontend = str(given.get("model", TINY)), None if "frontend" not in given else str(given["frontend"])
    require(
        frontend in (None, *FRONTENDS),
        f"frontend={frontend!r} is unknown: use {' or '.join(FRONTENDS)}, or leave it out",
    )
    require(
        frontend is None or model == TINY or (Path(model) / "tokenizer.json").is_file(),
        f"model={model!r} has no tokenizer.json, which frontend={frontend!r} reads: give a checkpoint's folder with one",
    )
    policies = AmpdConfig(**pick(given, (name for name in AMPD if name != "router")))
    require(policies.window_s > 0, f"window_s={policies.window_s} must be above 0 s")
    return Settings(
        model=model,
        deployment=deployment,
        slo=Slo(ttft_s=float(given.get("slo_ttft_s", 0.5)), itl_s=float(given.get("slo_itl_s", 0.05))),
        reading=DEFAULT_READING,
        policies=policies,
        workload=_workload(cell, given),
        frontend=frontend,
        redis=None if "redis" not in given else str(given["redis"]),
        kv_tokens=kv_tokens,
        lease_s=lease_s,
        is_pinned=bool(given.get("pin")),
        is_transient=bool(given.get("transient")),
    )


def _workload(cell: Cell, given: Mapping[str, Any]) -> SessionWorkloadConfig:
    path = given.get("dataset_path")
    arrivals = str(given.get("arrivals", "burst" if cell.rate is None else "poisson"))
    extra = {name: float(given[name]) for name in ("burstiness",) if name in given}
    return SessionWorkloadConfig(
        trace=cell.dataset,
        num_sessions=int(given.get("num_prompts", NUM_SESSIONS)),
        seed=cell.seed,
        arrivals=ArrivalConfig(kind=arrivals, rate=cell.rate, **extra),  # type: ignore[arg-type]
        source=given.get("dataset_source", "embedded" if path is None else "local"),
        trace_path=path,
        meets_totals=path is None,
        **pick(given, ("delay_mean_s",)),
    )
