"""``ServedEngine`` for the torch worker: a request is a session of one round, told token by token.

``ServedAr`` takes requests as they come, ends them at their end token, and drops them when they are cancelled.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from engines.ar.sampling import Logprobs, SamplingParams, check_vocabulary
from engines.cluster.sessions import Round, Session
from engines.errors import RunError, require
from engines.policies.views import Batching, NextStep, PrefillQueue, PrefillTask, Situation
from engines.server.protocol import Admitted, EngineStatus, Event, Failed, Finished, PromptScored, Submission, Tokens

if TYPE_CHECKING:
    from engines.ar.torch import rows
    from engines.ar.torch.executor import PagedExecutor
    from engines.ar.torch.worker import Step

Ints = NDArray[np.int64]

_LONGEST_WAIT_S = 0.001
"""Longest wait of a policy that waits for more requests; between waits we read commands."""


@dataclass(frozen=True, kw_only=True)
class ArGeneration(SamplingParams):
    """A request's settings. Without ``max_tokens`` it gets ``default_tokens``, or as many of them as the model's positions leave.

    ``stop_token_ids`` end an answer, as do the model's own ends, unless ``ignores_eos`` makes these ordinary tokens.
    """

    max_tokens: int | None = None
    default_tokens: int = 256
    ignores_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def check_ids(self, vocabulary: int) -> None:
        super().check_ids(vocabulary)
        check_vocabulary("stop_token_ids", self.stop_token_ids, vocabulary)

    def length(self, prompt_tokens: int, max_model_len: int) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        return max(1, min(self.default_tokens, max_model_len - prompt_tokens))


@dataclass(frozen=True, kw_only=True)
class AtMost:
    """Bounds the running sequences for a policy that does not: we tell it that each task needs an equal share of the room or more."""

    passes_on: ClassVar = True

    batching: Batching
    max_num_seqs: int

    def next_step(self, at: Situation, now: float) -> NextStep:
        places = self.max_num_seqs - at.decoding - len(at.begun)
        if places <= 0:
            return self.batching.next_step(at._replace(room=0), now)
        share = -(-at.room // places)

        def need_of(task: PrefillTask) -> int:
            return max(at.need_of(task), share)

        return self.batching.next_step(at._replace(need_of=need_of), now)


@dataclass(slots=True, eq=False)
class _Request:
    request_id: int
    prompt: Ints
    end_ids: frozenset[int]
    wants_tokens: bool
    generation: ArGeneration
    sequence: "rows.SessionState"
    length: int
    """Most tokens of its answer."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """Log probabilities of the ids that are not told yet, if the request asks for them."""
    num_told: int = 0
    has_begun: bool = False

    def take_logprobs(self) -> Logprobs | None:
        taken, self.logprobs = self.logprobs, []
        return Logprobs.joined(taken) if taken else None


class ServedAr:
    """Serves a causal model. ``queue`` can drop a waiting task (``OpenQueue``). ``end_ids`` end an answer; ``budget`` is the
    most tokens that the policy packs into a step. ``keeps`` keeps the K/V of answers for prompts that continue them."""

    def __init__(
        self,
        executor: "PagedExecutor",
        batching: Batching,
        queue: PrefillQueue,
        *,
        end_ids: frozenset[int],
        budget: int,
        keep_kv: bool = True,
        estimate_s: Callable[[int, int], float] | None = None,
    ) -> None:
        from engines.ar.torch.worker import TorchWorker

        self._worker = TorchWorker(executor, batching, queue, self, estimate_s)
        self._end_ids, self._budget, self._keep_kv = end_ids, budget, keep_kv
        self._requests: dict[int, _Request] = {}
        self._events: list[Event] = []
        self._began_s = time.perf_counter()
        self._last: Step | None = None
        self._forward_passes = self._committed_tokens = 0
        self._counts = {"prefilled_tokens": 0, "reused_tokens": 0}
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, submission: Submission) -> None:
        request_id, prompt_ids, generation, wants_tokens = submission
        assert isinstance(generation, ArGeneration)
        worker, tables = self._worker, self._worker.executor.tables
        prompt, room = np.array(prompt_ids, dtype=np.int64), tables.num_blocks * tables.block_size
        length = generation.length(len(prompt), tables.max_len)
        require(
            len(prompt) + length <= room,
            f"prompt of {len(prompt)} tokens and max_tokens={length} make more than the {room} tokens of K/V there is room "
            f"for: shorten the prompt, ask for fewer tokens, or start the server with more --kv-tokens",
        )
        now, vocabulary = self._now(), worker.executor.model.config.vocab_size
        ends = (frozenset() if generation.ignores_eos else self._end_ids).union(generation.stop_token_ids)
        sampling = replace(
            generation, prompt_tokens=len(prompt), end_ids=tuple(sorted(token for token in ends if token < vocabulary))
        )
        sequence = worker.add(Session(request_id, now, (Round(len(prompt), length),)), sampling)
        sequence.left = length
        request = _Request(request_id, prompt, ends, wants_tokens, generation, sequence, length)
        self._requests[request_id] = request
        if self._keep_kv and generation.prompt_logprobs is None:  # these need all of the prompt's rows
            worker.adopt(sequence, prompt)
        history = sequence.context
        worker.enqueue(sequence, "incremental" if history else "initial", history, len(prompt) - history, now)

    def cancel(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._worker.drop(request.sequence)

    def step(self) -> Sequence[Event]:
        worker, began_s = self._worker, time.perf_counter()
        self._events = []
        now, decodes = self._now(), worker.decode.size > 0
        plan = worker.next_plan(now)
        if worker.can_run(plan, now):
            step = self._last = worker.compute(plan, now)
            self._forward_passes += 1
            self._counts["prefilled_tokens"] += sum(share.tokens for share in step.shares)
            worker.settle(step, self._now())
            self._busy_s += time.perf_counter() - began_s
        elif not decodes:  # otherwise all were preempted, and we ask the policy again
            self._wait(plan, now)
        return self._events

    def give_up(self, sentence: str) -> Sequence[Event]:
        lost = [self._request_of(sequence) for sequence in self._worker.abandon()]
        for request in lost:
            del self._requests[request.request_id]
        return [Failed(request.request_id, sentence) for request in lost]

    def status(self) -> EngineStatus:
        worker, last = self._worker, self._last
        tables, waiting = worker.executor.tables, len(worker.queue)
        running = len(worker.sequences) - waiting
        prefill, decode = (0, 0) if last is None or not running else (len(last.shares), last.decoding)
        tokens = 0 if last is None or not running else sum(share.tokens for share in last.shares) + decode
        idle = worker.memory.idle_blocks
        return EngineStatus(
            waiting=waiting,
            running=running,
            phases={"prefill": prefill, "decode": decode},
            budget_used=tokens,
            budget=self._budget,
            pool_used=(tables.num_blocks - tables.num_free - idle) * tables.block_size,
            pool_idle=idle * tables.block_size,
            pool=tables.num_blocks * tables.block_size,
            forward_passes=self._forward_passes,
            committed_tokens=self._committed_tokens,
            busy_s=self._busy_s,
            counts={**self._counts, "preemptions": worker.num_preemptions},
        )

    # ---- what the worker asks and tells -------------------------------------------------------------------

    def ids(self, sequence: "rows.SessionState", start: int) -> Ints:
        return self._request_of(sequence).prompt[start:]

    def hear(self, sequence: "rows.SessionState", token: int) -> bool:
        request = self._request_of(sequence)
        if not request.token_ids and request.generation.prompt_logprobs is not None:
            parts, sequence.prompt_logprobs = sequence.prompt_logprobs, []
            self._events.append(PromptScored(request.request_id, Logprobs.joined(parts) if parts else None))
        request.token_ids.append(token)
        if request.generation.logprobs is not None and sequence.logprobs is not None:
            request.logprobs.append(sequence.logprobs)
        self._committed_tokens += 1
        is_over = token in request.end_ids
        if request.wants_tokens and not is_over and len(request.token_ids) < request.length:
            self._events.append(Tokens(request.request_id, (token,), request.take_logprobs()))
            request.num_told += 1
        return is_over

    def began(self, sequence: "rows.SessionState", now: float) -> None:
        request = self._request_of(sequence)
        if not request.has_begun:
            request.has_begun = True
            self._events.append(Admitted(request.request_id))

    def prefilled(self, sequence: "rows.SessionState", task: PrefillTask, now: float) -> None:
        self._counts["reused_tokens"] += task.history

    def done(self, sequence: "rows.SessionState", now: float) -> None:
        request = self._request_of(sequence)
        ids = tuple(request.token_ids[request.num_told :])
        self._events.append(Finished(request.request_id, ids, request.take_logprobs()))
        del self._requests[request.request_id]
        if self._keep_kv:
            self._worker.keep(sequence, np.concatenate([request.prompt, request.token_ids]).astype(np.int64))
        else:
            self._worker.drop(sequence)

    # ---- in between -----------------------------------------------------------------------------------------

    def _request_of(self, sequence: "rows.SessionState") -> _Request:
        return self._requests[sequence.session.session_id]

    def _wait(self, plan: NextStep, now: float) -> None:
        """Wait while nothing runs: the policy waits for more requests. Raises RunError if it does not say until when."""
        if plan.wake_s is None:
            raise RunError("the scheduler leaves waiting prompts where they are, though nothing runs")
        time.sleep(min(max(plan.wake_s - now, 0.0), _LONGEST_WAIT_S))

    def _now(self) -> float:
        return time.perf_counter() - self._began_s
