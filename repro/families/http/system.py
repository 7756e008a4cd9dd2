"""``openai-http``: any OpenAI-compatible endpoint as a system, driven over HTTP and measured at the client."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any, ClassVar

from engines.errors import RunError, require
from repro.families.http.endpoint import require_client
from repro.families.http.record import HTTP, tables_of, warnings
from repro.families.http.requests import HttpKnobs, HttpWorkload, resolve, tokenizer_of, workload_of
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.runs.http_driver import Exchange, drive_http
from repro.runs.record import Obtained, OnProgress, RunRecord

EXECUTOR = "http"


@dataclass(frozen=True, kw_only=True)
class HttpDeployment:
    knobs: HttpKnobs
    card: Mapping[str, Any]
    """The endpoint's description of the model."""
    rate: float | None
    obtained: ClassVar[Obtained] = "measured"
    is_tied_here: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = (__name__, "repro.families.platforms")

    @property
    def basis(self) -> str:
        """A digest of the endpoint's own description. A client cannot know more about it."""
        return hashlib.sha256(json.dumps(self.card, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def facts(self) -> Mapping[str, Any]:
        knobs = self.knobs
        return {
            "endpoint": {"url": knobs.endpoint.base, "api": knobs.endpoint.api, **self.card},
            "requested_rate": self.rate,
            "length_scale": self.knobs.length_scale,
            "ignore_eos": knobs.ignore_eos,
            "goodput": dict(knobs.limits),
        }

    def check_machine(self) -> None:
        require_client()

    def run(self, workload: HttpWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        nonce = token_hex(8) if self.knobs.unique_prefix else None
        sent = workload if nonce is None else workload.with_prefixes(nonce)
        exchanges = asyncio.run(self._drive(sent, on_progress))
        # We count tokens after the run, because counting would delay the clock.
        encode = None if self.knobs.tokenizer is None else tokenizer_of(self.knobs.tokenizer).encode
        facts = {**self.facts, "prefix_nonce": nonce, "history": _history(exchanges)}
        record = RunRecord(
            tables=tables_of(exchanges, encode),
            manifest={"obtained": self.obtained, "dataset": asdict(workload.provenance), "facts": facts},
        )
        # The manifest holds this same dictionary of facts.
        facts["tokens_counted_by"] = dict(Counter(by for by in record.requests["counted_by"] if by is not None))
        facts["warnings"] = [*warnings(record)]
        return record

    async def _drive(self, workload: HttpWorkload, on_progress: OnProgress | None) -> list[Exchange]:
        endpoint = self.knobs.endpoint
        async with endpoint.sending(needs_count=self.knobs.tokenizer is None) as send:
            for number in range(self.knobs.num_warmups):
                warming = workload.warm_up(f"{token_hex(8)}/warm-up")
                reply = await send(warming.ask(0, ()).body, time.perf_counter)
                if reply.error is not None:
                    raise RunError(f"warm-up request {number} failed: {reply.error}")
            return await drive_http(
                workload.conversations, send, max_concurrency=self.knobs.max_concurrency, on_progress=on_progress
            )


def _history(exchanges: Sequence[Exchange]) -> str | None:
    """How later turns repeat the answers before them; None if there are no later turns."""
    replies = [exchange.reply for exchange in exchanges if exchange.reply is not None and exchange.error is None]
    if all(exchange.turn == 0 for exchange in exchanges):
        return None
    return "token ids as answered" if all(reply.token_ids is not None for reply in replies) else "text as answered"


def attach(cell: Cell) -> tuple[HttpDeployment, HttpWorkload]:
    """Connect to the server at the cell's URL, and ask it for its model."""
    knobs = resolve(cell.system, cell.requested)
    card = knobs.endpoint.card(knobs.model)
    context = card.get("max_model_len")
    workload = workload_of(cell, knobs, str(card["id"]), context if type(context) is int and context > 0 else None)
    return HttpDeployment(knobs=knobs, card=card, rate=cell.rate), workload


class HttpSystem:
    name = "openai-http"
    title = "OpenAI-compatible endpoint"
    knobs = (HttpKnobs,)
    family: ClassVar[Family] = HTTP

    def prepare(self, cell: Cell) -> tuple[HttpDeployment, HttpWorkload]:
        """Connect to the endpoint, and ask it for its model."""
        require(
            cell.executor == EXECUTOR,
            f"executor={cell.executor!r} has no effect with system={self.name!r}: leave it out",
        )
        return attach(cell)


OPENAI_HTTP = HttpSystem()
