"""The price of a step: a catalogue of GPUs, the work of a step, and the seconds that a roofline charges for it.

A step has three parts that run one after the other: the matrices of the layers, attention, and the LM head. On the roofline each takes
the longer of its arithmetic and its traffic. Traffic is weights (streamed once per forward, the head once per chunk of logits), K/V
rows read and written, and logits. Activations between kernels are not counted.

``gpus.json`` has vendor peaks, memory and links of each card, with their source. Memory sizes and bandwidths are decimal: "24 GB" is
24e9 bytes. A card reports up to 7 % more (an RTX 4090 has 24 GiB on board) or slightly less (ECC of the L40S). Driver and context take
some of it, and a memory plan keeps a guard band besides.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from engines.data import import_path_of, load_named, read_text
from engines.errors import UserError, require
from engines.knobs import Checked, Proportion, Range
from engines.models.shape import ModelShape

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    bf16_tflops: float
    """Dense BF16 matrix peak with float32 accumulation, no structured sparsity."""
    memory_bandwidth_gb_s: float
    memory_bytes: int
    nvlink_gb_s: float | None
    """Per GPU, both directions together (as vendors print it); None without NVLink."""
    pcie_gb_s: float
    """x16 slot, both directions together."""
    source: str

    peak_flops: float = field(init=False, repr=False, compare=False)
    """FLOP per second."""
    bandwidth: float = field(init=False, repr=False, compare=False)
    """Bytes per second."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", self.bf16_tflops * 1e12)
        object.__setattr__(self, "bandwidth", self.memory_bandwidth_gb_s * 1e9)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of_peaks(cls, name: str, flops_per_s: float, bytes_per_s: float, source: str = "measured") -> "Gpu":
        """A card with measured peaks, for bounds alone: it has no memory and no links."""
        return cls(
            name=f"{name} (measured peaks)",
            bf16_tflops=flops_per_s / 1e12,
            memory_bandwidth_gb_s=bytes_per_s / 1e9,
            memory_bytes=0,
            nvlink_gb_s=None,
            pcie_gb_s=0.0,
            source=source,
        )


GPUS: tuple[Gpu, ...] = tuple(Gpu(**card) for card in json.loads(Path(__file__).with_name("gpus.json").read_text()))
RTX4090, L40S, A100, H100, H200, B200, H20 = GPUS


def gpu(name: str | Gpu) -> Gpu:
    """Look a GPU up by its name, ignoring case; or another as ``module:NAME`` or an installed package's name. A ``Gpu`` returns itself."""
    if isinstance(name, Gpu):
        return name
    for card in GPUS:
        if card.name == name.lower():
            return card
    named = load_named("gpu", import_path_of("gpu", name, [card.name for card in GPUS]))
    require(isinstance(named, Gpu), f"gpu={name!r} is no engines.cost.roofline.Gpu: name one")
    result: Gpu = named
    return result


_OTHER_CARDS = {"d", "3e", "laptop", "mobile", "mig", "nvl", "pcie"}
"""Words that a driver adds to the name of a card with other peaks, or of a part of a card."""
_SAID_MEMORY = re.compile(r"(\d+)gb")


