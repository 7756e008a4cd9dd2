"""Figures and tables by name. The harness never imports ``paper_figures`` directly: a figure's module is found and imported when the figure
is requested."""

import csv
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from engines.data import import_path_of, installed, load_module, load_named
from engines.errors import UserError, require
from engines.knobs import Checked, Range, knobs_of, with_knobs
from repro import paths
from repro.families.cost import CostKnobs
from repro.families.dllm.settings import SIMULATED_READING, BaselineKnobs, ReadingName
from repro.families.platforms import PLATFORMS, DllmPart, Platform
from repro.paths import PAPER as CLAIMS
from repro.paths import REPO
from repro.runs.cell import COMPARISON, Cell, Scalar

if TYPE_CHECKING:
    from repro.reports.claims import Finding
    from repro.runs.record import Obtained
    from repro.runs.store import StoredRun


Accuracy = Literal["usual", "dense"]
"""usual: each system keeps its usual share; dense: the least share at which it answers like the model without a cache."""
TASKS = ("mini-code", "mini-gsm")
RETENTIONS = (0.5, 0.7, 0.9, 0.95, 0.98, 1.0)
DENSE = "llada"
"""The model without a cache: the reference for every cache rule."""
SINGLE_REFRESH = "single-refresh"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A system with a cache rule. ``contender`` is the system's name, or that of a variant that is compared like a system."""

    contender: str
    system: str
    rule: str
    """The cache rule in words."""
    knobs: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The share of ``n`` problems of a task that were solved. ``low`` and ``high`` are Wilson's 95 % interval."""

    share: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def _retentions(contender: str, system: str, *knobs: tuple[str, Scalar]) -> list[Configuration]:
    return [
        Configuration(
            contender=contender,
            system=system,
            rule=f"{100 * ratio:g} % of the context",
            knobs=(*knobs, ("retention_ratio", ratio)),
        )
        for ratio in RETENTIONS
    ]


CONFIGURATIONS: tuple[Configuration, ...] = (
    *_retentions("dllm-serve", "dllm-serve"),
    *_retentions(SINGLE_REFRESH, "dllm-serve", ("refresh_delay", 0)),
    *_retentions("sparse-dllm", "sparse-dllm"),
    Configuration(contender="fast-dllm", system="fast-dllm", rule="dual cache"),
    Configuration(contender="fast-dllm", system="fast-dllm", rule="prefix cache", knobs=(("cache", "prefix"),)),
    Configuration(contender="dllm-cache", system="dllm-cache", rule="features, response every 7 steps"),
    Configuration(contender=DENSE, system="llada", rule="no cache"),
)
"""Configurations by contender; the one that keeps or computes least comes first."""

_DECIDING = frozenset(
    (
        *("retention_ratio", "refresh_delay", "cache", "selection", "pool_kernel", "whole_layer", "compat"),
        *("threshold", "factor", "settle_after", "full_every", "renew_at", "preset", "prompt_interval", "gen_interval"),
        *("transfer_ratio", "temperature", "remasking", "cfg_scale"),
    )
)
"""Knobs that decide which tokens are committed."""
Table = Mapping[tuple[str, str, str], Solved]
"""(contender, cache rule, task) -> the share that is solved."""


@functools.cache
def accuracies(path: Path = paths.ACCURACY) -> Table:
    """Read the committed table (``repro reproduce accuracy``), by each task's usual criterion."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["is_strict"] == "false"]
        table = {
            (row["contender"], row["rule"], row["task"]): Solved(
                share=float(row["accuracy"]), low=float(row["low"]), high=float(row["high"]), n=int(row["n"])
            )
            for row in rows
        }
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} holds no accuracies ({type(error).__name__}): make it by 'repro reproduce accuracy --out-dir {path.parent}'"
        ) from error
    return table


def solved_by(configuration: Configuration, task: str, table: Table | None = None) -> Solved | None:
    solved = accuracies() if table is None else table
    return solved.get((configuration.contender, configuration.rule, task))


def is_dense(configuration: Configuration, table: Table | None = None) -> bool:
    """Whether the configuration solves, in every task, at least the lower end of dense's interval."""
    solved = accuracies() if table is None else table
    for task in TASKS:
        ours, dense = solved_by(configuration, task, solved), solved.get((DENSE, "no cache", task))
        if ours is None or dense is None or ours.share < dense.low:
            return False
    return True


