"""What AIConfigurator (NVIDIA) says of a plan, where its package is installed: the rate that its kernel times allow without any queue.

Each phase alone, at the mean lengths of a round: prefills one prompt a step, decodes in the largest batch whose step is within the
limit of ITL or TPOT. It knows no arrivals, so its answer is what a plan reaches at most by its estimates.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.cluster.sessions import Session
from engines.cost.extract import SYSTEMS
from engines.models.shape import ModelShape
from repro.capacity.objectives import tightest
from repro.capacity.site import Plan, Site, prompts_of

MODULE = "aiconfigurator_core.sdk.engine"
MISSING = "AIConfigurator's own estimates are left out: aiconfigurator-core is not installed (pip install '.[silicon]')"
_BATCHES = tuple(2**power for power in range(10))


class Missing(Exception):
    """The package is not there."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """Mean tokens of a round."""

    history: float
    prompt: float
    decode: float
    rounds: float
    """Rounds of a session."""

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> Means:
        chunks = [chunk for session in sessions for chunk in prompts_of(session)]
        num = len(chunks)
        return cls(
            history=sum(chunk.history for chunk in chunks) / num,
            prompt=sum(chunk.tokens for chunk in chunks) / num,
            decode=sum(session.decode_tokens for session in sessions) / num,
            rounds=num / len(sessions),
        )


def engine() -> Any:
    """The package's, which is not imported before it is asked for."""
    try:
        found = importlib.import_module(MODULE).EngineHandle
    except ImportError as error:
        raise Missing from error
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    return found


def peer_rate(handle: Any, site: Site, plan: Plan) -> float | None:
    """Requests/s of the site's unit; None where the package has no tables of the card."""
    shape, card = site.hardware()
    if card not in SYSTEMS:
        return None
    framework = "sglang" if plan.decode[1] == 0 else "vllm"
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")

        def compiled(degree: int) -> Any:
            split = {"moe_tp_size": degree, "moe_ep_size": 1} if shape.num_experts > 1 else {}
            return handle.compile(folder, SYSTEMS[card], framework, tp_size=degree, **split)

        return rate_of(compiled, plan, Means.of(site.sessions()), tightest(site.objectives, "itl", "tpot"))


def rate_of(compiled: Callable[[int], Any], plan: Plan, means: Means, limit_s: float | None) -> float:
    """``compiled`` makes the engine of a degree."""
    prompt, history = max(1, round(means.prompt)), round(means.history)
    degree, replicas = plan.prefill or plan.decode
    prefill_ms, _, _ = compiled(degree).run_static(
        batch_size=1, isl=history + prompt, osl=2, prefix=history, mode="static_ctx"
    )
    if plan.decode[1] == 0:
        return 1e3 * replicas / prefill_ms
    decode_degree, decode_replicas = plan.decode
    worker = compiled(decode_degree)
    token_ms = None
    for batch in _BATCHES:
        _, step_ms, _ = worker.run_static(batch_size=batch, isl=history + prompt, osl=2, prefix=0, mode="static_gen")
        if token_ms is not None and limit_s is not None and step_ms > 1e3 * limit_s:
            break
        token_ms = step_ms / batch
    assert token_ms is not None, "one sequence at least is decoded"
    decode_ms = token_ms * max(0.0, means.decode - 1)
    if plan.prefill is None:
        rounds_s = 1e3 * decode_replicas / (prefill_ms + decode_ms)
    else:
        rounds_s = 1e3 * min(replicas / prefill_ms, decode_replicas / decode_ms if decode_ms else float("inf"))
    return rounds_s / means.rounds


def config_of(shape: ModelShape) -> dict[str, Any]:
    """What the package reads of a checkpoint. It knows families by their architecture: a norm of queries and keys is Qwen3's."""
    family = "Llama"
    if shape.num_experts > 1:
        family = "Mixtral"
    elif shape.qk_norm:
        family = "Qwen3"
    elif shape.qkv_bias:
        family = "Qwen2"
    experts = {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": shape.d_model,
        "intermediate_size": shape.mlp_hidden,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_rows,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        **(experts if shape.num_experts > 1 else {}),
    }