def gpu_of_device(device_name: str) -> Gpu | None:
    """The card that a driver calls ``device_name`` ("NVIDIA H100 80GB HBM3"). None if it is not in the catalogue, or is
    sold under the same name with other peaks or another memory."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    if names & _OTHER_CARDS:
        return None
    memories = {int(match[1]) * GB for word in words if (match := _SAID_MEMORY.fullmatch(word))}
    return next((card for card in GPUS if card.name in names and memories <= {card.memory_bytes}), None)


Bound = Literal["compute", "memory"]

LOGIT_PASSES = 2
"""The head writes logits, and the commit rule reads them."""


class StepWork(NamedTuple):
    """The work of one forward: packed sequences by their totals, or single ``prompts`` and sequences that decode a token each.

    A plain tuple: every step of a simulation makes one.
    """

    query_rows: int = 0
    """Rows of packed sequences, including padding; with prompts, only rows of padding."""
    attention_pairs: int = 0
    """Query length times key length, summed over packed sequences."""
    logit_rows: int = 0
    kv_read_rows: int = 0
    """Cached or fresh K/V rows that attention reads back, per layer (all layers have the same)."""
    kv_written_rows: int = 0
    num_sequences: int = 0
    prompts: Sequence[tuple[int, int]] = ()
    """(history, tokens) of each causal prompt; each has a row of logits."""
    decoding: int = 0
    """Sequences that decode a token each."""
    context: int = 0
    """Tokens that the decoding sequences attend over, summed."""
    padding: tuple[int, int] = (0, 0)
    """(number, tokens of each) of the prompts without history that a captured graph computes as padding."""
    logit_chunks: int = 1
    """Serial passes over the LM head (dLLM-Serve §4.3); each streams the head's weights again."""
    copied_logit_bytes: int = 0
    """Bytes that code moves if it reduces logits through copies of all of them."""
    extra_linear_flops: int = 0
    """FLOPs of rows that pass only some layers or matrices, like the next three; ``query_rows`` pass all."""
    extra_weight_bytes: int = 0
    """Layer weights that are streamed only for such rows."""
    extra_attention_flops: int = 0
    extra_cache_bytes: int = 0
    """Cached state read or written beyond the K/V rows; charged together with them."""
    new_layout: int = 0
    """1 if the rows lie otherwise than those of the step before, as far as that is noted."""
    builds: int = 0
    """1 if a sequence chooses the rows that it keeps, as far as that is noted."""

    def non_defaults(self) -> dict[str, Any]:
        """The fields that are not at their defaults, by name."""
        defaults = self._field_defaults
        return {name: value for name, value in self._asdict().items() if value != defaults[name]}


StepParts = tuple[float, float, float]
"""Seconds of the layers' matrices, of attention and of the LM head, one after another."""
Load = tuple[float, float]
"""FLOPs and bytes of a part of a step."""


class DecodeLine(NamedTuple):
    """A decode step of a given number of sequences takes max(base + slope * context, floor) seconds."""

    base_s: float
    slope_s: float
    """Per token of context, summed over the sequences."""
    floor_s: float

    def at(self, context: int) -> float:
        return max(self.base_s + self.slope_s * context, self.floor_s)


class Shares(Protocol):
    """Shares of a datasheet's peaks."""

    @property
    def matmul_efficiency(self) -> float: ...

    @property
    def attention_efficiency(self) -> float: ...

    @property
    def bandwidth_efficiency(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Calibration(Checked):
    """The constants of a GPU, the same for every system. Efficiencies are fractions of the datasheet peaks. Fits give
    matrix products and attention the same share, and assume the rest."""

    gpu: str
    matmul_efficiency: Proportion
    attention_efficiency: Proportion
    bandwidth_efficiency: Proportion
    step_overhead_s: Annotated[float, Range(0)]
    """Time of every step that the hardware does not explain (launches, Python)."""
    fitted_on: tuple[str, ...]
    """Names of the measured or published cells the constants were fitted on; empty: not fitted."""
    note: str = ""

    @property
    def text(self) -> str:
        """How the constants were found, as a clause."""
        return f"fitted on {'; '.join(self.fitted_on)}" if self.fitted_on else self.note

    @staticmethod
    def datasheet(gpu: Gpu) -> "Calibration":
        return Calibration(
            gpu=gpu.name,
            matmul_efficiency=1.0,
            attention_efficiency=1.0,
            bandwidth_efficiency=1.0,
            step_overhead_s=0.0,
            fitted_on=(),
            note="uncalibrated: datasheet peaks and no overhead; real steps are slower",
        )

    notes_steps: ClassVar[bool] = False
    """Whether the cost of a step depends on ``new_layout`` and ``builds``."""

    def overhead_s(self, work: StepWork) -> float:
        """Seconds of a step besides its parts; 0 for a step without work, which launches nothing."""
        return self.step_overhead_s if work.query_rows or work.extra_linear_flops else 0.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        names = [field.name for field in fields(cls)]
        required = [field.name for field in fields(cls) if field.default is MISSING]
        unknown, missing = sorted(set(raw) - set(names)), [name for name in required if name not in raw]
        if unknown or missing:
            raise UserError(
                f"calibration has unknown keys {unknown} and lacks {missing}: give exactly {', '.join(names)}"
            )
        fitted_on = raw["fitted_on"]
        if not isinstance(fitted_on, (list, tuple)) or not all(isinstance(value, str) for value in fitted_on):
            raise UserError(f"calibration: fitted_on={fitted_on!r} has the wrong type: see a saved calibration")
        return cls(**{**raw, "fitted_on": tuple(fitted_on)})

    @classmethod
    def load(cls, path: Path) -> Self:
        require(path.exists(), f"calibration file {path} does not exist: give the path of a saved calibration")
        text = read_text("calibration", path)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"calibration file {path} is not JSON ({error}): save it again") from error
        if not isinstance(raw, dict):
            raise UserError(f"calibration file {path} holds a {type(raw).__name__}: it must be one JSON object")
        return cls.from_dict(raw)


