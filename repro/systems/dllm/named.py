"""Diffusion-LLM systems by name, for what serves no other."""

from __future__ import annotations

from engines.errors import UserError
from repro.runs.system import SYSTEMS
from repro.systems.dllm.system import DllmSystem


def dllm_system(name: str) -> DllmSystem:
    found = SYSTEMS.get(name)
    if not isinstance(found, DllmSystem):
        able = [each for each in SYSTEMS if isinstance(SYSTEMS.get(each), DllmSystem)]
        raise UserError(f"system={name!r} is no diffusion-LLM system: use one of {', '.join(able)}")
    return found
