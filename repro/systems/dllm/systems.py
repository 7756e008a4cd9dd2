"""dLLM-Serve and the systems it is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from baselines.dllm.dllm_cache import method as dllm_cache
from baselines.dllm.dream import DREAM as _DREAM
from baselines.dllm.fast_dllm import FAST_DLLM as _FAST_DLLM
from baselines.dllm.llada import LLADA as _LLADA
from baselines.dllm.sparse_dllm import SPARSE_DLLM as _SPARSE_DLLM
from engines.dllm.serve import DLLM_SERVE as _DLLM_SERVE
from repro.runs.cell import Cell, Scalar
from repro.runs.free import Free
from repro.systems.dllm.system import DllmSystem

_STATIC_BATCH = Free(
    "static batch",
    ({"batch_rule": "batch"}, {"batch_rule": "max_model_len"}, {"batch_rule": "one"}),
    '§6.1: "the maximum static batch size that fits in memory", of which requests is not said. The largest that holds the workload\'s '
    "longest request by default",
)
_PLACES = Free(
    "requests running at once",
    ({"max_num_seqs": 16}, {"max_num_seqs": 64}, {"max_num_seqs": 128}),
    "Table 3 prints budgets of tokens and logits and no number of requests. 256 by default on a card",
)


def _packed(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """with reading=policy, whose steps are packed, as of dllm-serve"""
    return _PLACES.settings if cell.knob_values.get("reading") == "policy" else ()


_PACKED = Free(_PLACES.what, (), "the engine of this reading is dLLM-Serve's", _packed)
_BASELINE = (_STATIC_BATCH, _PACKED)
DLLM_SERVE = DllmSystem(_DLLM_SERVE, (_PLACES,))
FAST_DLLM = DllmSystem(_FAST_DLLM, _BASELINE)
DLLM_CACHE = DllmSystem(dllm_cache.DLLM_CACHE, _BASELINE)
SPARSE_DLLM = DllmSystem(_SPARSE_DLLM, _BASELINE)
LLADA = DllmSystem(_LLADA, _BASELINE)
DREAM = DllmSystem(_DREAM, _BASELINE)
