"""What no source prints of the prefill systems, and what a search may make of it (repro.runs.tuning)."""

from __future__ import annotations

from collections.abc import Mapping

from repro.runs.cell import Cell, Scalar
from repro.runs.free import Free

_WINDOW = Free(
    "waiting for company",
    ({"wait": "off"}, {"max_window_s": 0.02}),
    "§3.1: W_min and W_max are not printed; Figure 5 has no values on its axis. 5 ms by default",
)
_LONG_WAIT = Free(
    "when a long prompt gets every other step",
    ({"max_long_wait_s": 0.0}, {"max_long_wait_s": 0.2}),
    "§3.2 has two queues and no rule between them. 1 s by default, which is beyond the objective of 0.4 s",
)
_CHUNK = Free(
    "C_l, tokens of long prompts in a step",
    ({"chunk_tokens": 8192},),
    "§3.2 names C_l without a value. 2,048 by default; SGLang's steps have 8,192",
)


def _pools(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """num_short of an eighth and of three eighths of the instances, and of a quarter with controller=off"""
    instances = cell.asked.get("num_instances", 1)
    assert isinstance(instances, int)
    few, usual, many = (max(1, round(share * instances)) for share in (0.125, 0.25, 0.375))
    return {"num_short": few}, {"num_short": many}, {"num_short": usual, "controller": "off"}


_POOLS = Free(
    "pools of several instances",
    (),
    "§3.2 prints neither the sizes that pools begin with nor a constant of the controller",
    _pools,
)
_STEP_TOKENS = ({"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 4096}, {"max_num_batched_tokens": 16384})
_ROUTING = Free(
    "router",
    ({"routing": "least-requests"}, {"routing": "cache-aware"}),
    '§4 names "SGLang with router" and none of its policies. Least outstanding tokens by default',
)

LAPS = (_WINDOW, _LONG_WAIT, _CHUNK, _POOLS)
LAPS_DISAGGREGATION = (_LONG_WAIT, _CHUNK, _POOLS)
SGLANG = (
    Free("tokens of a step", _STEP_TOKENS, "no setting of a baseline is printed. 8,192, SGLang's own, by default"),
)
SGLANG_ROUTER = (*SGLANG, _ROUTING)
VLLM = (
    Free(
        "tokens of a step",
        ({"max_num_batched_tokens": 4096}, {"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 16384}),
        "no setting of a baseline is printed. 2,048, vLLM's own, by default",
    ),
)
_STEP_SECONDS = Free(
    "seconds of a step",
    ({"min_step_s": 0.025, "max_step_s": 0.075}, {"min_step_s": 0.1, "max_step_s": 0.3}),
    "ours. 0.05 to 0.15 s by default",
)
RESERVE = (
    _STEP_SECONDS,
    Free("share of late turns", ({"share": 0.25}, {"share": 0.5}), "ours. The least that its bound allows by default"),
    Free("aging", ({"aging": 0.0},), "ours. 0.05 by default"),
)
ON_TIME = (
    Free("share of those given up", ({"share": 0.125}, {"share": 0.5}), "ours. A quarter by default"),
    Free(
        "times their wait by arrival that they wait for it",
        ({"patience": 1.0}, {"patience": 4.0}),
        "ours. 2 by default",
    ),
)
SRPT = (_STEP_SECONDS._replace(settings=(*_STEP_SECONDS.settings, {"min_step_s": 0.15})),)
