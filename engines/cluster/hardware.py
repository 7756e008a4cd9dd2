"""The workers of a cluster and their hardware: degrees and replicas of each phase, servers, K/V beside the weights, and links.

A step's cost is the ground truth of the simulated cluster. A roofline spreads its work over the GPUs of a tensor-parallel group, and
adds two all-reduces per layer. Roofline or measured kernels, the overheads of ``CostConstants`` come on top, which no datasheet or
paper states. They are named readings: ``physical`` is what a well-built engine reaches on this hardware. The others lower or raise
single constants until one printed figure is met. None of them meets all figures at once (``repro reproduce ampd/readings``).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from engines.cost.kernels import Composed, composed_degrees, kernels_of
from engines.cost.roofline import DecodeLine, Gpu, Roofline, StepPrice, StepWork
from engines.errors import UserError, require
from engines.knobs import Checked, Count, Proportion, Range, Seconds
from engines.models.shape import ModelShape
from engines.policies.views import Chunk

Role = Literal["assumed", "fitted", "implied"]
"""assumed: chosen beforehand, from common experience. fitted: the best of a search against printed results, which
it thus does not predict. implied: follows from one printed figure, named in the note."""

_INTER_SERVER_GB_S = 25.0
"""Per GPU: the paper prints 200 GB/s per server of 8 GPUs (AMPD §7.1), which is one 200 Gb/s port each."""


@dataclass(frozen=True, kw_only=True)
class EngineTimes(Checked):
    """The times that a release of a serving engine takes besides its kernels."""

    host_s: Seconds = 0.0
    """Host time of a step. An engine that schedules ahead hides it behind kernels that take longer."""
    schedules_ahead: bool = False
    """Whether a step is planned when the one before it starts, so that a request waits for the step after."""
    keeps_answers: bool = False
    """Whether blocks of answers stay in a prefix cache until their room is needed, as those of prompts do."""
    sequence_s: Seconds = 0.0
    """Added to a step for each of its sequences: sampling and other work that does not overlap."""
    draw_s: Seconds = 0.0
    """Added to each step if sampling by ``top_p`` or ``top_k`` sorts the logits."""
    logit_s: Seconds = 0.0
    """Added to a step for each logit of its sequences, if sampling sorts the logits."""
    request_s: Seconds = 0.0
    """From a request at the server to its place in the scheduler's queue: HTTP and tokenizer."""
    response_s: Seconds = 0.0
    """From the end of a step to its tokens at the client."""
    experts_share: Proportion = 1.0
    """Share of their tabled time that the matrix products of a bf16 mixture of experts take."""
    compile_s: Seconds = 0.0
    """How long a fresh server compiles a kernel of experts when a prefill first needs it."""

    @property
    def identity(self) -> str:
        """The part that these times add to a stored run's key; empty for no times."""
        return "" if self == NO_TIMES else repr(self)


NO_TIMES = EngineTimes()


@dataclass(frozen=True, kw_only=True)
class CostConstants(Checked):
    name: str
    role: Role
    note: str
    matmul_efficiency: Proportion
    """Share of the datasheet's matrix peak."""
    attention_efficiency: Proportion
    """Share of the same peak that attention over a prompt reaches."""
    bandwidth_efficiency: Proportion
    """Share of the datasheet's memory bandwidth. Values below 0.6 stand in for engine overhead, not for hardware."""
    layer_launch_s: Seconds = 0.0
    """Least time of a layer in any step. A step that computes less than ``n_layers`` times this is launch-bound."""
    step_overhead_s: Seconds = 2e-3
    """Scheduling, sampling and detokenising of every step."""
    prefill_overhead_s: Seconds = 0.0
    """Added for every prefill, wherever it runs."""
    remote_prefill_overhead_s: Seconds = 0.0
    """Added for each prefill away from its decode worker: handshake, block allocation, registration."""
    tensor_parallel_loss: Annotated[float, Range(least=0)] = 0.0
    """A degree of n computes as fast as n / (1 + loss log2 n) GPUs; its communication is extra."""
    all_reduce_latency_s: Seconds = 12e-6
    """Latency of each of the two all-reduces per layer."""
    nvlink_efficiency: Proportion = 0.7
    inter_server_gb_s: Annotated[float, Range(above=0)] = _INTER_SERVER_GB_S
    """Per GPU, one direction."""
    inter_server_efficiency: Proportion = 0.8
    transfer_latency_s: Seconds = 1e-3
    """The alpha of a KV transfer (AMPD App. A.1, Hockney's model)."""
    memory_share: Proportion = 0.85
    """Share of a GPU's memory for weights and KV; the rest holds activations, graphs and the runtime."""
    engine: EngineTimes = field(default=NO_TIMES, repr=False)


