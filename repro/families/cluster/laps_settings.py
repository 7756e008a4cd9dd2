"""The settings of prefill instances, and the turns of their runs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from engines.cluster.sessions import ClosedLoop, OpenLoop, Round, Session
from engines.cost.kernels import Framework
from engines.cost.roofline import Gpu, gpu
from engines.errors import require
from engines.knobs import Checked, Except, Needs, Only, Range, Seconds, knobs_of
from engines.laps.batching import GRID, Graphs, graph_bytes, shapes_of
from engines.laps.cluster import Cache, OpenTurns, PrefillArrivals, PrefillConstants, PrefillCost, Turn, cost_of
from engines.laps.latency import StepModel
from engines.models.shape import ModelShape, Precision
from engines.policies.views import Bucket, Rung, StepTimes
from repro.families.cluster.system import PolicySettings
from repro.families.cost import CostKnobs, fit_of
from repro.families.platforms import PrefillPart
from repro.files import file_cache
from repro.runs.cell import Cell
from repro.runs.record import Obtained
from repro.workloads.conversations import (
    LONG,
    ConversationConfig,
    ConversationProvenance,
    Conversations,
    draw_conversations,
)
from repro.workloads.draws import ArrivalConfig, arrival_times, arrivals_of, derive_seed
from repro.workloads.knobs import TraceKnobs, UntoldAnswers
from repro.workloads.served import trace_of, trace_source
from repro.workloads.sessions import Source

if TYPE_CHECKING:
    from repro.families.cluster.instance import MeasuredInstance


Decode = Literal["none", "apart", "mixed"]
SIMULATED = Only(executor="roofline")
"""Marks a setting that means nothing for a measured instance."""
Clients = Annotated[int, Range(1, 10**5)]
_MaybeClients = Annotated[int, Range(0, 10**5)]
_BANDS = Only(rate=None, arrivals=None, clients=None, min_tokens=None, max_tokens=None)
"""Marks a setting of the two closed loops of long and short prompts, which fix clients and prompt lengths themselves."""


@dataclass(frozen=True, kw_only=True)
class InstanceKnobs(TraceKnobs, UntoldAnswers, Checked):
    model: str | None = None
    """A shape by its name, or a folder with a config.json."""
    precision: Annotated[Precision, SIMULATED] = "bf16"
    """The number format in which layers store and multiply matrices: bf16, fp8 (one scale per tensor), fp8-block or fp8-dynamic."""
    num_instances: int = 1
    """How many instances there are, with one GPU each."""
    constants: Annotated[PrefillConstants, SIMULATED] = field(default_factory=PrefillConstants)
    charged: CostKnobs = field(default_factory=lambda: CostKnobs(kernels="sglang"))
    cache: Cache = "shared"
    """Where histories are cached. shared: in one cache for all instances. instance: on the instance that computed them."""
    reprefills_answer: bool = False
    """Compute the last answer again with the next turn, as if it had been decoded elsewhere."""
    decode: Annotated[Decode, SIMULATED] = "none"
    """none: a turn ends with its first token. apart: as many other GPUs decode answers. mixed: the instances decode them. With apart
    and mixed the next turn comes after the whole answer."""
    num_prompts: Annotated[int, Range(1, 10**5)] | None = None
    """How many turns to run."""
    clients: Annotated[Clients, Only(rate=None, arrivals=Except("trace"))] | None = None
    """Clients of a closed loop, each of which holds one conversation after another. With a rate instead, turns arrive whether or not
    earlier turns have finished."""
    think_s: Annotated[Seconds, Needs(rate=None, arrivals=None)] = 0.0
    """Seconds a client thinks before its next turn."""
    answer_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Tokens of every answer."""
    dataset_source: Source | None = None
    """embedded or local; local if a file is given."""
    dataset_path: str | None = None
    """A file of recorded conversations."""
    min_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Use only prompts of at least this many tokens."""
    max_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Use only prompts of at most this many tokens."""
    long_clients: Annotated[_MaybeClients, _BANDS] | None = None
    """Clients of a closed loop of prompts above 1,000 tokens (LAPS Figures 1 and 3)."""
    short_clients: Annotated[_MaybeClients, _BANDS] | None = None
    """Clients of a closed loop of prompts below 64 tokens (LAPS Figures 1 and 3), beside long_clients."""
    slo_ttft_s: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Objective of the time to the first token, in seconds."""
    deadlines: bool = True
    """Whether policies know the objective. Without it, they serve offline."""
    transient: bool = False
    """Accept a rate that the instances cannot serve."""


SHORT_PROMPT = 63
"""The most tokens of a short prompt in LAPS Figures 1 and 3."""
_MEMORY_SHARE = 0.85
"""The share of a GPU's memory that weights and K/V may take."""
BOUNDARY = 256
"""L_m, in tokens of the data set (before a platform scales its lengths)."""
MEASURED_GRID = tuple(bucket for bucket in GRID if bucket.length <= 64 and bucket.batch <= 16)
"""Buckets of a measured instance: as long as its boundary, a quarter of the paper's, and as deep as the paper's figures have clients."""
UNMEASURED = StepModel(
    base_s=1e-3,
    request_s=1e-5,
    floor_s=1e-4,
    token_s=1e-5,
    alpha=1e-9,
    history_s=1e-8,
    shapes=dict.fromkeys(MEASURED_GRID, 1e-3),
)
"""A placeholder for a measured instance's step model, so that we can check options before any run."""


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(PolicySettings):
    part: PrefillPart
    knobs: InstanceKnobs
    shape: ModelShape | None
    """The model's shape; None for a measured instance."""
    slo_s: float
    boundary: int
    workload: "PrefillWorkloadConfig"
    instance: "MeasuredInstance | None" = None
    """The instance of a measured run, while it runs."""

    @property
    def is_simulated(self) -> bool:
        return self.part.gpu is not None

    @property
    def obtained(self) -> Obtained:
        return self.knobs.charged.obtained if self.is_simulated else "measured"

    @property
    def model(self) -> str:
        """The model's name, as the shape spells it."""
        return self.part.model if self.shape is None else self.shape.name

    @property
    def deadline_s(self) -> float | None:
        """The objective as policies know it; None if they do not."""
        return self.slo_s if self.knobs.deadlines else None

    @property
    def simulated_shape(self) -> ModelShape:
        assert self.shape is not None, "a measured instance has a model of its own"
        return self.shape

    @property
    def cost_text(self) -> str:
        """One sentence on how simulated steps are charged."""
        card = self.part.gpu
        assert card is not None, "a measured step is charged nothing"
        if self.knobs.charged.framework is not None:
            return self.knobs.charged.describe(card, "overheads assumed", self.shape)
        fit = fit_of(card)
        how = "uncalibrated: constants" if fit is None else f"{fit.text}; launches and requests"
        return f"{card}, {how} assumed, mixing penalty {self.knobs.constants.kappa:g}"

    @property
    def cost(self) -> StepTimes:
        """The time of a step: on a simulated card, or on the measured instance. Before there is an instance, this is a placeholder."""
        if self.part.gpu is not None:
            return cost_of(self.simulated_shape, gpu(self.part.gpu), self.knobs.constants, self.knobs.charged.framework)
        return UNMEASURED if self.instance is None else self.instance.cost

    def step_model(self, shapes: tuple[Bucket | Rung, ...]) -> StepModel:
        """The step model by which policies know the instances' speed: a fit to profiled steps, and the time of every captured graph."""
        if self.part.gpu is not None:
            framework = self.knobs.charged.framework
            return _step_model_of(self.simulated_shape, self.part.gpu, self.knobs.constants, framework, shapes)
        model = UNMEASURED if self.instance is None else self.instance.step_model
        return replace(model, shapes={shape: model.shapes[shape] for shape in shapes})

    def shapes(self, graphs: Graphs, budget_gb: float | None = None) -> tuple[Bucket | Rung, ...]:
        """The shapes of captured graphs. A simulation has those of ``graphs`` that fit the budget, a measured run its instance's."""
        if not self.is_simulated:
            require(
                graphs != "ladder",
                "graphs='ladder': packed sizes pay where launches cost, a CPU has none: use none, nearest or cheapest",
            )
            captured = MEASURED_GRID if self.instance is None else self.instance.captured
            return () if graphs == "none" else captured
        size = graph_bytes(self.model, self.simulated_shape.n_layers)
        return shapes_of(graphs, None if budget_gb is None else round(budget_gb * 1e9), size)

    @property
    def kv_capacity(self) -> int:
        """Tokens of K/V that fit beside the weights on one GPU. On a measured instance, its number of positions."""
        if self.part.gpu is None:
            return self.part.most_tokens
        shape = self.simulated_shape
        room = max(0.0, _MEMORY_SHARE * gpu(self.part.gpu).memory_bytes - shape.weight_bytes)
        return int(room / shape.kv_bytes_per_token)


