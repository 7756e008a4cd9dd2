#!/usr/bin/env bash
# transformers 5.24.0: `generate_batch` (continuous batching) ignores max_length, min_new_tokens, num_beams, max_time and stop_strings in silence.
#
# Guess: a GenerationConfig means the same in `generate` and in `generate_batch`; a setting that batching lacks is refused or warned of, as
#   repetition_penalty is ("isn't supported by CB. Dropping it.").
# Seen: a greedy prompt of 8 tokens, alone. With max_length=12 generate makes 4 tokens, and generate_batch goes on to the end of its cache. min_new_tokens
#   does not keep the end of text away, num_beams=3 gives the greedy answer, stop_strings and max_time do not stop. None is warned of.
#   The greedy answer, max_new_tokens, eos_token_id and suppress_tokens are the same in both.
# Who is hurt: an evaluation or a benchmark that is moved to generate_batch for speed: stop texts of a task are lost, and lengths are others.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 2 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip transformers==5.24.0 accelerate==1.15.0 psutil

cat > "$work/batch.py" <<'PY'
import importlib.metadata
import logging
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
torch.manual_seed(8)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512)
model = LlamaForCausalLM(LlamaConfig(vocab_size=258, bos_token_id=None, eos_token_id=257, pad_token_id=257, initializer_range=0.3, **shape)).eval()
prompt = list(range(10, 18))
pages = ContinuousBatchingConfig(num_blocks=4, page_size=32, max_batch_tokens=64)
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage()) if record.levelno == logging.WARNING else None
log = logging.getLogger("ContinuousBatchingLogger")
log.handlers, log.propagate = [handler], False


def answers(**settings):
    """The tokens of `generate` and of `generate_batch`, and what the latter warned of."""
    settings = dict(do_sample=False, max_new_tokens=24, eos_token_id=257, pad_token_id=257) | settings
    del warned[:]
    alone = model.generate(torch.tensor([prompt]), generation_config=GenerationConfig(**settings), tokenizer=tokenizer)[0, len(prompt):].tolist()
    batch = model.generate_batch([prompt], generation_config=GenerationConfig(**settings), continuous_batching_config=pages, warmup=False, progress_bar=False)
    return alone, next(iter(batch.values())).generated_tokens, [text for text in warned if "Processor" in text or "support" in text]


greedy, same, _ = answers()
print("transformers", importlib.metadata.version("transformers"), "greedy", greedy[:8])
fifth = greedy[4]
right = greedy == same and fifth not in greedy[:4]
as_said = {"max_new_tokens=4": dict(max_new_tokens=4), "an earlier end": dict(eos_token_id=fifth), "suppress_tokens": dict(suppress_tokens=[greedy[0]])}
ignored = {
    "max_length=12": dict(max_length=12, max_new_tokens=None),
    "min_new_tokens=20": dict(min_new_tokens=20, eos_token_id=fifth),
    "num_beams=3": dict(num_beams=3),
    "stop_strings": dict(stop_strings=[tokenizer.decode([fifth])]),
    "max_time=1e-6": dict(max_time=1e-6),
}
for name, settings in (as_said | ignored | {"repetition_penalty=5": dict(repetition_penalty=5.0)}).items():
    alone, batch, told = answers(**settings)
    print(f"{name}: generate {len(alone)} tokens, generate_batch {len(batch)}, {'equal' if alone == batch else 'other'}; warnings: {told}")
    right &= (alone == batch) if name in as_said else alone != batch
    right &= bool(told) if "penalty" in name else not told or name in as_said
sys.exit(not right)
PY
"$work/venv/bin/python" "$work/batch.py" 2>"$work/err" || { tail -5 "$work/err"; exit 1; }
