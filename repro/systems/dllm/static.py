"""How large a static batch is, and on what evidence (dLLM-Serve §6.1).

The paper gives no sizes, only that they are the largest that fit, found beforehand. ``batch_rule`` says what has to fit:
the workload's longest request, one of ``max_model_len`` tokens, or of each batch its own longest; or it says one request. What fits is known by the
memory model where a card is simulated, by the measured peak where the model runs ("preliminary profiling"). A batch that
was asked for is held to the same.

Upstream, what has to fit is what published code allocates, and a batch is one where published code serves one request
at a time. One request is run even where that allocation does not fit; ``oom_requests`` counts the requests for which it
would fail alone. On a real executor, where our code stands in for the published, only the batch differs from the largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from baselines.dllm.static.scheduler import check_in_step
from baselines.dllm.static.search import FoundBatch, StaticFootprint, largest_batch
from engines.errors import UserError, require
from repro.systems.dllm.deployment import Deployment
from repro.systems.dllm.knobs import BATCH_RULES, DEFAULT_BATCH_RULE


@dataclass(frozen=True, kw_only=True)
class Room:
    """Whether requests are a batch that fits in memory, padded to the longest of them."""

    deployment: Deployment
    is_upstream: bool

    def __call__(self, longest: int, members: int) -> bool:
        footprint = _footprint(self.deployment, longest, is_upstream=self.is_upstream)
        return footprint.peak_bytes(members) <= self.deployment.settings.memory_limit


def planned(deployment: Deployment, lengths: Sequence[int]) -> Deployment:
    """The deployment with its batch size, by the memory model; refuses what does not fit or cannot stay in step."""
    settings = deployment.settings
    asked, limit = settings.baseline.batch_size, settings.engine.max_num_seqs
    require(
        asked is None or asked <= limit,
        f"batch_size={asked} is more than max_num_seqs={limit} allows: ask for fewer, or raise max_num_seqs",
    )
    _check_rule(deployment)
    deployment = replace(deployment, longest=max(lengths))
    if settings.baseline.batch_rule == "batch":
        room = Room(deployment=deployment, is_upstream=deployment.batching.is_upstream)
        deployment = replace(deployment, room=room)
    most = most_members(deployment)
    check_in_step(settings.generation, deployment.sampler.decode, most)
    facts = dict(_planned(deployment, most) if asked is None else _asked(deployment, most))
    if deployment.batching.is_upstream and settings.is_simulated:
        # Longer requests take more: what fits is found in a few looks.
        ordered = sorted(lengths)
        fitting = bisect_right(
            ordered,
            settings.memory_limit,
            key=lambda length: _footprint(deployment, length, is_upstream=True).peak_bytes(1),
        )
        facts["oom_requests"] = len(ordered) - fitting
    return sized(deployment, facts)


def sized(deployment: Deployment, facts: Mapping[str, Any]) -> Deployment:
    """The deployment with a batch of ``facts['batch_size']``."""
    batch_size, settings = facts["batch_size"] or most_members(deployment), deployment.settings
    # The token budget is dLLM-Serve's currency; a static batch is bounded by memory alone.
    config = replace(deployment.config, max_num_batched_tokens=batch_size * settings.engine.max_model_len)
    rows = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    if deployment.room is not None:
        free = settings.memory_limit - _footprint(deployment, deployment.longest).fixed_bytes
        return replace(
            deployment,
            config=config,
            kv_rows=max(rows, min(batch_size * rows, free // settings.shape.kv_bytes_per_token)),
            batch_size=batch_size,
            facts=facts,
        )
    return replace(deployment, config=config, kv_rows=batch_size * rows, batch_size=batch_size, facts=facts)


def most_members(deployment: Deployment) -> int:
    """No batch is larger, whatever the memory."""
    settings, baseline = deployment.settings, deployment.settings.baseline
    most = min(settings.asked.num_prompts, settings.engine.max_num_seqs)
    if baseline.batch_size is not None:
        return min(most, baseline.batch_size)
    if baseline.batch_rule == "one":
        return 1
    if not deployment.batching.is_upstream:
        return most
    if not deployment.published.batches_upstream:
        return 1
    if deployment.room is not None:
        return most
    footprint = _footprint(deployment, member_tokens(deployment), is_upstream=True)
    return min(most, max(1, (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes))


def member_tokens(deployment: Deployment) -> int:
    """Tokens of the request that every member of a batch has to have room for."""
    settings = deployment.settings
    return settings.engine.max_model_len if settings.baseline.batch_rule == "max_model_len" else deployment.longest


def found_facts(found: FoundBatch, deployment: Deployment, most: int) -> Mapping[str, Any]:
    """Facts of a batch found by running batches of up to ``most``; one that was asked for has to be that large."""
    settings, asked = deployment.settings, deployment.settings.baseline.batch_size
    if asked is None:
        return _largest(found, deployment, "by the measured peak")
    if found.size < most:
        _refuse_batch(most, settings.memory_limit, found.size)
    return {"batch_size": found.size, "batch_obtained": _as_asked(asked, most), "batch_peak_bytes": found.peak_bytes}


def _planned(deployment: Deployment, most: int) -> Mapping[str, Any]:
    settings = deployment.settings
    if deployment.batching.is_upstream and settings.is_simulated:
        if not deployment.published.batches_upstream:
            return {"batch_size": most, "batch_obtained": "one request at a time, as published code serves"}
        rule = BATCH_RULES[settings.baseline.batch_rule]
        if deployment.room is not None:
            return {"batch_size": None, "batch_obtained": f"{rule}, in published code's memory"}
        return {"batch_size": most, "batch_obtained": f"{rule}, in published code's memory"}
    if deployment.room is not None:
        rule = BATCH_RULES[settings.baseline.batch_rule]
        return {"batch_size": None, "batch_obtained": f"{rule}, by the memory model"}
    footprint = _footprint(deployment, member_tokens(deployment))
    found = largest_batch(footprint.peak_bytes, settings.memory_limit, fixed_bytes=footprint.fixed_bytes, most=most)
    return _largest(found, deployment, "by the memory model")


def _largest(found: FoundBatch, deployment: Deployment, how: str) -> Mapping[str, Any]:
    rule = BATCH_RULES[deployment.settings.baseline.batch_rule]
    within = ", up to what published code could hold" if deployment.batching.is_upstream else ""
    return {"batch_size": found.size, "batch_obtained": f"{rule}, {how}{within}", "batch_peak_bytes": found.peak_bytes}


def _asked(deployment: Deployment, asked: int) -> Mapping[str, Any]:
    settings, is_upstream = deployment.settings, deployment.batching.is_upstream
    assert settings.baseline.batch_size is not None
    facts = {"batch_size": asked, "batch_obtained": _as_asked(settings.baseline.batch_size, asked)}
    if not settings.is_simulated:
        return facts
    footprint = _footprint(deployment, deployment.longest, is_upstream=is_upstream)
    peak = footprint.peak_bytes(asked)
    if peak > settings.memory_limit and (asked > 1 or not is_upstream):
        fitting = (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes
        _refuse_batch(asked, settings.memory_limit, max(0, fitting))
    return {**facts, "batch_peak_bytes": peak}


def _footprint(deployment: Deployment, longest: int, *, is_upstream: bool = False) -> StaticFootprint:
    settings = deployment.settings
    return deployment.published.footprint(
        settings.shape,
        deployment.sampler,
        settings.generation,
        memory_bytes=settings.memory_limit,
        longest=longest,
        is_upstream=is_upstream,
    )


def _check_rule(deployment: Deployment) -> None:
    method, baseline = deployment.published, deployment.settings.baseline
    if baseline.batch_rule == DEFAULT_BATCH_RULE:
        return
    require(
        baseline.batch_rule != "batch" or deployment.settings.is_simulated,
        "batch_rule='batch' needs executor='roofline', as batches of a measured run are found once: use workload or max_model_len",
    )
    given = f"batch_rule={baseline.batch_rule!r} has no effect with"
    require(baseline.batch_size is None, f"{given} batch_size={baseline.batch_size}: leave one of them out")
    require(
        method.batches_upstream or not deployment.batching.is_upstream,
        f"{given} system={method.name!r} and reading={baseline.reading!r}, whose code serves one request at a time: leave it out",
    )


def _as_asked(asked: int, size: int) -> str:
    return "asked for" if size == asked else f"asked for {asked}, all {size} requests"


def _refuse_batch(asked: int, memory_limit: int, fitting: int) -> NoReturn:
    raise UserError(
        f"batch_size={asked} does not fit into memory_limit={memory_limit}, which holds {fitting}: ask for no more, give "
        "more memory, or leave it out for the largest"
    )
