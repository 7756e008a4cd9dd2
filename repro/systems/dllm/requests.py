"""The requests of a cell: a data set's, or a task's problems."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from engines.dllm.config import GenerationConfig
from engines.errors import UserError, require
from engines.models.checkpoint import TINY_DIR, checkpoint_dir
from repro.runs.cell import Cell
from repro.runs.kept import kept
from repro.systems.dllm.settings import Settings
from repro.workloads.arrivals import arrivals_asked
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.workload import Workload, WorkloadConfig, build_workload


def room_for_prompt(settings: Settings) -> int:
    """Most prompt tokens a request can have."""
    engine, gen_length = settings.engine, settings.generation.gen_length
    limit = min(engine.max_model_len, engine.max_num_batched_tokens) - gen_length
    if limit < MIN_PROMPT_LEN:
        name = "max_num_batched_tokens" if engine.max_num_batched_tokens <= engine.max_model_len else "max_model_len"
        raise UserError(
            f"{name}={getattr(engine, name)} leaves {limit} tokens for a prompt beside gen_length={gen_length}: "
            f"raise it to at least {gen_length + MIN_PROMPT_LEN} or lower gen_length"
        )
    return limit


def requests_of(cell: Cell, settings: Settings) -> Workload:
    """With token ids where the model runs, else with lengths alone."""
    asked, limit = settings.asked, room_for_prompt(settings)
    require(
        asked.input_len is None or MIN_PROMPT_LEN <= asked.input_len <= limit,
        f"input_len={asked.input_len} must be between {MIN_PROMPT_LEN} and {limit} here: change it or gen_length",
    )
    config = WorkloadConfig(
        dataset=cell.dataset,
        num_requests=asked.num_prompts,
        seed=cell.seed,
        arrivals=arrivals_asked(cell.rate, asked),
        source=asked.dataset_source,
        dataset_path=asked.dataset_path,
        length_scale=asked.length_scale,
        max_prompt_len=limit,
        min_prompt_len=MIN_PROMPT_LEN,
        fixed_prompt_len=asked.input_len,
        may_replace_arrivals=asked.dataset_path is None or asked.arrivals is not None,
    )
    # Random full-size weights come without a tokenizer; the embedded one's ids are valid for any vocabulary.
    model = None if settings.is_simulated else "tiny" if settings.on.weights == "random" else settings.model
    return _built(config, settings.generation, model)


@kept(maxsize=64)
def _built(config: WorkloadConfig, generation: GenerationConfig, model: str | None) -> Workload:
    """The systems of a comparison serve the same requests."""
    return build_workload(config, generation, encode=None if model is None else _encode(model))


@kept(maxsize=2)
def _encode(model: str) -> Callable[[str], list[int]]:
    """Cells that differ in their rate, say, ask the same texts."""
    from engines.models.tokenizer import load_tokenizer

    return lru_cache(maxsize=1 << 14)(load_tokenizer(TINY_DIR if model == "tiny" else checkpoint_dir(model)).encode)
