"""The answers to one request: we submit them together, build them from the engine's events, and cancel them together."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeVar

from engines.ar.sampling import Logprobs
from engines.errors import UserError
from engines.models.tokenizer import special_tokens
from engines.server.answer import Answer, Piece, Score, ScoredTokens, Stops, prompt_logprobs, scores_of
from engines.server.body import SEEDS, AnswerBody, ChatBody, CompletionBody
from engines.server.codec import Codec
from engines.server.errors import ApiError, refusal
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
from engines.server.service import EngineProcess

T = TypeVar("T")

LONG_PROMPT = 1 << 10
"""From so many tokens on, we format a prompt's scores behind those of others (``Served.slow_work``)."""
LARGE_TEXT = 1 << 15
"""From so many bytes on, we tokenize texts behind the others (``Served.slow_work``)."""


class Served(NamedTuple):
    """Everything that answers requests. ``work`` runs tasks that would hold up the event loop, one at a time. ``slow_work``
    runs tasks that would hold up the others in ``work``."""

    model: ServedModel
    codec: Codec
    service: EngineProcess
    work: Executor
    slow_work: Executor


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class AnswerPiece(NamedTuple):
    """A piece of one choice. The first ``piece`` begins with the prompt if that is echoed."""

    choice: int
    piece: Piece
    logprobs: dict[str, list[Any]] | None = None
    """In the format of OpenAI's API, if the request asks for them."""


