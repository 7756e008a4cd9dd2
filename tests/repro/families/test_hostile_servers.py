"""Servers that redirect, lie, break off, or never end: each a sentence in bounded time, and nothing of theirs is a number."""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest
from support.cells import a_cell
from support.command import repro
from support.mock_openai import MockOpenAI, mock_server
from support.stored_runs import parts
from support.tables import data_beside

from baselines.servers import process
from baselines.servers.process import NoPage, ask
from engines.errors import RunError, UserError
from repro.families.http import endpoint
from repro.families.http.record import HTTP
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

DATA = data_beside(__file__, "hostile")
CARDS = b'{"data": [{"id": "mock"}]}'
EVENT = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
IDS = b'data: {"choices": [{"text": "x", "token_ids": [1, 2, 3]}]}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'


def says(*pieces: bytes | float, then: bytes | None = None) -> Callable[[], Iterable[bytes | float]]:
    """``then`` for ever, after the pieces."""
    return lambda: chain(pieces, () if then is None else repeat(then))


def page(body: bytes, *heads: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *heads, "", ""]).encode() + body


def sized(body: bytes, more: int = 0, *heads: str) -> bytes:
    return page(body, f"Content-Length: {len(body) + more}", *heads)


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def cell(url: str, **knobs: Any) -> Cell:
    own = {"url": url, "num_prompts": 1, "gen_length": 1, "input_len": 8, "num_warmups": 0, **knobs}
    return a_cell("openai-http", platform="endpoint", executor="http", **own)


# -- redirects --------------------------------------------------------------------------------------------------

PATHS = {"get /v1/models": "answers /v1/models with", "post /v1/": ""}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308, 399])
def test_no_redirect_is_followed(path, status, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    other = MockOpenAI()
    with mock_server(other) as elsewhere:
        answer = page(b"", f"Location: {elsewhere}/v1/models", "Set-Cookie: a=b", status=f"{status} X")
        mock = MockOpenAI(raw={path: says(answer)})
        with mock_server(mock) as url:
            host = elsewhere.removeprefix("http://")
            wanted = f"{PATHS[path]} status {status}, a redirect to the host '{host}', which is not followed".strip()
            if path.endswith("models"):
                with pytest.raises(UserError) as refused:
                    prepare(cell(url))
                assert wanted in str(refused.value)
            else:
                record = prepare(cell(url, num_prompts=2, max_concurrency=1)).run()
                errors = [error for error in record.requests["error"] if error is not None]
                assert wanted in (errors[0] if path.startswith("post") else record.facts["warnings"][0])
    assert not other.heads, "nobody asked it anything"
    assert all("Authorization: Bearer sk-secret" in head and "Cookie" not in head for head in mock.heads)


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("http://user:word@evil.example:81/x", "the host 'evil.example:81'"),
        ("//evil.example/x", "the host 'evil.example'"),
        ("/v2/models", "another path of this host"),
        ("http://[half", "the host '?'"),
        ("http://" + "a" * 5000, "the host 'aaa"),
        ("http://evil\x1b.example/", "the host 'evil\\x1b.example'"),
        (None, "nowhere"),
    ],
)
def test_where_a_redirect_leads_is_told_without_passwords(location, told):
    said = process.redirect(302, location)
    assert f"a redirect to {told}" in said
    assert len(said) < 200
    assert "word" not in said


# -- pages ------------------------------------------------------------------------------------------------------

