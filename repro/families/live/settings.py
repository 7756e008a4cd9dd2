"""A live cell's knobs, resolved: workers, model, objectives, policies, workload."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from engines.ampd.performance import PerformanceModel, Piecewise
from engines.ampd.system import AmpdConfig
from engines.cluster.hardware import Deployment
from engines.errors import require
from engines.knobs import Checked, Range, given_to
from engines.knobs import resolve as resolve_knobs
from engines.models.qwen2_config import CausalConfig, read_causal_config, tiny_causal
from engines.policies.own import Plugin
from engines.policies.views import Slo
from repro.families.cluster.ampd import ClusterPolicies, own_policies
from repro.families.cluster.ampd_settings import DEFAULT_READING, Objective, SessionKnobs, sessions_asked
from repro.families.cluster.deployments import parse_deployment
from repro.families.platforms import platform
from repro.runs.cell import Cell
from repro.runs.code import why_here
from repro.workloads.served import workload_knobs
from repro.workloads.sessions import SessionWorkloadConfig

TINY = "tiny"
_TINY_CONFIG = tiny_causal(d_model=256, n_layers=8)
"""A Qwen2 of 8 M parameters, random weights: large enough that a step's work outweighs what surrounds it."""
_PREFILL, _LINE = (
    Piecewise(knees=(), pieces=(piece,), mean_error=0.0, max_error=0.0)
    for piece in ((1e-2, 1e-4, 1e-8, 1e-6), (1e-3, 1e-5))
)
_UNMEASURED = PerformanceModel(prefill={1: _PREFILL}, decode={1: _LINE}, transfer={(1, 1): _LINE}, decode_context=1)
"""Stands for what is measured on the workers: policies of one's own are made once before they are started."""
MAX_WORKERS = 16
_NUM_SESSIONS = 20


@dataclass(frozen=True, kw_only=True)
class LiveKnobs(SessionKnobs, ClusterPolicies, Checked):
    model: str = TINY
    """tiny, or a checkpoint's folder."""
    deployment: str = "P:TP1x1 D:TP1x1"
    """As many workers as the machine has cores for."""
    frontend: Literal["dynamo"] | None = None
    """For requests over HTTP to Dynamo's frontend, of which the coordinator is the router; without it the coordinator is called."""
    redis: str | None = None
    """The address of a server that is there; by default one is started."""
    kv_tokens: Annotated[int, Range(1, 10**7)] = 32768
    """Tokens of K/V of each worker."""
    lease_s: Annotated[float, Range(0.5, 600)] = 5.0
    """Seconds after which the work of a silent worker is given to another."""
    pin: bool = False
    """Each worker on a core of its own."""
    slo_ttft_s: Objective = 0.5
    """Objective of the time to the first token, in seconds."""
    slo_itl_s: Objective = 0.05
    """Objective of the time between tokens, in seconds."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    knobs: LiveKnobs
    deployment: Deployment
    policies: AmpdConfig
    own: Mapping[str, Plugin]
    """Policies of one's own, by kind."""
    workload: SessionWorkloadConfig

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.knobs.slo_ttft_s, itl_s=self.knobs.slo_itl_s)

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
        return _TINY_CONFIG if self.knobs.model == TINY else self.knobs.model

    @property
    def vocab_size(self) -> int:
        found = self.config
        return (found if isinstance(found, CausalConfig) else read_causal_config(Path(found))).vocab_size

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers besides Python and the workload: model, objectives, Redis's scripts but for comments."""
        texts = [(files("engines.ampd.live") / name).read_text() for name in ("state.lua", "operations.lua")]
        scripts = [[line for line in text.splitlines() if not line.lstrip().startswith("--")] for text in texts]
        text = repr((self.config, self.slo, DEFAULT_READING, scripts))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve(cell: Cell, system: str) -> LiveSettings:
    """Everything a user can get wrong is refused here."""
    where = platform(cell.platform)
    require(
        cell.executor == where.executor == "torch" and where.gpu is None,
        f"platform={where.name!r}, executor={cell.executor!r}: system={system!r} runs workers on this machine's cores, use "
        "cpu-tiny and torch",
    )
    own = own_policies(cell.asked)
    plugged = (each.knobs for each in own.values())
    knobs = resolve_knobs(LiveKnobs, cell.asked, AmpdConfig, *plugged, workload_knobs(cell.asked), system=system)
    policies = given_to(AmpdConfig(), cell.asked)
    told = {"model": _UNMEASURED, "slo": Slo(ttft_s=knobs.slo_ttft_s, itl_s=knobs.slo_itl_s), "seed": cell.seed}
    for each in own.values():
        module, _, name = each.where.partition(":")
        if each.kind.name == "queue" or knobs.frontend is not None:
            why = why_here(module, name, elsewhere=each.kind.name != "queue")
            require(why is None, f"{each.kind.name}={each.where!r} {why}")
        each.checked(**{name: told[name] for name in each.kind.offered})
    deployment = parse_deployment(knobs.deployment)
    pools = (*deployment.prefill, *deployment.decode)
    require(
        all(pool.degree == 1 for pool in pools) and sum(pool.replicas for pool in pools) <= MAX_WORKERS,
        f"deployment={str(deployment)!r}: live workers have degree 1 and are at most {MAX_WORKERS}: write P:TP1x1 D:TP1x1",
    )
    require(bool(deployment.prefill), f"deployment={str(deployment)!r} has no prefill workers: write P:TP1x1 D:TP1x1")
    require(
        knobs.frontend is None or knobs.model == TINY or (Path(knobs.model) / "tokenizer.json").is_file(),
        f"model={knobs.model!r} has no tokenizer.json, which frontend={knobs.frontend!r} reads: give a checkpoint's folder with one",
    )
    workload = sessions_asked(cell, knobs, num_sessions=_NUM_SESSIONS)
    return LiveSettings(knobs=knobs, deployment=deployment, policies=policies, own=own, workload=workload)