def at_dense_accuracy(contender: str, table: Table | None = None) -> Configuration:
    """The contender's configuration that keeps least among those that answer like the model without a cache."""
    candidates = [config for config in CONFIGURATIONS if config.contender == contender]
    for config in candidates:
        if is_dense(config, table):
            return config
    raise UserError(
        f"contender={contender!r} has no configuration within the interval of dense: add one to CONFIGURATIONS"
    )


def configuration_of(system: str, knobs: Mapping[str, Scalar]) -> Configuration | None:
    """The configuration of a run's knobs, if its accuracy was measured; else None."""
    deciding = {name: value for name, value in knobs.items() if name in _DECIDING}
    defaults: dict[str, Scalar] = {"retention_ratio": 0.5} if system in ("dllm-serve", "sparse-dllm") else {}
    if deciding.get("refresh_delay") == 1:
        del deciding["refresh_delay"]
    wanted = {**defaults, **deciding}
    return next((config for config in CONFIGURATIONS if config.system == system and dict(config.knobs) == wanted), None)


Knobs = tuple[tuple[str, Scalar], ...]
PICTURES: ContextVar[Literal["whole", "plain", "none"]] = ContextVar("PICTURES", default="whole")
"""How figures are drawn. whole: PNG and PDF; plain: both without title and caption; none: only the numbers and words."""


@contextmanager
def pictures(kind: Literal["whole", "plain", "none"]) -> Iterator[None]:
    """Draw figures in this way inside the block."""
    token = PICTURES.set(kind)
    try:
        yield
    finally:
        PICTURES.reset(token)


