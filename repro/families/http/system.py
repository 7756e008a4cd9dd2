"""OpenAI-compatible endpoints as systems, driven over HTTP and measured at the client: any that runs (``openai-http``), and the projects'
own servers, which are started for a run (``vllm``, ``dynamo``, ``sglang``). The simulated systems are named vllm-sim and so on."""

import asyncio
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from baselines.servers.dynamo import Dynamo
from baselines.servers.environment import ServerEnvironment, environments_of, known_servers, machine_device
from baselines.servers.launch import SERVED_NAME, Launch, Sglang, Vllm
from engines.errors import RunError, UserError, require
from engines.knobs import check_requested, knobs_of
from repro.families.http.endpoint import require_client
from repro.families.http.record import HTTP, tables_of, warnings
from repro.families.http.requests import HttpKnobs, HttpWorkload, resolve, tokenizer_of, workload_of
from repro.families.platforms import Platform, platform
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.runs.http_driver import Exchange, drive_http
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.workloads.served import workload_knobs

EXECUTOR = "http"


@dataclass(frozen=True, kw_only=True)
class HttpDeployment:
    knobs: HttpKnobs
    card: Mapping[str, Any]
    """The endpoint's description of the model."""
    rate: float | None
    obtained: ClassVar[Obtained] = "measured"
    is_tied_here: ClassVar[bool] = True

    @property
    def basis(self) -> str:
        """A digest of the endpoint's own description. A client cannot know more about it."""
        return hashlib.sha256(json.dumps(self.card, sort_keys=True).encode()).hexdigest()[:12]

    def check_machine(self) -> None:
        require_client()

    def run(self, workload: HttpWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        knobs = self.knobs
        nonce = token_hex(8) if knobs.unique_prefix else None
        sent = workload if nonce is None else workload.with_prefixes(nonce)
        exchanges = asyncio.run(self._drive(sent, on_progress))
        # We count tokens after the run, because counting would delay the clock.
        encode = None if knobs.tokenizer is None else tokenizer_of(knobs.tokenizer).encode
        facts: dict[str, Any] = {
            "endpoint": {"url": knobs.endpoint.base, "api": knobs.endpoint.api, **self.card},
            "requested_rate": self.rate,
            "length_scale": knobs.length_scale,
            "ignore_eos": knobs.ignore_eos,
            "goodput": dict(knobs.limits),
            "prefix_nonce": nonce,
            "history": _history(exchanges),
        }
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


logger = logging.getLogger(__name__)

MEASURED = "torch"
"""The executor that measures, for any system."""
UNKNOWN_URL = "http://127.0.0.1:1"
"""A placeholder until the server has started."""
LONGEST_CONTEXT = 2**20
"""The context that we assume for a model launched by name, since only the server knows it. Data sets keep their own lengths."""
TEMPLATE_TOKENS = 64
"""The most tokens that we expect a chat template to add to a turn."""


@dataclass(frozen=True, kw_only=True)
class ServerDeployment:
    """A server that is started for the run and stopped after it."""

    launch: Launch
    driven: HttpDeployment
    """Drives the server over HTTP, once its URL is known."""
    obtained: ClassVar[Obtained] = "measured"
    is_tied_here: ClassVar[bool] = True

    @property
    def device(self) -> str:
        return self.launch.device

    @property
    def basis(self) -> str:
        return self.launch.basis

    def check_machine(self) -> None:
        self.driven.check_machine()
        device = self.launch.device
        require(
            device == "cpu" or machine_device() == "cuda",
            f"device={device!r}: this machine has no NVIDIA driver: use --platform cpu-tiny, or the --url of a server that runs",
        )
        self.launch.environment.require_installed()

    def run(self, workload: HttpWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        with log_folder(self.launch.name) as folder:
            logger.info("starting %s, which says what it does in %s", self.launch.name, folder)
            with self.launch.started(folder) as (url, startup_s):
                logger.info("%s answers after %.1f s", self.launch.name, startup_s)
                knobs = self.driven.knobs
                knobs = replace(knobs, endpoint=replace(knobs.endpoint, url=url))
                record = replace(self.driven, knobs=knobs).run(workload, on_progress)
        facts = {**record.facts, "server": {**self.launch.facts, "startup_s": round(startup_s, 1)}}
        return replace(record, manifest={**record.manifest, "facts": facts})


@contextmanager
def log_folder(name: str) -> Iterator[Path]:
    """A temporary folder for logs. It stays if the body raises an error, so that logs can be read; an interrupt removes it."""
    folder = Path(tempfile.mkdtemp(prefix=f"repro-{name}-"))
    try:
        yield folder
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class ServerSystem:
    name: str
    title: str
    launch: type[Launch]
    family: ClassVar[Family] = HTTP

    def default_dataset(self, target: Platform) -> str:
        return "gsm8k"

    @property
    def knobs(self) -> tuple[type, ...]:
        return self.launch, HttpKnobs

    def prepare(self, cell: Cell) -> tuple[ServerDeployment | HttpDeployment, HttpWorkload]:
        launch_knobs, client_knobs, requested = knobs_of(self.launch), knobs_of(HttpKnobs), cell.requested
        check_requested(requested, HttpKnobs, self.launch, workload_knobs(requested), owner=f"system={cell.system!r}")
        if "url" in requested:
            for name in sorted(requested.keys() & (launch_knobs.keys() - client_knobs.keys())):
                raise UserError(
                    f"{name}={requested[name]!r} has no effect on a server that runs already: leave it out, or leave out url"
                )
            return attach(cell)
        require(
            cell.executor in (MEASURED, EXECUTOR),
            f"executor={cell.executor!r}: {self.name} is a real server: use --executor {MEASURED}, or simulate its policy "
            f"('repro list')",
        )
        settings: dict[str, Any] = {name: value for name, value in requested.items() if name in launch_knobs}
        # A platform that names a card has a GPU.
        launch = self.launch(**{"device": "cpu" if platform(cell.platform).gpu is None else "cuda", **settings})
        client_values = {name: value for name, value in requested.items() if name not in launch_knobs}
        knobs = resolve(cell.system, {**client_values, "url": UNKNOWN_URL})
        workload = workload_of(cell, knobs, SERVED_NAME, launch.longest_request or LONGEST_CONTEXT)
        _check_lengths(workload, launch)
        driven = HttpDeployment(knobs=knobs, card={"id": SERVED_NAME, "root": launch.model}, rate=cell.rate)
        return ServerDeployment(launch=launch, driven=driven), workload


def _check_lengths(workload: HttpWorkload, launch: Launch) -> None:
    limit = launch.longest_request
    for conversation in workload.conversations if limit is not None else ():
        template = TEMPLATE_TOKENS * len(conversation.turns) if conversation.is_chat else 0
        length = sum(len(turn.new_ids) + turn.asked_tokens for turn in conversation.turns) + template
        require(
            length <= (limit or 0),
            f"conversation {conversation.session_id} grows to {length} tokens, more than max_model_len={limit}: lower length_scale, "
            f"max_prompt_len or gen_length, or raise max_model_len",
        )


VLLM = ServerSystem(name="vllm", title="vLLM", launch=Vllm)
DYNAMO = ServerSystem(name="dynamo", title="Dynamo", launch=Dynamo)
SGLANG = ServerSystem(name="sglang", title="SGLang", launch=Sglang)


def environment_of(name: str, device: str | None) -> ServerEnvironment:
    """The environment of a server for this device. Without a device, that for this machine, or else the first there is."""
    require(name in known_servers(), f"server={name!r} is unknown: use one of {', '.join(known_servers())}")
    environments = environments_of(name)
    if device is None:
        return environments.get(machine_device()) or next(iter(environments.values()))
    if device not in environments:
        raise UserError(f"device={device!r} is none that {name} is made for: use {' or '.join(environments)}")
    return environments[device]  # type: ignore[index]
