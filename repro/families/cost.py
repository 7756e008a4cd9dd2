"""How we charge simulated steps: by a roofline, or by the measured times of the kernels that a step runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from engines.cost.kernels import Card, Framework, has_tables, kernels_of, tables_of
from engines.cost.roofline import Calibration, Gpu, gpu
from engines.knobs import Checked, Only
from engines.models.shape import ModelShape
from repro.files import replace_text
from repro.paths import CALIBRATION
from repro.runs.record import Obtained

Cost = Literal["roofline", "composed"]


class Phase(NamedTuple):
    """A typical step, which stands for all steps of a phase of a run."""

    name: str
    rows: int
    logit_rows: int


PREFILLS, DECODES, DENOISING = Phase("prefill", 2048, 1), Phase("decode", 32, 32), Phase("denoising", 512, 32)


@dataclass(frozen=True, kw_only=True)
class CostKnobs(Checked):
    cost: Annotated[Cost | None, Only(executor="roofline")] = None
    """How long a simulated step takes. composed: the sum of kernel times that others measured on the card. roofline: the card's
    roofline [default: composed, or roofline on a card without such times]."""
    kernels: Annotated[Framework, Only(cost=("composed", None))] = "vllm"
    """The framework whose kernel times we use: vllm, sglang or trtllm."""

    def on(self, card: str | Gpu | None, shape: ModelShape | None = None) -> Self:
        """Return these knobs with ``cost`` decided for this card. ``shape`` matters if it has tables of its own. Without a card (nothing is
        simulated) they stay as they are. Raises UserError for kernels that the card of a file lacks."""
        if card is None:
            return self
        cost = self.cost or ("composed" if has_tables(card, shape) else "roofline")
        if cost == "composed" and isinstance(card, Card):
            tables_of(card).of(self.kernels, "gemm")
        return replace(self, cost=cost)

    @property
    def framework(self) -> Framework | None:
        """The framework whose kernels are charged, or None with a roofline."""
        return self.kernels if self.cost == "composed" else None

    @property
    def obtained(self) -> Obtained:
        return "composed" if self.cost == "composed" else "simulated"

    def basis(self, card: str | Gpu, shape: ModelShape | None = None) -> str:
        """The tables behind the numbers, for digests. Empty with a roofline."""
        return f"{self.kernels} {tables_of(card, shape).digest}" if self.cost == "composed" else ""

    def describe(self, card: str | Gpu, overheads: str, shape: ModelShape | None = None) -> str:
        """One sentence on how steps are charged, for manifests and captions."""
        tables = tables_of(card, shape)
        about = tables.about
        moved = "" if tables.card == str(card) else f", transferred from the {tables.card} by the datasheets of both"
        precision = "" if shape is None or shape.precision == "bf16" else f", layers in {shape.precision}"
        return (
            f"{card}, composed of {self.kernels} kernels measured in {about['package']} {about['version']} ({about['system']}, "
            f"table {tables.digest[:12]}){moved}{precision}; {overheads}"
        )

    def estimates(
        self,
        card: str | Gpu,
        shape: ModelShape,
        seconds: Mapping[tuple[Phase, int], float],
        pairs: float = 0.0,
        context: int = 0,
    ) -> dict[str, Any]:
        """Facts of a composed run: the share of matrix-product time that we estimate from other products, and all that no table holds.
        ``seconds`` weighs each phase and degree by the time that the run spent in such steps. ``pairs`` counts the attention pairs of the
        longest prompt, ``context`` the tokens of the longest sequence that decodes."""
        if self.framework is None:
            return {}
        estimated_s = total_s = 0.0
        extrapolated: dict[str, None] = {}
        for (phase, degree), spent_s in seconds.items():
            kernels = kernels_of(shape.on_rank(degree), gpu(card), self.framework, degree)
            estimated_s += spent_s * kernels.estimated_share(phase.rows, phase.logit_rows)
            total_s += spent_s
            extrapolated |= dict.fromkeys(kernels.extrapolations(pairs, context))
        steps = " and ".join(
            f"{phase.rows:,} rows ({phase.name})" for phase in dict.fromkeys(phase for phase, _ in seconds)
        )
        return {
            "estimated_share": estimated_s / total_s if total_s else None,
            "estimated_share_of": f"product time of steps of {steps}",
            "extrapolated": [*extrapolated],
        }


Constants = TypeVar("Constants", bound=Any)


@lru_cache
def load_calibration(card: str | Gpu) -> Calibration:
    """The stored fit of a card, or its datasheet peaks (which say that they are not fitted). A card from a file has its own fit."""
    if isinstance(card, Gpu):
        return fit_of(card) or Calibration.datasheet(card)
    path = CALIBRATION / f"{card}.json"
    return Calibration.load(path) if path.is_file() else Calibration.datasheet(gpu(card))


def fit_of(card: str | Gpu | None) -> Calibration | None:
    """The calibration fitted to a user's own card, if there is one."""
    return card.calibration if isinstance(card, Card) else None


def fitted_to(card: str | Gpu | None, constants: Constants) -> Constants:
    """A family's assumed constants, replaced by those that are fitted to the card."""
    fit = fit_of(card)
    if fit is None:
        return constants
    names = "matmul_efficiency", "attention_efficiency", "bandwidth_efficiency", "step_overhead_s"
    return replace(constants, **{name: getattr(fit, name) for name in names})


def save_calibration(calibration: Calibration, path: Path) -> None:
    replace_text(path, json.dumps(asdict(calibration), indent=2, allow_nan=False) + "\n")


def describe_calibration(calibration: Calibration) -> str:
    """One sentence on the calibration, for manifests and captions."""
    return f"{calibration.gpu}, {calibration.text}"