@dataclass(frozen=True, kw_only=True)
class CardCalibration(Calibration):
    """A calibration with the extra time of two kinds of steps of a diffusion LLM, for hosts that are slower than the card."""

    layout_s: Annotated[float, Range(0)] = 0.0
    """Added to a step whose rows lie otherwise than those of the step before, as their layout is then described anew."""
    build_s: Annotated[float, Range(0)] = 0.0
    """Added to a step in which a sequence chooses the rows that it keeps."""

    notes_steps: ClassVar[bool] = True

    def overhead_s(self, work: StepWork) -> float:
        return super().overhead_s(work) + self.layout_s * work.new_layout + self.build_s * work.builds


@dataclass(frozen=True, kw_only=True)
class PricedStep:
    """Simulated seconds of one step, and of its parts."""

    total_s: float
    linear_s: float
    attention_s: float
    logits_s: float
    overhead_s: float
    bound: Bound
    """Which takes longer at the datasheet's peaks: all parts' arithmetic alone, or all parts' traffic alone."""


class StepPrice(ABC):
    """Prices the steps of a model on a card; ``shape`` is a rank's share if a group of cards runs the model."""

    def __init__(self, shape: ModelShape, gpu: Gpu, calibration: Calibration | None = None) -> None:
        """``calibration`` has the overheads of ``step_time``; without it there are none."""
        self.shape, self.gpu = shape, gpu
        self.calibration = Calibration.datasheet(gpu) if calibration is None else calibration
        if self.calibration.gpu != gpu.name:
            raise UserError(
                f"calibration is for gpu={self.calibration.gpu!r}, not {gpu.name!r}: give the one of that GPU"
            )
        self._weights = None if shape.num_experts > 1 else shape.streamed_weight_bytes_layers()

    _diagonal = 1
    """1: each row of a prompt attends to itself as a whole pair; 0 counts half a pair."""
    _prompt_passes = 2
    """2: a prompt's own K/V rows are written and read; 1 leaves out the writing."""

    @abstractmethod
    def parts(self, work: StepWork) -> StepParts:
        """Seconds on the card alone; the caller adds overheads."""

    @abstractmethod
    def decode_line(self, decoding: int) -> DecodeLine:
        """Attention of ``decoding`` sequences that decode a token each."""

    def total_s(self, work: StepWork) -> float:
        """The same ``total_s`` as ``step_time`` returns."""
        linear_s, attention_s, logits_s = self.parts(work)
        return linear_s + attention_s + logits_s + self.calibration.overhead_s(work)

    def step_time(self, work: StepWork) -> PricedStep:
        linear_s, attention_s, logits_s = self.parts(work)
        overhead_s = self.calibration.overhead_s(work)
        compute_s, memory_s = (fsum(seconds) for seconds in zip(*self.floors(work), strict=True))
        return PricedStep(
            total_s=linear_s + attention_s + logits_s + overhead_s,
            linear_s=linear_s,
            attention_s=attention_s,
            logits_s=logits_s,
            overhead_s=overhead_s,
            bound="compute" if compute_s >= memory_s else "memory",
        )

    def floors(self, work: StepWork) -> list[tuple[float, float]]:
        """Seconds of each part's arithmetic, and of its traffic, at the datasheet peaks."""
        return [(flops / self.gpu.peak_flops, num_bytes / self.gpu.bandwidth) for flops, num_bytes in self.loads(work)]

    def lower_bound_s(self, work: StepWork) -> float:
        """max(all FLOP / peak, all bytes / bandwidth) at the datasheet peaks, whatever the calibration.

        No implementation of this forward on this card is faster. It is below ``step_time`` even
        without calibration: there one part's arithmetic may not overlap another part's traffic,
        and logits are charged two passes; here they are charged one (written once).
        """
        linear, attention, logits = self.loads(work, logit_passes=1)
        flops, num_bytes = linear[0] + attention[0] + logits[0], linear[1] + attention[1] + logits[1]
        return max(flops / self.gpu.peak_flops, num_bytes / self.gpu.bandwidth)

    def loads(self, work: StepWork, logit_passes: int = LOGIT_PASSES) -> tuple[Load, Load, Load]:
        """FLOPs and bytes of the layers' matrices, of attention (except decoded tokens') and of the LM head, without copies of logits."""
        shape = self.shape
        count, padded = work.padding
        prompts = [*work.prompts, *[(0, padded)] * count] if count else work.prompts
        rows, logit_rows = work.query_rows + work.decoding, work.logit_rows + work.decoding + len(prompts)
        pairs: float = work.attention_pairs
        cached = work.kv_read_rows + work.kv_written_rows
        diagonal, prompt_passes = self._diagonal, self._prompt_passes
        for history, tokens in prompts:
            rows += tokens
            pairs += tokens * (history + 0.5 * (tokens + diagonal))
            cached += history + prompt_passes * tokens
        weights = (self._weights or shape.streamed_weight_bytes_layers(rows)) if rows else 0
        head = shape.streamed_weight_bytes_head * work.logit_chunks if logit_rows else 0
        return (
            (shape.linear_flops_per_token * rows + work.extra_linear_flops, weights + work.extra_weight_bytes),
            (
                shape.attention_flops_per_pair * pairs + work.extra_attention_flops,
                shape.kv_bytes_per_token * cached + work.extra_cache_bytes,
            ),
            (shape.logits_flops_per_row * logit_rows, head + shape.logits_bytes_per_row * logit_passes * logit_rows),
        )