PAGES: dict[str, tuple[Callable[[], Iterable[bytes | float]], str]] = {
    "shorter than its length": (says(sized(CARDS, 9)), "broke off, 9 bytes before its Content-Length"),
    "a body of nothing": (says(sized(b"", 9)), "broke off, 9 bytes"),
    "a cut chunk": (says(page(b"ff\r\n" + CARDS, "Transfer-Encoding: chunked")), "its body broke off"),
    "no last chunk": (says(page(chunk(CARDS), "Transfer-Encoding: chunked")), "its body broke off"),
    "a length without end": (says(page(CARDS, "Content-Length: " + "9" * 5000)), "Content-Length is no length"),
    "chunks of no size": (says(page(b"zz\r\n" + CARDS, "Transfer-Encoding: chunked")), "its body broke off"),
    "two lengths": (says(sized(CARDS, 0, "Content-Length: 5")), "Content-Length is no length"),
    "a length below 0": (says(page(CARDS, "Content-Length: -1")), "Content-Length is no length"),
    "a length of words": (says(page(CARDS, "Content-Length: many")), "Content-Length is no length"),
    "gzip": (says(sized(gzip.compress(CARDS), 0, "Content-Encoding: gzip")), "its body is compressed ('gzip')"),
    "gzip for the way": (says(page(CARDS, "Transfer-Encoding: gzip, chunked")), "Transfer-Encoding is not known"),
    "endless": (says(page(CARDS), then=b" " * 65536), "its body is longer than 1000000 bytes"),
    "endless chunks": (says(page(b"", "Transfer-Encoding: chunked"), then=chunk(b" " * 65536)), "longer than 1000000"),
    "endless heads": (says(b"HTTP/1.1 200 OK\r\n", then=b"a: b\r\n" * 1000), "no HTTP: HTTPException"),
    "an endless head": (says(b"HTTP/1.1 200 OK\r\na: ", then=b"b" * 65536), "no HTTP: LineTooLong"),
    "an endless status": (says(then=b"b" * 65536), "no HTTP: LineTooLong"),
    "no HTTP": (says(b"+OK ready\r\n\r\n"), "no HTTP: BadStatusLine"),
    "for ever about to": (says(then=b"HTTP/1.1 100 Continue\r\n\r\n"), "no answer within 0.3 s"),
    "dripping": (says(page(b""), then=b" "), "no answer within 0.3 s"),
    "a long silence": (says(2.0), "no answer within 0.3 s"),
    "nothing": (says(), "does not answer"),
    "a part": (says(page(CARDS, status="206 Partial Content")), "status 206"),
    "nothing new": (says(page(b"", status="204 No Content")), "status 204"),
    "a page of errors": (says(page(b"x", status="500 No")), "status 500"),
}


@pytest.mark.parametrize("what", PAGES)
def test_a_page_that_is_not_whole_is_none(what, monkeypatch):
    pieces, sentence = PAGES[what]
    monkeypatch.setattr(process, "MOST_BYTES", 10**6)
    monkeypatch.setattr(process, "ASK_S", 0.3 if "within" in sentence else 30.0)
    with mock_server(MockOpenAI(raw={"get /v1/models": pieces})) as url:
        with pytest.raises(UserError) as refused:
            prepare(cell(url))
        with pytest.raises(NoPage):
            ask(f"{url}/v1/models")
    assert sentence in str(refused.value)


def test_two_cards_of_one_name_are_refused():
    for other, is_refused in (("b", True), ("a", False)):
        cards = json.dumps({"data": [{"id": "m", "root": root, "created": i} for i, root in enumerate(("a", other))]})
        with mock_server(MockOpenAI(raw={"get /v1/models": says(sized(cards.encode()))})) as url:
            if not is_refused:
                assert endpoint.Endpoint(url=url).card(None) == {"id": "m", "root": "a"}
                continue
            with pytest.raises(UserError, match="lists model 'm' twice and otherwise"):
                prepare(cell(url))


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 50, b"\xff", b"", b"{}", b"[]", b'{"data": {"id": 5}}', b'{"data": [], "data": [{"id": "m"}]}'),
        *(b'{"data": [{"id": "m", "root": NaN}]}', b'{"data": [{"id": "m", "root": 1e999}]}'),
        *(b'{"data": [{"id": "\\ud800"}]}', b'{"data": [{"id"]}'),
    ],
)
def test_a_page_of_another_shape_lists_no_models(body):
    with (
        mock_server(MockOpenAI(raw={"get /v1/models": says(sized(body))})) as url,
        pytest.raises(UserError, match="does not answer /v1/models as OpenAI's API does"),
    ):
        prepare(cell(url))


