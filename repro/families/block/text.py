"""Texts of a block-diffusion checkpoint: its tokenizer and the ids that end an answer."""

from collections.abc import Sequence
from dataclasses import replace

from engines.errors import UserError, require
from engines.models.chat import EMBEDDED_CHAT, CausalText, cut_at_end, load_causal_text
from repro.families.block.settings import EMBEDDED_DIRS, BlockSettings
from repro.prompt import TextAnswer


def find_text(settings: BlockSettings) -> CausalText | None:
    """The tokenizer and template of a checkpoint; None for random weights or without a tokenizer. An embedded model gets the chat
    template of the stories that it was trained on."""
    if settings.directory is None:
        return None
    text = load_causal_text(settings.directory)
    if text is None:
        return None
    template = EMBEDDED_CHAT if settings.directory in EMBEDDED_DIRS.values() else text.template
    return replace(text, template=template, mask_id=settings.config.mask_token_id)


def text_of(settings: BlockSettings) -> CausalText:
    text = find_text(settings)
    if text is None:
        raise UserError(
            f"model={settings.model!r} has no tokenizer: give --prompt-ids, or a checkpoint with a tokenizer.json, or with vocab.json and merges.txt"
        )
    return text


def encoded(
    text: CausalText,
    prompt: str,
    *,
    chat: bool | None = None,
    system_prompt: str | None = None,
    by_default: bool = True,
) -> tuple[int, ...]:
    """Like ``TextPrompt.encode``. With ``by_default`` False, a prompt becomes a conversation only if ``chat`` asks for it."""
    require(prompt != "", "prompt is empty: give some text")
    has_template = by_default and text.template is not None and text.template.source is not None
    if not (has_template if chat is None else chat):
        require(
            system_prompt is None,
            f"system_prompt={system_prompt!r} has no effect on a raw prompt: add --chat or leave it out",
        )
        return text.encode(prompt)
    turns = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return text.encode_chat([*turns, {"role": "user", "content": prompt}])


def answer_of(ids: Sequence[int], text: CausalText) -> TextAnswer:
    """The text up to the first id that ends an answer."""
    cut = cut_at_end(ids, text.end_ids)
    return TextAnswer(text.decode(cut.ids), cut.finish_reason)
