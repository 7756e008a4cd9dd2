"""What a worker does next: which prefills, how many tokens of each, and whether the decode batch comes along.

A batching policy sees the queue, the prefills it has begun, how many sequences decode and how many
tokens of K/V there is room for. It neither knows the time a step takes nor who asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.knobs import Checked, Count, Tokens
from engines.policies.step import IDLE, Share, Situation, StepPlan

CHUNK_TOKENS = 2048
"""vLLM's token budget of a step with chunked prefill."""


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """One whole prefill a step, before decoding (AMPD §3, footnote 3)."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        if at.begun:
            return StepPlan([Share(at.begun[0], at.begun[0].left)])
        if not at.queue or at.need_of(at.queue.peek(now)) > at.room:
            return IDLE
        task = at.queue.take(now)
        return StepPlan([Share(task, task.tokens)])


ONE_BY_ONE = OneByOne()


@dataclass(frozen=True, kw_only=True)
class _Limited(Checked):
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: Count = 256


@dataclass(frozen=True, kw_only=True)
class PrefillFirst(_Limited):
    """As many whole prefills as the token budget holds, at least one, before decoding (vLLM without chunking)."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        shares = [Share(task, task.left) for task in at.begun]
        budget = self.max_num_batched_tokens - sum(share.tokens for share in shares)
        places = self.max_num_seqs - at.decoding - len(shares)
        room = at.room
        while at.queue and places > 0:
            task = at.queue.peek(now)
            need = at.need_of(task)
            if need > room or (shares and task.tokens > budget):
                break
            at.queue.take(now)
            shares.append(Share(task, task.tokens))
            budget -= task.tokens
            room -= need
            places -= 1
        return StepPlan(shares) if shares else IDLE


@dataclass(frozen=True, kw_only=True)
class Chunked(_Limited):
    """Decodes first, prefills in what is left of the token budget, the last one in part (vLLM's chunked prefill)."""

    max_num_batched_tokens: Tokens = CHUNK_TOKENS

    def next_step(self, at: Situation, now: float) -> StepPlan:
        shares: list[Share] = []
        budget = max(self.max_num_batched_tokens - at.decoding, 1)
        for task in at.begun:
            tokens = min(task.left, budget)
            if tokens == 0:
                break
            shares.append(Share(task, tokens))
            budget -= tokens
        places = self.max_num_seqs - at.decoding - len(at.begun)
        room = at.room
        while at.queue and budget > 0 and places > 0:
            need = at.need_of(at.queue.peek(now))
            if need > room:
                break
            task = at.queue.take(now)
            tokens = min(task.tokens, budget)
            shares.append(Share(task, tokens))
            budget -= tokens
            room -= need
            places -= 1
        return StepPlan(shares, decodes=True) if shares else IDLE
