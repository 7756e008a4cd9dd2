"""Chat templates of checkpoints, rendered in a process of their own, in bounded time and memory."""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from engines.errors import UserError

_TIME_S = 2.0
"""For one conversation; the process's own start comes on top."""
START_S = 30.0
_PROGRAM = Path(__file__).with_name("template_process.py")


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Raises UserError for a template that fails, takes too long or too much, or for a missing jinja2."""
    if find_spec("jinja2") is None:
        raise UserError(
            "the checkpoint's chat template needs jinja2, which is missing: pip install 'dllm-serve-repro[hub]'"
        )
    answer = _process().ask(json.dumps({"template": source, "variables": dict(variables)}))
    if "error" in answer:
        raise UserError(
            f"the checkpoint's chat template failed ({answer['error']}): change the messages or fix the template"
        )
    return str(answer["text"])


@lru_cache(maxsize=1)
def _process() -> _Process:
    """One serves every conversation of this process."""
    process = _Process()
    atexit.register(process.end)
    return process


class _Process:
    """Starts when first asked, and again after one that had to be ended. It ends with its standard input."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, line: str) -> Mapping[str, Any]:
        with self._lock:
            if self._running is None or self._running.poll() is not None:
                self._running = subprocess.Popen(
                    [sys.executable, "-I", str(_PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                # Its start is not in a template's own time.
                self._exchange(json.dumps({"template": "", "variables": {}}), START_S)
            answer = self._exchange(line, _TIME_S)
            if answer is None:
                self.end()
                return {"error": f"it did not end within {_TIME_S:g} s"}
            try:
                return json.loads(answer)  # type: ignore[no-any-return]
            except ValueError:
                self.end()
                return {"error": "its process ended, as one does that takes too much memory"}

    def end(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None

    def _exchange(self, line: str, seconds: float) -> bytes | None:
        """None where no answer came in time, an empty one where the process ended."""
        assert self._running is not None
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        try:
            self._running.stdin.write(line.encode() + b"\n")
            self._running.stdin.flush()
        except OSError:
            return b""
        return _line_of(self._running.stdout, time.monotonic() + seconds)


def _line_of(stream: IO[bytes], until: float) -> bytes | None:
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        part = stream.read1(1 << 16)  # type: ignore[attr-defined]
        parts.append(part)
        if not part or part.endswith(b"\n"):
            return b"".join(parts)
