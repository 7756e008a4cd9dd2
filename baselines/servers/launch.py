"""What a server is started with: the settings all of them have, and what each makes of them."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from baselines.servers.checkpoint import MAX_MODEL_LEN, TINY, write_tiny
from baselines.servers.environment import Device, ServerEnvironment, environments_of
from baselines.servers.process import Address, Command, free_port, running
from engines.errors import UserError
from engines.knobs import Checked, Count, Range, Tokens

SERVED_NAME = "served"
"""What requests call the model."""
_OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one start of a server happens."""

    folder: Path
    port: int
    model: str
    """A folder, or a hub id."""
    is_local: bool

    @property
    def environment(self) -> Mapping[str, str]:
        return {"DO_NOT_TRACK": "1", **(_OFFLINE if self.is_local else {})}


@dataclass(frozen=True, kw_only=True)
class Launch(ABC, Checked):
    """Settings of a server; every one is part of what identifies a run."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """Whose versions are told."""
    ready_paths: ClassVar[tuple[str, ...]] = ("/health",)
    """That say 200 once the server is up."""
    model: str = TINY
    """'tiny' is a Qwen2 of random weights, made on the spot; else a checkpoint's folder or hub id."""
    device: Device = "cpu"
    """cpu or cuda."""
    max_model_len: Tokens | None = None
    """Tokens of a prompt and its answer; the model's positions by default."""
    max_num_seqs: Count | None = None
    """Requests running at once; the server's own number by default."""
    max_num_batched_tokens: Tokens | None = None
    """What a step, or a chunk of prefill, has at most."""
    prefix_caching: bool = False
    """vLLM's and SGLang's own default is on; off, a prompt costs its length."""
    start_timeout_s: Annotated[float, Range(above=0)] = 900.0
    """Seconds that the server may take to start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model != TINY and (folder := Path(self.model)).exists() and not (folder / "config.json").is_file():
            raise UserError(f"model={self.model!r} has no config.json: give a checkpoint's folder, a hub id, or 'tiny'")

    @property
    def environment(self) -> ServerEnvironment:
        return environments_of(self.name)[self.device]

    @abstractmethod
    def commands(self, place: Place) -> tuple[Command, ...]: ...

    @property
    def listed_workers(self) -> int | None:
        """That ``/health`` lists once the server is up; None where it lists none."""
        return None

    @property
    def longest_request(self) -> int | None:
        """Tokens of a prompt and its answer; None where only the model knows."""
        return self.max_model_len or (MAX_MODEL_LEN if self.model == TINY else None)

    @property
    def facts(self) -> Mapping[str, Any]:
        environment = self.environment
        packages = environment.packages or {}
        return {
            "name": self.name,
            "settings": {name: value for name, value in asdict(self).items() if value is not None},
            "packages": {name: packages[name] for name in self.packages if name in packages},
            "environment": environment.recipe,
        }

    @property
    def basis(self) -> str:
        """A digest of what is started, and of the checkpoint's description."""
        config = Path(self.model, "config.json")
        told = config.read_text() if config.is_file() else ""
        return hashlib.sha256(json.dumps([self.facts, told], sort_keys=True).encode()).hexdigest()[:12]

    @contextmanager
    def started(self, folder: Path) -> Iterator[tuple[str, float]]:
        """Its base URL and the seconds it took to start; it ends with the body."""
        is_tiny = self.model == TINY
        model = write_tiny(folder / "model") if is_tiny else Path(self.model)
        is_local = model.exists()
        place = Place(
            folder=folder, port=free_port(), model=str(model.absolute()) if is_local else self.model, is_local=is_local
        )
        url = f"http://127.0.0.1:{place.port}"
        address = Address(url=url, model=SERVED_NAME, paths=self.ready_paths, num_workers=self.listed_workers)
        with running(
            self.name, self.commands(place), address, folder=folder, within_s=self.start_timeout_s
        ) as startup_s:
            yield url, startup_s


def options(**given: object) -> Iterator[str]:
    """Options of a command line; None leaves one out, True is a flag."""
    for name, value in given.items():
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)
