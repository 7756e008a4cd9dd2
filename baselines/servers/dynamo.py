"""NVIDIA Dynamo: its frontend and router, with its simulated workers, workers of known times, or vLLM on a GPU.

Processes find each other by files, at addresses of this machine only: no etcd, no NATS. (Even so, its workers' event sockets listen on
every interface.)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from baselines.servers.environment import ServerEnvironment
from baselines.servers.launch import SERVED_NAME, Launch, Place, options
from baselines.servers.process import Command
from engines.errors import require
from engines.knobs import Range

_WORKER = Path(__file__).with_name("dynamo_worker.py")

_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


def variables(place: Place) -> Mapping[str, str]:
    """Environment variables by which the processes of one start find each other."""
    return {
        **place.environment,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(place.folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        **dict.fromkeys(_LOOPBACK, "127.0.0.1"),
        "TMPDIR": str(place.folder),  # every process of Dynamo leaves a file there
    }


def frontend(environment: ServerEnvironment, place: Place, *, router: str) -> Command:
    arguments = (
        *(str(environment.python), "-m", "dynamo.frontend"),
        *options(http_host="127.0.0.1", http_port=place.port, router_mode=router),
    )
    return Command(name="frontend", arguments=arguments, environment=variables(place))


@dataclass(frozen=True, kw_only=True)
class Dynamo(Launch):
    name: ClassVar[str] = "dynamo"
    packages: ClassVar[tuple[str, ...]] = ("ai-dynamo", "ai-dynamo-runtime", "vllm")
    workers: Literal["mocker", "python", "vllm"] = "mocker"
    """mocker: Dynamo's simulated engine; python: every prompt and token takes a known time; vllm: runs on a GPU."""
    num_workers: Annotated[int, Range(1, 64)] = 1
    """Workers behind the frontend."""
    router: Literal["round-robin", "random", "power-of-two", "kv", "least-loaded"] = "round-robin"
    """How a request finds its worker."""
    block_size: Annotated[int, Range(1)] = 16
    """Tokens of a block of K/V."""
    speedup_ratio: Annotated[float, Range(above=0)] = 1.0
    """The mocker divides its times by this."""
    prefill_us: Annotated[float, Range(0)] = 50.0
    """python workers take this long per prompt token, one prompt after the other."""
    decode_ms: Annotated[float, Range(0)] = 10.0
    """python workers take this long between two tokens of an answer, however many they serve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_gpu = self.device == "cuda"
        require(
            (self.workers == "vllm") == is_gpu,
            f"workers={self.workers!r} and device={self.device!r} do not go together: vllm is what a GPU runs, the others a CPU",
        )
        require(
            self.model != "tiny" or not is_gpu,
            "model='tiny' is for a CPU: give a checkpoint's folder or hub id with --model",
        )

    @property
    def listed_workers(self) -> int:
        return self.num_workers

    def commands(self, place: Place) -> tuple[Command, ...]:
        python, environment = str(self.environment.python), variables(place)
        commands = [frontend(self.environment, place, router=self.router)]
        for number, arguments in enumerate(self._worker_arguments(place)):
            commands.append(Command(name=f"worker-{number}", arguments=(python, *arguments), environment=environment))
        return tuple(commands)

    def _worker_arguments(self, place: Place) -> Iterator[tuple[str, ...]]:
        """Yield the arguments of each worker's process; one mocker process holds all workers."""
        bounds = {
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.prefix_caching,
            "no_enable_prefix_caching": not self.prefix_caching,
        }
        named = {"model_path": place.model, "model_name": SERVED_NAME}
        if self.workers == "mocker":
            arguments = options(**named, num_workers=self.num_workers, speedup_ratio=self.speedup_ratio, **bounds)
            yield ("-m", "dynamo.mocker", *arguments)
            return
        for _ in range(self.num_workers):
            if self.workers == "python":
                times = {"prefill_us": self.prefill_us, "decode_ms": self.decode_ms}
                # Keep this module's folder off its path, where Python would take it for Dynamo's package.
                yield ("-P", str(_WORKER), *options(**named, block_size=self.block_size, **times))
            else:
                yield ("-m", "dynamo.vllm", *options(model=place.model, served_model_name=SERVED_NAME, **bounds))