# -- answers ----------------------------------------------------------------------------------------------------


ANSWERS: dict[str, tuple[Callable[[], Iterable[bytes | float]], str]] = {
    "shorter than its length": (says(sized(EVENT + END, 9)), "ClientPayloadError"),
    "a cut chunk": (says(page(b"fff\r\n" + EVENT + END, "Transfer-Encoding: chunked")), "ClientPayloadError"),
    "no last chunk": (says(page(chunk(EVENT + END), "Transfer-Encoding: chunked")), "ClientPayloadError"),
    "cut behind a piece": (says(page(EVENT)), "broke off before its end"),
    "cut in a number": (says(page(EVENT + b'data: {"usage": {"completion_tokens": 1')), "JSONDecodeError"),
    "gzip": (says(page(gzip.compress(EVENT + END), "Content-Encoding: gzip")), "its body is compressed ('gzip')"),
    "deflate for the way": (says(page(EVENT + END, "Transfer-Encoding: deflate")), "Transfer-Encoding is not known"),
    "two lengths": (says(sized(EVENT + END, 0, "Content-Length: 5")), "no HTTP"),
    "a length of words": (says(page(EVENT, "Content-Length: many")), "no HTTP"),
    "brotli": (says(page(b"x", "Content-Encoding: br")), "its body is compressed ('br')"),
    "endless pieces": (says(page(b""), then=EVENT * 100), "goes on behind the 1 tokens that were asked for"),
    "endless ids": (says(page(IDS), then=EVENT), "goes on behind the 1 tokens"),
    "endless silence": (says(page(EVENT + END), then=b": still here\n\n" * 4000), "longer than 1000000 bytes"),
    "endless blanks": (says(page(b""), then=b"\n" * 65536), "longer than 1000000 bytes"),
    "an endless line": (says(page(b"data: "), then=b"x" * 65536), "an event of more than"),
    "endless heads": (says(b"HTTP/1.1 200 OK\r\n", then=b"a: b\r\n" * 1000), "no HTTP"),
    "an endless head": (says(b"HTTP/1.1 200 OK\r\na: ", then=b"b" * 65536), "no HTTP"),
    "for ever about to": (says(then=b"HTTP/1.1 100 Continue\r\n\r\n"), "no whole answer within timeout_s=0.3"),
    "dripping": (says(page(b""), then=b": \n"), "no whole answer within timeout_s=0.3"),
    "an error by its kind": (says(page(b'event: error\ndata: {"message": "no room"}\n\n' + EVENT + END)), "no room"),
    "an end before it": (says(page(b"data: [DONE]\n\n" + EVENT + END)), "the stream goes on behind its end, [DONE]"),
    "an error that is nested": (says(page(b"[" * 4000, status="500 No")), "status 500: [[["),
    "an error in colour": (says(page(b'{"message": "\\u001b[31m\\ud800no"}', status="500 No")), "status 500: ?[31m?no"),
    "a part": (says(page(EVENT + END, status="206 Part")), "status 206"),
    "no HTTP": (says(b"+OK ready\r\n\r\n"), "no HTTP"),
}


SHAPES = {
    **DATA["shapes"],
    "deep": [["[" * 90_000], "not as OpenAI's API has them"],
    "binary": [["\udcff"], "UnicodeDecodeError"],
}
for name, (events, sentence) in SHAPES.items():
    stream = "".join(f"data: {each}\n\n" for each in (*events, "[DONE]"))
    ANSWERS[name] = says(page(stream.encode(errors="surrogateescape"))), sentence


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_not_whole_is_none(what, monkeypatch):
    pieces, sentence = ANSWERS[what]
    monkeypatch.setattr(endpoint, "LONGEST_ANSWER", 10**6)
    # However it comes in pieces, the line is the first to be too long.
    monkeypatch.setattr(endpoint, "LONGEST_LINE", 10**5)
    with mock_server(MockOpenAI(raw={"post /v1/": pieces})) as url:
        record = prepare(cell(url, timeout_s=0.3 if "0.3" in sentence else 30.0)).run()
    (error,) = record.requests["error"]
    assert sentence in error
    assert record.requests["output_len"] == [None]
    assert not HTTP.assess(record).valid


