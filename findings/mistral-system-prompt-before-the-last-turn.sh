#!/usr/bin/env bash
# mistral-common 1.13.1: the v3 tokenizers move the system prompt to the last user message, so turns share no prefix.
#
# Guess: a conversation's next prompt begins with its last one, as where a template writes the system prompt first.
# Seen: with v3 (its tekken too) a second turn's prompt begins with 2 tokens of the first's 172, and a later one with what lies
# before the last user message. v7 writes the system prompt first, and all is shared; tools move there too: 1 token of 191.
# Who is hurt: prefix-cache hit rates and routers measured with one such model and told of chats in general: without a system
# prompt or tools the same conversation shares everything.
#
# Needs bash, python3 (3.11) and 1 GB; some two minutes, no card. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile mistral-common==1.13.1 sentencepiece==0.2.3 2>"$work/pip" || { cat "$work/pip"; exit 2; }

cat > "$work/turns.py" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import mistral_common
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, Tool
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

SYSTEM = [SystemMessage(content="You are a careful assistant. " * 20)]
TOOLS = [Tool(function=Function(name=f"f{i}", description="tool " * 10, parameters={"type": "object", "properties": {}})) for i in range(3)]
first = [UserMessage(content="How long is the river of the north? " * 5)]
second = [*first, AssistantMessage(content="It is 800 km long. " * 5), UserMessage(content="And the river of the south? " * 5)]
FILES = {
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v3, tekken": "tekken_240718.json",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}


def shared(tokenizer, system, tools):
    """The first turn's tokens, and how many of them the second turn begins with."""
    one, two = (tokenizer.encode_chat_completion(ChatCompletionRequest(messages=[*system, *turns], tools=tools)).tokens for turns in (first, second))
    return len(one), next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), len(one))


print("mistral-common", version("mistral-common"))
seen = {}
for name, file in FILES.items():
    tokenizer = MistralTokenizer.from_file(str(Path(mistral_common.__file__).parent / "data" / file))
    for other, system, tools in (("neither", [], None), ("a system prompt", SYSTEM, None), ("tools", [], TOOLS)):
        tokens, same = seen[name, other] = shared(tokenizer, system, tools)
        print(f"{name}, with {other}: the second turn begins with {same} of the first's {tokens} tokens")
all_of_it = [case for case, (tokens, same) in seen.items() if same == tokens]
next_to_none = [case for case, (_, same) in seen.items() if same <= 2]
moved = [("v3", "a system prompt"), ("v3", "tools"), ("v3, tekken", "a system prompt"), ("v3, tekken", "tools"), ("v7", "tools")]
sys.exit(not (set(next_to_none) == set(moved) and len(all_of_it) == 4))
PY
"$work/venv/bin/python" "$work/turns.py"