@dataclass(frozen=True, kw_only=True)
class View(Checked):
    """A request for a figure: its platform, the reading of the baselines, and the number of repeats."""

    platform: Platform
    reading: ReadingName
    num_runs: Annotated[int, Range(1, 1000)] = 1
    """Repeats with seeds 0, 1, ...: other arrivals, lengths and prompts."""
    knobs: Knobs = ()
    """Knobs set in every cell that does not set them itself: the weights of a measured run, or fewer requests."""
    rates: tuple[float, ...] = ()
    """Arrival rates in place of the platform's, requests/s."""
    accuracy: Accuracy = "usual"
    """usual: each system at its usual retention; dense: at the least retention at which it answers like the model without a cache."""
    is_grouped: bool = True
    """Whether compared measured cells are made in one sitting. A suite on a machine of its own does not need it."""

    @property
    def seeds(self) -> range:
        return range(self.num_runs)

    @property
    def dllm(self) -> DllmPart:
        """The platform's defaults for diffusion-LLM systems."""
        part = self.platform.part(DllmPart)
        return replace(part, rates=self.rates, panel_rates={}) if self.rates else part

    @property
    def obtained(self) -> "Obtained":
        return self.charged.obtained if self.is_simulated else "measured"

    @property
    def is_simulated(self) -> bool:
        return self.platform.executor == "roofline"

    @property
    def charged(self) -> CostKnobs:
        """The cost model that prices simulated steps."""
        knobs = with_knobs(CostKnobs(), {name: value for name, value in self.knobs if name in knobs_of(CostKnobs)})
        return knobs.on(self.platform.gpu)

    @property
    def charged_options(self) -> list[str]:
        """The options that give a command the same cost model."""
        return [f"--{name} {value}" for name, value in self.knobs if name in knobs_of(CostKnobs)]

    @property
    def stem(self) -> str:
        """The ending of the figure's file names."""
        platform = self.platform
        parts = [platform.name.rpartition(":")[2].lower()]
        if platform.name in PLATFORMS and PLATFORMS.get(platform.name).executor != platform.executor:
            parts.append("simulated" if self.is_simulated else "measured")
        parts += [str(value) for name, value in self.knobs if name in knobs_of(CostKnobs)]
        if self.reading != default_reading(platform):
            parts.append(self.reading)
        if self.accuracy != "usual":
            parts.append(self.accuracy)
        return "-".join(parts)

    def cell(
        self,
        figure: str | None,
        system: str,
        dataset: str,
        *,
        rate: float | None = None,
        seed: int = 0,
        knobs: Knobs = (),
    ) -> Cell:
        """A cell of a figure on this view's platform. ``applied`` adds the view's own knobs."""
        return Cell(
            figure=figure,
            system=system,
            dataset=dataset,
            platform=self.platform.name,
            executor=self.platform.executor,
            rate=rate,
            seed=seed,
            knobs=knobs,
        )

    def applied(self, cell: Cell) -> Cell:
        """A figure's cell as this view runs it."""
        return replace(cell, knobs=tuple({**dict(self.knobs), **cell.knob_values}.items())) if self.knobs else cell

    def together(self, comparison: str) -> Knobs:
        """The knob that puts a measured cell into a comparison, whose cells are measured in one sitting."""
        if self.is_simulated or not self.is_grouped:
            return ()
        parts: list[str] = [] if self.reading == default_reading(self.platform) else [self.reading]
        parts += [] if self.accuracy == "usual" else [self.accuracy]
        return ((COMPARISON, "-".join([comparison, *parts])),)

    def baseline_knobs(self) -> Knobs:
        """The knob that gives a baseline's cell this reading; empty for a measured cell's default reading."""
        is_default = self.obtained == "measured" and self.reading == default_reading(self.platform)
        return () if is_default else (("reading", self.reading),)


def default_reading(platform: Platform) -> ReadingName:
    is_simulated = platform.executor == "roofline"
    return SIMULATED_READING if is_simulated else BaselineKnobs.reading


