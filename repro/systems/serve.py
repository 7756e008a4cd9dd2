"""The paper's system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.errors import UserError
from repro.systems.base import PARTICULAR, Serving, System
from repro.systems.continuous import ContinuousBatching


class DllmServe(System):
    name = "dllm-serve"
    title = "dLLM-Serve"
    summary = "continuous batching by phase, logit decomposition, head-centric sparse KV cache"

    def serving(self, reading: str) -> Serving:
        return ContinuousBatching()

    def refuse_ignored(self, given: Mapping[str, Any]) -> None:
        for name in sorted((PARTICULAR - ContinuousBatching.knobs) & given.keys()):
            raise UserError(f"{name}={given[name]!r} has no effect with system={self.name!r}: leave it out")
