"""Sparse-dLLM: a delayed sparse KV cache with one selection for all heads of a layer."""

from baselines.dllm.dream import timestep_decode
from baselines.dllm.options import SparseOptions
from baselines.dllm.published import PublishedMethod
from engines.dllm.config import DecodeConfig, DelayedCache, GenerationConfig, SparsityConfig
from engines.dllm.method import BLOCKS, LEAP, Options, Sampler
from engines.errors import require


class SparseDllm(PublishedMethod):
    name = "sparse-dllm"
    title = "Sparse-dLLM"
    heeds = {"llada": BLOCKS | LEAP, "dream": BLOCKS | {"alg_temp"}}
    own = SparseOptions
    batches_upstream = False  # published code indexes the cache as a batch of one

    def _sampler(self, family: str, own: SparseOptions, options: Options) -> Sampler:
        sparsity = SparsityConfig(
            selection="uniform", min_kept=0, retention_ratio=own.retention_ratio, pool_kernel=own.pool_kernel
        )
        decode = timestep_decode(own.alg, first_step="first_position") if family == "dream" else DecodeConfig()
        return Sampler(rule=DelayedCache(delay=1), sparsity=sparsity, decode=decode)

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        if family == "dream":
            require(
                generation.block_length == 32,
                f"block_length={generation.block_length} must be 32 for sparse-dllm on a dream model: its published code "
                f"fixes it",
            )
            num_blocks = generation.num_blocks
            require(
                generation.gen_length % generation.block_length != 0 or generation.steps != num_blocks,
                f"steps={generation.steps} leaves a block one step, in which sparse-dllm on a dream model commits its first "
                f"token alone: use at least {2 * num_blocks}",
            )
        return super()._run_as(family, options, generation)


SPARSE_DLLM = SparseDllm()
