"""The interface between the server and an engine of any kind.

The server makes a ``ServedModel`` and pickles it to the engine's process, which makes a ``ServedEngine`` from it. A
``Submission`` goes there, an ``Event`` comes back. The server talks to the process (``service.py``) and never to an engine.
Each pickle follows its length, in the format of ``multiprocessing.connection.Connection``, which the engine's end uses.
"""

import asyncio
import pickle
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engines.ar.sampling import Logprobs, check_vocabulary
from engines.errors import require

Kind = type[int] | type[float] | type[str]


_OF_CAUSAL_MODELS = (
    # An echo of a conversation asks for prompt_logprobs, which its client did not name.
    *("logprobs", "echo", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
"""Fields of a request that concern how each token follows from those before it, which only causal models support."""


def diffusion_fields(requested: Mapping[str, Any], vocabulary: int) -> tuple[tuple[tuple[str, Any], ...], int, bool]:
    """Return (fields of the generation, seed, whether it ignores ends): the part of ``ServedModel.generation``'s fields for a diffusion
    engine. The last covers what the server does itself: it ends an answer at a stop id, and at no end that comes too early.
    Raises UserError for a field that a diffusion model cannot support."""
    name = next((key for key in _OF_CAUSAL_MODELS if key in requested), None)
    require(
        name is None,
        f"{name} is not supported: a diffusion model does not draw an answer's tokens left to right, each from its "
        f"probabilities behind those before it: leave it out, or ask a causal model",
    )
    fields = dict(requested)
    check_vocabulary("stop_token_ids", fields.pop("stop_token_ids", ()), vocabulary)
    if fields.pop("min_tokens", 0) > 0:
        fields["ignore_eos"] = True
    seed, ignores_eos = fields.pop("seed", 0), fields.pop("ignore_eos", False)
    if "max_tokens" in fields:
        fields["gen_length"] = fields.pop("max_tokens")
    return tuple(sorted(fields.items())), seed, ignores_eos


class Submission(NamedTuple):
    request_id: int
    prompt_ids: tuple[int, ...]
    generation: Any
    """The engine's own settings, made by ``ServedModel.generation``."""
    wants_tokens: bool
    """Whether the engine sends ``Tokens`` as they become final, not only at the end."""


class Accepted(NamedTuple):
    """The engine has the request and will end it with one of Finished and Failed, unless it is cancelled."""

    request_id: int


class Refused(NamedTuple):
    """The engine cannot run the request; ``sentence`` names the field, the value and the fix."""

    request_id: int
    sentence: str


class Admitted(NamedTuple):
    """Work on the request has begun."""

    request_id: int


class PromptScored(NamedTuple):
    """Log probabilities of the prompt's tokens from the second on, if the request asks for them; before the first ``Tokens``."""

    request_id: int
    logprobs: Logprobs | None
    """None for a prompt of one token."""


class Tokens(NamedTuple):
    """The next ids of the answer, in its order; none of them changes any more."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    """Log probabilities of the ids, if the request asks for them and there are ids."""


class Finished(NamedTuple):
    """The answer has ended; the ids are those that no ``Tokens`` told before."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    """As in ``Tokens``."""


class Failed(NamedTuple):
    request_id: int
    sentence: str


Event = Accepted | Refused | Admitted | PromptScored | Tokens | Finished | Failed
ENDS = (Refused, Finished, Failed)
"""No event of a request follows one of these."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """An engine's state. ``phases`` and ``budget_used`` are the last step's; ``forward_passes``, ``committed_tokens``, ``busy_s`` and
    ``counts`` are totals since the engine started."""

    waiting: int = 0
    running: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """Requests of the step by phase, such as prefill and decode."""
    budget_used: int = 0
    budget: int = 0
    """Query tokens charged to the step, and the most that a step may have."""
    pool_used: int = 0
    pool: int = 0
    """Rows of K/V in use, and in all."""
    pool_idle: int = 0
    """Rows that no request holds, kept for a request that continues from them, and evicted if room is needed."""
    forward_passes: int = 0
    committed_tokens: int = 0
    busy_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counters of this kind of engine."""


class ServedEngine(Protocol):
    """One engine, stepped by one thread."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, submission: Submission) -> None:
        """Take a request. Raises UserError if the engine cannot run it."""

    def cancel(self, request_id: int) -> None:
        """Forget the request and free what it holds; does nothing if it has ended already."""

    def step(self) -> Sequence[Event]:
        """Run one iteration."""

    def give_up(self, sentence: str) -> Sequence[Event]:
        """Fail the requests on which work had begun, after a step that raised; the others stay."""

    def status(self) -> EngineStatus: ...


class ServedModel(Protocol):
    """A model and its settings, which are checked. It is light and can be pickled."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Kind]:
        """Fields of a request that OpenAI's API lacks and this engine heeds."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def default_tokens(self) -> int:
        """Most tokens of an answer if a request gives no number."""

    def room(self, prompt_tokens: int) -> int:
        """Return the most tokens of an answer to a prompt of so many tokens; 0 or less means no room."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Further fields of the model in ``/v1/models``."""

    def generation(self, requested: Mapping[str, Any]) -> Any:
        """Return the engine's settings for a request. ``requested`` has the given fields of its body about how tokens are chosen or
        told. These are fields such as ``max_tokens``, ``seed``, ``logprobs`` and those of ``options``. Raises UserError for values
        that the engine cannot run.

        The server cuts an answer at its end and cancels it: an engine that runs past the end only wastes work.
        """

    def check_prompt(self, prompt_ids: Sequence[int], generation: Any) -> None:
        """Raise UserError for a prompt that cannot be run, as far as that is known without the engine."""

    def check_machine(self) -> None:
        """Raise UserError if this machine lacks something; called in the engine's process before anything is loaded."""

    def serving(self) -> AbstractContextManager[ServedEngine]:
        """Load the model; called in the engine's process."""


_LENGTH = struct.Struct("!i")


class Cancel(NamedTuple):
    request_id: int


class Stop(NamedTuple):
    """Tells the process to end, without waiting for requests that run."""


Command = Submission | Cancel | Stop


class Able(NamedTuple):
    """The machine has what the model needs, and the process now loads the model."""


class Ready(NamedTuple):
    status: EngineStatus


class Report(NamedTuple):
    events: Sequence[Event]
    status: EngineStatus


class Unable(NamedTuple):
    """The model cannot be served; the process ends."""

    sentence: str
    is_users: bool
    """Whether the user can correct it."""


def frame(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next message; None at the end of the stream, also inside a frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
