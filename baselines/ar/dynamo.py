"""NVIDIA Dynamo: disaggregation without AMPD's techniques, and with Dynamo's own conditional disaggregation.

The paper's Dynamo always separates the phases (§7.1). Since then Dynamo can itself run a prefill on the decode
worker; the rules below are those its documentation of version 1.6 describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engines.ar.cluster.cluster import Cluster, Hardware, Policies
from engines.ar.cluster.dispatch import Dispatch, RemoteOnly
from engines.ar.cluster.policy import Decision, DecodeView, Estimator, PrefillView
from engines.ar.deployment import Deployment
from engines.ar.task import PrefillTask
from engines.errors import UserError, require

BypassPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]


@dataclass(frozen=True, kw_only=True)
class ConditionalConfig:
    """``--router-conditional-disagg-config``, with its defaults."""

    policy: BypassPolicy = "isl_bounding"
    eff_isl_threshold: int = 2048
    """Tokens to prefill beyond the decode worker's prefix cache; fewer may stay."""
    eff_isl_ratio_threshold: float = 0.7
    """Of the whole prompt; a smaller share may stay."""
    prefill_busy_threshold: float | None = None
    """Batches of prefill tokens at the chosen prefill worker above which a prefill stays; None: never."""
    decode_busy_threshold: float | None = None
    """Share of the decode worker's K/V memory above which nothing stays; None: no such gate."""
    max_num_batched_tokens: int = 8192
    """What counts as one batch of prefill tokens."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(BypassPolicy):
            raise UserError(f"policy={self.policy!r} is unknown: use one of {', '.join(get_args(BypassPolicy))}")
        require(self.eff_isl_threshold >= 0, f"eff_isl_threshold={self.eff_isl_threshold} must not be negative")
        ratio = self.eff_isl_ratio_threshold
        require(0 <= ratio <= 1, f"eff_isl_ratio_threshold={ratio} must be in [0, 1]")
        for name in ("prefill_busy_threshold", "decode_busy_threshold"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name}={value} must not be negative")
        require(
            self.policy == "isl_bounding" or self.prefill_busy_threshold is not None,
            f"policy={self.policy!r} needs prefill_busy_threshold: give it in batches of prefill tokens",
        )


class ConditionalRouter:
    """A prefill stays on the decode worker if the policy says so and the decode worker is not too full."""

    def __init__(self, config: ConditionalConfig, dispatch: Dispatch = "shortest", *, seed: int = 0) -> None:
        self.config = config
        self._remote = RemoteOnly(dispatch, seed=seed)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        worker = self._remote.pick(prefills, now)
        reason = self._bypass_reason(task, worker)
        if reason is not None and not self._is_full(home, task):
            return Decision(home.worker_id, True, reason)
        return Decision(worker.worker_id, False, "remote")

    def _bypass_reason(self, task: PrefillTask, worker: PrefillView) -> str | None:
        config = self.config
        prompt = task.history + task.tokens
        if config.policy != "prefill_load" and (
            task.tokens < config.eff_isl_threshold and task.tokens < config.eff_isl_ratio_threshold * prompt
        ):
            return "short"
        limit = config.prefill_busy_threshold
        if config.policy != "isl_bounding" and limit is not None:
            return "prefill-busy" if worker.backlog_tokens > limit * config.max_num_batched_tokens else None
        return None

    def _is_full(self, home: DecodeView, task: PrefillTask) -> bool:
        limit = self.config.decode_busy_threshold
        return limit is not None and home.kv_tokens + task.tokens > limit * home.kv_capacity


def dynamo(
    hardware: Hardware,
    deployment: Deployment,
    estimator: Estimator,
    *,
    dispatch: Dispatch = "shortest",
    conditional: ConditionalConfig | None = None,
) -> Cluster:
    """First come, first served; decode workers chosen by K/V in use; history reads overlap as AMPD's do."""
    require(
        bool(deployment.prefill),
        f"deployment={deployment}: Dynamo needs prefill workers here, see vllm for co-location",
    )
    return Cluster(
        name="dynamo" if conditional is None else "dynamo-conditional",
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_router=lambda seed: (
                RemoteOnly(dispatch, seed=seed)
                if conditional is None
                else ConditionalRouter(conditional, dispatch, seed=seed)
            ),
            estimator=estimator,
            shares_prefill_queue=dispatch == "shared",
            # A task in a shared queue belongs to nobody until a worker is free.
            overlaps=dispatch != "shared",
        ),
    )
