"""What simulated steps are charged by: a roofline, or measured kernels that a step is composed of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from engines.cost.cards import Gpu
from engines.cost.kernels import has_tables, tables_of
from engines.cost.tables import Card, Framework
from engines.knobs import Checked, Only
from engines.models.shape import ModelShape
from repro.runs.record import Obtained

Cost = Literal["roofline", "composed"]


@dataclass(frozen=True, kw_only=True)
class CostKnobs(Checked):
    cost: Annotated[Cost | None, Only(executor="roofline")] = None
    """What a simulated step takes: composed of kernel times that others measured on the card, or by its roofline [default:
    composed, by the roofline on a card without such times]."""
    kernels: Annotated[Framework, Only(cost=("composed", None))] = "vllm"
    """Whose kernels: those of vllm, sglang or trtllm."""

    def on(self, card: str | Gpu | None, shape: ModelShape | None = None) -> Self:
        """As charged on this card, of ``shape`` where its tables are apart; of no effect where nothing is simulated. Refuses kernels that
        a card of a file has not."""
        if card is None:
            return self
        found = self
        if self.cost is None:
            found = replace(self, cost="composed" if has_tables(card, shape) else "roofline")
        if found.cost == "composed" and isinstance(card, Card):
            tables_of(card).of(found.kernels, "gemm")
        return found

    @property
    def framework(self) -> Framework | None:
        """None of a roofline."""
        return self.kernels if self.cost == "composed" else None

    @property
    def obtained(self) -> Obtained:
        return "composed" if self.cost == "composed" else "simulated"

    def basis(self, card: str | Gpu, shape: ModelShape | None = None) -> str:
        """The tables behind the numbers, for digests; empty where there are none."""
        return f"{self.kernels} {tables_of(card, shape).digest}" if self.cost == "composed" else ""

    def describe(self, card: str | Gpu, overheads: str, shape: ModelShape | None = None) -> str:
        """One sentence for manifests and captions."""
        tables = tables_of(card, shape)
        about = tables.about
        moved = "" if tables.card == str(card) else f", transferred from the {tables.card} by the datasheets of both"
        return (
            f"{card}, composed of {self.kernels} kernels measured in {about['package']} {about['version']} ({about['system']}, "
            f"table {tables.digest[:12]}){moved}; {overheads}"
        )
