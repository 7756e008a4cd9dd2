"""Tokenizers and chat templates of published checkpoints, made small."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

# Templates as a checkpoint stores them, from the description of the two formats.
LLADA_JINJA = (
    "{% for message in messages %}"
    "{{ bos_token if loop.first else '' }}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


CHATML_JINJA = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


LLADA_SPECIAL = (
    *("<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(directory: Path, **config: object) -> Path:
    """A byte-level tokenizer with LLaDA's special tokens, and a processor that would add a BOS if asked to."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The mask is an ordinary token, as it is not registered in the published tokenizer.
    tokenizer.add_tokens(
        [AddedToken(token, special=token != "<|mdm_mask|>", normalized=False) for token in LLADA_SPECIAL]
    )
    bos = ("<|startoftext|>", tokenizer.token_to_id("<|startoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|startoftext|> $A", special_tokens=[bos])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"mask_token_id": tokenizer.token_to_id("<|mdm_mask|>")}))
    return directory


def write_dream_tokenizer(directory: Path, **config: object) -> Path:
    """``vocab.json``, ``merges.txt`` and added tokens, without a ``tokenizer.json``."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    vocab = {token: i for i, token in enumerate([*BYTES, *(a + b for a, b in merges)])}
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|beginoftext|>", "<|mask|>")
    added = {
        str(len(vocab) + i): {"content": name, "special": name.startswith("<|"), "normalized": False}
        for i, name in enumerate(names)
    }
    fields = {
        "tokenizer_class": "DreamTokenizer",
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "added_tokens_decoder": added,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(fields | config))
    return directory
