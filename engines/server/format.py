"""Answers as OpenAI's API words them, whole and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from engines.server.answer import FinishReason, Piece
from engines.server.completion import Usage

DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(counted: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


class Format:
    """Words one request's answers. ``has_ids`` adds ``token_ids`` to every choice."""

    def __init__(self, model: str, *, is_chat: bool, has_ids: bool, includes_usage: bool) -> None:
        self._is_chat, self._has_ids, self._includes_usage = is_chat, has_ids, includes_usage
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        reasons: Sequence[FinishReason],
        logprobs: Sequence[Mapping[str, Any] | None],
        counted: Usage,
    ) -> dict[str, Any]:
        """One entry a choice."""
        choices = []
        for index, (text, token_ids, reason, scored) in enumerate(zip(texts, ids, reasons, logprobs, strict=True)):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            )
            choices.append(self._choice(index, said, token_ids, reason, scored))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(counted)}

    def opening(self, num_choices: int) -> Iterator[bytes]:
        """What a conversation's stream begins with: whose turn it is."""
        if self._is_chat:
            for index in range(num_choices):
                yield self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, (), None)])

    def part(self, index: int, piece: Piece, logprobs: Mapping[str, Any] | None) -> bytes:
        said: dict[str, Any] = {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
        return self._chunk([self._choice(index, said, piece.token_ids, piece.finish_reason, logprobs)])

    def closing(self, counted: Usage) -> bytes:
        """What a stream ends with where its usage was asked for."""
        return self._chunk([], usage(counted)) if self._includes_usage else b""

    def _choice(
        self,
        index: int,
        said: Mapping[str, Any],
        token_ids: Sequence[int],
        reason: FinishReason | None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        own = {"token_ids": list(token_ids)} if self._has_ids else {}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason, **own}

    def _chunk(self, choices: Sequence[Mapping[str, Any]], counted: Mapping[str, int] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        content = {**self._head, "object": kind, "choices": choices}
        return event({**content, "usage": counted} if self._includes_usage else content)
