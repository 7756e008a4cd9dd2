"""What a user may say of a workload, whatever serves it; light, for the options of the command line are read off it."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal

from engines.data import PLACE, installed
from engines.knobs import Range, Tokens

SourceKind = Literal["auto", "hub", "local", "embedded"]
TimeUnit = Literal["s", "ms", "us", "ns"]
TextStyle = Literal["coding", "post", "chat", "math", "function"]
"""The outer form of generated prompts."""
ArrivalKind = Literal["poisson", "gamma", "constant", "burst", "trace"]

Rate = Annotated[float, Range(1e-6, 1e6)]
"""Arrivals a second; times would lose their digits beyond."""
Burstiness = Annotated[float, Range(1e-6, 1e6)]
TimeScale = Annotated[float, Range(1e-6, 1e6)]


@dataclass(frozen=True, kw_only=True)
class ArrivalKnobs:
    arrivals: ArrivalKind | None = None
    """poisson, gamma or constant at the rate; trace for those of the data file; burst for all at once."""
    burstiness: Burstiness | None = None
    """Shape of gamma arrivals; 1 is Poisson."""
    time_scale: TimeScale | None = None
    """By which the times of trace arrivals are divided: 2 is twice as fast as recorded, 1 as recorded."""


@dataclass(frozen=True, kw_only=True)
class TraceKnobs(ArrivalKnobs):
    """Requests or sessions of any source."""

    workload: str | None = None
    """File of requests or sessions with lengths and times of their own, in place of a data set: JSON lines, CSV or parquet; or one's own
    that yields them, as module:NAME. The run is named after it."""
    columns: str | None = None
    """Which of its columns is what: OURS=THEIRS, with commas between, such as prompt_len=ContextTokens; files of public formats, and
    those with our names, need none."""
    time_unit: TimeUnit | None = None
    """Unit of the file's times, where its columns do not say it: s, ms, us or ns."""
    sort: bool = False
    """Sort the file's rows by their times."""


@dataclass(frozen=True, kw_only=True)
class UntoldAnswers:
    """For systems that take the lengths of answers from their sessions."""

    gen_length: Tokens | None = None
    """Tokens of the answers that a workload's file tells no length of."""


def place_of(workload: str) -> str | None:
    """``module:NAME`` of a workload of one's own, or what an installed package names so; None of a file."""
    return workload if PLACE.fullmatch(workload) else installed("workload").get(workload)


def named_after(workload: str) -> str:
    """The name of a run on a workload: a file's without its endings, or what it is called in its module."""
    if (where := place_of(workload)) is not None:
        return where.partition(":")[2]
    name = PurePath(workload).name.removesuffix(".gz")
    return PurePath(name).stem or name


@dataclass(frozen=True, kw_only=True)
class RequestKnobs(TraceKnobs):
    """What requests of a data set are."""

    dataset_source: SourceKind = "auto"
    """auto, hub, local or embedded."""
    dataset_path: str | None = None
    """Local file in a format of the dataset's card."""
    input_len: Tokens | None = None
    """Fix every prompt to this many tokens."""


EMBEDDED_CONTEXT = 768
"""Tokens of the embedded model, whose tokenizer makes the prompts for a server that does not say how many it takes."""
MIN_PROMPT_LEN = 8
"""Tokens; shorter ones are drawn out to it."""
SHORT_CONTEXT = 1024
SHORT_SCALE = 0.25


def length_scale_for(context: int) -> float:
    """1, the data set's own lengths, where a model takes prompts so long."""
    return SHORT_SCALE if context < SHORT_CONTEXT else 1.0
