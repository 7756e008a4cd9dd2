"""One prompt through one system: the command behind ``repro generate``."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.method import Method, Sampler
from engines.dllm.plan import Request, check_request
from engines.errors import RunError
from engines.models.checkpoint import checkpoint_dir, config_of
from repro.families.dllm.system import method


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """``knobs`` holds only what the user gave, so that an option without effect on the system is refused."""

    system: str
    model: str
    generation: GenerationConfig
    knobs: Mapping[str, Any]
    tie_policy: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    weights: str = "checkpoint"
    quantization: str = "none"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Checked options, with the system's method and what it makes of the settings."""

    options: GenerateOptions
    method: Method
    sampler: Sampler
    generation: GenerationConfig

    def request(self, prompt_ids: tuple[int, ...]) -> Request:
        """Raises UserError, before any weights are loaded, if the checkpoint cannot run the request."""
        request = Request(request_id=0, prompt_len=len(prompt_ids), prompt_ids=prompt_ids, generation=self.generation)
        check_request(request, config_of(self.options.model))
        return request


@dataclass(frozen=True, kw_only=True)
class Generated:
    token_ids: tuple[int, ...]
    """The generated region, gen_length ids."""
    forward_passes: int
    """Counted as the method's published code does."""
    rows: tuple[int, ...]
    """Query rows that each step computes."""
    committed: tuple[int, ...]
    """Tokens that each step commits."""


def prepare_generation(options: GenerateOptions) -> Prepared:
    """Check the options against the checkpoint's family. Only the checkpoint's config is loaded."""
    family, chosen = config_of(options.model).family, method(options.system)
    sampler = chosen.sampler(family, options.knobs)
    generation = chosen.generation(family, options.knobs, options.generation, tie_policy=options.tie_policy)
    return Prepared(options=options, method=chosen, sampler=sampler, generation=generation)


def generate(options: GenerateOptions, prompt_ids: tuple[int, ...]) -> Generated:
    """Run one request to its end on an engine that is sized for just this request."""
    return run_prepared(prepare_generation(options), prompt_ids)


def run_prepared(prepared: Prepared, prompt_ids: tuple[int, ...]) -> Generated:
    request, sampler = prepared.request(prompt_ids), prepared.sampler
    engine = _engine(prepared, request)
    engine.submit(request)
    records = engine.run()
    for record in records:
        for _, reason in record.done.failed:
            raise RunError(reason)
    token_ids = engine.take_output(0)
    assert token_ids is not None
    extra = 0
    if sampler.counts_empty_forward:
        # For a block that its first, full forward completed, the published code runs one more forward.
        refresh = [record.plan.num_refresh == 1 for record in records] + [True]
        extra = sum(now and after for now, after in pairwise(refresh))
    return Generated(
        token_ids=token_ids,
        forward_passes=len(records) + extra,
        rows=tuple(record.outcome.query_rows for record in records),
        committed=tuple(record.outcome.committed_tokens for record in records),
    )


def _engine(prepared: Prepared, request: Request) -> Engine:
    from engines.models.loader import load_model, parse_dtype

    options, sampler = prepared.options, prepared.sampler
    config = EngineConfig(
        max_num_batched_tokens=request.total_len,
        max_model_len=request.total_len,
        max_num_seqs=1,
        sparsity=sampler.sparsity,
        settling=sampler.settling,
        cut=sampler.cut,
        decode=sampler.decode,
        tie_policy=options.tie_policy or sampler.tie_policy,  # type: ignore[arg-type]
        suppress_mask_token=sampler.suppress_mask_token,
    )
    model = load_model(
        options.model,
        dtype=parse_dtype(options.dtype),
        device=options.device,
        weights=options.weights,  # type: ignore[arg-type]
        quantization=options.quantization,  # type: ignore[arg-type]
        keeps_weights=False,
    )
    stop_ids = None
    if request.generation.stop_at_eos and options.weights != "random":
        from engines.models.chat import stop_token_ids

        stop_ids = stop_token_ids(checkpoint_dir(options.model, weights=False), config_of(options.model))
    return prepared.method.alone(model, config, sampler, request, stop_ids=stop_ids)
