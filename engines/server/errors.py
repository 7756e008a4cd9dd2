"""Refusals and failures in the format of OpenAI's API: a status, and an object that holds one sentence."""

from collections.abc import Mapping
from typing import Any

MOST_SHOWN = 400
"""Most characters of a message, which may quote a text of any length from a client."""


class ApiError(Exception):
    """An answer with an error; ``retry_after_s`` tells the client when to try again."""

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


def refusal(message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> ApiError:
    return ApiError(status, message, param=param, code=code)


def unavailable(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: come again later", kind="server_error", code="unavailable", retry_after_s=1)


def _one_line(sentence: str) -> str:
    line = "".join(c if c.isprintable() else "?" for c in " ".join(sentence.split()))
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
