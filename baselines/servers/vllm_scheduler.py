"""LAPS or Reserve in vLLM: ``--scheduler-cls baselines.servers.vllm_scheduler.PolicyScheduler``, of the version in environments.yaml.

vLLM's step gives tokens to running requests first, then to waiting ones. Before each step we set aside the waiting requests that the
policy does not admit, and the prefills that it does not advance. Within the step no prompt gets more than its share of the plan. Decodes
are never delayed.
"""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from baselines.servers.admission import Admission, AdmissionConfig

_POLICY_VARIABLE = "REPRO_VLLM_POLICY"
_SETTINGS_VARIABLE = "REPRO_VLLM_POLICY_SETTINGS"


class PolicyScheduler(AsyncScheduler):
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = AdmissionConfig.parse(os.environ.get(_SETTINGS_VARIABLE, "{}"), policy=os.environ[_POLICY_VARIABLE])
        self._admission = Admission(config)
        self._shares: Mapping[str, int] | None = None
        """Tokens that each prompt may get in the step being planned."""

    def add_request(self, request: Any) -> None:
        is_known = request.request_id in self.requests
        super().add_request(request)
        if not is_known:
            self._admission.arrive(request.request_id, request.num_prompt_tokens, time.monotonic())

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._admission.leave(request.request_id)
        return finished

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        prefilling = {r.request_id: r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens}
        computed = {name: r.num_computed_tokens for name, r in prefilling.items()}
        # These were admitted, but have not run because K/V was short.
        computed |= {r.request_id: 0 for r in self.waiting if r.request_id not in self._admission}
        block = self.block_size
        free_tokens = self.kv_cache_manager.block_pool.get_num_free_blocks() * block
        plan = self._admission.step(now, computed, free_tokens, block)

        waiting = {request.request_id: request for request in self.waiting}
        # Preempted or blocked requests were admitted before: they go first, as in vLLM.
        returned = [
            r for r in waiting.values() if r.request_id not in self._admission and r.request_id not in plan.admitted
        ]
        admitted = [waiting[name] for name in plan.admitted if name in waiting]
        queued = [r for r in waiting.values() if r.request_id in self._admission]
        self._replace_waiting([*returned, *admitted])
        paused = [r for name, r in prefilling.items() if name not in plan.shares]
        answering = [r for r in self.running if r.request_id not in prefilling]
        advanced = [prefilling[name] for name in plan.shares if name in prefilling]
        self.running = [*answering, *advanced]
        self._shares = plan.shares
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._shares = None
            self.running = [*self.running, *paused]
            self._replace_waiting([*self.waiting, *queued])

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Limit a request's tokens in a step to its share, whether it runs or waits."""
        if self._shares is not None and num_computed_tokens < request.num_prompt_tokens:
            num_new_tokens = min(num_new_tokens, self._shares.get(request.request_id, num_new_tokens))
        allowed: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return allowed

    def _replace_waiting(self, requests: list[Any]) -> None:
        self.waiting.clear()
        self.waiting.extend(requests)
