"""A data set: its card, read from ``datasets/<name>.yaml``, and its prompts, from the hub, a local file or the embedded generator.

A card holds the facts (hub id, columns, licence, defects) and the embedded generator: a length distribution with the statistics that
determine it. A test computes the parameters again from the statistics, so a card cannot drift away from its source.

``auto`` takes a local file if the data directory has one that the card accepts, else the embedded generator. We use the network only
if ``hub`` is asked for by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from engines.knobs import Range
from repro.paths import DATASETS
from repro.workloads.card import Card, LocalFile, Origin, Section, known_cards, load
from repro.workloads.draws import LogNormalLengths
from repro.workloads.knobs import TextStyle

FileFormat = Literal["trace", "prompts_jsonl", "lengths_csv"]
"""trace: a table of requests, recognised by its columns; prompts_jsonl: a prompt in a named column; lengths_csv: a length in one."""


@dataclass(frozen=True, kw_only=True)
class HubReference(Section):
    id: str
    config: str | None
    split: str
    revision: str | None
    """The commit hash; None if none is known, and then ``note`` says so."""
    note: str


@dataclass(frozen=True, kw_only=True)
class PublishedColumns(Section):
    """The names of columns in the published rows. Either ``prompt`` (text) or ``prompt_tokens`` (a count) is given."""

    prompt: str | None = None
    prompt_tokens: str | None = None
    timestamp_s: str | None = None


@dataclass(frozen=True, kw_only=True)
class RowFilter(Section):
    """We keep only rows whose ``column`` has one of ``values``."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PromptFile(LocalFile):
    """A local file of prompts. ``column``, ``unit`` and ``offset`` are for ``lengths_csv``."""

    format: FileFormat
    column: str | None = None
    unit: Literal["tokens", "chars"] = "tokens"
    offset: Annotated[int, Range(0, 2**31 - 1)] = 0


@dataclass(frozen=True, kw_only=True)
class EmbeddedGenerator(Section):
    text: TextStyle
    lengths: LogNormalLengths
    basis: Literal["fitted", "assumed"]
    statistics: Mapping[str, Annotated[float, Range(-1e9, 1e9)]]
    """The statistics of (length - offset) that determine the parameters."""
    summary: str
    """One clause for the provenance of every run."""
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PaperRun(Section):
    num_requests: Annotated[int, Range(0, 10**9)] | None
    note: str


@dataclass(frozen=True, kw_only=True)
class DatasetCard(Card):
    hub: HubReference
    columns: PublishedColumns
    filter: RowFilter | None
    local: tuple[PromptFile, ...]
    embedded: EmbeddedGenerator
    paper_run: PaperRun

    def keeps(self, record: Mapping[str, object]) -> bool:
        """Whether a published row belongs to the data set."""
        return self.filter is None or record.get(self.filter.column) in self.filter.values


def known_datasets() -> tuple[str, ...]:
    return known_cards(DATASETS / DatasetCard.folder)


@cache
def load_card(name: str) -> DatasetCard:
    """Read the card of a data set; case does not matter (the paper's LiveBench is ``livebench``)."""
    return load(DatasetCard, name, unknown=f"dataset={name!r} is unknown")


Record = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Records:
    """Rows of a data set with all that grading needs, in the order of their source. They never come from the embedded generator."""

    origin: Origin
    rows: tuple[Record, ...]
    path: Path | None = None
    """Path of a local file; None for the hub."""


def hub_origin(card: DatasetCard) -> Origin:
    return Origin(source="hub", location=card.hub.id, revision=card.hub.revision)