@lru_cache(maxsize=256)
def _step_model_of(
    shape: ModelShape,
    card: str | Gpu,
    constants: PrefillConstants,
    kernels: Framework | None,
    shapes: tuple[Bucket | Rung, ...],
) -> StepModel:
    """The step model of a simulated card. It lacks the mixing penalty, because policies know only how long a step of one prompt takes."""
    cost = cost_of(shape, gpu(card), replace(constants, kappa=0.0), kernels)
    return _profiled(cost).replaying(cost, shapes)


@lru_cache(maxsize=64)
def _profiled(cost: PrefillCost) -> StepModel:
    return StepModel.profile(cost)


_TIMES = ("max_window_s", "slack_s", "margin_s", "max_wait_s", "max_long_wait_s", "min_step_s", "max_step_s")
_TOKENS = ("token_max", "chunk_tokens", "short_tokens")


def in_tokens(count: int, length_scale: float) -> int:
    """Scale a number of tokens in the paper to a platform's lengths, to at least 1."""
    return max(1, round(length_scale * count))


def scaled(kind: type, *, length_scale: float, time_scale: float) -> dict[str, Any]:
    """Defaults of a policy's settings by name, with the paper's lengths and times (for an objective of 0.4 s) scaled by these factors."""
    knobs = knobs_of(kind)
    times = {name: time_scale * knobs[name].default for name in _TIMES if name in knobs}
    return times | {name: in_tokens(knobs[name].default, length_scale) for name in _TOKENS if name in knobs}