class Roofline(StepPrice):
    """Each part takes the longer of FLOP / (share x peak) and bytes / (share x bandwidth)."""

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        calibration: Calibration | None = None,
        *,
        shares: Shares | None = None,
        gpus: float = 1.0,
        is_coarse: bool = False,
    ) -> None:
        """``shares`` default to those of ``calibration``. ``shape`` is the whole model's, whose work ``gpus`` cards
        share. With ``is_coarse`` it leaves out the K/V that prompts write, half of their diagonals, and logit traffic."""
        super().__init__(shape, gpu, calibration)
        shares = self.calibration if shares is None else shares
        self._logit_passes = LOGIT_PASSES
        if is_coarse:
            self._diagonal, self._prompt_passes, self._logit_passes = 0, 1, 0
        self._matmul = gpu.peak_flops * shares.matmul_efficiency * gpus
        self._scores = gpu.peak_flops * shares.attention_efficiency * gpus
        self._bandwidth = gpu.bandwidth * shares.bandwidth_efficiency * gpus
        pair_s = shape.attention_flops_per_pair / self._scores
        self._context_s = max(pair_s, shape.kv_bytes_per_token / self._bandwidth)

    def parts(self, work: StepWork) -> StepParts:
        linear, attention, logits = self.loads(work, self._logit_passes)
        bandwidth = self._bandwidth
        attention_s = max(attention[0] / self._scores, attention[1] / bandwidth)
        if work.decoding:
            attention_s += self.decode_line(work.decoding).at(work.context)
        return (
            max(linear[0] / self._matmul, linear[1] / bandwidth),
            attention_s,
            max(logits[0] / self._matmul, (logits[1] + work.copied_logit_bytes) / bandwidth),
        )

    def decode_line(self, decoding: int) -> DecodeLine:
        """Each sequence reads its context and writes one row."""
        return DecodeLine(self.shape.kv_bytes_per_token * decoding / self._bandwidth, self._context_s, 0.0)
