"""What the server asks of an engine, whatever it generates with.

A ``ServedModel`` is made where the server runs and pickled to the engine's process, which makes a ``ServedEngine`` of
it. ``Submission`` goes there, ``Event`` comes back. The server talks to the process (``service.py``) and never to an engine.
Pickles go between them behind their length, as ``multiprocessing.connection.Connection``, the engine's end, frames them.
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
    *("logprobs", "prompt_logprobs", "echo", "logit_bias", "allowed_token_ids", "bad_words", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
"""Fields of a request about how each token follows from those before it."""


def asked_of_diffusion(asked: Mapping[str, Any], vocabulary: int) -> tuple[tuple[tuple[str, Any], ...], int, bool]:
    """(fields of the generation, seed, whether it ignores ends): what a diffusion model's engine heeds of ``ServedModel.generation``'s
    fields. The last stands for all that the server looks after, as it ends an answer at a stop id, and at no end that comes too
    early. Raise UserError for a field that such a model has no answer to."""
    name = next((each for each in _OF_CAUSAL_MODELS if each in asked), None)
    require(
        name is None,
        f"{name} is not supported: a diffusion model does not draw an answer's tokens left to right, each from its "
        f"probabilities behind those before it: leave it out, or ask a causal model",
    )
    given = dict(asked)
    check_vocabulary("stop_token_ids", given.pop("stop_token_ids", ()), vocabulary)
    if given.pop("min_tokens", 0) > 0:
        given["ignore_eos"] = True
    if given.get("temperature") == 0:  # whoever asks for the likeliest tokens gets them, as in vLLM
        for each in ("top_p", "top_k"):
            given.pop(each, None)
    seed, ignores_eos = given.pop("seed", 0), given.pop("ignore_eos", False)
    if "max_tokens" in given:
        given["gen_length"] = given.pop("max_tokens")
    return tuple(sorted(given.items())), seed, ignores_eos


class Submission(NamedTuple):
    request_id: int
    prompt_ids: tuple[int, ...]
    generation: Any
    """The engine's own settings, made by ``ServedModel.generation``."""
    wants_tokens: bool
    """Whether ``Tokens`` are told as they become final, and not at the end alone."""


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
    """Log probabilities of the prompt's tokens from the second on, where they were asked for; before the first ``Tokens``."""

    request_id: int
    logprobs: Logprobs | None
    """None of a prompt of one token."""


class Tokens(NamedTuple):
    """The next ids of the answer, in its order; none of them changes any more."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    """Those of the ids, where they were asked for and there are some."""


class Finished(NamedTuple):
    """The ids behind those that ``Tokens`` told, all of them where it told none."""

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
    """``phases`` and ``budget_used`` are the last step's; ``forward_passes``, ``committed_tokens``, ``busy_s`` and
    ``counts`` are totals since the engine started."""

    waiting: int = 0
    running: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """Requests of the step by what was computed of them."""
    budget_used: int = 0
    budget: int = 0
    """Query tokens of a step: charged, and the most that may be."""
    pool_used: int = 0
    pool: int = 0
    """Rows of K/V."""
    pool_idle: int = 0
    """Rows no request holds, kept in case one goes on from them; given up when room is needed."""
    forward_passes: int = 0
    committed_tokens: int = 0
    busy_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    """What this kind of engine counts besides."""


class ServedEngine(Protocol):
    """One engine, stepped by one thread."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, submission: Submission) -> None:
        """Raise UserError for what it cannot run."""

    def cancel(self, request_id: int) -> None:
        """Forget the request and free what it holds; nothing happens where it has ended already."""

    def step(self) -> Sequence[Event]:
        """Run one iteration."""

    def give_up(self, sentence: str) -> Sequence[Event]:
        """Fail the requests that work had begun on, after a step that raised; the others stay."""

    def status(self) -> EngineStatus: ...


class ServedModel(Protocol):
    """A model and how it is run, checked; light, and it pickles."""

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
        """Most tokens of an answer where a request says no number."""

    def room(self, prompt_tokens: int) -> int:
        """Most tokens of an answer behind so many of a prompt; none where it is not above 0."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What ``/v1/models`` says of it besides."""

    def generation(self, asked: Mapping[str, Any]) -> Any:
        """The engine's settings of a request. ``asked`` has the fields of its body that say how tokens are chosen or told, such as
        ``max_tokens``, ``seed``, ``logprobs`` and those of ``options``, each only where it was asked for. Raise UserError for what
        it cannot be.

        The server cuts an answer at its end and cancels it: an engine that runs on behind one wastes work and no more.
        """

    def check_prompt(self, prompt_ids: Sequence[int], generation: Any) -> None:
        """Raise UserError for a prompt that cannot be run, as far as that is known without the engine."""

    def check_machine(self) -> None:
        """Raise UserError for what this machine lacks; called in the engine's process before anything is loaded."""

    def serving(self) -> AbstractContextManager[ServedEngine]:
        """Load the model; called in the engine's process."""


_LENGTH = struct.Struct("!i")


class Cancel(NamedTuple):
    request_id: int


class Stop(NamedTuple):
    """Nothing that runs is waited for."""


Command = Submission | Cancel | Stop


class Able(NamedTuple):
    """The machine has what the model needs, which is loaded now."""


class Ready(NamedTuple):
    status: EngineStatus


class Report(NamedTuple):
    events: Sequence[Event]
    status: EngineStatus


class Unable(NamedTuple):
    """The model cannot be served; the process ends."""

    sentence: str
    is_users: bool
    """Whether it is the user's to mend."""


def frame(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """None at the end of the stream, in the middle of a frame too."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
