"""Static batching of the published samplers: how large a batch is, and on what evidence (dLLM-Serve §6.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from baselines.dllm.method import Method
from baselines.dllm.static.memory import base_bytes
from baselines.dllm.static.scheduler import StaticBatchScheduler
from baselines.dllm.static.search import FoundBatch, largest_batch
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.bounded import BoundedExecutor
from engines.dllm.plan import Executor, ExecutorError
from engines.errors import UserError, require
from repro.systems import backend
from repro.systems.base import STATIC_KNOBS, Assembled, Resources, Serving, engine_config, rows_of_request
from repro.systems.settings import Settings

if TYPE_CHECKING:
    from engines.parallel.group import TensorParallel
    from repro.systems.baseline import Baseline


class LargestBatches(Serving):
    """The largest static batch that fits, in our implementation.

    A plan takes it from the memory model. That is what a simulated card runs; on a real executor,
    assembling replaces it by the largest whose measured peak fits (§6.1, "preliminary profiling"). A batch that was
    asked for is held to the same.
    """

    knobs = STATIC_KNOBS
    is_upstream = False
    """Whether simulated steps are charged published code's overhead."""
    within = ""
    """What else bounds the batch, for the facts."""

    def plan(self, system: Baseline, settings: Settings, chosen: Method, lengths: Sequence[int]) -> Resources:
        asked, longest = settings.batch_size, max(lengths)
        require(asked is None or asked >= 1, f"batch_size={asked} must be at least 1")
        limit = settings.engine.max_num_seqs
        require(
            asked is None or asked <= limit,
            f"batch_size={asked} is more than max_num_seqs={limit} allows: ask for fewer, or raise max_num_seqs",
        )
        most = self._most(system, settings)
        _refuse_out_of_step(settings.generation, chosen, most)
        if asked is not None:
            facts = self._asked(system, settings, chosen, longest, most)
        else:
            facts = self._planned(system, settings, chosen, longest, most)
        return _resources(settings, chosen, longest, facts)

    def assemble(
        self, system: Baseline, settings: Settings, resources: Resources, group: TensorParallel | None = None
    ) -> Assembled:
        assert group is None, "tensor_parallel is refused for static batches"
        chosen, longest = resources.method, resources.longest
        executor: Executor
        if settings.executor == "roofline":
            executor = system.static_roofline(
                backend.roofline(settings), resources.config, chosen, is_upstream=self.is_upstream
            )
            return _assembled(resources, executor)
        backend.lift_memory_limit(settings)
        bound = backend.measured_roofline(settings)
        resources = _resources(settings, chosen, longest, self._measured(system, settings, chosen, longest))
        resources = replace(resources, facts={**resources.facts, **backend.set_memory_limit(settings)})
        assert resources.batch_size is not None
        padded = system.static_torch(
            backend.load(*backend.model_key(settings)),
            resources.config,
            chosen,
            resources.kv_rows,
            batch_size=resources.batch_size,
            stop_ids=backend.stop_ids(settings),
            profile_every=settings.profile_every,
        )
        resources = replace(resources, facts={**resources.facts, **padded.paths()})
        executor = padded
        if bound is not None:
            meter = system.static_roofline(bound, resources.config, chosen, is_upstream=False)
            executor = BoundedExecutor(executor, meter)
            resources = replace(resources, facts={**resources.facts, **backend.bound_facts(bound)})
        return _assembled(resources, executor)

    def _most(self, system: Baseline, settings: Settings) -> int:
        """No batch is larger, whatever the memory."""
        asked = settings.num_requests if settings.batch_size is None else settings.batch_size
        return min(asked, settings.num_requests, settings.engine.max_num_seqs)

    def _asked(
        self, system: Baseline, settings: Settings, chosen: Method, longest: int, asked: int
    ) -> Mapping[str, Any]:
        if settings.executor == "torch":
            return {"batch_size": asked, "batch_obtained": _as_asked(settings, asked)}
        footprint = system.footprint(settings, chosen, longest, is_upstream=self.is_upstream)
        peak = footprint.peak_bytes(asked)
        if peak > settings.memory_bytes and (asked > 1 or not self.is_upstream):
            fitting = (settings.memory_bytes - footprint.fixed_bytes) // footprint.per_request_bytes
            _refuse_batch(asked, settings.memory_bytes, max(0, fitting))
        return {"batch_size": asked, "batch_obtained": _as_asked(settings, asked), "batch_peak_bytes": peak}

    def _planned(
        self, system: Baseline, settings: Settings, chosen: Method, longest: int, most: int
    ) -> Mapping[str, Any]:
        footprint = system.footprint(settings, chosen, longest)
        found = largest_batch(footprint.peak_bytes, settings.memory_bytes, fixed_bytes=footprint.fixed_bytes, most=most)
        return _facts(found, f"largest that fits the memory model{self.within}")

    def _measured(self, system: Baseline, settings: Settings, chosen: Method, longest: int) -> Mapping[str, Any]:
        most = self._most(system, settings)
        found = _largest_measured(
            system,
            backend.model_key(settings),
            engine_config(settings, chosen),
            chosen,
            settings.generation,
            longest,
            memory_bytes=settings.memory_bytes,
            fixed_bytes=base_bytes(backend.model_shape(settings), settings.memory_bytes),
            most=most,
        )
        if settings.batch_size is None:
            return _facts(found, f"largest whose measured peak fits{self.within}")
        if found.size < most:
            _refuse_batch(most, settings.memory_bytes, found.size)
        return _facts(found, _as_asked(settings, most))


