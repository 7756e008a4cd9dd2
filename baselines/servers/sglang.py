"""SGLang's server on a GPU, and its router before any OpenAI-compatible servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from baselines.servers.environment import ServerEnvironment
from baselines.servers.launch import SERVED_NAME, Launch, Place, options
from baselines.servers.process import Command
from engines.errors import require
from engines.knobs import Range

VERSION = "0.5.23"
ENVIRONMENT = ServerEnvironment(
    name="sglang",
    device="cuda",
    steps=(("install", f"sglang[all]=={VERSION}"),),
    check="import sglang, torch; assert torch.cuda.is_available(), 'torch sees no GPU'",
    disk_gb=14,
    minutes="5-20",
)
_ROUTER_VERSION = "0.3.2"
ROUTER_ENVIRONMENT = ServerEnvironment(
    name="sglang-router",
    device="cpu",
    steps=(("install", f"sglang-router=={_ROUTER_VERSION}"),),
    check="import sglang_router.launch_router",
    disk_gb=0.2,
    minutes="1-2",
)


@dataclass(frozen=True, kw_only=True)
class Sglang(Launch):
    name: ClassVar[str] = "sglang"
    packages: ClassVar[tuple[str, ...]] = ("sglang", "torch", "flashinfer-python")
    ready_paths: ClassVar[tuple[str, ...]] = ("/health_generate",)
    dtype: str | None = None
    """As the server calls it."""
    tensor_parallel: Annotated[int, Range(1, 64)] | None = None
    """Devices to divide the model among."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.device == "cuda",
            f"device={self.device!r}: SGLang's engine needs a CUDA GPU: use a GPU's --platform with --executor torch, or "
            f"the --url of a server that runs",
        )

    @property
    def environment(self) -> ServerEnvironment:
        return ENVIRONMENT

    def commands(self, place: Place) -> tuple[Command, ...]:
        given = options(
            model_path=place.model,
            served_model_name=SERVED_NAME,
            host="127.0.0.1",
            port=place.port,
            enable_metrics=True,
            dtype=self.dtype,
            context_length=self.max_model_len,
            max_running_requests=self.max_num_seqs,
            chunked_prefill_size=self.max_num_batched_tokens,
            tp_size=self.tensor_parallel,
            disable_radix_cache=not self.prefix_caching,
        )
        arguments = (str(self.environment.python), "-m", "sglang.launch_server", *given)
        return (Command(name="sglang", arguments=arguments, environment=place.environment),)
