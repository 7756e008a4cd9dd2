"""A ``ServedModel`` without a model: answers are arithmetic, and prompts can make its engine fail in every way."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import UserError, require
from engines.models.chat import USUAL_FORM, PromptForm
from engines.server.protocol import Admitted, EngineStatus, Event, Failed, Finished, Kind, Submission, Tokens

BLOCK = 4
"""Tokens of an answer that become final together."""
ROWS = 10
"""Rows of the pool that a running request holds."""
END = 0
"""End of text, which an answer holds where its prompt ends in one."""
RAISE, DIE, REFUSE, DIE_AT_ONCE = 250, 251, 252, 253
"""As a prompt's first id: its step raises, its step ends the process, it is refused, taking it ends the process."""


def answer_of(prompt_ids: Sequence[int], length: int, seed: int = 0) -> tuple[int, ...]:
    """Letters that depend on every id; a 0 in the middle where the prompt ends in one."""
    start = sum((i + 1) * value for i, value in enumerate(prompt_ids)) + seed
    ids = [97 + (start + 7 * i) % 26 for i in range(length)]
    if prompt_ids[-1] == END:
        ids[length // 2] = END
    return tuple(ids)


LONG_LEN, LONG_ANSWER = 1 << 15, 30_000
"""``max_model_len``, and tokens of an answer that takes minutes by steps of 0.02 s: no test sees its end."""


@dataclass(frozen=True)
class EchoGeneration:
    max_tokens: int
    seed: int


@contextmanager
def held(by: Path) -> Iterator[None]:
    """What runs in a model ``held_by`` it goes on running."""
    by.touch()
    try:
        yield
    finally:
        by.unlink()


class ByteCodec:
    end_ids = frozenset({END})
    eos_id = END
    longest_token = 4
    speller = backend = None
    shows_half_characters = True

    def encode(self, text: str, *, add_special: bool | None = None, keep: int | None = None) -> tuple[int, ...]:
        """A byte in front is the special token of those who ask for it."""
        ids = (1,) * (add_special is True) + tuple(text.encode())
        return ids if keep is None else ids[len(ids) - keep :]

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], form: PromptForm = USUAL_FORM, **how: Any
    ) -> tuple[int, ...]:
        told = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        text = told.rstrip("\n") if form.continue_final_message else told
        return self.encode(text + "".join(f"{name}={value}\n" for name, value in form.variables.items()), **how)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(i for i in ids if i or not skip_special).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class EchoModel:
    name: str = "echo"
    max_model_len: int = 512
    max_running: int = 4
    step_s: float = 0.0
    held_by: Path | None = None
    """While this file is there no step but the first is made: what runs goes on running."""
    load_s: float = 0.0
    refusal: str | None = None
    """Why the model cannot be loaded."""
    lacks: str | None = None
    """What this machine lacks."""
    closed_port: int | None = None
    """Nobody may listen there before the model is loaded."""
    default_tokens: int = 16
    options: Mapping[str, Kind] = field(default_factory=lambda: {"steps": int})
    facts: Mapping[str, Any] = field(default_factory=dict)

    def room(self, prompt_tokens: int) -> int:
        return self.max_model_len - prompt_tokens

    def generation(self, requested: Mapping[str, Any]) -> EchoGeneration:
        require(requested.get("steps", 1) == 1, f"steps={requested.get('steps')} must be 1: leave it out")
        return EchoGeneration(requested.get("max_tokens", self.default_tokens), requested["seed"])

    def check_prompt(self, prompt_ids: Sequence[int], generation: EchoGeneration) -> None:
        require(len(prompt_ids) > 0, "prompt has no token: give some text")
        require(
            len(prompt_ids) + generation.max_tokens <= self.max_model_len,
            f"prompt of {len(prompt_ids)} tokens and max_tokens={generation.max_tokens} make more than "
            f"max_model_len={self.max_model_len}: shorten the prompt or ask for fewer tokens",
        )

    def check_machine(self) -> None:
        require(self.lacks is None, str(self.lacks))
        if self.closed_port is not None:
            with socket.socket() as client:
                code = client.connect_ex(("127.0.0.1", self.closed_port))
            require(code == errno.ECONNREFUSED, f"port {self.closed_port} is open: {errno.errorcode.get(code)}")

    @contextmanager
    def serving(self) -> Iterator[EchoEngine]:
        time.sleep(self.load_s)
        require(self.refusal is None, str(self.refusal))
        yield EchoEngine(self)


class EchoEngine:
    def __init__(self, model: EchoModel) -> None:
        self._model = model
        self._waiting: dict[int, Submission] = {}
        self._running: dict[int, Submission] = {}
        self._told: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._steps = self._committed = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, submission: Submission) -> None:
        kind = submission.prompt_ids[0]
        if kind == REFUSE:
            raise UserError(f"prompt_ids begin with {kind}: begin with another")
        if kind == DIE_AT_ONCE:
            os._exit(9)
        self._waiting[submission.request_id] = submission

    def cancel(self, request_id: int) -> None:
        for table in (self._waiting, self._running, self._told, self._done):
            table.pop(request_id, None)

    def step(self) -> list[Event]:
        time.sleep(self._model.step_s)
        while self._steps and self._model.held_by is not None and self._model.held_by.exists():
            time.sleep(0.005)
        self._steps += 1
        events: list[Event] = []
        while self._waiting and len(self._running) < self._model.max_running:
            request_id = next(iter(self._waiting))
            self._running[request_id] = self._waiting.pop(request_id)
            self._told[request_id] = self._done[request_id] = 0
            events.append(Admitted(request_id))
        kinds = {submission.prompt_ids[0] for submission in self._running.values()}
        if DIE in kinds:
            os._exit(9)
        if RAISE in kinds:
            raise RuntimeError("the step of such a prompt raises")
        for request_id, submission in list(self._running.items()):
            length = submission.generation.max_tokens
            ids = answer_of(submission.prompt_ids, length, submission.generation.seed)
            done = min(length, self._done[request_id] + BLOCK)
            self._committed += done - self._done[request_id]
            self._done[request_id] = done
            told = self._told[request_id]
            if done == length:
                events.append(Finished(request_id, ids[told:]))
                self.cancel(request_id)
            elif submission.wants_tokens:
                events.append(Tokens(request_id, ids[told:done]))
                self._told[request_id] = done
        return events

    def give_up(self, sentence: str) -> list[Event]:
        lost = list(self._running)
        for request_id in lost:
            self.cancel(request_id)
        return [Failed(request_id, sentence) for request_id in lost]

    def status(self) -> EngineStatus:
        running = len(self._running)
        return EngineStatus(
            waiting=len(self._waiting),
            running=running,
            phases={"refresh": 0, "reuse": running},
            budget_used=running * BLOCK,
            budget=self._model.max_running * BLOCK,
            pool_used=running * ROWS,
            pool=self._model.max_running * ROWS,
            forward_passes=self._steps,
            committed_tokens=self._committed,
        )