class PublishedBatches(LargestBatches):
    """As published code is run: its batch, its copies of all logits, and its overhead per step.

    The paper gives no batch sizes, only that they are the largest that fit, found beforehand (§6.1). So a size is
    the largest that holds requests of ``max_model_len`` tokens with what published code allocates, whatever the
    workload, and one where published code serves one request at a time. One request is run even where that
    allocation does not fit; ``oom_requests`` counts the requests for which it would fail alone. On a real
    executor, where our code stands in for the published, only the batch differs from the largest.
    """

    is_upstream = True
    within = ", up to what published code could hold"

    def plan(self, system: Baseline, settings: Settings, chosen: Method, lengths: Sequence[int]) -> Resources:
        resources = super().plan(system, settings, chosen, lengths)
        if settings.executor == "torch":
            return resources
        counts = Counter(lengths)
        oom_requests = sum(
            count
            for length, count in counts.items()
            if system.footprint(settings, chosen, length, is_upstream=True).peak_bytes(1) > settings.memory_bytes
        )
        return replace(resources, facts={**resources.facts, "oom_requests": oom_requests})

    def _most(self, system: Baseline, settings: Settings) -> int:
        most = super()._most(system, settings)
        if settings.batch_size is not None:
            return most
        return min(most, self._upstream_size(system, settings) if system.batches_upstream else 1)

    @staticmethod
    def _upstream_size(system: Baseline, settings: Settings) -> int:
        footprint = system.footprint(settings, system.method(settings), settings.engine.max_model_len, is_upstream=True)
        return max(1, (settings.memory_bytes - footprint.fixed_bytes) // footprint.per_request_bytes)

    def _planned(
        self, system: Baseline, settings: Settings, chosen: Method, longest: int, most: int
    ) -> Mapping[str, Any]:
        if settings.executor == "torch":
            return super()._planned(system, settings, chosen, longest, most)
        if not system.batches_upstream:
            return {"batch_size": most, "batch_obtained": "one at a time, as published code serves"}
        held = f"requests of {settings.engine.max_model_len} tokens in published code's memory"
        return {"batch_size": most, "batch_obtained": f"largest that holds {held}"}


def _as_asked(settings: Settings, size: int) -> str:
    return "asked for" if size == settings.batch_size else f"asked for {settings.batch_size}, all {size} requests"


def _refuse_batch(asked: int, memory_bytes: int, fitting: int) -> NoReturn:
    raise UserError(
        f"batch_size={asked} does not fit into memory_bytes={memory_bytes}, which holds {fitting}: ask for no more, give "
        "more memory, or leave it out for the largest"
    )


def _refuse_out_of_step(generation: GenerationConfig, chosen: Method, most: int) -> None:
    """Members of a static batch commit the same number of tokens in every step."""
    alone = "ends requests of a static batch at different steps, and its members must stay in step: add --batch-size 1"
    require(
        most == 1 or not generation.is_parallel,
        f"threshold={generation.threshold}, factor={generation.factor}: parallel decoding {alone}",
    )
    require(most == 1 or not generation.stop_at_eos, f"stop_at_eos=True {alone}")
    require(most == 1 or chosen.decode.quota != "origin", f"alg='origin' {alone}")


def _resources(settings: Settings, chosen: Method, longest: int, facts: Mapping[str, Any]) -> Resources:
    batch_size = facts["batch_size"]
    return Resources(
        # The token budget is dLLM-Serve's currency; a static batch is bounded by memory alone.
        config=engine_config(settings, chosen, max_num_batched_tokens=batch_size * settings.engine.max_model_len),
        method=chosen,
        kv_rows=batch_size * rows_of_request(longest, settings.generation, chosen),
        longest=longest,
        batch_size=batch_size,
        facts=facts,
    )


def _facts(found: FoundBatch, obtained: str) -> Mapping[str, Any]:
    return {"batch_size": found.size, "batch_obtained": obtained, "batch_peak_bytes": found.peak_bytes}


def _assembled(resources: Resources, executor: Executor) -> Assembled:
    chosen, batch_size = resources.method, resources.batch_size
    assert batch_size is not None
    scheduler = StaticBatchScheduler(
        resources.config, KvPool(resources.kv_rows), chosen.rule, batch_size=batch_size, exact_steps=chosen.exact_steps
    )
    return Assembled(engine=Engine(scheduler, executor), config=resources.config, facts=resources.facts)


@lru_cache(maxsize=32)
def _largest_measured(
    system: Baseline,
    key: backend.ModelKey,
    config: EngineConfig,
    chosen: Method,
    generation: GenerationConfig,
    longest: int,
    *,
    memory_bytes: int,
    fixed_bytes: int,
    most: int,
) -> FoundBatch:
    """Searched once per sweep."""
    from baselines.dllm.static.profile import static_batch_bytes

    model = backend.load(*key)
    rows = rows_of_request(longest, generation, chosen)

    def peak(size: int) -> int:
        try:
            held = static_batch_bytes(
                model,
                config,
                chosen,
                generation,
                longest=longest,
                rows_per_request=rows,
                batch_size=size,
                make_executor=lambda kv_rows: system.static_torch(model, config, chosen, kv_rows, batch_size=size),
            )
        except ExecutorError:  # out of memory: more than any limit there can be
            return memory_bytes + 1
        return fixed_bytes + held

    # What the model makes at its first step and keeps, such as its table of rotations, is no batch's.
    peak(1)
    return largest_batch(peak, memory_bytes, fixed_bytes=fixed_bytes, most=most)
