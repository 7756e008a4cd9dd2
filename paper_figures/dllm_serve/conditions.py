"""dLLM-Serve conditions: what leaving rows out saves, by load, prompt and tokens a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paper_figures.common.caption import basis_of
from paper_figures.common.figure import Page, Picture, cell_by_cell, table
from paper_figures.common.panel import Axis, Guide, Layer, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.dllm_serve.frontier import (
    CARD_REQUESTS,
    CARD_TOKENS,
    FAST_DLLM,
    POLICIES,
    THRESHOLD,
    Policy,
    followed,
    rows_per_request,
)
from paper_figures.dllm_serve.layout import dllm_figure
from repro.families.dllm.record import STEPS
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval, paired_ratio
from repro.runs.store import StoredRun

SHOWN = tuple(policy for policy in POLICIES if policy.is_fixed and not policy.name.endswith(("settled", "renewed")))
REQUESTS, PROMPT, PACE = "requests at once", "tokens of a prompt", "tokens a step"
BLOCK = 32
FOLLOWED = "mini-gsm in blocks of 32"
"""The setting whose measured blocks are followed if there is a threshold."""
THROUGHPUT = Measure(path="throughput_tok_s")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One change from the usual condition: 64 requests of Burst at once, one token a step."""

    axis: str
    value: str
    num_requests: int = CARD_REQUESTS
    input_len: int | None = None
    steps: int | None = CARD_TOKENS
    """None follows the steps of a measured run with a threshold."""

    def cell(self, view: View, policy: Policy) -> Cell:
        knobs: dict[str, Scalar] = {"gen_length": CARD_TOKENS, "block_length": BLOCK, "num_prompts": self.num_requests}
        knobs["steps"] = self.steps or CARD_TOKENS
        if self.input_len is not None:
            knobs["input_len"] = self.input_len
        if self.steps is None:
            knobs |= {"replay": followed(FOLLOWED, THRESHOLD, policy), "replay_drawn": True}
        return view.cell(None, policy.system, "burst", knobs=tuple({**knobs, **dict(policy.knobs)}.items()))


CONDITIONS = (
    *(Condition(axis=REQUESTS, value=str(count), num_requests=count) for count in (1, 4, 8, 16, 64, 200)),
    *(Condition(axis=PROMPT, value=str(length), input_len=length) for length in (50, 600, 3000)),
    *(Condition(axis=PACE, value=f"{CARD_TOKENS / steps:.2g}", steps=steps) for steps in (256, 128, 88, 64)),
    Condition(axis=PACE, value="threshold 0.9", steps=None),
)


def tokens_per_step(run: StoredRun) -> float:
    """Tokens that a request commits per step it takes part in."""
    steps = run.total(STEPS, "num_refresh") + run.total(STEPS, "num_reuse")
    return CARD_TOKENS * run.num_requests / max(1.0, steps)


def cells(view: View) -> list[Cell]:
    return cell_by_cell([condition.cell(view, policy) for condition in CONDITIONS for policy in SHOWN], view)


def faster(runs: Runs, condition: Condition, policy: Policy, base: Policy) -> Interval:
    view = runs.view
    ours, theirs = (runs.values(condition.cell(view, each), THROUGHPUT) for each in (policy, base))
    return paired_ratio(ours, theirs)


def named(runs: Runs, conditions: Sequence[Condition]) -> list[str]:
    """Name conditions by their value, and a threshold by the tokens that its steps committed."""
    return [
        each.value if each.steps else f"{runs.at(each.cell(runs.view, FAST_DLLM), tokens_per_step).mean or 0:.1f}"
        for each in conditions
    ]


def page(runs: Runs) -> Page:
    rows = [
        (condition, policy, run)
        for condition in CONDITIONS
        for policy in SHOWN
        for run in runs.of(condition.cell(runs.view, policy))
    ]
    columns = {
        "condition": lambda each: each[0].axis,
        "value": lambda each: each[0].value,
        "policy": lambda each: each[1].name,
        "seed": lambda each: each[2].cell.seed,
        "throughput_tok_s": lambda each: THROUGHPUT(each[2]),
        "tokens_per_step": lambda each: tokens_per_step(each[2]),
        "rows_per_request": lambda each: rows_per_request(each[2]),
        "obtained": lambda each: each[2].obtained,
        "valid": lambda each: each[2].validity.valid,
    }
    return Page(
        picture=Picture(panels=list(panels(runs)), caption=SAID, columns=3), csv=table(rows, columns), notes=SAID
    )


SAID = [
    f"LLaDA-8B, {CARD_TOKENS} tokens in blocks of {BLOCK}. Each panel moves one thing: otherwise {CARD_REQUESTS} requests of Burst at once, one "
    "token a step. The last pace is threshold 0.9, whose blocks commit as the embedded model's did. Ratios are paired by seed."
]


def panels(runs: Runs) -> Iterator[Panel]:
    for axis in (REQUESTS, PROMPT, PACE):
        own = [condition for condition in CONDITIONS if condition.axis == axis]
        layers: list[Layer] = [Guide(value=1.0)]
        for policy in SHOWN:
            if policy is FAST_DLLM:
                continue
            at = [faster(runs, each, policy, FAST_DLLM) for each in own]
            layers.append(
                Line(label=policy.name, places=list(range(len(own))), at=at, look=policy.look, names=named(runs, own))
            )
        yield Panel(
            title=axis,
            layers=layers,
            x=Axis(label=axis, ticks=range(len(own)), names=named(runs, own)),
            y=Axis(label="throughput over Fast-dLLM's rule", better="higher"),
        )


FIGURE = dllm_figure(
    "conditions",
    "ours; Fast-dLLM's dual cache (arXiv:2505.22618) is what ratios are over",
    platforms=("h200",),
    page=page,
    cells=cells,
    num_runs=3,
    decides_on=(),
    under_title=basis_of,
)
