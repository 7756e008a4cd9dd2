"""Answers in the format of OpenAI's API, whole and in chunks, and ``/v1/responses`` for text, whose body becomes a conversation's.

We keep nothing after an answer, whatever ``store`` says: a request holds its whole conversation.
"""

import json
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from engines.server.answer import FinishReason, Piece
from engines.server.body import (
    AnswerBody,
    ChatBody,
    Count,
    Messages,
    check_neutral,
    ignored_fields,
    refused_fields,
    short_text,
)
from engines.server.completion import AnswerPiece, Usage
from engines.server.errors import ApiError, refusal

_DONE = b"data: [DONE]\n\n"
_NO_MESSAGE = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
"""Fields that a text message does not have, as OpenAI's API and vLLM tell them."""


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
    }


class Choice(NamedTuple):
    """A whole answer."""

    answer: Piece
    prompt_ids: Sequence[int]
    logprobs: Mapping[str, Any] | None
    prompt_logprobs: Sequence[Any] | None


class Format:
    """Formats the answers to one request as vLLM does."""

    def __init__(self, model: str, body: AnswerBody) -> None:
        self._role = body.role if isinstance(body, ChatBody) else None
        """The role of a conversation's answer."""
        self._is_chat = self._role is not None
        self._has_ids, self._has_echo = body.return_token_ids, body.echo
        self._begun: set[int] = set()
        """Choices whose first chunk, which may tell the prompt's ids, was made."""
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{body.request_id or token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        entries = []
        for index, (answer, prompt_ids, logprobs, prompt_logprobs) in enumerate(choices):
            choice: dict[str, Any] = {"index": index}
            if self._is_chat:
                choice["message"] = {"role": self._role, "content": answer.text, **_NO_MESSAGE}
            else:
                choice["text"] = answer.text
            choice |= {
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "token_ids": self._ids_field(answer.token_ids),
            }
            if not self._is_chat:
                choice |= {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": self._ids_field(prompt_ids)}
            entries.append(choice)
        kind = "chat.completion" if self._is_chat else "text_completion"
        body = {**self._head, "object": kind, "choices": entries, "service_tier": None, "system_fingerprint": None}
        details = {"prompt_tokens_details": None, "completion_tokens_details": None}
        body["usage"] = usage_json(usage) | details
        if self._is_chat:
            first = choices[0]
            body |= {"prompt_logprobs": first.prompt_logprobs, "prompt_token_ids": self._ids_field(first.prompt_ids)}
        return body

    def opening(self, index: int, prompt_ids: Sequence[int], usage: Usage | None) -> bytes:
        """Return the first chunk of a conversation's answer in a stream, which tells the role; nothing for other answers."""
        if not self._is_chat:
            return b""
        choice = {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], usage, prompt_token_ids=self._ids_field(prompt_ids))

    def part(self, part: AnswerPiece, prompt_ids: Sequence[int], usage: Usage | None) -> bytes:
        """Return a chunk; ``usage`` is the usage of the answer so far, if every chunk is to tell it."""
        index, piece, logprobs = part
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
        choice |= {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None or not self._is_chat:
            choice["stop_reason"] = piece.stop_reason
        if not self._is_chat:
            is_first = index not in self._begun
            choice["prompt_token_ids"] = list(prompt_ids) if is_first and (self._has_ids or self._has_echo) else None
            self._begun.add(index)
        choice["token_ids"] = self._ids_field(piece.token_ids)
        return self._chunk([choice], usage)

    def ending(self, usage: Usage, *, has_usage: bool) -> bytes:
        """Return the end of a stream, with its usage if ``has_usage``."""
        return (self._chunk([], usage) if has_usage else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails after its status was sent, so that only the stream can tell the error."""
        return event(error.body) + _DONE

    def _ids_field(self, ids: Sequence[int]) -> list[int] | None:
        return list(ids) if self._has_ids else None

    def _chunk(self, choices: Sequence[Mapping[str, Any]], usage: Usage | None, **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        details = {"completion_tokens_details": None} if self._is_chat and choices else {}
        extra = {} if usage is None else {"usage": usage_json(usage) | details}
        return event({**self._head, "object": kind, "choices": choices, **more, **extra})


_OF_OTHER_ROUTES = refused_fields("instead of responses")
_OF_OBJECTS = {"text.format": "response_format", "text.verbosity": "verbosity", "reasoning.effort": "reasoning_effort"}
"""Place in an object of the body -> the field of a conversation."""
_OF_NO_ANSWER = ("reasoning.generate_summary", "reasoning.summary")
_LOGPROBS = "message.output_text.logprobs"
_UNFINISHED = ("in_progress", "incomplete")


class ResponsesBody(ChatBody):
    """A conversation's body, with the names that its fields have on this route."""

    ignored = (ChatBody.ignored | ignored_fields("responses")) - {"metadata"}
    not_supported: ClassVar = {**ChatBody.not_supported, **refused_fields("responses")}

    messages: Annotated[
        Messages,
        Field(
            alias="input",
            description="a text, or a list of at least one message, each a role and a content: a text, or parts of type "
            "'input_text' or 'output_text'",
        ),
    ]
    max_tokens: Annotated[Count | None, Field(alias="max_output_tokens")] = None
    instructions: str | None = None
    """A system message in front of ``input``."""
    include: Annotated[list[str], Field(description="a list of texts")] = []
    """Further parts of a response to tell; for text there is only ``_LOGPROBS``."""
    metadata: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    """Repeated in the response."""
    truncation: Annotated[Literal["auto", "disabled"], Field(description="'auto' or 'disabled'")] = "disabled"
    """Whether a conversation that is too long loses its beginning, as in vLLM, or is refused."""

    @model_validator(mode="before")
    @classmethod
    def _as_a_conversation(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        body = {name: value for name, value in fields.items() if value is not None}
        for name in body.keys() & _OF_OTHER_ROUTES.keys():
            check_neutral(name, body.pop(name), _OF_OTHER_ROUTES[name])
        body |= _object_fields(body.pop("text", None), body.pop("reasoning", None))
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if isinstance(items, list) and items:
            _check_items(items)
            last = items[-1]
            if isinstance(last, dict) and last.get("role") == "assistant" and last.get("status") in _UNFINISHED:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        instructions = body.get("instructions")
        if isinstance(items, list) and items and isinstance(instructions, str) and instructions:
            items = [{"role": "system", "content": instructions}, *items]
        include = body.get("include")
        if body.get("top_logprobs") or (isinstance(include, list) and _LOGPROBS in include):
            body["logprobs"] = True
        if body.get("truncation") == "auto":
            body.setdefault("truncate_prompt_tokens", -1)
        return body if items is None else {**body, "input": items}


def _object_fields(text: Any, reasoning: Any) -> Mapping[str, Any]:
    """Return the contents of ``text`` and ``reasoning`` as fields of a conversation; unknown ones keep the name of their place."""
    fields = {}
    for name, content in (("text", text), ("reasoning", reasoning)):
        if content is not None and not isinstance(content, dict):
            raise refusal(f"{name}={short_text(content)} is wrong, {name} must be an object", name)
        for key, value in (content or {}).items():
            path = f"{name}.{key}"
            if value is not None and path not in _OF_NO_ANSWER:
                fields[_OF_OBJECTS.get(path, path)] = value
    return fields


def _check_items(items: Sequence[Any]) -> None:
    """Raise ApiError for items that are no messages, such as calls and their results. Messages may leave out their type."""
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind not in ("message", None):
            raise refusal(
                f"input[{index}].type={short_text(kind)} is not supported, no tool is called and nothing is kept here: give messages",
                "input",
            )


class ResponseFormat:
    """Formats the answer to one request. Events are numbered in the order in which they are sent."""

    def __init__(self, model: str, body: ResponsesBody) -> None:
        self._model, self._body = model, body
        self._id = f"resp_{body.request_id or token_hex(16)}"
        self._item_id = f"msg_{token_hex(16)}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        """The place of the text in the response, which every event about it names."""
        self._created_at = int(time.time())
        self._num_events = 0
        self._reason: FinishReason | None = None
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        self._texts.append(choice.answer.text)
        self._logprobs += _content(choice.logprobs)
        return self._response(choice.answer.finish_reason, usage)

    def opening(self, index: int, prompt_ids: Sequence[int], usage: Usage | None) -> bytes:
        response, item = self._response(None, None), self._item("in_progress")
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item | {"content": []})
            + self._event("response.content_part.added", **self._place, part=self._part)
        )

    def part(self, part: AnswerPiece, prompt_ids: Sequence[int], usage: Usage | None) -> bytes:
        text, logprobs = part.piece.text, _content(part.logprobs)
        self._reason = part.piece.finish_reason
        self._texts.append(text)
        self._logprobs += logprobs
        if not text and not logprobs:
            return b""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def ending(self, usage: Usage, *, has_usage: bool) -> bytes:
        """Return the end of a stream, which always tells the usage here."""
        status = _status(self._reason)
        response = self._response(self._reason, usage)
        return (
            self._event("response.output_text.done", **self._place, text="".join(self._texts), logprobs=self._logprobs)
            + self._event("response.content_part.done", **self._place, part=self._part)
            + self._event("response.output_item.done", output_index=0, item=self._item(status))
            + self._event(f"response.{status}", response=response)
        )

    def failure(self, error: ApiError) -> bytes:
        details = error.body["error"]
        response = self._response(None, None) | {"status": "failed"}
        response["error"] = {"code": "server_error", "message": details["message"]}
        content = {"code": details["code"], "message": details["message"], "param": details["param"]}
        return self._event("error", **content) + self._event("response.failed", response=response)

    @property
    def _part(self) -> dict[str, Any]:
        text = {"type": "output_text", "annotations": [], "text": "".join(self._texts)}
        return {**text, "logprobs": list(self._logprobs)}

    def _item(self, status: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": [self._part]}

    def _response(self, reason: FinishReason | None, usage: Usage | None) -> dict[str, Any]:
        """Return the response object; ``reason`` is None while the answer is not complete."""
        body, status = self._body, "in_progress" if reason is None else _status(reason)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "completed_at": None if reason is None else int(time.time()),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if reason is None else [self._item(status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None if usage is None else _usage_json(usage),
            "user": None,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return f"event: {kind}\n".encode() + event({"type": kind, "sequence_number": number, **fields})


def _status(reason: FinishReason | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _content(logprobs: Mapping[str, Any] | None) -> list[Any]:
    return [] if logprobs is None else list(logprobs["content"])


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
