"""The answers to one request: submitted together, put together from the engine's events, cancelled together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from engines.ar.sampling import Logprobs
from engines.errors import UserError
from engines.models.tokenizer import Speller
from engines.server.answer import Answer, Piece
from engines.server.body import MOST_CHOICES, Asked, ChatBody, CompletionBody
from engines.server.codec import Codec
from engines.server.errors import ApiError, queue_full, refused, unavailable
from engines.server.logprobs import Score, ScoredTokens, prompt_logprobs, scores_of
from engines.server.protocol import (
    Accepted,
    Admitted,
    Event,
    Failed,
    Finished,
    PromptScored,
    Refused,
    ServedModel,
    Tokens,
)
from engines.server.service import EngineProcess, Overloaded, Unavailable

T = TypeVar("T")

_SEEDS = 2**63
"""Seeds of an engine are those below it; a negative one is another from there."""
LARGE_TEXT = 1 << 15
"""Bytes from which texts are tokenized behind the others."""


class Served(NamedTuple):
    """What requests are answered with. ``work`` runs what would hold up the event loop, one thing at a time, and
    ``slow_work`` what would hold up the others there."""

    model: ServedModel
    codec: Codec
    service: EngineProcess
    work: Executor
    slow_work: Executor
    max_queue: int


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class Part(NamedTuple):
    """``piece`` begins with the prompt where that is echoed."""

    choice: int
    piece: Piece
    logprobs: dict[str, list[Any]] | None = None
    """As OpenAI's API words them, where they were asked for."""


