"""Golden cases: recorded token ids of published samplers, replayed through ``repro generate``'s own path."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from repro.generation import GenerateOptions, generate

# Method of a case -> (system, options that are fixed, parameters of the case -> options).
_SPARSE = {"keep_ratio": "retention_ratio", "kernel_size": "pool_kernel"}
_FEATURES = {name: name for name in ("prompt_interval", "gen_interval", "transfer_ratio")}
_METHODS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "llada": ("llada", {}, {}),
    "fast_dllm_nocache": ("fast-dllm", {"cache": "none"}, {}),
    "fast_dllm_prefix_cache": ("fast-dllm", {"cache": "prefix"}, {}),
    "fast_dllm_dual_cache": ("fast-dllm", {"cache": "dual"}, {}),
    "sparse_dllm": ("sparse-dllm", {}, _SPARSE),
    "dllm_cache": ("dllm-cache", {}, _FEATURES),
    "dllm_serve_upstream_uniform": ("dllm-serve", {"selection": "uniform"}, {**_SPARSE, "delay_step": "refresh_delay"}),
    "dllm_serve_upstream_head": ("dllm-serve", {"selection": "head"}, {**_SPARSE, "delay_step": "refresh_delay"}),
    "dream_vanilla": ("dream", {}, {"alg": "alg"}),
    "dream_prefix_cache": ("fast-dllm", {"cache": "prefix"}, {"alg": "alg"}),
    "dream_dual_cache": ("fast-dllm", {"cache": "dual"}, {"alg": "alg"}),
}


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    case: str
    method: str
    tie_sensitive: bool
    """Its ids depend on the order in which a library's top-k returns equal values."""
    ids_equal: bool
    passes_equal: bool | None
    """Forward passes against the recorded count; None where none is recorded."""

    @property
    def passed(self) -> bool:
        return self.ids_equal and self.passes_equal is not False


def read_cases(folder: Path) -> tuple[Mapping[str, Path], Sequence[Mapping[str, Any]]]:
    """Checkpoint folders by name, and the cases, of ``folder``/cases.json."""
    path = folder / "cases.json"
    if not path.is_file():
        raise UserError(f"golden={str(folder)!r} has no cases.json: give a folder of golden cases")
    raw = json.loads(path.read_text())
    checkpoints = {name: folder / entry["path"] for name, entry in raw["checkpoints"].items()}
    unknown = sorted({case["method"] for case in raw["cases"]} - _METHODS.keys())
    if unknown:
        raise UserError(f"golden={str(folder)!r} holds method {unknown[0]!r}: known are {', '.join(_METHODS)}")
    return checkpoints, raw["cases"]


def verify(folder: Path, on_case: Callable[[], object] = lambda: None) -> list[CaseResult]:
    """Replay every case, ties in the library's order as the recording had them."""
    checkpoints, cases = read_cases(folder)
    results = []
    for case in cases:
        results.append(_replay(case, checkpoints[case["checkpoint"]]))
        on_case()
    return results


def _replay(case: Mapping[str, Any], checkpoint: Path) -> CaseResult:
    system, fixed, renamed = _METHODS[case["method"]]
    params = case["params"]
    options = {**fixed, **{option: params[name] for name, option in renamed.items() if name in params}}
    if system == "dllm-serve" and params.get("first_token_rule") and options.get("refresh_delay", 1) > 0:
        options["compat"] = "upstream"
    for name in ("threshold", "factor"):
        if params.get(name) is not None:
            options[name] = params[name]
    generation = GenerationConfig(
        gen_length=params["gen_length"],
        block_length=params.get("block_length") or params["gen_length"],
        steps=params["steps"],
        threshold=options.get("threshold"),
        factor=options.get("factor"),
    )
    parity = None if generation.is_parallel or system != "dllm-serve" else "parity"
    done = generate(
        GenerateOptions(system=system, model=str(checkpoint), generation=generation, knobs=options, tie_policy=parity),
        tuple(case["prompt_ids"]),
    )
    nfe = case.get("nfe")
    return CaseResult(
        case=case["id"],
        method=case["method"],
        tie_sensitive=bool(case.get("tie_sensitive")),
        ids_equal=list(done.token_ids) == case["expected_ids"],
        passes_equal=None if nfe is None else done.forward_passes == nfe,
    )
