"""Every file the program reads, broken in every way: an answer, or one sentence that names the file."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import refused, repro
from support.tables import data_beside
from support.tiny_models import GQA

from engines.cost.roofline import Calibration
from engines.errors import UserError
from engines.models.chat import Message, load_chat_template
from engines.models.checkpoint import TINY_DIR, read_config, weight_files
from engines.models.loader import stored_tensors
from engines.models.tokenizer import load_tokenizer
from repro.api import load
from repro.prompt import read_prompt_ids
from repro.reports.claims import read_claims
from repro.runs.cell import Cell
from repro.workloads.dataset_rows import read_prompts, read_rows

DEEP = "[" * 100_000
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5, True]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.just("\ud800"),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def named(read: Callable[[], object], *names: str) -> None:
    """It can be read, or a UserError says in one sentence what is wrong with which file."""
    said = None
    try:
        read()
    except UserError as error:
        said = str(error)
    if said is not None:
        assert "Traceback" not in said
        assert any(name in said for name in names), said


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A file cut, with bytes changed, or with bytes put in."""
    place = st.integers(0, len(content))
    return st.one_of(
        place.map(lambda i: content[:i]),
        st.tuples(place, st.binary(min_size=1, max_size=4)).map(
            lambda c: content[: c[0]] + c[1] + content[c[0] + len(c[1]) :]
        ),
        st.tuples(place, st.binary(min_size=1, max_size=4)).map(lambda c: content[: c[0]] + c[1] + content[c[0] :]),
        st.binary(max_size=64),
    )


# ---- traces and prompts ---------------------------------------------------------------------------

LINES = {
    "400 digits": (f'{{"prompt_len": 1{"0" * 400}}}', "at most 2147483647"),
    "400 digits of time": (f'{{"prompt_len": 5, "arrival_s": 1{"0" * 400}}}', "finite number"),
    "5000 digits": (f'{{"prompt_len": {"9" * 5000}}}', "number too long"),
    "deep": (f'{{"prompt": {DEEP}', "nested too deeply"),
    "binary": ("\x00\x01", ""),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_trace(line, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(LINES[line][0] + "\n")
    own = ("--dataset-path", path, "--result-dir", tmp_path / "r")
    refused(repro("bench --platform rtx4090 --num-prompts 2", *own), "mine.jsonl", LINES[line][1])
    assert not (tmp_path / "r").exists()


def test_a_trace_is_replayed_as_it_is(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt_len": 20, "arrival_s": 3.0 * i, "gen_length": 40 + i} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("--dataset-path", path, "--result-dir", tmp_path / "r")
    result = repro("bench --platform rtx4090 --num-prompts 4 --arrivals trace --json", *own)
    assert result.code == 0, result
    (run,) = json.loads(result.out)["runs"]
    requests = load(Cell.from_dict(run["cell"]), result_dir=tmp_path / "r").record.requests
    assert requests["arrival_s"] == [0.0, 3.0, 6.0, 9.0]
    assert requests["gen_length"] == [40, 41, 42, 43]
    assert requests["output_len"] == [40, 41, 42, 43]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["prompt", "prompt_len", "arrival_s", "gen_length", "x"]), values, max_size=4))
def test_records_of_a_trace(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_text(json.dumps(record) + "\n")
    named(lambda: read_rows(path), "fuzz.jsonl")
    named(lambda: read_prompts(path, "prompt"), "fuzz.jsonl")


CSV = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
FUZZED: dict[str, tuple[Callable[[Path], object], st.SearchStrategy[bytes]]] = {
    "rows.csv": (read_rows, damaged(CSV)),
    "ids.json": (read_prompt_ids, st.binary(max_size=40) | st.text(max_size=40).map(encoded)),
    "calibration.json": (
        Calibration.load,
        st.binary(max_size=60) | st.dictionaries(st.text(max_size=8), values, max_size=3).map(json.dumps).map(encoded),
    ),
    "claims.yaml": (lambda path: read_claims(path, "mine"), st.binary(max_size=60)),
}


@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=200)
@given(st.data())
def test_bytes_of_a_file(tmp_path_factory, name, data):
    read, contents = FUZZED[name]
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data.draw(contents))
    named(lambda: read(path), name.partition(".")[0])


# ---- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = GQA.write(tmp_path_factory.mktemp("model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_DIR / name, folder / name)
    return folder


@settings(max_examples=250)
@given(st.sampled_from(sorted(GQA.config.to_dict())), values)
def test_values_of_a_config(folder, name, value):
    other = folder.parent / "config"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text(json.dumps({**GQA.config.to_dict(), name: value}))
    named(lambda: read_config(other), "config.json", "model_type")


def test_a_config_of_too_many_layers_is_not_built(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**GQA.config.to_dict(), "n_layers": 10**9}))
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    asked = ("--model", tmp_path, "--weights", "random", "--prompt-ids", tmp_path / "ids.json")
    refused(repro("generate", *asked), "n_layers=1000000000")


@settings(max_examples=150)
@given(st.data())
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_bytes_of_a_tokenizer(folder, name, data):
    content = (folder / name).read_bytes()
    other = folder.parent / "tokens"
    if not other.exists():
        shutil.copytree(folder, other)
    (other / name).write_bytes(data.draw(damaged(content[: 1 << 14] if name == "tokenizer.json" else content)))
    named(lambda: load_tokenizer(other), "tokenizer")
    named(lambda: load_chat_template(other, "llada"), "tokenizer_config")
    shutil.copy(folder / name, other / name)


def test_kinds_of_broken_tokenizer(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "m")
    for content in (b"", b"{}", b"[]", b"\xff\xfe\x00", b"null", b'{"model": {"type": "BPE"}}', DEEP.encode()):
        (other / "tokenizer.json").write_bytes(content)
        refused(repro("generate", "--model", other, "--prompt", "x"), "tokenizer.json")


@settings(max_examples=250)
@given(st.data())
def test_headers_of_weights(folder, data):
    content = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    head, rest = content[: 8 + length], content[8 + length :]
    other = folder.parent / "weights"
    other.mkdir(exist_ok=True)
    (other / "model.safetensors").write_bytes(data.draw(damaged(head)) + rest)
    named(lambda: stored_tensors(other), "model.safetensors", "tensor")


@settings(max_examples=100)
@given(values)
def test_an_index_of_weights(folder, value):
    other = folder.parent / "index"
    other.mkdir(exist_ok=True)
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    named(lambda: weight_files(other), "index", "lacks weights")


TEMPLATES = data_beside(__file__, "cases")["templates"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template(name, folder, tmp_path):
    source, says = TEMPLATES[name]
    (tmp_path / "chat_template.jinja").write_text(source)
    template = load_chat_template(tmp_path, "llada")
    if not says:
        named(lambda: template.render([Message(role="user", content="x")]), "chat template")
        return
    with pytest.raises(UserError, match=says):
        template.render([Message(role="user", content="x")])
    # The next one is answered all the same.
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_chat_template(tmp_path, "llada").render([Message(role="user", content="<é>")]) == "<é>"