MEASURED_RUNS = 3
"""Default repeats of a measured figure: the fewest with a useful interval (t = 4.3; it is 12.7 for two)."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The files of a drawn figure, and the table and notes that the terminal shows."""

    files: tuple[Path, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure or table: its runs, how it is drawn, and its findings on the paper's claims."""

    title: str
    source: str
    """Figure and section of the paper."""
    platforms: tuple[str, ...]
    """Platforms drawn by default, each into its own figure file."""
    cells: Callable[[View], list[Cell]]
    """The grid of runs behind it; empty if arithmetic is enough."""
    render: "Callable[[Sequence[StoredRun], View, Path], Rendered]"
    """Draws stored runs into a folder: <name>-<stem>.png, .pdf and the .csv behind them."""
    findings: "Callable[[Sequence[StoredRun], View], list[Finding]]" = lambda runs, view: []
    num_runs: int = 1
    """Repeats that answer claims: more than one if a single seed would be an anecdote."""
    is_timed: bool = True
    """False if repeated measured runs give the same result: a figure of memory or accuracy."""
    decides_on: tuple[str, ...] | None = None
    """Platforms whose runs answer claims; None means all platforms that it is drawn for."""
    place: Callable[[Platform], str] = lambda where: where.title
    """Names the platform: its title, or that of its part for another family's model."""

    @property
    def deciding(self) -> tuple[str, ...]:
        return self.platforms if self.decides_on is None else self.decides_on

    def default_num_runs(self, target: Platform) -> int:
        return MEASURED_RUNS if self.is_timed and target.executor != "roofline" else self.num_runs


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    """A figure that can be loaded by name. ``name`` is ``paper/figure``."""

    name: str
    title: str
    module: str

    @property
    def alias(self) -> str:
        """The name for a command: bare if no earlier paper has the same, or the module and a colon if no package names its paper."""
        paper, _, bare = self.name.partition("/")
        if self.name in FIGURES:
            return bare if figure(bare).name == self.name else self.name
        return self.name if paper in installed("paper") else f"{self.module}:"

    def load(self) -> Figure:
        """The module's ``FIGURE``, or a figure made from the module's top-level names."""
        module = load_module("figure", self.name, self.module)
        if isinstance(declared := getattr(module, "FIGURE", None), Figure):
            return declared
        for name in ("TITLE", "SOURCE", "PLATFORMS", "cells", "render"):
            require(
                hasattr(module, name), f"figure={self.name!r} is no module of a figure, it has no {name!r}: name one"
            )
        names = (field.name for field in fields(Figure))
        attrs = {name: getattr(module, key) for name in names for key in (name, name.upper()) if hasattr(module, key)}
        return Figure(**attrs)


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper whose figures are modules of one package and whose claims are in a YAML file."""

    name: str
    title: str
    package: str
    figures: Mapping[str, str]
    """Figure name (its module's, with hyphens) -> what it draws."""
    claims: Path

    @property
    def entries(self) -> tuple[FigureEntry, ...]:
        return tuple(
            FigureEntry(
                name=f"{self.name}/{name}",
                title=f"{self.title} {subtitle}",
                module=f"{self.package}.{name.replace('-', '_')}",
            )
            for name, subtitle in self.figures.items()
        )


def _paper(name: str, title: str) -> Paper:
    """A paper with figures in a folder of ``paper_figures``. Each module's first line, after the title, says what it draws."""
    folder, figures = name.replace("-", "_"), {}
    for path in sorted((REPO / "paper_figures" / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nFIGURE = " in text:
            line = text.partition("\n")[0].strip('"').removesuffix(".")
            figures[path.stem.replace("_", "-")] = line.removeprefix(f"{title} ")
    claims = CLAIMS / folder / "claims.yaml"
    return Paper(name=name, title=title, package=f"paper_figures.{folder}", figures=figures, claims=claims)


DLLM_SERVE = _paper("dllm-serve", "dLLM-Serve")
AMPD = _paper("ampd", "AMPD")
LAPS = _paper("laps", "LAPS")
BLOCK = _paper("block", "Block diffusion")
"""Not a paper: results published by projects that serve such models."""

PAPERS: Mapping[str, Paper] = MappingProxyType({paper.name: paper for paper in (DLLM_SERVE, AMPD, LAPS, BLOCK)})
FIGURES: Mapping[str, FigureEntry] = MappingProxyType(
    {entry.name: entry for paper in PAPERS.values() for entry in paper.entries}
)


def paper(name: str) -> Paper:
    """Return one of ``PAPERS``, a paper of an installed package, or any other as ``module:NAME``."""
    if name in PAPERS:
        return PAPERS[name]
    loaded: Paper = load_named("paper", import_path_of("paper", name, PAPERS))
    require(isinstance(loaded, Paper), f"paper={name!r} is no repro.reports.figures.Paper: name one")
    return loaded


def figure(name: str) -> FigureEntry:
    """Return a figure by ``paper/figure``, by its bare name (of the first paper that has it), or by its module and a colon. Papers of
    installed packages are included."""
    for entry in FIGURES.values():
        if name in (entry.name, entry.name.partition("/")[2]):
            return entry
    if (paper_name := name.partition("/")[0]) in installed("paper"):
        entries = {entry.name: entry for entry in paper(paper_name).entries}
        require(name in entries, f"figure={name!r} is unknown: use one of {', '.join(entries)}")
        return entries[name]
    if name.endswith(":"):
        module = name.removesuffix(":")
        return FigureEntry(name=module, title=module, module=module)
    raise UserError(f"figure={name!r} is unknown: use one of {', '.join(FIGURES)}, or a module of your own and a colon")
