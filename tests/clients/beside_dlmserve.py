"""The same prompts through dlmserve 0.1.1 and through two of our systems: are the answers the same, and at what processor time?

``PYTHONPATH=. python tests/clients/beside_dlmserve.py [PROMPTS] [STEPS]``, with dlmserve installed. Its loader reads LLaDA-8B on a GPU alone, so
it gets the embedded model. They take each batch of eight in turn, and ratios are of processor time.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from dlmserve.denoise_loop import init_state, step_batch
from dlmserve.sampler import SamplingParams

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.models.loader import load_model
from repro.generation import GenerateOptions, prepare_generation
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import paired_ratio

BATCH, BLOCK = 8, 32
SYSTEMS = {"llada": {}, "dllm-serve": {"preset": "exact"}}


def as_theirs(model):
    """The embedded model as dlmserve calls one: padded ids, mask and positions to logits. Padding is left out of its products."""

    def forward(ids, attention_mask, position_ids):
        is_real = attention_mask.bool()
        lengths = is_real.sum(1).tolist()

        def attend(layer, q, k, v):
            parts = zip(*(each.transpose(0, 1).split(lengths, 1) for each in (q, k, v)), strict=True)
            found = [torch.nn.functional.scaled_dot_product_attention(*part, enable_gqa=True) for part in parts]
            return torch.cat(found, 1).transpose(0, 1)

        logits = model.logits(model(ids[is_real], position_ids[is_real], attend))
        whole = logits.new_zeros(*ids.shape, logits.shape[-1])
        whole[is_real] = logits
        return SimpleNamespace(logits=whole)

    forward.forward = forward  # whose parameters it looks at
    return forward


def theirs(model, prompts, steps):
    """All of a batch end with the same step."""
    mask_id, pad_id, called = model.config.mask_token_id, model.config.eos_token_id, as_theirs(model)
    params = SamplingParams(num_denoising_steps=steps, gen_length=steps, block_length=BLOCK)
    states = [init_state(torch.tensor([ids]), params, mask_id) for ids in prompts]
    while not all(state.done for state in states):
        step_batch(called, states, mask_id, pad_id)
    return [state.seq[0, state.prompt_len :].tolist() for state in states]


def ours(model, prompts, steps, system):
    generation = GenerationConfig(gen_length=steps, block_length=BLOCK, steps=steps)
    prepared = prepare_generation(
        GenerateOptions(model="tiny", system=system, generation=generation, knobs=SYSTEMS[system])
    )
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


def main(num_prompts="64", steps="64"):
    knobs = {"num_prompts": int(num_prompts), "gen_length": int(steps), "block_length": BLOCK, "steps": int(steps)}
    cell = Cell(
        figure=None, system="llada", dataset="mini-gsm", platform="cpu-tiny", executor="torch", rate=None, seed=0,
        knobs=tuple(knobs.items()),
    )  # fmt: skip
    prompts = [request.prompt_ids for request in prepare(cell).workload.requests]
    torch.set_num_threads(1)
    model, answers, seconds = load_model("tiny"), {}, {}
    asked = {"dlmserve": theirs, **{name: partial(ours, system=name) for name in SYSTEMS}}
    with torch.no_grad():
        for at in range(0, len(prompts), BATCH):
            for name, ask in asked.items():
                start = time.process_time()
                answers.setdefault(name, []).extend(ask(model, prompts[at : at + BATCH], int(steps)))
                seconds.setdefault(name, {})[at] = time.process_time() - start
    for name, each in seconds.items():
        same = sum(a == b for a, b in zip(answers[name], answers["dlmserve"], strict=True))
        speed, ratio = len(prompts) * int(steps) / sum(each.values()), paired_ratio(seconds["dlmserve"], each)
        print(
            f"{name}: {same} of {len(prompts)} answers as dlmserve's, {speed:.0f} tokens a processor second, times {ratio}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
