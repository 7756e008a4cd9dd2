"""The same batches through the authors' Fast-dLLM and through our systems: are the answers the same, and at what processor time?

``PYTHONPATH=. python tests/clients/beside_fast_dllm.py CHECKOUT [ROUNDS] [STEPS]``, with transformers 4.49 installed. CHECKOUT is the folder
``v1/llada`` of ``git clone https://github.com/NVlabs/Fast-dLLM``. Their code takes prompts of one length, so a batch has eight of these. All
take each batch in turn on one thread, the first batch untimed, and ratios are of processor time.
"""

import sys
import time
from collections import defaultdict

import torch
from beside import BATCH, BLOCK, ours, prompts_of, shown

from engines.models.checkpoint import checkpoint_dir
from engines.models.loader import load_model
from repro.runs.statistics import paired_ratio

SYSTEMS = {
    "fast-dllm, prefix": ("fast-dllm", {"cache": "prefix"}),
    "fast-dllm, dual": ("fast-dllm", {"cache": "dual"}),
    "dllm-serve, exact": ("dllm-serve", {"preset": "exact"}),
    "dllm-serve, balanced": ("dllm-serve", {"preset": "balanced"}),
}


def batches_of_one_length(num, steps):
    by_length = defaultdict(list)
    for ids in prompts_of("mini-gsm", 64 * num, steps):
        by_length[len(ids)].append(ids)
    whole = [same[at : at + BATCH] for same in by_length.values() for at in range(0, len(same) - BATCH + 1, BATCH)]
    return whole[:num]


def authors(checkout):
    """Name -> their loop as ``(prompts, steps, threshold) -> answers``, on the embedded model's weights."""
    sys.path.insert(0, checkout)
    import generate as theirs
    from model.modeling_llada import LLaDAModelLM

    model = LLaDAModelLM.from_pretrained(checkpoint_dir("tiny"), torch_dtype=torch.float32).eval()

    def asked(loop):
        def ask(prompts, steps, threshold):
            ids, _ = loop(
                model, torch.tensor(prompts), steps=steps, gen_length=steps, block_length=BLOCK,
                mask_id=model.config.mask_token_id, threshold=threshold,
            )  # fmt: skip
            return ids[:, len(prompts[0]) :].tolist()

        return ask

    loops = {"prefix": theirs.generate_with_prefix_cache, "dual": theirs.generate_with_dual_cache}
    return {f"authors, {name}": asked(loop) for name, loop in loops.items()}


def main(checkout, rounds="7", steps="64"):
    steps, batches = int(steps), batches_of_one_length(int(rounds) + 1, int(steps))
    torch.set_num_threads(1)
    model, theirs = load_model("tiny"), authors(checkout)
    asks = dict(theirs)
    for name, (system, knobs) in SYSTEMS.items():
        asks[name] = lambda prompts, steps, threshold, system=system, knobs=knobs: ours(
            model, prompts, steps, system, threshold, **knobs
        )
    for threshold in (None, 0.9):
        answers, seconds = defaultdict(list), defaultdict(dict)
        for at, batch in enumerate(batches):
            for name, ask in asks.items():
                start = time.process_time()
                found = ask(batch, steps, threshold)
                if at:
                    seconds[name][at] = time.process_time() - start
                    answers[name] += found
        total = BATCH * (len(batches) - 1)
        print(f"threshold {threshold}, {total} answers of {steps} tokens")
        for name, each in seconds.items():
            beside = [
                f"{sum(a == b for a, b in zip(answers[name], answers[their], strict=True))} answers as {their}, times "
                f"{shown(paired_ratio(seconds[their], each))}"
                for their in theirs
                if name not in theirs
            ]
            print(
                f"  {name}: {1000 * sum(each.values()) / total / steps:.3f} processor ms a token",
                *beside,
                sep="; ",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
