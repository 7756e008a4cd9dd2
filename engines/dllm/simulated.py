"""Charges step plans to a hardware model instead of running them: the same plans, no tokens.

A policy (a refresh rule, a scheduler, a method) that decides by a model's data must say so in ``needs``: a simulation lacks such data. A
policy that keeps state could hold such data unseen. So a rule must be a frozen dataclass, or say what it needs.

A replay (``Replayed``) follows a measured run at the cost of another card. The model decided how many tokens a step commits, when a rule
refreshes and where a request stops. None of this depends on the batch, so it stays the same in any other batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engines.cost.roofline import StepPrice, StepWork
from engines.dllm.config import EngineConfig, GenerationConfig, Phase, RefreshRule, Seen, is_constant
from engines.dllm.plan import POSITION_BYTES, DelegatingExecutor, Executor, PlanItem, Request, StepOutcome, StepPlan
from engines.dllm.sequence import Coming, Course, Tokens
from engines.errors import UserError, require
from engines.models.shape import ModelShape
from engines.runtime.step_timer import DeviceTimes

LETTERS = {"f": Phase.FULL, "b": Phase.BUILD, "p": Phase.PARTIAL, "r": Phase.REUSE}
"""The letter that stands for a step's phase in files."""


class BlockSteps(NamedTuple):
    """The steps of one block, as they ran."""

    phases: tuple[Phase, ...]
    committed: tuple[int, ...]
    stop: int | None = None
    """The place of the stop token that ended the block, or None."""


Path = tuple[BlockSteps, ...]


class RecordingExecutor(DelegatingExecutor):
    """Records what every request's steps did."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.steps: dict[int, dict[int, list[tuple[Phase, int]]]] = {}
        """Request id -> first position of a block -> its steps."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.execute(plan)
        for item, count in zip(plan.items, outcome.committed, strict=True):
            self.steps.setdefault(item.request_id, {}).setdefault(item.block_start, []).append((item.phase, count))
        return outcome


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The paths to follow, one for each request."""

    paths: Mapping[int, Path]

    def check(self, request: Request) -> None:
        path = self.paths.get(request.request_id)
        require(path is not None, f"replay has no request {request.request_id}: it asks other requests than its run")
        assert path is not None
        generation, lengths = request.generation, block_lengths(request.generation)
        stops = path[-1].stop is not None
        fits = [sum(block.committed) == length for block, length in zip(path, lengths, strict=False)]
        require(
            all(fits) and (len(path) == len(lengths) or stops),
            f"replay of request {request.request_id} has blocks of {', '.join(str(sum(b.committed)) for b in path)} tokens, "
            f"where gen_length={generation.gen_length} and block_length={generation.block_length} ask for others: give those "
            f"of the run",
        )


def block_lengths(generation: GenerationConfig) -> list[int]:
    ends = [*range(0, generation.gen_length, generation.block_length), generation.gen_length]
    return [after - before for before, after in pairwise(ends)]


class ReplayedRule:
    """Refreshes when the measured run did. It replaces a rule that sees what a model gives; any other rule is asked itself."""

    needs: Collection[str] = frozenset()

    def __init__(self, rule: RefreshRule, replayed: Replayed, path: Path = ()) -> None:
        """Each request has its own rule, with its ``path`` (``of``)."""
        self.caches, self.window = rule.caches, rule.window
        self._rule, self._replayed, self._path = rule, replayed, path
        self._block = -1

    def of(self, request: Request) -> "ReplayedRule":
        self._replayed.check(request)
        return ReplayedRule(self._rule, self._replayed, self._replayed.paths[request.request_id])

    def phase(self, step_in_block: int) -> Phase:
        self._block += step_in_block == 0
        phase = self._path[self._block].phases[step_in_block]
        return Phase.BUILD if phase is Phase.PARTIAL else phase  # the sequence turns it into a PARTIAL again

    def see(self, seen: Seen) -> None:
        return


class ReplayingExecutor(DelegatingExecutor):
    """Charges steps as ``executor`` does, but commits and stops as the measured run did."""

    def __init__(self, executor: Executor, replayed: Replayed) -> None:
        super().__init__(executor)
        self._replayed = replayed
        self._requests: dict[int, Request] = {}

    def validate(self, request: Request) -> None:
        self._replayed.check(request)
        self._requests[request.request_id] = request

    def release(self, request_id: int) -> tuple[int, ...] | None:
        del self._requests[request_id]
        return super().release(request_id)

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.execute(plan)
        committed, stops = [], {}
        for item in plan.items:
            request = self._requests[item.request_id]
            index = (item.block_start - request.prompt_len) // request.generation.block_length
            block = self._replayed.paths[item.request_id][index]
            committed.append(block.committed[item.step_in_block])
            if block.stop is not None and item.step_in_block == len(block.committed) - 1:
                stops[item.request_id] = item.block_start + block.stop
        return outcome._replace(committed=tuple(committed), stops=stops)


def redraw(paths: Collection[Path], requests: Sequence[Request], seed: int) -> Replayed:
    """Make paths for requests that differ from the run's. Each block follows a block of the same length, drawn evenly from the run by the
    request's number alone. A block that a stop token ended has all its steps; no request stops early."""
    by_length: dict[int, list[BlockSteps]] = {}
    for path in paths:
        for block in path:
            by_length.setdefault(sum(block.committed), []).append(block._replace(stop=None))
    new_paths = {}
    for request in requests:
        rng = np.random.default_rng([seed, request.request_id])
        chosen: list[BlockSteps] = []
        for length in block_lengths(request.generation):
            if length not in by_length:
                lengths = ", ".join(map(str, sorted(by_length))) or "none"
                raise UserError(
                    f"block_length={request.generation.block_length}: the run to replay has no block of {length} tokens, "
                    f"only of {lengths}: give a length of its blocks"
                )
            chosen.append(by_length[length][int(rng.integers(len(by_length[length])))])
        new_paths[request.request_id] = tuple(chosen)
    return Replayed(paths=new_paths)


