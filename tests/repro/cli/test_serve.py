"""``repro serve`` as users run it: a process, a checkpoint with a chat template, the official client, a signal."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from support.command import refused, repro
from support.tables import data_beside

pytest.importorskip("jinja2", reason="needs the extra hub: jinja2 is not installed")

from support.checkpoints import write_llada
from support.http_client import ask
from support.tokenizers import LLADA_JINJA

from engines.dllm.config import GenerationConfig
from engines.models.chat import Message, load_chat_template
from engines.models.tokenizer import load_tokenizer
from repro.generation import GenerateOptions, generate
from repro.paths import REPO
from repro.prompt import answer_of

CASES = data_beside(__file__, "cases")

GENERATION = GenerationConfig(gen_length=16, block_length=8, steps=16)
KEY = "sesame"


@dataclass(frozen=True, kw_only=True)
class Served:
    folder: str
    port: int
    process: subprocess.Popen[str]


def start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Returns once requests are taken."""
    process = subprocess.Popen(
        [sys.executable, "-m", "repro", "serve", "--port", "0", *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "REPRO_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("ready: "):
            return process, int(line.split()[1].removesuffix("/v1,").rpartition(":")[2])
    pytest.fail(said)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_llada(tmp_path_factory.mktemp("models") / "llada", chat_template=LLADA_JINJA)
    process, port = start(
        *("--model", str(folder), "--served-model-name", "mine"),
        *("--gen-length", "16", "--block-length", "8", "--steps", "16"),
    )
    yield Served(folder=str(folder), port=port, process=process)
    process.terminate()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "ending: 0 requests to finish\n")


def generated(served: Served, ids: list[int], **changes: Any) -> tuple[tuple[int, ...], str, str]:
    """Ids, text and finish reason as 'repro generate' has them; the ids up to the end."""
    options = GenerateOptions(
        system="dllm-serve",
        model=served.folder,
        generation=replace(GENERATION, **changes),
        knobs={"block_length": 8, **{name: value for name, value in changes.items() if name == "threshold"}},
    )
    token_ids = generate(options, tuple(ids)).token_ids
    tokenizer = load_tokenizer(Path(served.folder))
    answer = answer_of(token_ids, served.folder, tokenizer)
    return token_ids, answer.text, answer.finish_reason


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "mine", "prompt": prompt, **fields}


HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(("asked", "changes"), CASES["tokens over http"])
def test_tokens_over_http_are_those_of_generate(served, asked, changes):
    ids = load_tokenizer(Path(served.folder)).encode("what is it?")
    token_ids, text, reason = generated(served, ids, **changes)
    said = ask(
        served.port,
        "/v1/completions",
        body("what is it?", **asked, ignore_eos=True, return_token_ids=True),
        headers=HEADERS,
    )
    assert said.status == 200, said.body
    assert tuple(said.body["choices"][0]["token_ids"]) == token_ids
    said = ask(served.port, "/v1/completions", body(ids, **asked), headers=HEADERS)
    choice = said.body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_the_official_client_completes_chats_and_streams(served):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY, max_retries=0)
    tokenizer = load_tokenizer(Path(served.folder))
    assert [model.id for model in client.models.list()] == ["mine"]
    done = client.completions.create(model="mine", prompt="hello", seed=0)
    _, text, reason = generated(served, tokenizer.encode("hello"))
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text, reason)

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hello? "}]
    ids = load_chat_template(Path(served.folder), "llada").encode(tokenizer, [Message(**m) for m in messages])
    _, text, reason = generated(served, ids)
    chat = client.chat.completions.create(model="mine", messages=messages, seed=0)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text, reason)
    assert chat.usage.prompt_tokens == len(ids)
    chunks = list(
        client.chat.completions.create(
            model="mine", messages=messages, seed=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert chunks[-1].usage == chat.usage
    with pytest.raises(openai.BadRequestError, match="max_tokens=4000 is more than"):
        client.completions.create(model="mine", prompt="hello", max_tokens=4000)
    with pytest.raises(openai.NotFoundError, match="is not served here: use 'mine'"):
        client.completions.create(model="gpt-4", prompt="hello")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model="mine", prompt="hello")


def test_the_status_page_draws_in_a_browser(served):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        try:
            browser = play.chromium.launch(executable_path=os.environ.get("REPRO_CHROMIUM"))
        except playwright.Error as error:
            pytest.skip(f"playwright has no browser: {str(error).splitlines()[0]}")
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector('#state[data-state="ready"]')
        answered = page.locator("#totals tr", has_text="answered").locator("td").nth(1)
        before = answered.inner_text()
        ask(served.port, "/v1/completions", body("hello"), headers=HEADERS)
        playwright.expect(answered).not_to_have_text(before, timeout=60_000)
        playwright.expect(page.locator("#model")).to_have_text("mine")
        playwright.expect(page.locator("#pool-of")).to_have_text(re.compile(r"of [\d,]+ rows"))
        drawn = [page.locator(f"#{name}-plot").screenshot() for name in ("rate", "budget")]
        assert drawn[0] != drawn[1], "one has a line that rose, the other's is flat again"
        assert faults == []
        browser.close()


def test_an_address_that_is_none():
    refused(repro("serve", "--host", "256.0.0.1", "--port", "0"), "cannot be listened on")
