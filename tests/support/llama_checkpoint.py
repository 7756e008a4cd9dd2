"""A random Llama of two layers with the published tokenizer of Llama 3, as its checkpoints have it."""

import importlib.util
from pathlib import Path

import torch
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    5: "step_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FIRST_SPECIAL, NUM_SPECIAL = 128_000, 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def write_llama(folder: Path, *, max_len: int = 1024) -> Path:
    spec = importlib.util.find_spec("llama_models")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    vocabulary = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    special = [f"<|{NAMED.get(i, f'reserved_special_token_{i}')}|>" for i in range(NUM_SPECIAL)]
    tokenizer = TikTokenConverter(vocab_file=str(vocabulary), pattern=PATTERN, extra_special_tokens=special).converted()
    begin = [(special[0], FIRST_SPECIAL)]
    single, pair = f"{special[0]} $A", f"{special[0]} $A {special[0]} $B"
    tokenizer.post_processor = Sequence(
        [ByteLevel(trim_offsets=False), TemplateProcessing(single=single, pair=pair, special_tokens=begin)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[9], clean_up_tokenization_spaces=True
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    ends = [FIRST_SPECIAL + i for i in (1, 8, 9)]
    config = LlamaConfig(
        vocab_size=FIRST_SPECIAL + NUM_SPECIAL,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=FIRST_SPECIAL,
        eos_token_id=ends,
        # Far-apart logits: two programs' roundings change no greedy token.
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    return folder
