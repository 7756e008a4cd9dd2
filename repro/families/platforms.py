"""Platforms: hardware and what each family of systems runs on it by default, read from ``platforms.yaml``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from engines.cost.roofline import Gpu, gpu
from engines.data import import_path_of, load_named
from engines.errors import UserError, require
from engines.knobs import Checked, Count, Memory, Range, Tokens, check_value, knobs_of
from repro.files import read_yaml, size_of
from repro.runs.system import Registry

if TYPE_CHECKING:
    from engines.dllm.config import EngineConfig, GenerationConfig

MIB = 2**20
STORED = Path(__file__).with_name("platforms.yaml")
Dtype = Literal["float32", "float16", "bfloat16"]
Requests = Annotated[int, Range(1, 10**5)]
_Scale = Annotated[float, Range(above=0, most=1e3)]
LEAST_REQUESTS = 8
"""The fewest requests of a run, if their number follows from the rate."""

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class DllmPart(Checked):
    """Defaults of diffusion-LLM systems, and the protocol of the paper's runs; a cell's knobs override these by name."""

    system: ClassVar[str] = "dllm-serve"
    """The system that runs if none is named."""
    model: str
    """'tiny', or a full-size shape (engines.models.checkpoint.PUBLISHED_CONFIGS)."""
    memory_bytes: Memory
    device: str = "cuda"
    """The device of a measured run."""
    dtype: Dtype = "bfloat16"
    """Dtype of a measured run's weights."""
    gen_length: Tokens = 256
    block_length: Tokens = 32
    steps: Tokens = 256
    max_num_batched_tokens: Tokens
    max_num_logits: Tokens
    max_num_seqs: Count = 256
    max_model_len: Tokens
    length_scale: _Scale = 1.0
    rates: tuple[float, ...]
    """Arrival rates of Figure 3 and 4, requests/s; the first and the last are those of every panel."""
    panel_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Rates by data set, for data sets on which the systems have their knees at other rates."""
    num_requests: Mapping[str, int]
    load_s: Annotated[float, Range(above=0, most=1e6)] | None = None
    """Seconds over which requests arrive in a run of Figures 3 to 5. The number of requests then follows from the rate. None runs
    ``num_requests`` at every rate."""

    @property
    def generation(self) -> "GenerationConfig":
        """How much each request generates."""
        from engines.dllm.config import GenerationConfig

        return GenerationConfig(gen_length=self.gen_length, block_length=self.block_length, steps=self.steps)

    @property
    def engine(self) -> "EngineConfig":
        # Runs of other families load no engine of this one.
        from engines.dllm.config import EngineConfig

        return EngineConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_logits=self.max_num_logits,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
        )

    def rates_of(self, dataset: str) -> tuple[float, ...]:
        return self.panel_rates.get(dataset, self.rates)

    def requests_at(self, rate: float) -> int | None:
        return None if self.load_s is None else max(LEAST_REQUESTS, round(rate * self.load_s))


@dataclass(frozen=True, kw_only=True)
class BlockPart(Checked):
    """Defaults of block-diffusion systems on a card; a cell's knobs override these by name."""

    system: ClassVar[str] = "block-diffusion"
    """The system that runs if none is named."""
    model: str
    """A shape by name (engines.models.block_config)."""
    memory_limit: Memory
    tokens_per_forward: Annotated[float, Range(1, 4096)] = 4.0
    """Tokens decided per forward. This is an assumption, because no shape says how a model responds to a threshold."""
    device: str = "cuda"
    dtype: Dtype = "bfloat16"
    num_prompts: Requests = 64
    length_scale: _Scale = 1.0
    gen_length: Tokens = 256
    max_num_seqs: Count = 128
    max_num_batched_tokens: Tokens = 8192
    max_model_len: Tokens = 8192


class _Objectives(NamedTuple):
    """Objectives in milliseconds, as the paper prints them."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, kw_only=True)
class ArPart(Checked):
    """Defaults of autoregressive systems on a cluster; a cell's knobs override these by name."""

    system: ClassVar[str] = "ampd"
    """The system that runs if none is named."""
    model: str
    """A shape by name (engines.models.shape)."""
    num_gpus: Count
    """All GPUs of the platform. A trace's card says how many of them its runs use."""
    trace: str = "dureader"
    """The data set that runs if none is named."""
    constants: str
    """A reading of the cost model (engines.cluster.hardware)."""
    schedules: Literal["vllm-0.15", "paper"] = "vllm-0.15"
    """Whose step schedule systems follow by default: vLLM 0.15's, or that of AMPD's paper, which has no chunks."""
    rates: tuple[float, ...]
    """Arrival rates of Figure 4, sessions/s."""
    num_sessions: Requests
    objectives: Mapping[tuple[str, str], _Objectives]
    """Objectives by model and trace."""


