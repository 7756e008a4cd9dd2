"""What a refresh rule of diffusion LLMs is held to."""

from collections.abc import Sequence
from typing import Any

from engines.dllm.config import EngineConfig, GenerationConfig, Phase, RefreshRule, SparsityConfig, check_rule
from engines.dllm.plan import Request
from engines.dllm.scheduling import PhaseScheduler
from engines.dllm.sequence import Sequence as Live
from engines.dllm.sequence import cache_rows
from repro.testing.properties import Kind, PlugIn, Property, Source, made
from repro.testing.schedulers import Case, charged, run

_SPARSITY = SparsityConfig()


class Refreshing(PlugIn):
    """The rule that ``make`` is, or gives; of a run every request has the same."""

    title = "refresh rule"
    methods = ("phase",)
    told = "without arguments"

    def first(self) -> RefreshRule:
        return self.rule()

    def rule(self) -> RefreshRule:
        found: RefreshRule = made(self.make)
        return found

    @property
    def lacks_data(self) -> str | None:
        needs = getattr(self.one, "needs", None)
        return f"it needs {', '.join(sorted(needs))}, which a model gives" if needs else None


def _requests(source: Source, subject: Refreshing) -> tuple[tuple[int, Request], ...]:
    """A few that begin at several steps; of one length as likely as not."""
    arrivals = []
    for index in range(source.whole(2, 6)):
        length = source.whole(1, 24)
        block = source.whole(1, length)
        steps = source.whole(-(-length // block), length + 4)
        generation = GenerationConfig(gen_length=length, block_length=block, steps=steps)
        request = Request(request_id=index, prompt_len=source.whole(1, 40), generation=generation)
        arrivals.append((source.whole(0, 10), request))
    return tuple(sorted(arrivals, key=lambda arrival: arrival[0]))


def _phases(rule: RefreshRule, arrivals: Sequence[tuple[int, Request]]) -> dict[int, list[Phase]]:
    """By request: the phases of its steps, where all that have begun run in every step and share the rule."""
    found: dict[int, list[Phase]] = {request.request_id: [] for _, request in arrivals}
    pending, live, step = [*arrivals], list[Live](), 0
    while pending or live:
        while pending and pending[0][0] <= step:
            live.append(Live(pending.pop(0)[1], rule, EngineConfig()))
        for sequence in live:
            found[sequence.request.request_id].append(sequence.phase)
            sequence.advance(sequence.quota)
        live = [sequence for sequence in live if not sequence.is_finished]
        step += 1
    return found


def _independence(subject: Refreshing, arrivals: Sequence[tuple[int, Request]]) -> None:
    together = _phases(subject.rule(), arrivals)
    for _, request in arrivals:
        which = request.request_id
        alone = _phases(subject.rule(), [(0, request)])[which]
        for step, (phase, other) in enumerate(zip(alone, together[which], strict=True)):
            if phase is not other:
                raise AssertionError(
                    f"step {step} of request {which} is {_said(phase)} alone and {_said(other)} beside {len(arrivals) - 1} others"
                )


def _said(phase: Any) -> str:
    return phase.value if isinstance(phase, Phase) else repr(phase)


def _due(subject: Refreshing, arrivals: Sequence[tuple[int, Request]]) -> None:
    """What its rule says of a block stands in every plan, and is a cache that is built before it is reused."""
    rule = subject.rule()
    requests = [request for _, request in arrivals]
    check_rule(rule, max(request.generation.steps for request in requests))
    rows = max(cache_rows(each.total_len, each.generation, _SPARSITY, rule.window) for each in requests)
    config = EngineConfig(max_num_batched_tokens=200, max_num_seqs=4, max_model_len=200)
    case = Case(config=config, kv_rows=3 * rows, rule=rule, exact_steps=False, arrivals=tuple(arrivals))
    expected = subject.rule()
    for index, plan in enumerate(run(PhaseScheduler, case, charged(case)).plans):
        for item in plan.items if plan is not None else ():
            due = expected.phase(item.step_in_block)
            if item.phase is not due:
                raise AssertionError(
                    f"step {index} runs step {item.step_in_block} of a block of request {item.request_id} as "
                    f"{_said(item.phase)}, where {_said(due)} is due"
                )


REFRESH_RULE: Kind[Refreshing] = Kind(
    name="refresh-rule",
    properties=(
        Property(
            name="independence of the batch",
            draw=_requests,
            check=_independence,
            without=lambda subject: subject.lacks_data,
        ),
        Property(name="due refreshes", draw=_requests, check=_due, without=lambda subject: subject.lacks_data),
    ),
)