_STORED: Mapping[str, Any] = json.loads(Path(__file__).with_name("constants.json").read_text(encoding="utf-8"))


def _readings(rows: Sequence[Mapping[str, Any]]) -> tuple[CostConstants, ...]:
    defaults = _STORED["paper"][0]
    return tuple(CostConstants(**{**defaults, **row, "engine": EngineTimes(**row.get("engine", {}))}) for row in rows)


CONSTANTS = _readings(_STORED["paper"])
"""Readings of the paper's printed figures. A constant that one leaves out has the value of the first."""
PHYSICAL, TRIAL_R2, *_ = CONSTANTS
ENGINES = _readings(_STORED["engines"])
"""Readings of releases of serving engines, and one without an engine."""


def cost_constants(name: str) -> CostConstants:
    by_name = {constants.name: constants for constants in (*CONSTANTS, *ENGINES)}
    require(name.lower() in by_name, f"constants={name!r} are unknown: use one of {', '.join(by_name)}")
    return by_name[name.lower()]


class StepCost(Protocol):
    """The cluster asks this about a worker's speed. A measured table or a stub will do as well."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        """One step that prefills ``chunks`` and advances ``decoding`` sequences of ``context`` tokens in all.

        ``mode`` is the way that the batching policy asked for (``NextStep.mode``), if a worker has several.
        """

    def decode_line(self, decoding: int) -> DecodeLine: ...


class WorkerCost:
    """The cost of a tensor-parallel group of ``degree`` GPUs, by a roofline, or composed of a framework's ``kernels``.

    If composed, only the overheads among the constants count: of launches, steps, prefills and remote prefills. The tables contain
    the shares of a peak, and the exchange of activations in a group.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        degree: int,
        constants: CostConstants,
        *,
        kernels: str | None = None,
        is_remote: bool = False,
    ) -> None:
        """``is_remote`` adds the overhead of a prefill away from its decode worker."""
        require(
            shape.n_heads % degree == 0,
            f"degree={degree} does not divide the {shape.n_heads} heads of {shape.name}: use a power of two",
        )
        self._engine = constants.engine
        self._least_s = max(shape.n_layers * constants.layer_launch_s, self._engine.host_s)
        is_tabled_slow = shape.num_experts > 1 and shape.precision == "bf16"
        self._products_share = self._engine.experts_share if is_tabled_slow else 1.0
        self._fixed_s = constants.step_overhead_s + self._engine.draw_s
        self._sequence_s = self._engine.sequence_s + self._engine.logit_s * shape.vocab_rows
        self._prefill_overhead_s = constants.prefill_overhead_s
        if is_remote:
            self._prefill_overhead_s += constants.remote_prefill_overhead_s
        self._row_s = 0.0
        self.price: StepPrice
        if kernels is not None:
            self.price = Composed(kernels_of(shape.on_rank(degree), gpu, kernels, degree))
        else:
            gpus = degree / (1 + constants.tensor_parallel_loss * math.log2(degree))
            self.price = Roofline(shape, gpu, shares=constants, gpus=gpus)
            if degree > 1:
                self._fixed_s += 2 * shape.n_layers * constants.all_reduce_latency_s
                # A ring moves 2 (n - 1) / n of the activations over each GPU's link, in one direction.
                num_bytes = 2 * (degree - 1) / degree * 2 * shape.n_layers * shape.d_model * shape.dtype_bytes
                self._row_s = num_bytes / (link_bytes_per_s(gpu) * constants.nvlink_efficiency)

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        if mode is not None:
            raise UserError(f"mode={mode!r}: this cost model knows one way to run a step")
        work = StepWork(prompts=chunks, decoding=decoding, context=context)
        linear_s, attention_s, logits_s = self.price.parts(work)
        sequences = decoding + len(chunks)
        device_s = self._products_share * linear_s + attention_s + logits_s
        busy_s = max(device_s, self._least_s) + sequences * self._sequence_s
        rows = decoding + sum([tokens for _, tokens in chunks]) if self._row_s else 0
        return busy_s + self._fixed_s + rows * self._row_s + len(chunks) * self._prefill_overhead_s

    @property
    def terms(self) -> tuple[float, ...]:
        """The constants of ``step_s``: a share of linear_s, least_s, and seconds per sequence, step, row and prefill."""
        overheads = self._sequence_s, self._fixed_s, self._row_s, self._prefill_overhead_s
        return self._products_share, self._least_s, *overheads

    def decode_line(self, decoding: int) -> DecodeLine:
        else_s = besides_attention_s(self.price, decoding, self._products_share)
        fixed_s = self._fixed_s + decoding * (self._row_s + self._sequence_s)
        attention = self.price.decode_line(decoding)
        floor_s = max(else_s + attention.floor_s, self._least_s)
        return DecodeLine(else_s + attention.base_s + fixed_s, attention.slope_s, floor_s + fixed_s)


