"""Options of commands: how a field of settings becomes an option, options that several commands share, and how we parse their text."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from engines.errors import UserError
from engines.knobs import Checked, Knob, Range, helps_of, knobs_of
from repro.files import size_of

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
"""Panels of a help, in the order shown."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.", rich_help_panel=RUNS)]
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
    """How to charge simulated steps (``CostKnobs``), if a user asks."""

    panel: ClassVar[str] = WHAT
    cost: Literal["roofline", "composed"] | None = None
    """How long a simulated step takes: composed of kernel times that others measured on the card, or by its roofline [default: composed,
    or roofline on a card without such times]."""
    kernels: Literal["vllm", "sglang", "trtllm"] | None = None
    """Whose kernels composed steps consist of [default: vllm; sglang for LAPS]."""

    @property
    def charged(self) -> dict[str, Any]:
        return given_options(cost=self.cost, kernels=self.kernels)


@dataclass(frozen=True, kw_only=True)
class Reused:
    """Which stored runs to reuse, and where they are."""

    panel: ClassVar[str] = RUNS
    result_dir: Path | None = None
    """Folder of runs [default: results/local]."""
    accept_other_code: Annotated[bool, typer.Option("--accept-other-code", rich_help_panel=RUNS)] = False
    """Reuse stored runs made by other code, and mark them."""

    @property
    def root(self) -> Path:
        from repro.paths import LOCAL

        return self.result_dir or LOCAL

    @property
    def store(self) -> "Store":
        from repro.runs.store import Store

        return Store(self.root, accept_other_code=self.accept_other_code)


@dataclass(frozen=True, kw_only=True)
class Stored(Reused):
    """Which stored runs to reuse, if any."""

    force: bool = False
    """Run again what is already stored."""


@dataclass(frozen=True, kw_only=True)
class Place:
    panel: ClassVar[str] = RUNS
    pool: str = "local"
    """Make runs on this machine (local), or on a cluster (ray)."""
    address: str | None = None
    """With --pool ray: a running cluster, as auto or host:port [default: start one for the command]."""

    def opened(self) -> "AbstractContextManager[Pool]":
        from repro.runs.sweep import pool_of

        return pool_of(self.pool, self.address, getattr(self, "jobs", None))


@dataclass(frozen=True, kw_only=True)
class Placement(Place, Checked):
    """A place to make runs, and how many simulated ones at once."""

    jobs: Annotated[int, Range(1, 1024)] | None = None
    """Simulated runs at once [default: as many as help, at most one per usable core]."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """How far to go with a list of runs, and how to show it."""

    panel: ClassVar[str] = RUNS
    dry_run: bool = False
    """Check everything, and list the runs and why each would run."""
    continue_on_error: bool = False
    """Continue with the next run after a failure."""
    plot: Plot = None
    json: Json = False


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options the user set. We leave out None, so that later code uses its own default."""
    return {name: value for name, value in options.items() if value is not None}