class RooflineExecutor:
    """Charges each step by the roofline. It counts rows as the torch executors compute them, padding and monolithic logits included.

    Code that reduces logits through copies of all of them moves ``copied_bytes_per_logit`` more.
    """

    def __init__(self, roofline: StepPrice, config: EngineConfig, *, copied_bytes_per_logit: int = 0) -> None:
        self.roofline = roofline
        self.config = config
        self.copied_bytes_per_logit = copied_bytes_per_logit
        # Steps repeat: most of a simulation's time would go into pricing the same ones.
        self._seconds: dict[StepWork, tuple[float, float]] = {}
        self._coming, self._totals = Coming(5), [0] * 5
        self._block = lru_cache(maxsize=4096)(self._block_totals)
        self._notes = StepNotes() if roofline.calibration.notes_steps else None

    def validate(self, request: Request) -> None:
        check_simulated_generation(request.generation)

    def release(self, request_id: int) -> None:
        return None

    def wait(self) -> None:
        return

    def times(self) -> Mapping[int, DeviceTimes]:
        return {}

    def close(self) -> None:
        return

    def execute(self, plan: StepPlan) -> StepOutcome:
        self._coming = Coming(5)
        return self._charge_noted(plan, self.work(plan))

    def execute_again(
        self, plan: StepPlan, begun: Sequence[tuple[PlanItem, Course]], number: int, previous: StepOutcome | None
    ) -> StepOutcome:
        """Return what ``execute`` would for step ``number``. Items of ``plan`` may have the masks and settled rows of an earlier step of
        their block. ``begun`` holds the items in a new block, with its course. ``previous`` is the outcome of the same plan, if any."""
        config, pad_to = self.config, plan.pad_to
        if previous is not None and self._notes is None and not config.settling.settles:
            if pad_to is not None or config.logit_rows != "decomposed" or not config.suppress_mask_token:
                return previous
            self._totals[4] = previous.logit_rows - previous.committed_tokens
        else:
            padded_keys = max([item.kept_rows + item.window_len for item in plan.items]) if begun and pad_to else 0
            for item, course in begun:
                lengths = item.total_len, item.block_len, item.window_len, item.kept_rows, item.first_row
                totals = self._block(course, *lengths, pad_to or item.total_len, padded_keys)
                self._coming.add(number, totals[:, item.step_in_block :])
            self._totals = self._coming.at(number)
        return self._charge_noted(plan, work_of_totals(self._totals, plan, config))

    def _block_totals(
        self, course: Course, total_len: int, length: int, window: int, kept: int, first_row: int, whole: int, keys: int
    ) -> Tokens:
        """[5, steps of the block]: one request's share of the totals of ``work_of_totals``. A Refresh has ``whole`` rows, padding included; a Reuse
        of a padded batch reads ``keys`` keys."""
        config = self.config
        if config.sparsity.whole_layer is not None:
            kept = config.sparsity.mean_rows(kept, self.roofline.shape.n_layers)
        rows = course.rows(whole, window, total_len - first_row)
        read = course.rows(whole, keys or kept + window, total_len) + course.num_settled
        written = rows * (1 - course.is_refresh) + (kept + length * config.settling.settles) * course.is_build
        wanted = course.masks if config.suppress_mask_token else [length] * len(rows)
        return np.stack((rows, rows * read, read, written, np.array(wanted)))

    def _charge_noted(self, plan: StepPlan, work: StepWork) -> StepOutcome:
        return self.charged(plan, work if self._notes is None else self._notes.with_notes(plan, work))

    def charged(self, plan: StepPlan, work: StepWork) -> StepOutcome:
        price = self._seconds.get(work)
        if price is None:
            copied = with_copies(work, self.roofline.shape, self.copied_bytes_per_logit)
            price = self._seconds[work] = self.roofline.total_s(copied), self.roofline.lower_bound_s(work)
        duration, bound = price
        committed = tuple([item.commit for item in plan.items])
        return StepOutcome(committed, work.query_rows, work.logit_rows, duration, duration, bound_s=bound)

    def work(self, plan: StepPlan) -> StepWork:
        """Work of one step. Call it once for each step, in order, because some methods count the calls."""
        return step_work(plan, self.config, self.roofline.shape.n_layers)


