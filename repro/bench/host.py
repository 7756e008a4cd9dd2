"""What a dLLM-Serve step costs the host, on any machine: python -m repro.bench.host --help

    launches   kernels that a captured forward launches, per layer and outside the layers: every operator that is no view
               counts as one, and so does every fused kernel, which its reference replaces here
    ms         of a whole engine step: schedule, metadata, candidates, commit. The model does nothing, so this is the time of
               Python, and of the CPU's work in place of a few small launches

The model has LLaDA-8B's depth, and almost no width and vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.attention.backends import Spans
from engines.dllm.config import DelayedCache, EngineConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.graphs import GraphForward, graph_key, metadata_size
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.kernels.rowwise import rms_norm_reference, rotate_reference, swiglu_reference
from engines.models.config import LLADA_8B
from engines.models.layers import FusedOps, fuse
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import Attend, Rotary
from engines.runtime.device import PoolTensors, store_by_index
from repro.bench.common import Rows, add_counts, parser_of, run, table
from repro.bench.step import StepBatch

BLOCK = 32
NARROW = replace(LLADA_8B, d_model=8, n_heads=2, n_kv_heads=2, mlp_hidden_size=8, vocab_size=8)
NARROW = replace(NARROW, mask_token_id=7, eos_token_id=6, pad_token_id=6)
ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Launches(TorchDispatchMode):
    """Counts kernel launches while it is entered."""

    names: list[str] = field(default_factory=list)
    _is_paused: bool = False

    @property
    def number(self) -> int:
        return len(self.names)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._is_paused or _is_view(func) or func.name().partition(".")[0] in ALLOCATIONS):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def as_one_launch(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that it counts as one launch, whatever it does."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self.names.append(name)
            self._is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = False

        return call


def _is_view(func: Any) -> bool:
    """Whether the operator returns an alias of its input and writes nothing."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A stand-in for a varlen kernel that reads its pool in place. Its output is never written."""

    launch: Callable[[Tensor], Tensor]
    name: str = "none"
    needs_host_runs: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        return self.launch(q)


def launches(num_layers: int, *, has_refresh: bool, fused: bool) -> Launches:
    """Count the kernels that one captured forward launches."""
    counter = Launches()
    # In float16 a CPU multiplies with torch's operators, like a card.
    model = LLaDAModelLM(replace(NARROW, n_layers=num_layers)).requires_grad_(False).half()
    store = store_by_index
    if fused:
        fuse(
            model,
            FusedOps(
                rms_norm=counter.as_one_launch("rms_norm", rms_norm_reference),
                rotate=counter.as_one_launch("rotate", rotate_reference),
                swiglu=counter.as_one_launch("swiglu", swiglu_reference),
                joins=True,
            ),
        )
        store = counter.as_one_launch("store", store_by_index)
    attention = Attention(launch=counter.as_one_launch("attention", torch.empty_like))
    key = graph_key(4 * BLOCK, 4, BLOCK, has_refresh=has_refresh)
    tokens = torch.zeros(5, 64, dtype=torch.int32)
    forward = GraphForward(model, attention, store, tokens, PoolTensors.of(model, 4 * BLOCK + 1))
    numbers = torch.zeros(metadata_size(key), dtype=torch.int64)
    with torch.no_grad():  # in inference mode composite operators are not taken apart
        forward(key, numbers)  # tables are made
        counter.names.clear()
        with counter:
            forward(key, numbers)
    return counter


class NullModel(LLaDAModelLM):
    """A model that computes nothing, and returns zeros for its rows."""

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        return torch.zeros(len(ids), self.config.d_model)

    def local_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.config.vocab_size)


def time_steps(size: int, total_len: int, *, blocks: int) -> dict[str, Any]:
    """Time the steps of an engine that serves ``size`` requests at once, over all of their blocks."""
    config = EngineConfig(
        max_num_batched_tokens=size * total_len,
        max_num_logits=1 << 20,
        max_model_len=total_len,
        max_num_seqs=size,
        attention_backend="sdpa-padded",
    )
    batch = StepBatch(size=size, total_len=total_len, block_length=BLOCK, config=config)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    model = NullModel(NARROW).requires_grad_(False)
    for _ in range(blocks):
        executor = packed_executor(model, config, batch.kv_rows, num_slots=size)
        engine = Engine(PhaseScheduler(config, KvPool(batch.kv_rows), DelayedCache()), executor)
        for request in batch.requests(NARROW.vocab_size, NARROW.mask_token_id):
            engine.submit(request)
        while True:
            started = perf_counter()
            record = engine.step()
            step_s = perf_counter() - started
            if record is None:
                break
            seconds[record.plan.num_refresh > 0].append(step_s)
        engine.close()
    reuse = seconds[False]
    return {
        "requests": size,
        "total_len": total_len,
        "steps": len(reuse),
        "reuse_ms": 1e3 * median(reuse),
        "reuse_p95_ms": 1e3 * quantiles(reuse, n=20)[-1],
        "refresh_ms": 1e3 * median(seconds[True]),
    }


def launch_rows() -> list[dict[str, Any]]:
    """Launches of captured forwards: per layer, outside the layers, and in the whole model."""
    rows = []
    for has_refresh in (False, True):
        for fused in (False, True):
            one_layer, two_layers = (launches(n, has_refresh=has_refresh, fused=fused).number for n in (1, 2))
            name = f"{'mixed' if has_refresh else 'reuse'}, {'fused' if fused else 'operator by operator'}"
            a_layer, outside = two_layers - one_layer, 2 * one_layer - two_layers
            total = LLADA_8B.n_layers * a_layer + outside
            rows.append({"name": name, "a_layer": a_layer, "beside": outside, "whole": total})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    add_counts(
        parser,
        requests=((1, 16, 64, 256), "requests at once"),
        length=(256, f"tokens of a request, its block of {BLOCK} included"),
        blocks=(5, "times that all requests are served"),
    )
    options = parser.parse_args()
    if options.length <= BLOCK:
        parser.error(f"--length counts from {BLOCK + 1}")
    torch.set_num_threads(1)
    launched = launch_rows()
    print(table(launched))
    rows = Rows(options.json, {"torch": torch.__version__, "launches": launched})
    for size in options.requests:
        rows.add(time_steps(size, options.length, blocks=options.blocks))
    print(f"\n{table(rows.rows)}")


if __name__ == "__main__":
    run(main)