_KERNEL_ROWS = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096
"""The rows for which vLLM has tuned kernels of experts. A step takes the kernel whose rows are nearest."""
_MOST_GRAPH_ROWS = 512


class FreshCost:
    """The cost of a worker that has just started. Triton compiles a kernel of experts when a step first needs it. There is one kernel
    for each number of tuned rows, and for whether 16 divides the rows that experts get, with their padding and without.

    Before it serves, vLLM runs a step of ``max_num_batched_tokens``, and captures graphs for steps of up to twice ``max_num_seqs``
    rows."""

    def __init__(
        self, cost: StepCost, shape: ModelShape, compile_s: float, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._cost, self._shape, self._compile_s = cost, shape, compile_s
        self._graph_rows = min(2 * max_num_seqs, _MOST_GRAPH_ROWS, max_num_batched_tokens)
        captured = *range(8, self._graph_rows + 1, 8), max_num_batched_tokens
        self._compiled = {self._kernel(rows) for rows in captured}
        self.decode_line = cost.decode_line

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        step_s = self._cost.step_s(chunks, decoding, context, mode)
        rows = decoding + sum([tokens for _, tokens in chunks])
        kernel = self._kernel(rows)
        if rows <= self._graph_rows or kernel in self._compiled:
            return step_s
        self._compiled.add(kernel)
        return step_s + self._compile_s

    def _kernel(self, rows: int) -> tuple[int, bool, bool]:
        """Blocks of experts have a multiple of 16 rows, and padding fills at most all but one row of each expert."""
        nearest = min(_KERNEL_ROWS, key=lambda each: abs(each - rows))
        of_experts = rows * self._shape.experts_per_token
        return nearest, of_experts % 16 == 0, (of_experts - self._shape.num_experts) % 16 == 0


def besides_attention_s(price: StepPrice, rows: int, share: float = 1.0) -> float:
    """Seconds of the LM head, plus ``share`` of those of the layers' matrices, in a step of ``rows`` rows, each with logits."""
    linear_s, _, logits_s = price.parts(StepWork(query_rows=rows, logit_rows=rows))
    return share * linear_s + logits_s


def link_bytes_per_s(gpu: Gpu) -> float:
    """Bandwidth between GPUs of a server, one direction: of NVLink, or of PCIe if there is none."""
    both_gb_s = gpu.pcie_gb_s if gpu.nvlink_gb_s is None else gpu.nvlink_gb_s
    return both_gb_s * 1e9 / 2


DEGREES = (1, 2, 4, 8)
"""T of AMPD §5."""
GPUS_PER_SERVER = 8


@dataclass(frozen=True, kw_only=True)
class Pool(Checked):
    """``replicas`` workers of ``degree`` GPUs each (TP and DP of AMPD's Table 2)."""

    degree: Annotated[int, Range(1, GPUS_PER_SERVER)]
    """A worker does not span servers."""
    replicas: Count

    def __str__(self) -> str:
        return f"TP{self.degree}x{self.replicas}"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``decode`` workers hold the sessions; without ``prefill`` workers they are co-located and do both."""

    decode: tuple[Pool, ...]
    prefill: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.decode), "decode=(): a deployment needs at least one worker that decodes")

    @staticmethod
    def disaggregated(prefill_degree: int, prefill_replicas: int, degree: int, replicas: int) -> "Deployment":
        """In the order of Table 2: P:<TP, DP>, D:<TP, DP>."""
        return Deployment(
            prefill=(Pool(degree=prefill_degree, replicas=prefill_replicas),),
            decode=(Pool(degree=degree, replicas=replicas),),
        )

    @staticmethod
    def colocated(degree: int, replicas: int) -> "Deployment":
        return Deployment(decode=(Pool(degree=degree, replicas=replicas),))

    @property
    def gpus(self) -> int:
        return sum(pool.degree * pool.replicas for pool in (*self.prefill, *self.decode))

    def __str__(self) -> str:
        decode = "+".join(map(str, self.decode))
        return f"P:{'+'.join(map(str, self.prefill))} D:{decode}" if self.prefill else decode


def place(decode: Sequence[int], prefill: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Return the servers of decode and prefill workers of these degrees. Each worker gets the first server with room, the largest
    first. Workers of the two phases take turns, so that each finds one of the other phase on its server."""
    free: list[int] = []
    servers = [0] * len(decode), [0] * len(prefill)
    workers = [
        (-degree, index, phase) for phase, pool in enumerate((decode, prefill)) for index, degree in enumerate(pool)
    ]
    for minus_degree, index, phase in sorted(workers):
        server = next((position for position, room in enumerate(free) if room >= -minus_degree), len(free))
        if server == len(free):
            free.append(GPUS_PER_SERVER)
        free[server] += minus_degree
        servers[phase][index] = server
    return servers


class PlacedWorker(NamedTuple):
    degree: int
    server: int
    is_decode: bool
    """Whether it decodes. Other workers only prefill."""


def workers_of(deployment: Deployment) -> list[PlacedWorker]:
    """Those that decode first."""
    decode, prefill = (
        [pool.degree for pool in pools for _ in range(pool.replicas)]
        for pools in (deployment.decode, deployment.prefill)
    )
    decode_servers, prefill_servers = place(decode, prefill)
    return [
        *(PlacedWorker(*each, True) for each in zip(decode, decode_servers, strict=True)),
        *(PlacedWorker(*each, False) for each in zip(prefill, prefill_servers, strict=True)),
    ]


def splits(num_gpus: int, prefill_degrees: Sequence[int], decode_degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every deployment with one degree a phase that uses all GPUs, small prefill pools first."""
    for prefill_gpus in range(1, num_gpus):
        for prefill in prefill_degrees:
            for decode in decode_degrees:
                if prefill_gpus % prefill == 0 and (num_gpus - prefill_gpus) % decode == 0:
                    yield Deployment.disaggregated(
                        prefill, prefill_gpus // prefill, decode, (num_gpus - prefill_gpus) // decode
                    )


def replications(num_gpus: int, degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every co-located deployment with one degree that uses all GPUs."""
    for degree in degrees:
        if num_gpus % degree == 0:
            yield Deployment.colocated(degree, num_gpus // degree)


_LinkName = Literal["intra-server", "inter-server"]


@dataclass(frozen=True, kw_only=True)
class Link:
    name: _LinkName
    latency_s: float
    bytes_per_s: float
    """Bandwidth of one GPU; ranks of a tensor-parallel group send in parallel."""


@dataclass(frozen=True, kw_only=True)
class KvLinks:
    """T_kv of AMPD §3: Hockney's alpha-beta model over the slower of the two ends (App. A.1). Transfers do not slow each other down,
    because every GPU has its own port."""

    intra: Link
    inter: Link
    kv_bytes_per_token: int

    def between(self, server: int, other_server: int) -> Link:
        return self.intra if server == other_server else self.inter

    def transfer_s(self, tokens: int, link: Link, degree: int, other_degree: int) -> float:
        """Seconds of a transfer: latency + bytes over the ports of the smaller group; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        return link.latency_s + tokens * self.kv_bytes_per_token / (link.bytes_per_s * min(degree, other_degree))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A model on a kind of GPU, under one reading of what its steps cost."""

    shape: ModelShape
    gpu: Gpu
    constants: CostConstants
    kernels: str | None = None
    """The framework whose measured kernels make up a step; None: a roofline."""
    kv_tokens: int | None = field(default=None, repr=False)
    """Tokens of K/V of each worker that holds the weights; None: as many as fit its memory beside them."""
    _costs: dict[tuple[int, bool], StepCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cost(self, degree: int, *, is_remote: bool = False) -> StepCost:
        key = degree, is_remote
        if key not in self._costs:
            self._costs[key] = WorkerCost(
                self.shape, self.gpu, degree, self.constants, kernels=self.kernels, is_remote=is_remote
            )
        return self._costs[key]

    def run_cost(self, degree: int, batching: object = None, *, is_remote: bool = False) -> StepCost:
        """The cost of one worker in one run. The limits of its ``batching`` decide which kernels a fresh server has compiled."""
        cost, compile_s, shape = self.cost(degree, is_remote=is_remote), self.constants.engine.compile_s, self.shape
        if not (compile_s and shape.num_experts > 1 and shape.precision == "bf16"):
            return cost
        limits = {name: getattr(batching, name, 0) for name in ("max_num_seqs", "max_num_batched_tokens")}
        return FreshCost(cost, shape, compile_s, **limits)

    @property
    def links(self) -> KvLinks:
        constants, latency_s = self.constants, self.constants.transfer_latency_s
        intra_bytes_s = link_bytes_per_s(self.gpu) * constants.nvlink_efficiency
        inter_bytes_s = constants.inter_server_gb_s * 1e9 * constants.inter_server_efficiency
        return KvLinks(
            intra=Link(name="intra-server", latency_s=latency_s, bytes_per_s=intra_bytes_s),
            inter=Link(name="inter-server", latency_s=latency_s, bytes_per_s=inter_bytes_s),
            kv_bytes_per_token=self.shape.kv_bytes_per_token,
        )

    def kv_capacity(self, degree: int) -> int:
        """Tokens of K/V that fit beside the weights; below 1 if the weights alone do not fit."""
        free_bytes = self.gpu.memory_bytes * degree * self.constants.memory_share - self.shape.weight_bytes
        num_tokens = math.floor(free_bytes / self.shape.kv_bytes_per_token)
        return num_tokens if self.kv_tokens is None or num_tokens < 1 else self.kv_tokens

    def degrees(self, *, min_kv_tokens: int = 1) -> tuple[int, ...]:
        """Tensor-parallel degrees that leave room for so many tokens of K/V."""
        require(
            self.kv_tokens is None or self.kv_tokens >= min_kv_tokens,
            f"kv_tokens={self.kv_tokens} is less than the {min_kv_tokens} tokens of K/V that are needed at once: raise it",
        )
        heads, kv_heads = self.shape.n_heads, self.shape.n_kv_heads
        degrees = tuple(
            degree
            for degree in DEGREES
            if heads % degree == kv_heads % degree == 0 and self.kv_capacity(degree) >= min_kv_tokens
        )
        require(
            bool(degrees),
            f"model={self.shape.name!r} with {min_kv_tokens} tokens of K/V does not fit {max(DEGREES)} x {self.gpu.name}: "
            "use a smaller model or a larger GPU",
        )
        return degrees if self.kernels is None else composed_degrees(self.shape, self.gpu, self.kernels, degrees)