def workload_of(cell: Cell, part: PrefillPart, knobs: InstanceKnobs) -> "PrefillWorkloadConfig":
    """The workload of a cell: at a rate, in one closed loop (all prompts or a band of lengths), or in two (long and short)."""
    arrivals, think_s, file = None, knobs.think_s, trace_source(cell.dataset, knobs, cell.requested)
    if cell.rate is not None or knobs.arrivals is not None:
        require(
            knobs.arrivals != "burst" and (knobs.arrivals != "trace" or file is not None),
            f"arrivals={knobs.arrivals!r}: turns come at a rate (poisson, gamma, constant) or a workload file's times (trace), "
            "or leave it out for clients in a closed loop",
        )
        arrivals = arrivals_of(cell.rate, knobs)
    else:
        for name, needed in (("burstiness", "a request rate"), ("time_scale", "arrivals='trace'")):
            require(getattr(knobs, name) is None, f"{name} has no effect without {needed}: leave it out")
    asked = cell.requested
    default_turns = part.num_turns if file is None else trace_of(file, cell.seed).num_rounds
    is_replayed = arrivals is not None and arrivals.kind == "trace"
    conversations = ConversationConfig(
        dataset=cell.dataset,
        num_turns=default_turns if knobs.num_prompts is None else knobs.num_prompts,
        seed=cell.seed,
        think_s=knobs.think_s,
        answer_tokens=knobs.answer_tokens,
        low=knobs.min_tokens,
        high=knobs.max_tokens,
        source=knobs.dataset_source or ("embedded" if knobs.dataset_path is None else "local"),
        path=knobs.dataset_path,
        file=file,
        replayed=arrivals if is_replayed else None,
    )
    pair: dict[str, int] = {name: getattr(knobs, name) for name in ("long_clients", "short_clients") if name in asked}
    if pair:
        streams = _bands(conversations, pair)
    else:
        clients = None if arrivals is not None else knobs.clients or part.clients
        streams = (Stream(conversations=conversations, clients=clients),)
    return PrefillWorkloadConfig(streams=streams, arrivals=arrivals, think_s=think_s, length_scale=part.length_scale)


def _bands(whole: ConversationConfig, clients: Mapping[str, int]) -> "tuple[Stream, ...]":
    """Two closed loops, of long and of short prompts, with the same number of turns per client."""
    total = sum(clients.values())
    require(total > 0, "long_clients=0 and short_clients=0: give one of them clients")
    streams: list[Stream] = []
    for name, (low, high) in {"long_clients": (LONG + 1, None), "short_clients": (None, SHORT_PROMPT)}.items():
        if clients.get(name):
            num_turns = max(1, round(whole.num_turns * clients[name] / total))
            band = replace(whole, num_turns=num_turns, seed=whole.seed + 1000 * len(streams), low=low, high=high)
            streams.append(Stream(conversations=band, clients=clients[name]))
    return tuple(streams)


LANES = 256
"""The most conversations that an open loop holds side by side."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    conversations: ConversationConfig
    clients: int | None
    """Clients of a closed loop; None at a rate."""


@dataclass(frozen=True, kw_only=True)
class PrefillWorkloadConfig:
    streams: tuple[Stream, ...]
    arrivals: ArrivalConfig | None
    """Arrivals of an open loop; None for closed loops."""
    think_s: float = 0.0
    length_scale: float = 1.0
    """Factor on drawn prompts and answers. ``low`` and ``high`` count tokens before scaling."""

    @property
    def is_replayed(self) -> bool:
        """Whether conversations arrive at a file's own times."""
        return self.arrivals is not None and self.arrivals.kind == "trace"