class Completion:
    """The answers to one request. Its methods raise ApiError if the request cannot be answered."""

    def __init__(self, served: Served, body: AnswerBody) -> None:
        self._served, self._body = served, body
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._ids: dict[int, int] = {}
        """Choice -> id of its request, while it is open."""
        self._answers: list[Answer] = []
        self._prompts: list[tuple[int, ...]] = []
        self._scored: dict[int, list[Score | None]] = {}
        """Choice -> scores of its prompt's tokens, if the request asks for them."""
        self._tokens: dict[int, ScoredTokens] = {}
        """Choice -> its tokens, if the request asks for log probabilities."""
        self._early: list[tuple[int, Event]] = []
        self.has_begun_at: float | None = None
        """When work on the first of its answers began, on the loop's clock."""

    @asynccontextmanager
    async def submitted(self) -> AsyncIterator[Self]:
        """Submit every answer, and enter once the engine has taken them; leaving cancels those that are open."""
        try:
            await self._submit()
            yield self
        finally:
            for request_id in self._ids.values():
                self._served.service.cancel(request_id)
            self._ids.clear()

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        return Usage(sum(map(len, self._prompts)), sum(answer.num_tokens for answer in self._answers))

    def usage_of(self, choice: int) -> Usage:
        """Tokens of one answer so far, and of its prompt."""
        return Usage(len(self.prompt_of(choice)), self._answers[choice].num_tokens)

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        return self._prompts[choice // self._body.n]

    async def parts(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of the answers as they become final, until all have ended."""
        while self._ids:
            choice, event = self._early.pop(0) if self._early else await self._events.get()
            if choice not in self._ids:
                continue
            if isinstance(event, Failed):
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
                make = partial(self._part, choice, piece, event.logprobs, is_first=is_first)
                is_long = is_first and len(self._scored.get(choice, ())) > LONG_PROMPT
                yield await self._run_in(make, self._served.slow_work) if is_long else make()

    async def prompt_logprobs(self, choice: int) -> list[Any] | None:
        """Return the field of that name, once the choice has begun; None if the request does not ask for it."""
        if self._body.num_prompt_logprobs is None:
            return None
        ids, scores = self.prompt_of(choice), self._scored[choice]
        make = partial(prompt_logprobs, ids, scores, self._served.codec.speller)
        return await self._run_in(make, self._served.slow_work)

    async def _run_in(self, make: Callable[[], T], lane: Executor) -> T:
        """Run a long task behind others of ``lane``, not on the event loop."""
        return await asyncio.get_running_loop().run_in_executor(lane, make)

    def _part(self, choice: int, piece: Piece, logprobs: Logprobs | None, *, is_first: bool) -> AnswerPiece:
        body = self._body
        ids: list[int] = list(piece.token_ids)
        scores: list[Score | None] = []
        if logprobs is not None:
            scores += [*scores_of(logprobs)][: len(ids)]
        if isinstance(body, ChatBody) and body.echo and is_first:
            last = body.messages[-1]
            if last.role == body.role:
                piece = piece._replace(text=last.turn["content"] + piece.text)
        if isinstance(body, CompletionBody) and body.echo and is_first:
            prompt, limit = self.prompt_of(choice), body.logprobs or 0
            prompt_scores = [score and score._replace(top=score.top[:limit]) for score in self._scored.get(choice, ())]
            ids, scores = [*prompt, *ids], [*prompt_scores, *scores]
            if body.length == 0:  # the one token that was made says where the prompt's ends
                ids, scores, piece = ids[: len(prompt)], scores[: len(prompt)], piece._replace(text="")
            piece = piece._replace(text=self._echo(choice) + piece.text)
        if body.num_logprobs is None:
            return AnswerPiece(choice, piece)
        if choice not in self._tokens:
            self._tokens[choice] = ScoredTokens(
                self._served.codec.speller,
                is_chat=isinstance(body, ChatBody),
                has_names=not body.return_tokens_as_token_ids,
            )
        return AnswerPiece(choice, piece, self._tokens[choice].logprobs_field(ids, scores))

    def _echo(self, choice: int) -> str:
        """Return the prompt's text as it was given; empty with ``return_token_ids``, which tells it as ids, as in vLLM."""
        body, speller = self._body, self._served.codec.speller
        assert isinstance(body, CompletionBody)
        prompt = body.prompt[choice // body.n]
        if body.return_token_ids:
            return ""
        if isinstance(prompt, str):
            return prompt
        return "" if speller is None else speller.text(self.prompt_of(choice))

    # -- submission ----------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        served, body = self._served, self._body
        num_left, limit = body.num_choices, served.service.max_waiting
        if num_left > limit:
            raise refusal(
                f"n={body.n} for {num_left // body.n} prompts makes {num_left} answers, more than max_queue={limit}, the most "
                "that is taken: send several requests",
                "n",
            )
        size = self._check_texts()
        lane = served.work if size < LARGE_TEXT else served.slow_work
        check = partial(self._generations, 1)
        if body.bad_words:  # we look up their tokens
            await self._run_in(check, lane)
        else:
            check()
        # We reserve before we tokenize: a request that cannot be queued must not cost much.
        served.service.reserve(num_left)
        try:
            checked = await self._run_in(self._encode_prompts, lane)
            self._prompts = [prompt_ids for prompt_ids, _ in checked]
            stops = Stops(
                texts=tuple(body.stop),
                token_ids=frozenset(body.stop_token_ids),
                specials=special_tokens(served.codec.backend, body.stop) if body.skip_special_tokens else {},
                ignores_eos=body.ignore_eos,
                min_tokens=body.min_tokens,
                are_shown=body.include_stop_str_in_output,
            )
            wants_tokens = body.stream or bool(stops.texts or stops.token_ids or stops.min_tokens)
            for prompt_ids, generations in checked:
                for generation in generations:
                    choice = len(self._answers)
                    self._answers.append(Answer(served.codec, stops, skip_special=body.skip_special_tokens))
                    self._ids[choice] = served.service.submit(
                        prompt_ids, generation, partial(self._on_event, choice), wants_tokens=wants_tokens
                    )
                    num_left -= 1
        finally:
            served.service.give_back(num_left)
        await self._wait_until_taken()

    def _generations(self, num: int, room: int | None = None) -> list[object]:
        """Return the settings of ``num`` answers to a prompt, which differ in their seed; the prompt leaves them ``room`` tokens.

        Raises ApiError for settings that are wrong for every prompt.
        """
        model, body, fields = self._served.model, self._body, self._body.generation
        name = body.name_of("max_tokens")
        # An echo alone takes one token, which says where its prompt ends.
        length = model.default_tokens if body.length is None else max(1, body.length)
        if length > model.max_model_len:
            raise refusal(f"{name}={length} is more than max_model_len={model.max_model_len}: ask for fewer", name)
        # The context cuts an answer short, as in vLLM.
        if (room := model.room(1) if room is None else room) < length:
            fields["max_tokens"] = length = room
        if body.min_tokens > length:
            raise refusal(
                f"min_tokens={body.min_tokens} is more than the {length} tokens of an answer here: lower it, or raise {name}",
                "min_tokens",
            )
        # An engine's seeds are not negative.
        return for_client(lambda: [model.generation({**fields, "seed": (self._seed + i) % SEEDS}) for i in range(num)])

    @cached_property
    def _seed(self) -> int:
        """The request's seed. If it asks for none, or for -1 as in vLLM, we draw a new one for every request, as OpenAI does. With a
        temperature of 0 it is 0: such a request wants the same answer each time, and a canvas is drawn at any temperature."""
        seed = self._body.seed
        if seed is not None and seed != -1:
            return seed
        return 0 if self._body.temperature == 0 else secrets.randbelow(SEEDS)

    def _check_texts(self) -> int:
        """Return the bytes of all texts to tokenize. Raises ApiError for a prompt that is too long whatever its tokens are."""
        body, limit = self._body, self._max_text_bytes
        if isinstance(body, ChatBody):
            name, sizes = body.name_of("messages"), [sum(_num_bytes(turn["content"]) for turn in body.turns)]
        else:
            name, sizes = "prompt", [_num_bytes(text) for text in body.prompt if isinstance(text, str)]
            if body.truncate_prompt_tokens is not None:
                sizes = [min(size, limit) for size in sizes]
        for size in sizes:
            if size > limit:
                raise refusal(
                    f"prompt of {size} bytes is more than the {self._served.codec.longest_token} bytes of the longest token "
                    f"times max_model_len={self._served.model.max_model_len}: shorten it",
                    name,
                )
        return sum(sizes) + sum(map(_num_bytes, body.bad_words))

    @property
    def _max_text_bytes(self) -> int:
        """Bytes of the longest text that can fit, whatever its tokens are."""
        return self._served.model.max_model_len * self._served.codec.longest_token

    def _encode_prompts(self) -> list[tuple[tuple[int, ...], list[object]]]:
        """Return the checked ids of the prompts, each with the settings of its answers."""
        codec, model, body = self._served.codec, self._served.model, self._body
        limit = self._max_prompt_tokens()
        # Truncation keeps added special tokens unless the request names a side, as in vLLM.
        keep = None if "truncation_side" in body.model_fields_set else limit
        from_end = body.truncation_side == "left"

        def encode(text: str) -> tuple[int, ...]:
            if limit is not None:  # what is cut off anyway need not be tokenized
                text = text[-self._max_text_bytes :] if from_end else text[: self._max_text_bytes]
            return codec.encode(text, add_special=body.add_special_tokens, keep=keep)

        def checked_prompt(prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], list[object]]:
            prompt_ids = cut(encode(prompt) if isinstance(prompt, str) else prompt)
            room = model.room(len(prompt_ids))
            generations = self._generations(body.n, room if room > 0 else None)
            model.check_prompt(prompt_ids, generations[0])
            return prompt_ids, generations

        def cut(ids: tuple[int, ...]) -> tuple[int, ...]:
            if limit is None or len(ids) <= limit:
                return ids
            return ids[len(ids) - limit :] if from_end else ids[:limit]

        def run() -> list[tuple[tuple[int, ...], list[object]]]:
            if isinstance(body, ChatBody):
                special = body.add_special_tokens
                return [checked_prompt(codec.encode_chat(body.turns, body.form, add_special=special, keep=keep))]
            return [checked_prompt(prompt) for prompt in body.prompt]

        return for_client(run)

    def _max_prompt_tokens(self) -> int | None:
        """Return the number of tokens that a prompt is cut to, if the request asks for it; -1 leaves a token for the answer."""
        length, limit = self._body.truncate_prompt_tokens, self._served.model.max_model_len
        if length is not None and length > limit:
            raise refusal(
                f"truncate_prompt_tokens={length} is more than max_model_len={limit}: lower it",
                "truncate_prompt_tokens",
            )
        return limit - 1 if length == -1 else length

    def _on_event(self, choice: int, event: Event) -> None:
        self._events.put_nowait((choice, event))

    async def _wait_until_taken(self) -> None:
        """Wait until the engine has taken every answer. Other events are kept for ``parts``."""
        missing = set(self._ids)
        while missing:
            choice, event = await self._events.get()
            if isinstance(event, Refused):
                del self._ids[choice]
                raise refusal(event.sentence)
            if isinstance(event, Accepted | Failed):
                missing.discard(choice)
            if not isinstance(event, Accepted):
                self._early.append((choice, event))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def for_client(make: Callable[[], T]) -> T:
    """Return what ``make`` returns. Its UserError becomes an ApiError, because the client caused it."""
    try:
        return make()
    except UserError as error:
        raise refusal(str(error)) from None
