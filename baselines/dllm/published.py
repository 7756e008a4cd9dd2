"""Base of all published methods: whole blocks, and static batches."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from baselines.dllm.static.scheduler import StaticFootprint, base_bytes
from engines.cost.roofline import StepPrice
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.memory import REDUCTION_ROWS
from engines.dllm.method import Method, Options, Sampler
from engines.dllm.simulated import RooflineExecutor
from engines.errors import require
from engines.models.shape import ModelShape

if TYPE_CHECKING:
    from engines.dllm.executor.torch import TorchExecutor
    from engines.models.protocol import DiffusionModel


class PublishedMethod(Method):
    batches_upstream: ClassVar[bool]
    """Whether published code can run several requests at once."""
    mixes_lengths: ClassVar[bool] = True
    """Whether requests with different generation lengths can be padded to one batch."""
    torch_executors: ClassVar[Mapping[str, str]] = {
        **Method.torch_executors,
        "static": "baselines.dllm.static.executor:padded_executor",
    }

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        """Refuse, in words, what published samplers assert against: they need whole blocks, and whole steps per block."""
        length, block = generation.gen_length, generation.block_length
        require(
            length % block == 0,
            f"gen_length={length} is not a multiple of block_length={block}, which system={self.name!r} needs: change one "
            f"of them",
        )
        num_blocks = length // block
        require(
            generation.steps % num_blocks == 0,
            f"steps={generation.steps} is not a multiple of the {num_blocks} blocks, which system={self.name!r} needs: "
            f"change steps or block_length",
        )
        return generation

    # ---- padded static batches ------------------------------------------------------------

    def footprint(
        self,
        shape: ModelShape,
        sampler: Sampler,
        generation: GenerationConfig,
        *,
        memory_bytes: int,
        longest: int,
        is_upstream: bool = False,
    ) -> StaticFootprint:
        """Memory of a static batch: each of ``longest`` rows has activations and logits. Upstream copies all logits at once to reduce
        them; here only the copies of REDUCTION_ROWS rows exist together."""
        copies = sampler.reduction_bytes_per_value(shape.dtype_bytes)
        logits = shape.dtype_bytes + (copies if is_upstream else 0)
        per_row = shape.activation_bytes_per_query_token + logits * shape.vocab_rows
        reduced = 0 if is_upstream else copies * REDUCTION_ROWS * shape.vocab_rows
        cached = sampler.rows_of_request(longest, generation) * shape.kv_bytes_per_token
        return StaticFootprint(
            fixed_bytes=base_bytes(shape, memory_bytes) + reduced, per_request_bytes=longest * per_row + cached
        )

    def static_roofline(
        self, roofline: StepPrice, config: EngineConfig, sampler: Sampler, *, copied_bytes_per_logit: int
    ) -> RooflineExecutor:
        return RooflineExecutor(roofline, config, copied_bytes_per_logit=copied_bytes_per_logit)

    def static_cache(self, sampler: Sampler, kv_rows: int) -> Any:
        """The argument that the padded executor takes besides the model: how many rows its pool has."""
        return kv_rows

    def static_torch(
        self, model: "DiffusionModel", config: EngineConfig, sampler: Sampler, kv_rows: int, **options: Any
    ) -> "TorchExecutor":
        """``options`` are ``padded_executor``'s."""
        return self.torch_executor("static")(model, config, self.static_cache(sampler, kv_rows), **options)  # type: ignore[no-any-return]