@dataclass(frozen=True, kw_only=True)
class PrefillWorkload:
    config: PrefillWorkloadConfig
    streams: tuple[Conversations, ...]
    """The conversations of each stream. Session ids are unique over all streams."""
    provenance: ConversationProvenance

    @cached_property
    def arrivals(self) -> tuple[PrefillArrivals, ...]:
        config = self.config
        if config.is_replayed:
            return tuple(OpenLoop(sessions=conversations.sessions) for conversations in self.streams)
        if config.arrivals is not None:
            seed = config.streams[0].conversations.seed
            return tuple(open_turns(conversations, config.arrivals, seed) for conversations in self.streams)
        return tuple(
            ClosedLoop(sessions=conversations.sessions, num_clients=stream.clients or 1, think_s=config.think_s)
            for conversations, stream in zip(self.streams, config.streams, strict=True)
        )


_conversations = file_cache(maxsize=256)(draw_conversations)
"""Draws conversations, which we keep so that runs with other rates or clients share them."""


@file_cache(maxsize=256)
def draw_workload(config: PrefillWorkloadConfig) -> PrefillWorkload:
    """The workload of these settings, which all systems of a comparison share."""
    streams = []
    first_id = 0
    for stream in config.streams:
        drawn = _conversations(stream.conversations)
        require(
            stream.clients is None or len(drawn.sessions) > stream.clients,
            f"num_prompts={stream.conversations.num_turns} makes {len(drawn.sessions)} conversations for {stream.clients} clients: give more",
        )
        if config.length_scale != 1:
            drawn = with_scaled_lengths(drawn, config.length_scale)
        sessions = drawn.sessions
        if first_id:
            sessions = tuple(replace(session, session_id=first_id + session.session_id) for session in sessions)
        first_id += len(sessions)
        streams.append(replace(drawn, sessions=sessions))
    provenance = streams[0].provenance
    if len(streams) > 1:
        checksum = hashlib.sha256(" ".join(stream.provenance.checksum for stream in streams).encode()).hexdigest()
        text = "; ".join(dict.fromkeys(stream.provenance.description for stream in streams))
        provenance = replace(provenance, checksum=checksum, description=text)
    return PrefillWorkload(config=config, streams=tuple(streams), provenance=provenance)


def open_turns(conversations: Conversations, arrivals: ArrivalConfig, seed: int) -> OpenTurns:
    """Give every turn its own arrival time, such as a Poisson process's, whether or not the turn before it has finished.

    We line up the turns of all conversations, cut the line into lanes of equal length, and draw at random which lane goes next. So every
    part of the run has the right shares of first and later turns, full histories, and the turns of a conversation in order. If a cut
    divides a conversation, both parts count as conversations of their own.
    """
    flat = []
    for session in conversations.sessions:
        history = answered = 0
        for index, (prefill, decode, _) in enumerate(session.rounds):
            flat.append(Turn(0.0, session.session_id, index, history, prefill, answered))
            history, answered = history + prefill + decode, decode
    bounds = np.linspace(0, len(flat), min(LANES, len(flat)) + 1).astype(np.int64)
    rng = np.random.default_rng(derive_seed(seed, "conversations", "lanes"))
    lanes = rng.permutation(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))).tolist()
    times = arrival_times(arrivals, len(flat), seed).tolist()
    positions = bounds[:-1].tolist()
    cut_ids = [flat[position].session_id if flat[position].turn > 0 else None for position in positions]
    turns = []
    for lane, arrival_s in zip(lanes, times, strict=True):
        turn = flat[positions[lane]]
        positions[lane] += 1
        is_rest = turn.session_id == cut_ids[lane]
        session_id = len(conversations.sessions) + lane if is_rest else turn.session_id
        turns.append(turn._replace(arrival_s=arrival_s, session_id=session_id))
    return OpenTurns(turns=turns)


def with_scaled_lengths(conversations: Conversations, scale: float) -> Conversations:
    """The conversations with scaled lengths of at least one token. The published shares stay those of unscaled lengths."""
    sessions = tuple(
        Session(
            session.session_id,
            session.arrival_s,
            tuple(
                Round(in_tokens(turn.prefill_tokens, scale), in_tokens(turn.decode_tokens, scale), turn.delay_s)
                for turn in session.rounds
            ),
        )
        for session in conversations.sessions
    )
    provenance = replace(
        conversations.provenance,
        description=f"{conversations.provenance.description}; lengths x {scale:g}",
        checksum=hashlib.sha256(f"{conversations.provenance.checksum} x {scale!r}".encode()).hexdigest(),
    )
    return replace(conversations, sessions=sessions, provenance=provenance)