def data_file_knobs(path: Path | None, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs for a named data file; its source is ``local`` unless the user gave another."""
    if path is None:
        return {}
    return {"dataset_path": str(path), "dataset_source": knobs.get("dataset_source", "local")}


def parse_rate(text: str) -> float | None:
    """Return requests per second; 'inf' (everything at once) returns None."""
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


def parse_knobs(texts: Sequence[str], given_knobs: Mapping[str, Any], *, several: bool = False) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` of knobs without an option. A value that is JSON (a number, true) is parsed as such, else it is text. If
    ``several`` values of a knob are allowed, they become a tuple."""
    from repro.runs.cell import COMPARISON, NOTES

    knobs: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise UserError(f"knob={text!r} is no setting: write NAME=VALUE")
        if name in (*NOTES, COMPARISON):
            raise UserError(f"knob={text!r} is a note about a run and asks nothing of it: leave it out")
        if name in given_knobs or (name in knobs and not several):
            raise UserError(f"knob={text!r} is given more than once: keep one")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        entry = value if isinstance(parsed, list | dict) else parsed
        knobs.setdefault(name, []).append(entry)
    return {name: values[0] if len(values) == 1 else tuple(values) for name, values in knobs.items()}


def with_steps(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Default to one token a step if the user gave the length but not the steps."""
    return {"steps": knobs["gen_length"], **knobs} if "gen_length" in knobs else dict(knobs)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Given = dict[str, Any]
"""The settings that a user gave, by name. Later code uses its own default for the others."""


class Some(NamedTuple):
    """Some of the knobs of a settings class."""

    kind: type
    names: tuple[str, ...]


class Knobs:
    """A group of options made from knobs of settings; the command's parameter holds what is ``Given`` of them. ``panels`` returns the
    settings for each panel of the help, and is called when the command is needed. ``defaults`` returns defaults that the help shows in place
    of the fields' own; "" shows none. With ``several``, a user may repeat an option that is no switch, and repeated values become a
    tuple."""

    def __init__(
        self,
        panels: Callable[[], Mapping[str, Sequence[type | Some]]],
        *,
        without: Sequence[str] = (),
        defaults: Callable[[], Mapping[str, object]] = dict,
        several: bool = False,
    ) -> None:
        self._panels, self._without, self._defaults, self._several = panels, without, defaults, several

    @cached_property
    def _placed(self) -> "Mapping[str, _Placed]":
        placed: dict[str, _Placed] = {}
        for panel, settings in self._panels().items():
            for group in settings:
                kind, names = group if isinstance(group, Some) else (group, knobs_of(group))
                for name in names:
                    if name not in self._without:
                        placed.setdefault(name, _Placed(knobs_of(kind)[name], kind, panel))
        return placed

    def parameters(self) -> Iterator[inspect.Parameter]:
        for knob, _, panel in self._placed.values():
            yield _parameter(knob, panel, default=None, several=self._several and knob.kind is not bool)

    def take(self, options: Given) -> Given:
        """Take this group's values out of ``options``. A size may have a unit."""
        values = {name: options.pop(name) for name in self._placed}
        return {name: self._value(name, value) for name, value in values.items() if value not in (None, [])}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            values = tuple(dict.fromkeys(self._value(name, item) for item in value))
            return values if len(values) > 1 else values[0]
        return size_of(name, value) if self._placed[name].knob.is_size else value

    def helps(self) -> Iterator[tuple[str, str]]:
        """Yield the help text of each option. This reads sources, so call it only to print a help."""
        defaults = self._defaults()
        for name, (knob, kind, _) in self._placed.items():
            text, default = helps_of(kind).get(name, ""), defaults.get(name, _default_text(knob.default))
            if not all(choice in text for choice in knob.choices):
                text = f"{text.removesuffix('.')}: {', '.join(knob.choices)}."
            yield name, text if default in (None, "") else f"{text.removesuffix('.')} [default: {default}]."


class _Placed(NamedTuple):
    knob: Knob
    kind: type
    panel: str


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each group of options replaced by its single options. Its ``helps`` returns the texts read from settings,
    and its ``paths`` names the options that take a path."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        declared = hints[parameter.name]
        group = next((mark for mark in getattr(declared, "__metadata__", ()) if isinstance(mark, Knobs)), None)
        if group is None and is_dataclass(declared):
            groups[parameter.name] = declared
            parameters += _dataclass_parameters(declared)
        elif group is not None:
            groups[parameter.name] = group
            parameters += group.parameters()
        else:
            parameters.append(parameter.replace(annotation=declared))

    @wraps(command)
    def spread_out(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group.take(options) if isinstance(group, Knobs) else _build_group(group, options)
        command(**options)

    def helps() -> dict[str, str]:
        texts: dict[str, str] = {}
        for group in groups.values():
            texts |= group.helps() if isinstance(group, Knobs) else helps_of(group)
        return texts

    keyword_only = [parameter.replace(kind=_KEYWORD) for parameter in parameters]
    spread_out.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread_out.helps = helps  # type: ignore[attr-defined]
    kinds = {each.name: get_args(each.annotation)[0] for each in parameters if get_origin(each.annotation) is Annotated}
    paths = [name for name, kind in kinds.items() if kind is Path or Path in get_args(kind)]
    spread_out.paths = paths  # type: ignore[attr-defined]
    return spread_out


def _build_group(group: Any, options: Given) -> Any:
    values = {field.name: options.pop(field.name) for field in fields(group)}
    sizes = {name for name, knob in knobs_of(group).items() if knob.is_size and values[name] is not None}
    return group(**values | {name: size_of(name, values[name]) for name in sizes})


def _dataclass_parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    knobs = knobs_of(group)
    for field in fields(group):
        declared, default, panel = hints[field.name], field.default, getattr(group, "panel", None)
        if field.name in knobs and not _is_option(declared):
            yield _parameter(knobs[field.name], panel, default=default)
        else:
            # A path, or an option with several values.
            annotation = declared if _is_option(declared) else Annotated[declared, typer.Option(rich_help_panel=panel)]
            yield inspect.Parameter(field.name, _KEYWORD, default=_parameter_default(default), annotation=annotation)


def _is_option(declared: Any) -> bool:
    return any(isinstance(mark, typer.models.ParameterInfo) for mark in getattr(declared, "__metadata__", ()))


def _parameter(knob: Knob, panel: str | None, *, default: object, several: bool = False) -> inspect.Parameter:
    """Make an option from a knob. A knob that is on by default gets a switch to turn it off."""
    name = f"--{knob.name.replace('_', '-')}"
    names = f"{name}/--no-{name[2:]}" if knob.default is True else name
    kind: Any = str if knob.is_size else knob.kind
    kind = list[kind] if several else kind
    declared: Any = Annotated[kind | None if default is None else kind, typer.Option(names, rich_help_panel=panel)]
    return inspect.Parameter(knob.name, _KEYWORD, default=_parameter_default(default), annotation=declared)


def _parameter_default(default: object) -> object:
    return inspect.Parameter.empty if default is MISSING else default


def _default_text(default: object) -> object:
    """The default as a help shows it; empty if it is off, or not known before the run."""
    if default is MISSING or default is None or default is False:
        return ""
    return "yes" if default is True else default


def decoding_knobs() -> dict[str, Sequence[type | Some]]:
    """Knobs that say how tokens are generated, and what is cached of their context."""
    from baselines.dllm.options import OPTIONS
    from engines.dllm.config import EngineConfig, GenerationConfig

    return {DECODING: (GenerationConfig, Some(EngineConfig, ("tie_policy",))), METHOD: OPTIONS}


def answer_knobs() -> dict[str, Sequence[type | Some]]:
    """``decoding_knobs`` and the rules of block diffusion, for commands that offer these as options."""
    from repro.families.block.settings import DECODING as BLOCK_DECODING
    from repro.families.block.settings import BlockKnobs

    knobs = decoding_knobs()
    return {**knobs, DECODING: (*knobs[DECODING], Some(BlockKnobs, BLOCK_DECODING))}


def model_knobs() -> dict[str, Sequence[type | Some]]:
    from repro.families.dllm.settings import Device, ModelKnobs

    model = Some(ModelKnobs, ("model",)), Some(Device, ("weights",))
    return {WHAT: model, ENGINE: (Some(ModelKnobs, ("memory_limit",)), Device)}


def engine_knobs(*more: type) -> dict[str, Sequence[type | Some]]:
    """All knobs of a cell; ``more`` adds settings to its engine panel."""
    from engines.dllm.config import EngineConfig
    from repro.families.cost import CostKnobs
    from repro.families.dllm.settings import BaselineKnobs, ReplayKnobs, WorkloadKnobs

    decoding, model = decoding_knobs(), model_knobs()
    return {
        WHAT: (*model[WHAT], Some(BaselineKnobs, ("reading",)), CostKnobs),
        WORKLOAD: (WorkloadKnobs, ReplayKnobs),
        **decoding,
        ENGINE: (*model[ENGINE], EngineConfig, BaselineKnobs, *more),
    }


def platform_defaults() -> Mapping[str, object]:
    from repro.families.platforms import DllmPart

    names = (*(field.name for field in fields(DllmPart)), "memory_limit", "num_prompts")
    return {**dict.fromkeys(names, "the platform's"), "reading": "", "steps": "one a token", "batch_rule": "workload"}
