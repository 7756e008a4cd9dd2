"""Refusals and failures as OpenAI's API words them: a status, and an object with one sentence in it."""

from collections.abc import Mapping
from typing import Any

MOST_SHOWN = 400
"""Characters of a message: what a client sent may be any number of them."""


class ApiError(Exception):
    """``retry_after_s`` tells a client when to come again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _one_line(message)
        self.kind, self.param, self.code = kind, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def refused(message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> ApiError:
    return ApiError(status, message, param=param, code=code)


def queue_full(max_waiting: int) -> ApiError:
    return ApiError(
        429,
        f"the queue has no place left of max_queue={max_waiting}: come again later, or start the server with a longer one",
        kind="rate_limit_error",
        code="queue_full",
        retry_after_s=1,
    )


def unavailable(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: come again later", kind="server_error", code="unavailable", retry_after_s=1)


def too_late(timeout_s: float) -> ApiError:
    return ApiError(
        504,
        f"the answer was not complete after timeout={timeout_s:g} s: ask for fewer tokens, or allow more time",
        kind="timeout_error",
        code="deadline_exceeded",
    )


def _one_line(sentence: str) -> str:
    line = "".join(c if c.isprintable() else "?" for c in " ".join(sentence.split()))
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
