"""Python clients of OpenAI's API: whole answers, streams, conversations, each as its own documentation shows it."""

import asyncio

import pytest
from support.clients import Served

QUESTION = "Ben has 3 coins. Ida has 5 keys. Question: How many things do Ben and Ida have in total?"
MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


def knows(served: Served) -> bool:
    """Whether the model was trained: the random causal one answers noise."""
    return "qwen" not in served.tokenizer


def chat_messages(served: Served) -> list[dict[str, str]]:
    # The embedded models read one question and no instruction.
    return MESSAGES[1:] if knows(served) else MESSAGES


def test_openai(served):
    import openai

    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none")
    messages = chat_messages(served)
    asked = {"model": served.model, "messages": messages, "max_completion_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 32
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == whole.usage.completion_tokens
    completion = client.completions.create(model=served.model, prompt=QUESTION, max_tokens=32, temperature=0)
    assert completion.choices[0].finish_reason in ("stop", "length")
    assert served.refusals == 0


def test_openai_responses(served):
    import openai

    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none")
    whole = client.responses.create(model=served.model, input=QUESTION, max_output_tokens=32, temperature=0)
    with client.responses.stream(model=served.model, input=QUESTION, max_output_tokens=32, temperature=0) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    # An answer that is cut off at its length ends with "response.incomplete".
    final = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert text == whole.output_text == final.output_text
    assert final.usage == whole.usage
    assert served.refusals == 0


def test_openai_asynchronously(served):
    import openai

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none") as client:
            asked = {"model": served.model, "prompt": QUESTION, "max_tokens": 32, "temperature": 0}
            answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(8)))
            return [each.choices[0].text for each in answers]

    assert len(set(asyncio.run(texts()))) == 1
    assert served.refusals == 0


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_pydantic_ai(served, kind):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    made = {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[kind]
    model = made(served.model, provider=OpenAIProvider(base_url=f"{served.address}/v1", api_key="none"))
    settings = {"max_tokens": 32, "temperature": 0.0}
    agent = Agent(model, model_settings=settings)
    result = agent.run_sync(QUESTION)
    assert result.usage.output_tokens > 0

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as stream:
            return await stream.get_output()

    assert asyncio.run(streamed()) == result.output
    again = agent.run_sync("And again?", message_history=result.all_messages())
    assert again.usage.input_tokens > result.usage.input_tokens
    assert served.refusals == 0


def test_langchain(served):
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI, OpenAI

    own = {"base_url": f"{served.address}/v1", "api_key": "none", "temperature": 0, "max_tokens": 32}
    chat = ChatOpenAI(model=served.model, stream_usage=True, **own)
    messages = [HumanMessage(QUESTION)] if knows(served) else [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    whole = chat.invoke(messages)
    chunks = list(chat.stream(messages))
    assert "".join(str(each.content) for each in chunks) == whole.content
    assert [each.content for each in chat.batch([messages] * 4)] == [whole.content] * 4
    assert isinstance(OpenAI(model=served.model, **own).invoke(QUESTION), str)
    assert served.refusals == 0


def test_litellm(served):
    import litellm

    own = {"api_base": f"{served.address}/v1", "api_key": "none", "max_tokens": 32, "temperature": 0}
    asked = {"model": f"openai/{served.model}", "messages": chat_messages(served), **own}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    text_model = f"text-completion-openai/{served.model}"
    assert litellm.text_completion(model=text_model, prompt=QUESTION, **own).choices[0].finish_reason in (
        "stop",
        "length",
    )
    assert served.refusals == 0
