"""The knobs of a workload, whichever system serves it. This module imports little, because the command line reads its options from it."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal

from engines.data import PLACE, installed
from engines.knobs import Range, Tokens

SourceKind = Literal["auto", "hub", "local", "embedded"]
TimeUnit = Literal["s", "ms", "us", "ns"]
TextStyle = Literal["coding", "post", "chat", "math", "function"]
"""The kind of text that a generated prompt imitates."""
ArrivalKind = Literal["poisson", "gamma", "constant", "burst", "trace"]

Rate = Annotated[float, Range(1e-6, 1e6)]
"""Arrivals per second. Beyond this range, times would lose digits."""
Burstiness = Annotated[float, Range(1e-6, 1e6)]
TimeScale = Annotated[float, Range(1e-6, 1e6)]


@dataclass(frozen=True, kw_only=True)
class ArrivalKnobs:
    arrivals: ArrivalKind | None = None
    """poisson, gamma or constant: at the rate. trace: at the data file's times. burst: all at once."""
    burstiness: Burstiness | None = None
    """Shape of gamma arrivals; 1 is Poisson, lower is burstier."""
    time_scale: TimeScale | None = None
    """Divides the times of trace arrivals: 2 is twice as fast as recorded, 1 as recorded."""


@dataclass(frozen=True, kw_only=True)
class TraceKnobs(ArrivalKnobs):
    """Knobs of requests or sessions from any source."""

    workload: str | None = None
    """Requests or sessions to serve instead of a data set. Give a file (JSON lines, CSV or parquet) with its own lengths and times, or your
    own code that yields them, as module:NAME. The run is named after it."""
    columns: str | None = None
    """The meaning of the file's columns as OURS=THEIRS, separated by commas, such as prompt_len=ContextTokens. Files in public formats
    or with our names need none."""
    time_unit: TimeUnit | None = None
    """Unit of the file's times, if its columns do not say it: s, ms, us or ns."""
    sort: bool = False
    """Sort the file's rows by their times."""


@dataclass(frozen=True, kw_only=True)
class UntoldAnswers:
    """Knobs of systems that take the lengths of answers from their sessions."""

    gen_length: Tokens | None = None
    """Tokens of answers whose length the workload's file does not give."""


def place_of(workload: str) -> str | None:
    """``module:NAME`` of a user's own workload, given so or by the name of an installed package's entry point. None for a file."""
    return workload if PLACE.fullmatch(workload) else installed("workload").get(workload)


def named_after(workload: str) -> str:
    """The name of a run on a workload: a file's name without its endings, or its name in its module."""
    if (spec := place_of(workload)) is not None:
        return spec.partition(":")[2]
    name = PurePath(workload).name.removesuffix(".gz")
    return PurePath(name).stem or name


@dataclass(frozen=True, kw_only=True)
class RequestKnobs(TraceKnobs):
    """Knobs of a data set's requests."""

    dataset_source: SourceKind = "auto"
    """auto, hub, local or embedded."""
    dataset_path: str | None = None
    """Local file in a format of the dataset's card."""
    input_len: Tokens | None = None
    """Fix every prompt to this many tokens."""


EMBEDDED_CONTEXT = 768
"""The context of the embedded model in tokens. We assume it for a server that does not report its context."""
MIN_PROMPT_LEN = 8
"""The fewest tokens of a prompt. We lengthen shorter prompts to it."""
SHORT_CONTEXT = 1024
SHORT_SCALE = 0.25


def length_scale_for(context: int) -> float:
    """The factor on a data set's lengths: 1 if the model's context is long enough for them, else ``SHORT_SCALE``."""
    return SHORT_SCALE if context < SHORT_CONTEXT else 1.0
