"""Bodies that clients and harnesses send, each with a name: what two servers of one checkpoint are asked alike.

All are deterministic: ``temperature`` is 0, one token is left to draw from, or the body is refused.
"""

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The sky over the hill was"
LONG = "one two three four five six seven eight nine ten " * 40
HELLO = [{"role": "user", "content": "Hello there"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "And now?"},
]

Body = dict[str, Any]


def completion(**fields: Any) -> tuple[str, Body]:
    return COMPLETIONS, {"model": "MODEL", "prompt": TEXT, "max_tokens": 8, "temperature": 0, **fields}


def chat(**fields: Any) -> tuple[str, Body]:
    return CHAT, {"model": "MODEL", "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}


def without(name: str, asked: tuple[str, Body]) -> tuple[str, Body]:
    route, body = asked
    return route, {key: value for key, value in body.items() if key != name}


PLAIN = {
    "completion": completion(),
    "chat": chat(),
    "completion without model": without("model", completion()),
    "chat without model": without("model", chat()),
    "token ids": completion(prompt=[128000, 9906, 1917]),
    "lists of token ids": completion(prompt=[[128000, 9906], [128000, 1917, 0]]),
    "several texts": completion(prompt=["Hello", "Good morning to"]),
    "two choices": completion(n=2, seed=1, temperature=0.0),
    "return_token_ids": completion(return_token_ids=True),
    "chat return_token_ids": chat(return_token_ids=True),
    "max_tokens as 8.0": completion(max_tokens=8.0),
    "temperature as an integer": completion(temperature=0),
    "top_p of 1 at temperature 0": completion(top_p=1),
    "top_p below 1 at temperature 0": completion(top_p=0.9),
    "null fields": completion(
        stop=None, seed=None, logprobs=None, user=None, suffix=None, stream=None, stream_options=None
    ),
    "user and metadata": chat(user="someone", metadata={"a": "b"}, store=False),
    "unknown field": completion(session_id="abc"),
    "unknown fields of a front end": chat(chat_id="1", session_id="2", id="3", background_tasks={}),
    "max_completion_tokens": without("max_tokens", chat(max_completion_tokens=5)),
    "both lengths alike": chat(max_completion_tokens=8),
    "min_tokens and ignore_eos": completion(min_tokens=8, ignore_eos=True),
    "min_tokens": completion(min_tokens=4),
    "min_tokens above max_tokens": completion(min_tokens=9),
    "seed -1": completion(seed=-1),
    "seed 0": completion(seed=0),
    "context cuts": completion(prompt=[128000] + [1917] * 1019),
    "context is full": completion(prompt=[128000] + [1917] * 1023),
    "context is exceeded": completion(prompt=[128000] + [1917] * 1100),
    "max_tokens beyond the context": completion(max_tokens=5000),
    "max_tokens 0": completion(max_tokens=0),
    "max_tokens -1": completion(max_tokens=-1),
    "priority 0": completion(priority=0),
    "request_id": completion(request_id="mine"),
    "echo": completion(echo=True),
    "echo and ids": completion(echo=True, return_token_ids=True),
    "an empty text among others": completion(prompt=["", "Hello"]),
    "no request_id": completion(request_id=""),
    "best_of 0": completion(best_of=0),
    "an end ends": completion(allowed_token_ids=[128001, 128008, 128009], return_token_ids=True),
    "an end is shown": completion(
        allowed_token_ids=[128001, 128008, 128009], skip_special_tokens=False, ignore_eos=True
    ),
}

STREAMS = {
    "stream": completion(stream=True),
    "chat stream": chat(stream=True),
    "stream with usage": completion(stream=True, stream_options={"include_usage": True}),
    "chat stream with usage": chat(stream=True, stream_options={"include_usage": True}),
    "continuous usage": completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "chat continuous usage": chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "continuous usage alone": chat(stream=True, stream_options={"continuous_usage_stats": True}),
    "no obfuscation": chat(stream=True, stream_options={"include_obfuscation": False}),
    "stream_options without stream": completion(stream_options={"include_usage": True}),
    "stream with ids": completion(stream=True, return_token_ids=True),
    "chat stream with ids": chat(stream=True, return_token_ids=True),
    "stream with a stop": completion(stream=True, stop=["zzzz", "e"]),
    "stream of two prompts": completion(stream=True, prompt=["Hello", "Good"]),
    "stream with logprobs": completion(stream=True, logprobs=2),
    "chat stream with logprobs": chat(stream=True, logprobs=True, top_logprobs=2),
    "stream with echo": completion(stream=True, echo=True),
    "stream with echo and usage": completion(stream=True, echo=True, stream_options={"include_usage": True}),
    "stream with echo and logprobs": completion(stream=True, echo=True, logprobs=1),
    "stream with echo and ids": completion(stream=True, echo=True, return_token_ids=True),
    "stream of an echo alone": completion(stream=True, echo=True, max_tokens=0),
    "stream of two lists of ids": completion(
        stream=True, return_token_ids=True, prompt=[[128000, 9906], [128000, 1917, 0]]
    ),
    "stream of two prompts with continuous usage": completion(
        stream=True, prompt=["Hello", "Good"], stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "stream with logprobs and a stop": completion(stream=True, logprobs=2, stop=["e"], max_tokens=24),
    "stream with ids and stops": completion(stream=True, return_token_ids=True, stop=["ing", "er"], max_tokens=32),
    "chat stream with ids, usage and stops": chat(
        stream=True,
        return_token_ids=True,
        stop=["e", "o"],
        max_tokens=24,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    "chat stream of three choices": chat(
        stream=True, n=3, temperature=1, top_k=1, seed=1, stream_options={"include_usage": True}
    ),
    "stream of two choices for each of two prompts": completion(
        stream=True, n=2, temperature=1, top_k=1, seed=1, prompt=["Hello", "Good"], logprobs=1
    ),
    "stream that goes on": chat(
        stream=True,
        echo=True,
        messages=[*HELLO, {"role": "assistant", "content": "Well, I"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "stream that an end ends": chat(
        stream=True,
        allowed_token_ids=[128001, 128008, 128009],
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    "stream that the context cuts": completion(
        stream=True, prompt=[128000] + [1917] * 1019, stream_options={"include_usage": True}
    ),
}

STOPS = {
    "one stop": completion(stop="e", max_tokens=24),
    "six stops": completion(stop=["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"], max_tokens=24),
    "a stop that comes": completion(stop=["a", "e", "i", "o", "u"], max_tokens=24),
    "sixteen stops": chat(stop=[f"stop{i}" for i in range(16)]),
    "four stops": completion(stop=["a", "e", "i", "o"], max_tokens=24),
    "an empty stop": completion(stop=""),
    "no stops": completion(stop=[]),
    "a stop in the output": completion(stop=["a", "e", "i"], include_stop_str_in_output=True, max_tokens=24),
    "stop and min_tokens": completion(stop=["a", "e", "i"], min_tokens=6, max_tokens=24),
    "stop_token_ids none": completion(stop_token_ids=[]),
    "stop_token_ids that never comes": completion(stop_token_ids=[5, 6]),
}

MESSAGES = {
    "system": chat(messages=TURNS),
    "developer": chat(messages=[{"role": "developer", "content": "Be brief."}, *HELLO]),
    "parts": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}]
    ),
    "one part": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]),
    "name": chat(messages=[{"role": "user", "name": "ida", "content": "Hello"}]),
    "empty tool_calls": chat(messages=[*TURNS[:2], {"role": "assistant", "content": "Hi", "tool_calls": []}, TURNS[3]]),
    "annotations": chat(
        messages=[*TURNS[:2], {"role": "assistant", "content": "Hi", "annotations": [], "refusal": None}, TURNS[3]]
    ),
    "message type": chat(messages=[{"type": "message", "role": "user", "content": "Hello"}]),
    "no messages": chat(messages=[]),
    "no content": chat(messages=[{"role": "user"}]),
    "empty content": chat(messages=[{"role": "user", "content": ""}]),
    "unicode": chat(messages=[{"role": "user", "content": "Grüße, 世界 👋"}]),
    "special text": completion(prompt="Hello<|eot_id|>there"),
    "special text in a message": chat(messages=[{"role": "user", "content": "a <|eot_id|> b"}]),
    "template variables": chat(chat_template_kwargs={"enable_thinking": False}),
    "template variable that the template reads": chat(chat_template_kwargs={"add_generation_prompt": False}),
    "no generation prompt": chat(add_generation_prompt=False),
    "continue": chat(
        messages=[*HELLO, {"role": "assistant", "content": "Well, I"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "continue and prompt": chat(
        messages=[*HELLO, {"role": "assistant", "content": "Well"}], continue_final_message=True
    ),
    "add_special_tokens false": completion(add_special_tokens=False),
    "chat add_special_tokens": chat(add_special_tokens=True),
    "truncated": completion(prompt=LONG, truncate_prompt_tokens=5),
    "truncated chat": chat(truncate_prompt_tokens=5),
    "truncated to the context": completion(prompt=LONG, truncate_prompt_tokens=-1),
    "skip_special_tokens": completion(skip_special_tokens=False),
    "truncated to the right": completion(
        prompt=LONG, truncate_prompt_tokens=5, truncation_side="right", return_token_ids=True
    ),
    "truncated echo": completion(prompt=LONG, truncate_prompt_tokens=5, echo=True),
    "a tool's message": chat(messages=[*HELLO, {"role": "tool", "content": "5", "tool_call_id": "a"}]),
    "a role of one's own": chat(messages=[{"role": "critic", "content": "Hello"}]),
    "reasoning": chat(messages=[*TURNS[:2], {"role": "assistant", "content": "Hi", "reasoning": "hm"}, TURNS[3]]),
    "a user alone goes on": chat(continue_final_message=True, add_generation_prompt=False, echo=True),
    "reasoning_effort": chat(reasoning_effort="none"),
    "spaces between": completion(spaces_between_special_tokens=False),
}

LOGPROBS = {
    **{f"logprobs {k}": completion(logprobs=k) for k in (0, 1, 5, 20)},
    "logprobs 21": completion(logprobs=21),
    "logprobs -1": completion(logprobs=-1),
    "chat logprobs": chat(logprobs=True),
    "chat top_logprobs": chat(logprobs=True, top_logprobs=3),
    "chat top_logprobs 0": chat(logprobs=True, top_logprobs=0),
    "chat top_logprobs 21": chat(logprobs=True, top_logprobs=21),
    "chat top_logprobs alone": chat(top_logprobs=3),
    "echo with logprobs": completion(echo=True, logprobs=1),
    "echo of one token": completion(echo=True, logprobs=1, max_tokens=1),
    "echo of ids": completion(prompt=[128000, 9906, 1917, 9906], echo=True, logprobs=1, max_tokens=1),
    "echo of several": completion(
        prompt=[[128000, 9906, 1917], [128000, 1917, 0, 5]], echo=True, logprobs=1, max_tokens=1
    ),
    "scored alone": completion(echo=True, logprobs=1, max_tokens=0),
    "prompt_logprobs": completion(prompt_logprobs=1),
    "prompt_logprobs of a chat": chat(prompt_logprobs=1),
    "prompt_logprobs beside echo": completion(prompt_logprobs=2, logprobs=1, echo=True),
    "prompt_logprobs with names as ids": completion(prompt_logprobs=1, return_tokens_as_token_ids=True),
    "names as ids": completion(logprobs=1, return_tokens_as_token_ids=True),
    "chat echo": chat(echo=True),
    "half characters": completion(allowed_token_ids=[9468], max_tokens=4, logprobs=2),
    "half characters of a chat": chat(allowed_token_ids=[9468], max_tokens=4, logprobs=True, stream=True),
    "emoji scored": completion(prompt="👋🏽 世界", echo=True, logprobs=0, max_tokens=1),
    "logprobs true": completion(logprobs=True),
    "penalties beside logprobs": completion(frequency_penalty=1.5, logprobs=2, max_tokens=12),
    "logprobs with a stop": completion(logprobs=1, stop=["e"], max_tokens=24),
}

SAMPLING = {
    "top_k": completion(top_k=5),
    "top_k -1": completion(top_k=-1),
    "top_k 0": completion(top_k=0),
    "top_k -2": completion(top_k=-2),
    "min_p": completion(min_p=0.1),
    "min_p 1.5": completion(min_p=1.5),
    "frequency_penalty": completion(frequency_penalty=1.5, max_tokens=24),
    "presence_penalty": completion(presence_penalty=1.5, max_tokens=24),
    "repetition_penalty": completion(repetition_penalty=1.3, max_tokens=24),
    "three penalties": chat(frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=24),
    "frequency_penalty 3": completion(frequency_penalty=3),
    "repetition_penalty 0": completion(repetition_penalty=0),
    "logit_bias": completion(logit_bias={"1917": 100}),
    "negative logit_bias": completion(logit_bias={"1917": -100, "9906": -5.5}),
    "logit_bias outside": completion(logit_bias={"999999": 1}),
    "logit_bias of a word": completion(logit_bias={"word": 1}),
    "allowed_token_ids": completion(allowed_token_ids=[1917, 9906, 0]),
    "allowed_token_ids of none": completion(allowed_token_ids=[]),
    "allowed_token_ids outside": completion(allowed_token_ids=[999999]),
    "bad_words": completion(bad_words=["the", "hello world"]),
    "top_p 0": completion(top_p=0),
    "top_p 1.5": completion(top_p=1.5),
    "temperature -1": completion(temperature=-1),
    "temperature 3": completion(temperature=3, top_k=1),
    "best_of 2": completion(best_of=2),
    "best_of 1": completion(best_of=1),
    "use_beam_search": completion(use_beam_search=False),
}

REFUSED = {
    "no prompt": without("prompt", completion()),
    "a number as a prompt": completion(prompt=5),
    "an empty list as a prompt": completion(prompt=[]),
    "another model": completion(model="nobody"),
    "a token outside": completion(prompt=[128000, 999999]),
    "a negative token": completion(prompt=[-1]),
    "n 0": completion(n=0),
    "n as text": completion(n="two"),
    "max_tokens as text": completion(max_tokens="many"),
    "a role that is none": chat(messages=[{"content": "Hello"}]),
    "messages as text": chat(messages="Hello"),
    "max_tokens as 8.5": completion(max_tokens=8.5),
    "response_format of text": chat(response_format={"type": "text"}),
    "tool_choice none": chat(tools=[], tool_choice="none"),
    "suffix": completion(suffix="and so on"),
    "max_tokens as '8'": completion(max_tokens="8"),
    "stream as 1": completion(stream=1),
    "null n": completion(n=None),
}

_KINDS = {
    "plain": PLAIN,
    "streams": STREAMS,
    "stops": STOPS,
    "messages": MESSAGES,
    "logprobs": LOGPROBS,
    "sampling": SAMPLING,
    "refused": REFUSED,
}
BODIES = {f"{kind}: {name}": asked for kind, bodies in _KINDS.items() for name, asked in bodies.items()}