class Completion:
    """``async with`` submits, and returns once the engine has taken every answer; leaving it cancels those that are open.

    Raises ApiError for what cannot be answered.
    """

    def __init__(self, served: Served, asked: Asked) -> None:
        self._served, self._asked = served, asked
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._ids: dict[int, int] = {}
        """Choice -> id of its request, while it is open."""
        self._answers: list[Answer] = []
        self._prompt_tokens = 0
        self._prompts: list[tuple[int, ...]] = []
        self._scored: dict[int, list[Score | None]] = {}
        """Choice -> of its prompt's tokens, where they were asked for."""
        self._tokens: dict[int, ScoredTokens] = {}
        """Choice -> its tokens, where log probabilities were asked for."""
        self._early: list[tuple[int, Event]] = []
        self.has_begun_at: float | None = None
        """When work on the first of its answers began, on the loop's clock."""

    async def __aenter__(self) -> Self:
        try:
            await self._submit()
        except BaseException:
            self._cancel_open()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_open()

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        return Usage(self._prompt_tokens, sum(answer.num_tokens for answer in self._answers))

    async def parts(self) -> AsyncIterator[Part]:
        """Pieces of the answers as they become final, until all have ended."""
        while self._ids:
            choice, event = self._early.pop(0) if self._early else await self._events.get()
            if choice not in self._ids:
                continue
            if isinstance(event, Failed | Refused):  # refused by an engine that was started again
                raise ApiError(500, event.sentence, kind="server_error", code="engine_failed")
            if isinstance(event, Admitted) and self.has_begun_at is None:
                self.has_begun_at = asyncio.get_running_loop().time()
            if isinstance(event, PromptScored):
                scores = () if event.logprobs is None else scores_of(event.logprobs)
                self._scored[choice] = [None, *scores]
            if not isinstance(event, Tokens | Finished):
                continue
            answer = self._answers[choice]
            is_first = answer.num_tokens == 0
            piece = answer.add(event.token_ids, is_last=isinstance(event, Finished))
            if isinstance(event, Finished):
                del self._ids[choice]
            elif answer.finish_reason is not None:
                self._served.service.cancel(self._ids.pop(choice))
            if piece.text or piece.token_ids or piece.finish_reason is not None:
                yield self._part(choice, piece, event.logprobs, is_first=is_first)

    def prompt_logprobs(self, choice: int) -> list[Any] | None:
        """The field of that name, once the choice has begun; None where it was not asked for."""
        if self._asked.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._prompt_of(choice), self._scored[choice], self._speller)

    @property
    def _speller(self) -> Speller | None:
        return None if self._asked.return_tokens_as_token_ids else self._served.codec.speller

    def _prompt_of(self, choice: int) -> tuple[int, ...]:
        return self._prompts[choice // self._asked.n]

    def _part(self, choice: int, piece: Piece, found: Logprobs | None, *, is_first: bool) -> Part:
        asked = self._asked
        ids, scores = list(piece.token_ids), [] if found is None else list(scores_of(found))[: len(piece.token_ids)]
        if isinstance(asked, CompletionBody) and asked.echo and is_first:
            prompt = self._prompt_of(choice)
            ids, scores = [*prompt, *ids], [*self._scored.get(choice, ()), *scores]
            if asked.length == 0:  # the one token that was made says where the prompt's ends
                ids, scores, piece = ids[: len(prompt)], scores[: len(prompt)], piece._replace(text="")
            piece = piece._replace(text=self._echo(choice) + piece.text)
        if asked.num_logprobs is None:
            return Part(choice, piece)
        if choice not in self._tokens:
            self._tokens[choice] = ScoredTokens(self._speller, is_chat=isinstance(asked, ChatBody))
        return Part(choice, piece, self._tokens[choice].worded(ids, scores))

    def _echo(self, choice: int) -> str:
        """The text of the prompt; empty beside ``return_token_ids``, which tells it as ids, as in vLLM."""
        asked, speller = self._asked, self._served.codec.speller
        assert isinstance(asked, CompletionBody)
        given = asked.prompt[choice // asked.n]
        if asked.return_token_ids:
            return ""
        return given if isinstance(given, str) else "" if speller is None else speller.text(given)

    # -- submission ----------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        served, asked = self._served, self._asked
        left, most = asked.num_choices, min(MOST_CHOICES, served.max_queue)
        if left > most:
            raise refused(
                f"n={asked.n} for {left // asked.n} prompts makes {left} answers, more than {most}, the most that is taken "
                f"(max_queue={served.max_queue}): send several requests",
                "n",
            )
        size = self._check_texts()
        generations = self._generations()
        try:
            # Before anything is tokenized: what cannot be queued must not cost much.
            served.service.reserve(left)
        except Overloaded:
            raise queue_full(served.max_queue) from None
        except Unavailable as error:
            raise unavailable(str(error)) from None
        try:
            prompts = await self._encode(generations[0], served.work if size < LARGE_TEXT else served.slow_work)
            self._prompts, self._prompt_tokens = prompts, sum(map(len, prompts))
            wants_tokens = asked.stream or bool(asked.stop)
            for prompt_ids in prompts:
                for generation in generations:
                    choice = len(self._answers)
                    self._answers.append(Answer(served.codec, asked.stop, ignores_eos=asked.ignore_eos))
                    self._ids[choice] = served.service.submit(
                        prompt_ids, generation, partial(self._hear, choice), wants_tokens=wants_tokens
                    )
                    left -= 1
        finally:
            served.service.give_back(left)
        await self._wait_until_taken()

    def _generations(self) -> list[object]:
        """Settings of the ``n`` answers to a prompt, which differ in their seed."""
        given, seed = self._asked.generation, self._asked.seed
        # Drawn anew for every request, as OpenAI's is, where none was asked for; -1 asks for none, as in vLLM.
        first = secrets.randbelow(_SEEDS) if seed in (None, -1) else seed
        return _users(
            lambda: [
                self._served.model.generation({**given, "seed": (first + i) % _SEEDS}) for i in range(self._asked.n)
            ]
        )

    def _check_texts(self) -> int:
        """Bytes of the prompts' text. Raises for a text that is too long whatever its tokens are."""
        model, asked = self._served.model, self._asked
        if isinstance(asked, ChatBody):
            name, sizes = "messages", [sum(_num_bytes(each["content"]) for each in asked.turns)]
        else:
            name, sizes = "prompt", [_num_bytes(each) for each in asked.prompt if isinstance(each, str)]
        longest = self._served.codec.longest_token
        for size in sizes:
            if size > model.max_model_len * longest:
                raise refused(
                    f"prompt of {size} bytes is more than the {longest} bytes of the longest token times "
                    f"max_model_len={model.max_model_len}: shorten it",
                    name,
                )
        return sum(sizes)

    async def _encode(self, generation: object, work: Executor) -> list[tuple[int, ...]]:
        """Ids of the prompts, checked."""
        codec, model, asked = self._served.codec, self._served.model, self._asked

        def encode() -> list[tuple[int, ...]]:
            if isinstance(asked, ChatBody):
                found = [codec.encode_chat(asked.turns)]
            else:
                found = [codec.encode(each) if isinstance(each, str) else each for each in asked.prompt]
            for prompt_ids in found:
                model.check_prompt(prompt_ids, generation)
            return found

        return await asyncio.get_running_loop().run_in_executor(work, partial(_users, encode))

    def _hear(self, choice: int, event: Event) -> None:
        self._events.put_nowait((choice, event))

    async def _wait_until_taken(self) -> None:
        """What comes between is kept for ``parts``."""
        missing = set(self._ids)
        while missing:
            choice, event = await self._events.get()
            if isinstance(event, Refused):
                del self._ids[choice]
                raise refused(event.sentence)
            if isinstance(event, Accepted | Failed):
                missing.discard(choice)
            if not isinstance(event, Accepted):
                self._early.append((choice, event))

    def _cancel_open(self) -> None:
        for request_id in self._ids.values():
            self._served.service.cancel(request_id)
        self._ids.clear()


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _users(make: Callable[[], T]) -> T:
    """A UserError is the client's."""
    try:
        return make()
    except UserError as error:
        raise refused(str(error)) from None