@dataclass(frozen=True, kw_only=True)
class PrefillPart(Checked):
    """Defaults of prefill systems; a cell's knobs override these by name."""

    title: str
    gpu: str | Gpu | None
    """The card, or its name in the catalogue; None if steps are measured."""
    model: str
    """The name of a shape (engines.models.shape), or of the model of a measured instance (repro.families.cluster.instance)."""
    dataset: str = "lmsys-chat-1m"
    """The data set that runs if none is named."""
    clients: Requests
    """Clients of a closed loop, if neither a rate nor a number of clients is given."""
    num_turns: Requests
    slo_s: Annotated[float, Range(1e-6, 1e6)]
    """TTFT objective (LAPS §4.1)."""
    most_instances: Count
    length_scale: _Scale = 1.0
    """Factor on the length of every prompt and answer, and on the boundary and budgets in tokens."""
    most_tokens: Annotated[int, Range(0, 10**9)] = 0
    """The most tokens of a conversation, if steps are measured."""
    time_scale: _Scale = 1.0
    """Factor on every time in the paper's settings, which are for an objective of 0.4 s."""
    max_num_seqs: Count = 256
    """The most requests in one step of Reserve."""


SECTIONS: Mapping[str, type[Any]] = {"dllm": DllmPart, "ampd": ArPart, "laps": PrefillPart, "block": BlockPart}
"""The defaults that a file may state, by family."""
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "dllm": {"memory_limit": "memory_bytes", "num_prompts": "num_requests"},
    "ampd": {"num_prompts": "num_sessions"},
    "laps": {"num_prompts": "num_turns", "slo_ttft_s": "slo_s"},
}
"""Fields that a file names after the knob that overrides them."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    name: str
    title: str
    executor: str = "roofline"
    """The default executor of a step: torch (measured), roofline (simulated), or http (measured at the client)."""
    gpu: Any = None
    """The card's name in the catalogue, or a ``Gpu`` for a user's own card; None if only measuring is possible."""
    parts: tuple[Any, ...] = ()
    """Defaults of each family that runs on it."""
    usual_gpus: int | None = None
    """GPUs in its cluster for a user's own sessions, if no number is given [default: all]."""
    digest: str = ""
    """A digest of the user's file, for the basis of its runs."""

    @property
    def cluster_title(self) -> str:
        """The title of its clusters. The title of a card will not do, because it names the diffusion LLM that the card runs."""
        return self.title if self.usual_gpus is None else f"servers of 8 NVIDIA {str(self.gpu).upper()}"

    @property
    def default_system(self) -> str:
        """The system that runs on it if none is named."""
        return next((part.system for part in self.parts if hasattr(part, "system")), "dllm-serve")

    def part(self, kind: type[P]) -> P:
        """The defaults of one family."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        usable = [name for name in PLATFORMS if any(isinstance(part, kind) for part in PLATFORMS.get(name).parts)]
        raise UserError(
            f"platform={self.name!r} has no settings for this kind of system: use {', '.join(usable) or 'a platform of your own'}"
        )

    def with_part(self, kind: type[Any], **changes: Any) -> "Platform":
        """The platform with some of a family's defaults replaced."""
        parts = [replace(part, **changes) if isinstance(part, kind) else part for part in self.parts]
        return replace(self, parts=tuple(parts))


def checked_section(name: str, section: Any) -> dict[str, Any]:
    """Return the values of a family's section by field. Raises UserError if one has the wrong type or is out of range."""
    require(isinstance(section, dict), f"{name}={section!r} must be a mapping of settings: write them below it")
    kind, renamed = SECTIONS[name], _FIELDS.get(name, {})
    field_names = {field.name for field in fields(kind)} - {*renamed.values(), "gpu", "objectives"}
    accepted = {**{field_name: field_name for field_name in sorted(field_names)}, **renamed}
    values: dict[str, Any] = {}
    for key, value in section.items():
        require(key in accepted, f"{name}: {key}={value!r} is unknown: use one of {', '.join(accepted)}")
        if value is not None:
            values[accepted[key]] = _checked(f"{name}: ", key, accepted[key], kind, value)
    return values


