"""``/tokenize`` and ``/detokenize`` with the embedded tokenizer, and pages of other origins."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.http_client import ask, streaming
from support.http_server import Running, running_server
from support.served_echo import ByteCodec, EchoModel
from support.tables import data_beside
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR, config_of
from engines.models.tokenizer import special_tokens
from engines.server.codec import IdsAlone, TextCodec
from engines.server.settings import ServerSettings

REQUESTS = data_beside(__file__, "requests")
TEXT = "Ben has 3 coins, né?"
USER = [{"role": "user", "content": "Story: Ben has 3 coins."}]
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.of(TINY_DIR, config_of("tiny"))


@pytest.fixture(scope="module")
def server(codec: TextCodec) -> Iterator[Running]:
    settings = ServerSettings(allow_origin=(PAGE, "http://localhost:3000"), api_key="sesame")
    with running_server(EchoModel(), codec, settings) as found:
        yield found


def told(server: Running, path: str, body: Any, **headers: str) -> Any:
    return ask(server.port, path, body, headers={"Authorization": "Bearer sesame", **headers})


def test_a_text_and_its_tokens_are_told_there_and_back(server, codec):
    said = told(server, "/tokenize", {"prompt": TEXT}).body
    ids = list(codec.encode(TEXT))
    assert said == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert told(server, "/detokenize", {"model": "echo", "tokens": ids}).body == {"prompt": TEXT}

    said = told(server, "/tokenize", {"model": "echo", "prompt": TEXT, "return_token_strs": True}).body
    assert [codec.backend.token_to_id(each) for each in said["token_strs"]] == said["tokens"]


def test_a_conversation_has_the_tokens_that_it_is_asked_with(server, codec):
    said = told(server, "/tokenize", {"messages": USER}).body
    assert said["tokens"] == list(codec.encode_chat(USER))
    alone = told(server, "/tokenize", {"messages": USER, "add_generation_prompt": False}).body
    assert alone["tokens"] == said["tokens"][: alone["count"]]
    assert alone["count"] < said["count"]
    going_on = {"messages": USER, "continue_final_message": True, "add_generation_prompt": False}
    assert told(server, "/tokenize", going_on).status == 200


def test_special_tokens_are_text_of_ids_and_unknown_ids_none(server, codec):
    (end,) = codec.end_ids
    said = told(server, "/detokenize", {"tokens": [*codec.encode("a"), end, 4_000_000_000]}).body
    assert said["prompt"] == "a" + codec.backend.id_to_token(end)
    assert told(server, "/detokenize", {"tokens": []}).body == {"prompt": ""}
    assert told(server, "/tokenize", {"prompt": ""}).body["count"] == 0


def test_a_special_token_is_a_stop_text_though_the_text_leaves_it_out(server, codec):
    (end,) = codec.end_ids
    body = {"model": "echo", "prompt": [300, end], "max_tokens": 8, "ignore_eos": True}
    for skips in (True, False):
        said = told(server, "/v1/completions", {**body, "stop": ["<|endoftext|>"], "skip_special_tokens": skips}).body
        (choice,) = said["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|endoftext|>")
        assert said["usage"]["completion_tokens"] == 5
    said = told(server, "/v1/completions", {**body, "stop": ["<|mdm_mask|>", "no token"]}).body
    assert (said["choices"][0]["finish_reason"], said["usage"]["completion_tokens"]) == ("length", 8)


def test_ordinary_and_added_tokens_are_no_special_ones():
    backend = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    backend.add_tokens(["<b>"])
    backend.add_special_tokens(["<c>", "<d>"])
    assert special_tokens(backend, ["a", "<b>", "<c>"]) == {2: "<c>"}
    assert special_tokens(None, ["<c>"]) == {}


@pytest.mark.parametrize(("path", "body", "status", "param"), REQUESTS["tokens"])
def test_what_has_no_tokens_is_refused_by_its_name(server, path, body, status, param):
    said = told(server, path, body)
    assert (said.status, said.body["error"]["param"]) == (status, param)


def test_a_model_without_a_tokenizer_says_so():
    with running_server(EchoModel(), IdsAlone()) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            said = ask(server.port, path, body)
            assert (said.status, "no tokenizer" in said.body["error"]["message"]) == (400, True)


# -- pages of other origins ---------------------------------------------------------------------------------


def preflight(server: Running, origin: str, **headers: str) -> Any:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    return ask(server.port, "/v1/chat/completions", method="OPTIONS", headers={**asked, **headers})


def test_a_page_that_is_allowed_may_ask_and_read(server):
    said = preflight(server, PAGE)
    assert said.status == 200
    assert said.headers["access-control-allow-origin"] == PAGE
    assert "POST" in said.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in said.headers["access-control-allow-headers"]
    read = told(server, "/tokenize", {"prompt": "a"}, Origin="http://localhost:3000")
    assert read.headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = ask(server.port, "/v1/completions", {"prompt": "a"}, headers={"Origin": PAGE})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_another_page_may_not_and_the_other_checks_stay(server):
    said = preflight(server, "https://other.example")
    assert (said.status, "access-control-allow-origin" in said.headers) == (400, False)
    assert (
        "access-control-allow-origin" not in told(server, "/tokenize", {"prompt": "a"}, Origin=f"{PAGE}.evil").headers
    )
    assert preflight(server, PAGE, Host="evil.example").status == 421
    assert told(server, "/tokenize", {"prompt": "a"}, Origin=PAGE, **{"Content-Type": "text/plain"}).status == 415


def test_no_page_may_by_default_and_any_where_all_are_allowed():
    with running_server(EchoModel(), ByteCodec()) as server:
        said = preflight(server, PAGE)
        assert (said.status, "access-control-allow-origin" in said.headers) == (405, False)
    with running_server(EchoModel(), ByteCodec(), ServerSettings(allow_origin=("*",))) as server:
        assert preflight(server, "https://any.example").headers["access-control-allow-origin"] == "*"
        asked = {"prompt": "a", "stream": True}
        with streaming(server.port, "/v1/completions", asked, {"Origin": PAGE}) as events:
            assert [*events][-1] == "[DONE]"


@pytest.mark.parametrize(
    "origin", ["", "page.example", "https://page.example/", "https://Page.example", "https://*.a", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(UserError, match="allow_origin"):
        ServerSettings(allow_origin=(origin,))
