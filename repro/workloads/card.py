"""Dataset cards: what a workload is made from, read from ``datasets/<name>.yaml``.

A card holds the facts (hub id, columns, licence, defects) and the embedded generator: a length
distribution together with the statistics it follows from. The parameters are recomputed from the
statistics on loading, so a card cannot drift away from its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from engines.errors import UserError, require
from engines.knobs import Range
from repro.paths import DATASETS
from repro.workloads.lengths import LengthDistribution, LogNormalLengths, fit_statistics
from repro.workloads.schema import Card, LocalFile, Part, known_cards, load
from repro.workloads.text import TextStyle
from repro.workloads.trace import FileFormat

CARDS_DIR = DATASETS

_PARAMETER_TOLERANCE = 5e-4


@dataclass(frozen=True, kw_only=True)
class HubReference(Part):
    id: str
    config: str | None
    split: str
    revision: str | None
    """Commit hash; None where none is known, and then ``note`` says so."""
    note: str


@dataclass(frozen=True, kw_only=True)
class Columns(Part):
    """Names in the published rows. Either ``prompt`` (text) or ``prompt_tokens`` (a count) is given."""

    prompt: str | None = None
    prompt_tokens: str | None = None
    response_tokens: str | None = None
    timestamp_s: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require((self.prompt is None) != (self.prompt_tokens is None), "columns: give either prompt or prompt_tokens")


@dataclass(frozen=True, kw_only=True)
class RowFilter(Part):
    """Rows are kept whose ``column`` has one of ``values``."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PromptFile(LocalFile):
    """``column``, ``unit`` and ``offset`` are for ``lengths_csv``."""

    format: FileFormat
    column: str | None = None
    unit: Literal["tokens", "chars"] = "tokens"
    offset: Annotated[int, Range(0, 2**31 - 1)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.format == "lengths_csv") != (self.column is not None):
            raise UserError(f"{self.path}: column goes with format lengths_csv, and with it only")


@dataclass(frozen=True, kw_only=True)
class EmbeddedGenerator(Part):
    text: TextStyle
    lengths: LengthDistribution
    basis: Literal["fitted", "assumed"]
    statistics: Mapping[str, Annotated[float, Range(-1e9, 1e9)]]
    """What the parameters follow from, of (length - offset); empty for an empirical table."""
    summary: str
    """One clause for the provenance of every run."""
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lengths, LogNormalLengths):
            return
        fitted, found = fit_statistics(self.statistics), self.lengths
        for name, value in fitted._asdict().items():
            if not math.isclose(value, getattr(found, name), abs_tol=_PARAMETER_TOLERANCE):
                raise UserError(
                    f"mu={found.mu}, sigma={found.sigma} do not follow from the statistics: "
                    f"put mu: {fitted.mu:.4f} and sigma: {fitted.sigma:.4f}"
                )


@dataclass(frozen=True, kw_only=True)
class PaperRun(Part):
    num_requests: Annotated[int, Range(0, 10**9)] | None
    note: str


@dataclass(frozen=True, kw_only=True)
class DatasetCard(Card):
    hub: HubReference
    columns: Columns
    filter: RowFilter | None
    local: tuple[PromptFile, ...]
    embedded: EmbeddedGenerator
    paper_run: PaperRun

    def keeps(self, record: Mapping[str, object]) -> bool:
        """Tells whether a published row is of the data set."""
        return self.filter is None or record.get(self.filter.column) in self.filter.values


def known_datasets(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_card(name: str, cards_dir: Path = CARDS_DIR) -> DatasetCard:
    """Reads the card of a data set; case does not matter (the paper's LiveBench is ``livebench``)."""
    return load(DatasetCard, name, cards_dir, unknown=f"dataset={name!r} is unknown")
