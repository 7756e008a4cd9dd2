"""``/tokenize`` and ``/detokenize``, as vLLM has them: ids of a text or a conversation, and the text of ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import FailFast, Field, model_validator

from engines.errors import UserError
from engines.server.body import Conversation, Messages, Object, Whole
from engines.server.completion import Served
from engines.server.errors import refused

_MOST_ID = 2**32 - 1
"""Tokenizers have ids of 32 bits."""


class TokenizeBody(Conversation):
    """Either ``prompt`` or ``messages``."""

    not_supported: ClassVar = {
        "chat_template": ("the checkpoint's own chat template is used", ("",)),
        "media_io_kwargs": ("prompts are text here", ({},)),
        "mm_processor_kwargs": ("prompts are text here", ({},)),
        "tools": ("no tool is called here", ([],)),
    }
    model: str = ""
    prompt: str | None = None
    messages: Messages = []
    add_special_tokens: bool | None = None
    """None adds to a prompt what ``/v1/completions`` adds, and nothing to a conversation."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_of_one_form(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise refused("prompt and messages are two forms of one request: give one of them", "prompt")
        return self

    @property
    def size(self) -> int:
        """Characters."""
        if self.prompt is not None:
            return len(self.prompt)
        return sum(len(part.text) for each in self.messages for part in each.content)

    def answered(self, served: Served) -> Mapping[str, Any]:
        codec = served.codec
        if self.prompt is not None:
            ids = codec.encode(self.prompt, add_special=self.add_special_tokens)
        else:
            ids = codec.encode_chat(self.turns, self.form, add_special=self.add_special_tokens)
        names = [codec.backend.id_to_token(i) for i in ids] if self.return_token_strs and codec.backend else None
        return {
            "count": len(ids),
            "max_model_len": served.model.max_model_len,
            "tokens": list(ids),
            "token_strs": names,
        }


class DetokenizeBody(Object):
    model: str = ""
    tokens: Annotated[
        list[Annotated[Whole, Field(ge=0, le=_MOST_ID)]], FailFast(), Field(description="a list of token ids")
    ]

    @property
    def size(self) -> int:
        """Characters, about."""
        return 4 * len(self.tokens)

    def answered(self, served: Served) -> Mapping[str, Any]:
        """Special tokens are part of the text; ids that the vocabulary has not add nothing."""
        backend = served.codec.backend
        if backend is None:
            raise UserError("tokens: the model has no tokenizer, its ids have no text: ask another model")
        return {"prompt": backend.decode(self.tokens, skip_special_tokens=False)}