def with_copies(work: StepWork, shape: ModelShape, bytes_per_logit: int) -> StepWork:
    """Return ``work`` with ``bytes_per_logit`` bytes per logit that are moved beyond what the head and one reader move."""
    if not bytes_per_logit:
        return work
    return work._replace(copied_logit_bytes=shape.vocab_rows * bytes_per_logit * work.logit_rows)


class StepNotes:
    """Adds facts that a step's cost may depend on, besides what it computes. It must see every step, in order."""

    def __init__(self) -> None:
        self._last: object = None

    def with_notes(self, plan: StepPlan, work: StepWork) -> StepWork:
        rows = [
            (i.request_id, i.phase, i.total_len, i.block_start, i.block_end, i.window_end, i.kept_rows, i.kv_start)
            for i in plan.items
        ]
        is_new, self._last = rows != self._last, rows
        return work._replace(new_layout=int(is_new), builds=int(any(i.phase is Phase.BUILD for i in plan.items)))


class BoundedExecutor(DelegatingExecutor):
    """Adds ``bound_s`` to the outcomes of ``executor``. ``meter`` is the simulated executor of the same method: it knows each step's work,
    and its roofline knows the card."""

    def __init__(self, executor: Executor, meter: RooflineExecutor) -> None:
        super().__init__(executor)
        self.meter = meter

    def execute(self, plan: StepPlan) -> StepOutcome:
        # The meter counts failed steps too. It comes second: a device that lags behind works meanwhile.
        try:
            outcome = self.executor.execute(plan)
        finally:
            bound_s = self.meter.execute(plan).bound_s
        return outcome._replace(bound_s=bound_s)

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self.meter.release(request_id)
        return super().release(request_id)