@pytest.mark.parametrize(("told", "context"), [("1", 1), ("64", 64), ("true", 768), ("null", 768)])
def test_a_prompt_is_not_cut_to_nothing(told, context):
    """By what an endpoint says of its context, or by what it is taken to hold where it says nothing that is a number."""
    cards = f'{{"data": [{{"id": "m", "max_model_len": {told}}}]}}'.encode()
    with mock_server(MockOpenAI(raw={"get /v1/models": says(sized(cards))})) as url:
        asked = cell(url, input_len=None, gen_length=max(64, context))
        with pytest.raises(UserError, match=f"no token for a prompt of the {context} that the endpoint is taken to"):
            prepare(asked)
        shorter = replace(asked, knobs=(*asked.knobs, ("max_prompt_len", 9)))
        assert len(prepare(shorter).workload.conversations) == 1


def test_what_fails_the_warm_up_is_said():
    raw = {"post /v1/": says(page(b"", "Location: http://evil.example/", status="307 X"))}
    with (
        mock_server(MockOpenAI(raw=raw)) as url,
        pytest.raises(RunError, match=r"warm-up request 0 failed: status 307, a redirect to the host 'evil.example'"),
    ):
        prepare(cell(url, num_warmups=1)).run()


# -- counts -----------------------------------------------------------------------------------------------------


def reasons(mock: MockOpenAI, **knobs: Any) -> tuple[str, RunRecord]:
    with mock_server(mock) as url:
        record = prepare(cell(url, **{"num_prompts": 12, "gen_length": 4, "num_warmups": 1, **knobs})).run()
    return "; ".join(each for each in HTTP.assess(record).reasons if "late by the harness" not in each), record


@pytest.mark.parametrize("told", [0, 1, 7, 9, 315])
def test_a_prompt_is_as_long_as_it_was_sent(told):
    wanted = f"in 12 answers the endpoint counts other prompt tokens (usage) than it got, the first {told} of the 8 that were sent"
    assert reasons(MockOpenAI(prompt_tokens=told))[0] == wanted


@pytest.mark.parametrize(
    ("told", "is_so"), [(None, True), (1, False), (15, False), (10**6, False), (400, True), (1300, True)]
)
def test_a_text_has_as_many_tokens_as_a_tokenizer_and_a_template_make_of_it(told, is_so):
    said, record = reasons(MockOpenAI(prompt_tokens=told), api="chat", input_len=200)
    assert ("counts other prompt tokens" not in said) is is_so, record.requests["least_prompt"]
    assert all(15 < least < 60 for least in record.requests["least_prompt"])


@pytest.mark.parametrize(
    ("mock", "sentence"),
    [
        (MockOpenAI(completion_tokens=3, has_ids=False), "the first 3 (pieces: 4)"),
        (MockOpenAI(completion_tokens=5), "the first 5 (pieces: 4, ids: 4)"),
        (MockOpenAI(completion_tokens=3), "the first 3 (pieces: 4, ids: 4)"),
        (MockOpenAI(completion_tokens=3, tokens_per_piece=4), "the first 3 (pieces: 1, ids: 4)"),
        (MockOpenAI(num_silent=3), "the first 4 (pieces: 1, ids: 1)"),
    ],
)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_has_the_tokens_that_are_counted(mock, sentence, api):
    found, _ = reasons(replace(mock), api=api, ignore_eos=False)
    assert f"12 answers have not the tokens that the endpoint counts (usage), {sentence}" in found


