"""What the programs ``beside_*.py`` have in common: the embedded model's prompts, and a batch of them through one of our systems."""

from dataclasses import replace

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.scheduling import KvPool, PhaseScheduler
from repro.generation import GenerateOptions, prepare_generation
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

BATCH, BLOCK = 8, 32


def prompts_of(task, num_prompts, steps):
    knobs = {"num_prompts": num_prompts, "gen_length": steps, "block_length": BLOCK, "steps": steps}
    cell = Cell(
        figure=None, system="llada", dataset=task, platform="cpu-tiny", executor="torch", rate=None, seed=0,
        knobs=tuple(knobs.items()),
    )  # fmt: skip
    return [request.prompt_ids for request in prepare(cell).workload.requests]


def ours(model, prompts, steps, system, threshold=None, **knobs):
    """Answers of ``steps`` ids each. ``knobs`` are the system's own."""
    generation = GenerationConfig(gen_length=steps, block_length=BLOCK, steps=steps, threshold=threshold)
    given = knobs if threshold is None else {**knobs, "threshold": threshold}
    prepared = prepare_generation(GenerateOptions(model="tiny", system=system, generation=generation, knobs=given))
    requests = [replace(prepared.request(ids), request_id=at) for at, ids in enumerate(prompts)]
    longest, sampler = max(request.total_len for request in requests), prepared.sampler
    config = EngineConfig(
        max_num_batched_tokens=BATCH * longest,
        max_model_len=longest,
        max_num_seqs=BATCH,
        sparsity=sampler.sparsity,
        settling=sampler.settling,
        decode=sampler.decode,
        tie_policy=sampler.tie_policy,
        suppress_mask_token=sampler.suppress_mask_token,
    )
    rows = BATCH * sampler.rows_of_request(longest, prepared.generation)
    executor = prepared.method.torch_executor("packed")(model, config, rows, num_slots=BATCH, stop_ids=None)
    engine = Engine(PhaseScheduler(config, KvPool(rows), sampler.rule, exact_steps=sampler.exact_steps), executor)
    for request in requests:
        engine.submit(request)
    engine.run()
    return [list(engine.take_output(request.request_id)) for request in requests]


def shown(ratio):
    return f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
