"""SGLang's server on a GPU, and its router before any OpenAI-compatible servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from baselines.servers.checkpoint import TINY
from baselines.servers.launch import SERVED_NAME, Launch, Place, options
from baselines.servers.process import Command
from engines.blockdiffusion.rules import Level
from engines.errors import require
from engines.knobs import SOMETHING, Needs, Range


@dataclass(frozen=True, kw_only=True)
class Sglang(Launch):
    name: ClassVar[str] = "sglang"
    packages: ClassVar[tuple[str, ...]] = ("sglang", "torch", "flashinfer-python")
    ready_paths: ClassVar[tuple[str, ...]] = ("/health_generate",)
    dtype: str | None = None
    """As the server calls it."""
    tensor_parallel: Annotated[int, Range(1, 64)] | None = None
    """Devices to divide the model among."""
    dllm_algorithm: Literal["LowConfidence", "JointThreshold"] | None = None
    """Serve a block-diffusion checkpoint (LLaDA2, SDAR), its blocks decoded so; of such the server runs one request at a time unless
    max_num_seqs is given."""
    dllm_threshold: Annotated[Level, Needs(dllm_algorithm=SOMETHING)] | None = None
    """Confidence above which a token of a block is taken; the server's own default unless given."""
    dllm_edit_threshold: Annotated[Level, Needs(dllm_algorithm="JointThreshold")] | None = None
    """Confidence above which a written token is replaced; the server's own default unless given."""
    dllm_fdfo: Annotated[bool, Needs(dllm_algorithm=SOMETHING)] | None = None
    """Return to the scheduler after each denoise (first done, first out), not once all blocks of a batch are done."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.dllm_algorithm is None or self.model != TINY,
            f"dllm_algorithm={self.dllm_algorithm!r} with model='tiny', a Qwen2: give a LLaDA2 or SDAR checkpoint with --model",
        )
        require(
            self.device == "cuda",
            f"device={self.device!r}: SGLang's engine needs a CUDA GPU: use a GPU's --platform with --executor torch, or "
            f"the --url of a server that runs",
        )

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
            # Their code comes with the checkpoint.
            trust_remote_code=self.dllm_algorithm is not None,
            dllm_algorithm=self.dllm_algorithm,
            dllm_algorithm_config=self._algorithm_config(place.folder),
            dllm_fdfo=self.dllm_fdfo,
        )
        arguments = (str(self.environment.python), "-m", "sglang.launch_server", *given)
        return (Command(name="sglang", arguments=arguments, environment=place.environment),)

    def _algorithm_config(self, folder: Path) -> Path | None:
        """A file with the thresholds that are given, which the server takes no other way."""
        given = {"threshold": self.dllm_threshold, "edit_threshold": self.dllm_edit_threshold}
        lines = [f"{name}: {value}\n" for name, value in given.items() if value is not None]
        if not lines:
            return None
        path = folder / "dllm.yaml"
        path.write_text("".join(lines), encoding="utf-8")
        return path
