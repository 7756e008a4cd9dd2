"""``vllm``, ``dynamo``, ``sglang``: the projects' own servers. The simulated systems are named vllm-sim and so on."""

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from baselines.servers.dynamo import Dynamo
from baselines.servers.environment import ServerEnvironment, environments_of, known_servers, machine_device
from baselines.servers.launch import SERVED_NAME, Launch, Sglang, Vllm
from engines.errors import UserError, require
from engines.knobs import check_requested, knobs_of
from repro.families.http.record import HTTP
from repro.families.http.requests import HttpKnobs, HttpWorkload, resolve, workload_of
from repro.families.http.system import EXECUTOR, HttpDeployment, attach
from repro.families.platforms import Platform, platform
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.workloads.served import workload_knobs

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

    @property
    def modules(self) -> tuple[str, ...]:
        return (__name__, type(self.launch).__module__, *self.driven.modules)

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**self.driven.facts, "server": self.launch.facts}

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