def test_tokens_that_nothing_shows_are_told_and_no_fault():
    found, record = reasons(MockOpenAI(has_ids=False, word="", gap_s=0.0))
    assert found == ""
    unseen = "12 answers have fewer bytes of text than tokens (usage), and nothing shows the others"
    assert any(each.startswith(unseen) for each in record.facts["warnings"])
    assert not any(unseen in each for each in reasons(MockOpenAI(has_ids=False))[1].facts["warnings"])


def test_a_table_of_a_server_fits_a_narrow_terminal(tmp_path, monkeypatch):
    with mock_server(MockOpenAI(gap_s=0.002)) as url:
        words = f"bench --url {url} --num-prompts 12 --gen-length 3 --input-len 8 --goodput ttft:60000"
        monkeypatch.setenv("COLUMNS", "80")
        said = repro(words, "--result-dir", tmp_path)
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    table = dict(line.replace(",", "").split(":", 1) for line in lines if ":" in line)
    assert (table["in tok"].strip(), table["out tok"].strip()) == ("8.0", "3.0")
    (file,) = tmp_path.rglob("*.jsonl.gz")
    stored = parts(file)["summary"]
    for name in ("ttft", "tpot", "itl"):  # a busy machine may hear of all pieces at once: 0.0 ms
        assert float(table[f"{name} ms"]) == pytest.approx(1e3 * stored[f"{name}_s"]["mean"], abs=0.051)
        assert stored[f"{name}_s"]["mean"] > 0
    assert float(table["goodput/s"]) == pytest.approx(stored["goodput_http"]["requests_s"], abs=0.051)
    assert (stored["input_len"]["max"], stored["output_len"]["n"]) == (8, 12)


# -- extra ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "fix"), DATA["extra"])
def test_extra_sets_nothing_that_the_benchmark_sets(names, fix):
    for name in names.split():
        for extra in ({name: None}, {"top_k": 3, name: 1}, {"nvext": {name: 1}}):
            with pytest.raises(UserError, match=rf"extra: {name} is not for it to set: .*{fix}"):
                prepare(cell("http://127.0.0.1:9", extra=json.dumps(extra)))


def test_extra_adds_all_else():
    mock = MockOpenAI()
    with mock_server(mock) as url:
        prepare(cell(url, extra='{"top_k": 3, "nvext": {"extra_fields": ["completion_token_ids"]}}')).run()
    assert (mock.bodies[0]["top_k"], mock.bodies[0]["max_tokens"]) == (3, 1)


def test_a_secret_reaches_the_server_and_nothing_that_is_written(tmp_path):
    mock = MockOpenAI(fails_every=4)
    fields = {"gateway": [{"X-Api-Key": "harmless-9f3e", "route": "a"}]}
    with mock_server(mock) as url:
        words = f"--verbose bench --url {url} --num-prompts 12 --gen-length 2 --input-len 8"
        own = ("--result-dir", tmp_path, "--knob", f"extra={json.dumps(fields)}")
        shown = [repro(words, *own, *more) for more in ((), ("--json",))]
    assert all(body["gateway"] == fields["gateway"] for body in mock.bodies)
    assert len(mock.bodies) > 12
    shown += [repro("export", tmp_path), repro("compare", tmp_path, tmp_path)]
    stored = [gzip.decompress(file.read_bytes()).decode() for file in tmp_path.glob("*.gz")]
    assert stored
    assert all("route" in text for text in stored)
    for text in (*stored, *(each.out + each.err for each in shown)):
        assert "harmless-9f3e" not in text


@pytest.mark.parametrize(
    "url", ["http://h:1/v1?api_key=harmless-9f3e", "ftp://h?token=harmless-9f3e", "http://me:harmless-9f3e@h"]
)
def test_an_address_is_refused_without_its_secrets(url):
    with pytest.raises(UserError, match="url") as refused:
        prepare(cell(url))
    assert "harmless-9f3e" not in str(refused.value)
    assert "harmless-9f3e" not in repro("bench", "--url", url).err
