#!/usr/bin/env bash
# transformers 5.24.0, transformers serve: `n`, `logprobs`, penalties and `response_format` do nothing, and `temperature` nothing for many a model.
#
# Guess: the server refuses a field that it does not know, with 422 and the field's name. So the fields of OpenAI's that it takes are honoured.
# Seen: `n: 3` gives one choice, and `logprobs` none. A chat takes `presence_penalty` and `response_format` and answers the same text, and a completion does
#   so with `echo`, `frequency_penalty` and `logit_bias`. `temperature: 5` with any seed is greedy, unless the model's own generation_config.json says
#   `do_sample`, which most base models' do not. Then sampling and seeds work, and `n` still gives one choice. The client gets 200 and no word. The server's
#   log has "Ignoring unsupported fields" for `n`, `logprobs`, `presence_penalty`, `response_format` and `echo`, and nothing for the other three.
# Who is hurt: pass@k from one sample per problem, a "temperature 0.8" that is greedy, and a client of JSON mode.
#
# Needs bash, Python 3.10 or later as $PYTHON or python3, and 2 GB; some three minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile "$@" 2>"$work/pip" || { cat "$work/pip"; exit 2; }; }
pip torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
pip 'transformers[serving]==5.24.0' accelerate==1.15.0

cat > "$work/make.py" <<'PY'
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3)
model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=256, bos_token_id=256, eos_token_id=257, **shape))
for name, sample in (("plain", None), ("sampling", True)):
    model.generation_config.do_sample = sample
    wrapped.save_pretrained(f"{sys.argv[1]}/{name}")
    model.save_pretrained(f"{sys.argv[1]}/{name}")
PY
"$work/venv/bin/python" "$work/make.py" "$work" >/dev/null 2>&1

cat > "$work/ask.py" <<'PY'
import json
import sys
import urllib.error
import urllib.request

port, model, sampling = sys.argv[1:]


def ask(**settings):
    """The texts and the logprobs of the choices of an answer of 12 tokens, or the status and reason of a refusal."""
    chat = settings.pop("chat", True)
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    body = {"model": model, "max_tokens": 12, "temperature": 0, **asked, **settings}
    url = f"http://127.0.0.1:{port}/v1/{'chat/' if chat else ''}completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})) as reply:
            choices = json.load(reply)["choices"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["detail"]
    return [choice["message"]["content"] if chat else choice["text"] for choice in choices], [choice.get("logprobs") for choice in choices]


right = True
greedy = {chat: ask(chat=chat) for chat in (True, False)}
print("greedy", greedy)
for fields in ({"ignore_eos": True}, {"top_k": 5}):
    seen = ask(**fields)
    print(fields, "in a chat:", seen)
    right &= seen[0] == 422 and next(iter(fields)) in seen[1]
same = [({"logprobs": True, "top_logprobs": 2}, True), ({"presence_penalty": 2.0}, True), ({"response_format": {"type": "json_object"}}, True)]
same += [({"logprobs": 2}, False), ({"frequency_penalty": 2.0}, False), ({"logit_bias": {"64": 100}}, False), ({"echo": True}, False)]
for fields, chat in same:
    seen = ask(chat=chat, **fields)
    print(fields, "in a chat:" if chat else "in a completion:", "as without, no logprobs" if seen == greedy[chat] else seen)
    right &= seen == greedy[chat] and seen[1] == [None]
for chat in (True, False):
    hot = [ask(chat=chat, temperature=5.0, seed=seed)[0] for seed in (1, 2)]
    three = ask(chat=chat, n=3, temperature=1.0)[0]
    drawn = sum(text != greedy[chat][0] for text in hot)
    print(f"{'chat' if chat else 'completion'}: with temperature 5 {drawn} of 2 answers are not the greedy one; n=3 gives {len(three)} choice")
    right &= drawn == (2 if sampling == "sampling" else 0) and len(three) == 1
sys.exit(not right)
PY
"$work/venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
for name in plain sampling; do
  port=$("$work/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  HF_HUB_OFFLINE=1 "$work/venv/bin/transformers" serve --host 127.0.0.1 --port "$port" --device cpu "$work/$name" >"$work/log" 2>&1 &
  server=$!
  for _ in $(seq 300); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 "$server" || { tail "$work/log"; exit 2; }
    sleep 1
  done
  echo "model whose generation_config.json is $name:"
  "$work/venv/bin/python" "$work/ask.py" "$port" "$work/$name" "$name"
  kill "$server"
  wait "$server" 2>/dev/null || true
  server=
done