def step_work(plan: StepPlan, config: EngineConfig, num_layers: int = 1) -> StepWork:
    """The work that a plan asks of the hardware (dLLM-Serve §2.3): rows, attention pairs, logits, KV traffic. If one of ``num_layers``
    layers keeps every row and the others select, keys are those of the mean layer."""
    query_rows = pairs = read = written = wanted = 0
    # In a padded batch, every member attends over as many keys as the longest has.
    padded_keys = 0 if plan.pad_to is None else max([item.key_tokens for item in plan.items])
    settles, sparsity = config.settling.settles, config.sparsity
    selects = sparsity.whole_layer is not None
    for item in plan.items:
        kept = sparsity.mean_rows(item.kept_rows, num_layers) if selects else item.kept_rows
        if item.chosen.rows:
            rows, keys = item.query_tokens, len(item.chosen.keys) // POSITION_BYTES or item.total_len
            written += rows
        elif item.phase is Phase.REUSE:
            window = item.window_end - item.block_start
            rows, keys = window - item.settled_rows, padded_keys or kept + window
            written += rows
        elif item.phase is Phase.PARTIAL:
            rows, keys = item.total_len - item.first_row, item.total_len
            written += rows
        else:
            rows = keys = plan.pad_to or item.total_len
            if item.phase is Phase.BUILD:
                written += kept + (item.block_end - item.block_start if settles else 0)
        read += keys
        query_rows += rows
        pairs += rows * keys
        wanted += item.candidates if config.suppress_mask_token else item.block_end - item.block_start
    return work_of_totals((query_rows, pairs, read, written, wanted), plan, config)


def work_of_totals(totals: Sequence[int], plan: StepPlan, config: EngineConfig) -> StepWork:
    """Make the work of ``totals`` over a plan's items: query rows, attention pairs, K/V rows read and written, and wanted logit rows."""
    query_rows, pairs, read, written, wanted = totals
    if plan.pad_to is None and config.logit_rows == "decomposed":
        logit_rows, chunks = wanted, max(1, -(-wanted // config.max_num_logits))
    else:
        logit_rows, chunks = query_rows, 1
    return StepWork(query_rows, pairs, logit_rows, read, written, len(plan.items), logit_chunks=chunks)


DATA = ("confidences", "ids", "attention")
"""Data that only a model gives: confidences of a step's tokens, token ids (prompts included), and what the model attended to."""


def check_simulated(kind: str, policy: object, *, keeps_state: bool = False) -> None:
    """Raise UserError for a policy that cannot be simulated; ``keeps_state`` if policies of its kind keep state to do their work."""
    name = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    needs: Collection[str] | None = getattr(policy, "needs", None)
    is_set = isinstance(needs, Collection) and not isinstance(needs, str)
    if needs is not None and not (is_set and all(need in DATA for need in needs)):
        raise UserError(f"{kind} {name} has needs={needs!r}: give a set of {' and '.join(DATA)}")
    if needs:
        names = " and ".join(sorted(needs))
        raise UserError(
            f"{kind} {name} needs {names}, which a simulation does not know, they depend on the model: use --executor torch"
        )
    if needs is None and not keeps_state and not is_constant(policy):
        raise UserError(
            f"{kind} {name} may change while it runs, and a simulation has no data that it could change by: make it a frozen "
            f"dataclass, or say what it needs (needs = frozenset(), or of {' and '.join(DATA)})"
        )


def check_simulated_generation(generation: GenerationConfig) -> None:
    """Raise UserError for a request if only the model knows how many steps it takes, or what they cost."""
    reasons = {
        "stop_at_eos": "where a request ends depends on the model",
        "threshold": "how many tokens pass it depends on the model",
        "factor": "how many tokens pass it depends on the model",
        "anchor_threshold": "how many tokens pass it depends on the model",
        "cfg_scale": "its second forward has no cost here",
    }
    for name, reason in reasons.items():
        value = getattr(generation, name)
        require(not value, f"{name}={value} cannot be simulated, {reason}: use --executor torch")
