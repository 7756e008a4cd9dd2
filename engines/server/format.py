"""Answers as OpenAI's API words them, whole and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

from engines.server.answer import Piece
from engines.server.body import AnswerBody, ChatBody
from engines.server.completion import Part, Usage
from engines.server.errors import ApiError

_DONE = b"data: [DONE]\n\n"
_NO_MESSAGE = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
"""What a message of text has not, as OpenAI's API and vLLM tell it."""


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(counted: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "completion_tokens": counted.completion_tokens,
    }


class Choice(NamedTuple):
    """A whole answer."""

    answer: Piece
    prompt_ids: Sequence[int]
    logprobs: Mapping[str, Any] | None
    prompt_logprobs: Sequence[Any] | None


class Format:
    """Words the answers to one request as vLLM does."""

    def __init__(self, model: str, asked: AnswerBody) -> None:
        self._role = asked.role if isinstance(asked, ChatBody) else None
        """Whose turn a conversation's answer is."""
        self._is_chat = self._role is not None
        self._has_ids, self._has_echo = asked.return_token_ids, asked.echo
        self._begun: set[int] = set()
        """Choices whose prompt was told."""
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{asked.request_id or token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], counted: Usage) -> dict[str, Any]:
        told = []
        for index, (answer, prompt_ids, logprobs, prompt_logprobs) in enumerate(choices):
            said: dict[str, Any] = {"index": index}
            if self._is_chat:
                said["message"] = {"role": self._role, "content": answer.text, **_NO_MESSAGE}
            else:
                said["text"] = answer.text
            said |= {
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "token_ids": self._told(answer.token_ids),
            }
            if not self._is_chat:
                said |= {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": self._told(prompt_ids)}
            told.append(said)
        kind = "chat.completion" if self._is_chat else "text_completion"
        body = {**self._head, "object": kind, "choices": told, "service_tier": None, "system_fingerprint": None}
        details = {"prompt_tokens_details": None, "completion_tokens_details": None}
        body["usage"] = usage(counted) | details
        if self._is_chat:
            first = choices[0]
            body |= {"prompt_logprobs": first.prompt_logprobs, "prompt_token_ids": self._told(first.prompt_ids)}
        return body

    def opening(self, index: int, prompt_ids: Sequence[int], counted: Usage | None) -> bytes:
        """What an answer of a conversation begins with in a stream: whose turn it is."""
        if not self._is_chat:
            return b""
        said = {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk([said], counted, prompt_token_ids=self._told(prompt_ids))

    def part(self, part: Part, prompt_ids: Sequence[int], counted: Usage | None) -> bytes:
        """A chunk; ``counted`` is what the answer has come to, where each is to say."""
        index, piece, logprobs = part
        said: dict[str, Any] = {"index": index}
        said |= {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
        said |= {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None or not self._is_chat:
            said["stop_reason"] = piece.stop_reason
        if not self._is_chat:
            is_first = index not in self._begun
            said["prompt_token_ids"] = list(prompt_ids) if is_first and (self._has_ids or self._has_echo) else None
            self._begun.add(index)
        said["token_ids"] = self._told(piece.token_ids)
        return self._chunk([said], counted)

    def ending(self, counted: Usage, *, is_told: bool) -> bytes:
        """What a stream ends with; ``is_told`` where its usage was asked for."""
        return (self._chunk([], counted) if is_told else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with whose status is out: what is left is to say it there."""
        return event(error.body) + _DONE

    def _told(self, ids: Sequence[int]) -> list[int] | None:
        return list(ids) if self._has_ids else None

    def _chunk(self, choices: Sequence[Mapping[str, Any]], counted: Usage | None, **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        details = {"completion_tokens_details": None} if self._is_chat and choices else {}
        said = {} if counted is None else {"usage": usage(counted) | details}
        return event({**self._head, "object": kind, "choices": choices, **more, **said})
