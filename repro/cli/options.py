"""Options that several commands share, and what a text given for one means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from engines.errors import UserError
from engines.knobs import Checked, Range

if TYPE_CHECKING:
    from repro.runs.pool import Pool
    from repro.runs.store import Store

WHAT, WORKLOAD, SERVER, ENGINE, DECODING, METHOD, RUNS = (
    "What is run",
    "Workload",
    "Server",
    "Engine",
    "Decoding",
    "Method and cache",
    "Runs and output",
)
PANELS = (WHAT, WORKLOAD, SERVER, ENGINE, DECODING, METHOD, RUNS)
"""Panels of a help, in their order."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.", rich_help_panel=RUNS)]
ResultDir = Annotated[Path | None, typer.Option(help="Where runs are [default: results/local].", rich_help_panel=RUNS)]
OtherCode = Annotated[
    bool,
    typer.Option(
        "--accept-other-code", help="Reuse stored runs that other code made, and mark them.", rich_help_panel=RUNS
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, list the runs and why each would run.", rich_help_panel=RUNS),
]
ContinueOnError = Annotated[
    bool, typer.Option("--continue-on-error", help="Go on with the next run after a failure.", rich_help_panel=RUNS)
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw the runs into this file, .png or .pdf, with a CSV of the same name beside it.", rich_help_panel=RUNS
    ),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        help="Seed of arrivals, lengths, prompts and sampling; several times [default: 0].", rich_help_panel=WORKLOAD
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths, prompts and sampling.", rich_help_panel=WORKLOAD)]
DatasetPath = Annotated[
    Path | None, typer.Option(help="Local file in a format of the dataset's card.", rich_help_panel=WORKLOAD)
]
KnobTexts = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE of a system's setting that no option is for; several times ('repro list --knobs SYSTEM').",
        rich_help_panel=ENGINE,
    ),
]

RATES = Range(above=0, most=1e6)
"""Requests/s."""


@dataclass(frozen=True, kw_only=True)
class Charged:
    """What simulated steps are charged by (``CostKnobs``), where that is asked for."""

    panel: ClassVar[str] = WHAT
    cost: Literal["roofline", "composed"] | None = None
    """What a simulated step takes: composed of kernel times that others measured on the card, or by its roofline [default:
    composed, by the roofline on a card without such times]."""
    kernels: Literal["vllm", "sglang", "trtllm"] | None = None
    """Whose kernels composed steps are made of [default: vllm; of LAPS sglang]."""

    @property
    def charged(self) -> dict[str, Any]:
        return given(cost=self.cost, kernels=self.kernels)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs are made."""

    panel: ClassVar[str] = RUNS
    pool: str = "local"
    """Where runs are made: local, on this machine, or ray, on a cluster."""
    address: str | None = None
    """With --pool ray: a cluster that is there, auto or host:port [default: one started for the command]."""

    def opened(self) -> AbstractContextManager[Pool]:
        from repro.runs.sweep import pool_of

        return pool_of(self.pool, self.address, getattr(self, "jobs", None))


@dataclass(frozen=True, kw_only=True)
class Placement(Place, Checked):
    """And how many at once, of simulated ones."""

    jobs: Annotated[int, Range(1, 1024)] | None = None
    """Simulated runs at once [default: as many as pay, at most one a core that may be used]."""


@dataclass(frozen=True, kw_only=True)
class Reused:
    """Which runs are reused, and where they are."""

    result_dir: ResultDir = None
    accept_other_code: OtherCode = False

    @property
    def root(self) -> Path:
        from repro.paths import LOCAL

        return self.result_dir or LOCAL

    @property
    def store(self) -> Store:
        from repro.runs.store import Store

        return Store(self.root, accept_other_code=self.accept_other_code)


@dataclass(frozen=True, kw_only=True)
class Stored(Reused):
    """And whether any are."""

    panel: ClassVar[str] = RUNS
    force: bool = False
    """Run again what is already stored."""


def given(**options: Any) -> dict[str, Any]:
    """The options the user set; what is None keeps its default further down."""
    return {name: value for name, value in options.items() if value is not None}


def of_data_file(path: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """A file that is named is where the data are, unless something else is said."""
    if path is None:
        return {}
    return {"dataset_path": str(path), "dataset_source": given.get("dataset_source", "local")}


def parse_rate(text: str) -> float | None:
    """Requests per second; 'inf' (everything at once) is None."""
    if text == "inf":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise UserError(f"request_rate={text!r} must be a positive number of requests/s, or 'inf'")
    if not RATES.allows(rate):
        raise UserError(f"request_rate={text} {RATES.refusal(rate)}")
    return rate


def parse_knobs(texts: Sequence[str], given: Mapping[str, Any], *, several: bool = False) -> dict[str, Any]:
    """``NAME=VALUE`` of knobs without an option; a value that is JSON (a number, true) is that, else text. Where there may be
    ``several`` of a knob, they are a tuple."""
    from repro.runs.cell import COMPARISON, NOTES

    knobs: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise UserError(f"knob={text!r} is no setting: write NAME=VALUE")
        if name in (*NOTES, COMPARISON):
            raise UserError(f"knob={text!r} is a note about a run and asks nothing of it: leave it out")
        if name in given or (name in knobs and not several):
            raise UserError(f"knob={text!r} is given more than once: keep one")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        one = value if isinstance(parsed, list | dict) else parsed
        knobs.setdefault(name, []).append(one)
    return {name: values[0] if len(values) == 1 else tuple(values) for name, values in knobs.items()}


def with_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """One token a step where the length is set and the steps are not."""
    return {"steps": given["gen_length"], **given} if "gen_length" in given else dict(given)