def _checked(prefix: str, key: str, field_name: str, kind: type, value: Any) -> Any:
    knob = knobs_of(kind).get(field_name)
    if knob is not None:
        sized = size_of(key, value) if knob.is_size and isinstance(value, str) else value
        return knob._replace(name=key).check(sized, prefix=prefix)
    if field_name == "num_requests":
        counts = value if isinstance(value, dict) else dict.fromkeys(("livebench", "burst", "osc"), value)
        for count in counts.values():
            check_value(Requests, f"{prefix}{key}", count)
        return counts
    if field_name == "panel_rates":
        require(isinstance(value, dict), f"{prefix}{key}={value!r} must be a mapping of data sets to rates")
        return {name: _rates(f"{prefix}{key}", rates) for name, rates in value.items()}
    return _rates(f"{prefix}{key}", value)


def _rates(name: str, value: Any) -> tuple[float, ...]:
    require(isinstance(value, list) and value != [], f"{name}={value!r} must be a list of arrivals a second")
    for rate in value:
        check_value(Annotated[float, Range(above=0, most=1e6)], name, rate)
    return tuple(map(float, value))


@cache
def _catalogue() -> Mapping[str, Any]:
    stored: Mapping[str, Any] = read_yaml(STORED)
    return stored


@cache
def paper_objectives() -> Mapping[tuple[str, str], _Objectives]:
    """Objectives of AMPD's paper by model and trace."""
    printed = _catalogue()["objectives"].items()
    return {(model, trace): _Objectives(*pair) for model, traces in printed for trace, pair in traces.items()}


@cache
def _load(name: str) -> Platform:
    stored = dict(_catalogue()["platforms"][name])
    sections = {family: checked_section(family, stored.pop(family)) for family in SECTIONS if family in stored}
    parts = tuple(_part(family, stored.get("gpu"), values) for family, values in sections.items())
    return Platform(name=name, parts=parts, **stored)


def _part(family: str, card: str | None, values: Mapping[str, Any]) -> Any:
    defaults: dict[str, Any] = {}
    if family in ("dllm", "block") and card is not None:
        defaults["memory_bytes" if family == "dllm" else "memory_limit"] = gpu(card).memory_bytes
    if family == "ampd":
        defaults["objectives"] = paper_objectives()
    if family == "laps":
        defaults["gpu"] = card
    return SECTIONS[family](**{**defaults, **values})


class _Platforms(Registry[Platform]):
    """The platforms of ``platforms.yaml``, which we read on first use, and those of installed packages."""

    def __iter__(self) -> Iterator[str]:
        return iter(_catalogue()["platforms"])

    def get(self, name: str) -> Platform:
        return _load(name) if isinstance(name, str) and name in _catalogue()["platforms"] else super().get(name)


PLATFORMS = _Platforms("platform", {})


CARD_FILE = re.compile(r"(?P<path>.+\.ya?ml)(:(?P<name>[^:/\\]+))?")
"""The name of a card from a file. Users give the file's path, and cells store the path with the card's name behind."""


def platform(name: str) -> Platform:
    """The platform of this name: one of ``PLATFORMS``, the path of a card's YAML file, or any other as ``module:NAME``, which becomes
    its name."""
    if isinstance(name, str) and (match := CARD_FILE.fullmatch(name)):
        reader = load_named("platform", "repro.families.card_file:platform_of")
        from_file: Platform = reader(match["path"], match["name"])
        return from_file
    entry = PLATFORMS.get(name)
    require(isinstance(entry, Platform), f"platform={name!r} is no repro.families.platforms.Platform: name one")
    return entry if name in PLATFORMS else replace(entry, name=import_path_of("platform", name))


def card(name: str) -> Gpu:
    """The card of this name: in the catalogue, in a YAML file, or any other as ``module:NAME``."""
    card_name = platform(name).gpu if CARD_FILE.fullmatch(name) else name
    assert card_name is not None, "a file is of a card"
    return gpu(card_name)
