"""The same prompts through dlmserve 0.1.1 and through two of our systems: are the answers the same, and at what processor time?

``PYTHONPATH=. python tests/clients/beside_dlmserve.py [PROMPTS] [STEPS]``, with dlmserve installed. Its loader reads LLaDA-8B on a GPU alone, so
it gets the embedded model. They take each batch of eight in turn, and ratios are of processor time.
"""

import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
from beside import BATCH, BLOCK, ours, prompts_of, shown
from dlmserve.denoise_loop import init_state, step_batch
from dlmserve.sampler import SamplingParams

from engines.models.loader import load_model
from repro.runs.statistics import paired_ratio

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


def main(num_prompts="64", steps="64"):
    prompts = prompts_of("mini-gsm", int(num_prompts), int(steps))
    torch.set_num_threads(1)
    model, answers, seconds = load_model("tiny"), {}, {}
    asked = {"dlmserve": theirs, **{name: partial(ours, system=name, **knobs) for name, knobs in SYSTEMS.items()}}
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
            f"{name}: {same} of {len(prompts)} answers as dlmserve's, {speed:.0f} tokens a processor second, times {shown(ratio)}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
