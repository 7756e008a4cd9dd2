"""``repro generate`` on checkpoints in the published layouts: prompts as text, answers as text, refusals in one line."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.cells import a_cell
from support.checkpoints import EOS, EOT, LLADA, MASK, write_dream, write_llada
from support.command import Result, refused, repro
from support.forks import repro_in_a_process
from support.refusals import refuses
from support.tables import data_beside
from support.tokenizers import CHATML_JINJA, LLADA_JINJA

from baselines.dllm.fast_dllm import THRESHOLD as FAST_THRESHOLD
from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from engines.models.chat import _environment, load_chat_template, parse_messages
from engines.models.checkpoint import checkpoint_digest
from engines.models.tokenizer import load_tokenizer
from repro.families.dllm.system import method
from repro.generation import GenerateOptions, prepare_generation
from repro.paths import REPO
from repro.prompt import read_prompt_ids
from repro.runs.experiment import prepare

CASES = data_beside(__file__, "cases")

SHORT = ("--gen-length", "16", "--block-length", "8")


def generate(*arguments: object, stdin: bytes = b"") -> Result:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))):
        return repro("generate", *arguments)


def answer(*arguments: object) -> dict[str, Any]:
    done = generate(*arguments, "--json")
    assert (done.code, done.err) == (0, ""), done
    found: dict[str, Any] = json.loads(done.out)
    return found


def refusal(*arguments: object, stdin: bytes = b"") -> str:
    return refused(generate(*arguments, stdin=stdin))


def rendered(directory: Path, family: str, *turns: tuple[str, str]) -> list[int]:
    messages = parse_messages([{"role": role, "content": content} for role, content in turns])
    return load_chat_template(directory, family).encode(load_tokenizer(directory), messages)


# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("family", "build", "template"), [("llada", write_llada, LLADA_JINJA), ("dream", write_dream, CHATML_JINJA)]
)
def test_a_prompt_is_a_users_turn_where_there_is_a_template(tmp_path, family, build, template, shards):
    folder, file = build(tmp_path / "model", shards=shards, chat_template=template), tmp_path / "ids.json"

    def by_ids(ids: list[int]) -> object:
        file.write_text(json.dumps(ids))
        return answer("--model", folder, "--prompt-ids", file, *SHORT)["token_ids"]

    asked = ("--model", folder, "--prompt", " hello? ", *SHORT)
    turn, raw = rendered(folder, family, ("user", " hello? ")), load_tokenizer(folder).encode(" hello? ")
    both = rendered(folder, family, ("system", "Be brief."), ("user", " hello? "))
    chat = answer(*asked)
    assert chat["token_ids"] == by_ids(turn)
    assert answer(*asked, "--chat") == chat
    assert answer(*asked, "--no-chat")["token_ids"] == by_ids(raw)
    assert answer(*asked, "--system-prompt", "Be brief.")["token_ids"] == by_ids(both)
    assert len({tuple(map(int, by_ids(ids))) for ids in (turn, raw, both)}) == 3
    said = refusal(*asked, "--no-chat", "--system-prompt", "Be brief.")
    assert "system_prompt='Be brief.' has no effect on a raw prompt" in said


def test_without_a_template_a_prompt_is_raw_unless_asked(tmp_path):
    bare, stored = write_llada(tmp_path / "bare"), write_llada(tmp_path / "stored", chat_template=LLADA_JINJA)
    asked = ("--prompt", "hello", *SHORT)
    raw = answer("--model", bare, *asked)
    assert raw == answer("--model", stored, *asked, "--no-chat")
    assert answer("--model", bare, *asked, "--chat") == answer("--model", stored, *asked) != raw
    assert "has no effect on a raw prompt: add --chat" in refusal("--model", bare, *asked, "--system-prompt", "x")


def test_a_template_of_its_own_file(tmp_path):
    folder = write_llada(tmp_path / "model")
    raw = generate("--model", folder, "--prompt", "hello", *SHORT).out
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert generate("--model", folder, "--prompt", "hello", *SHORT).out == raw
    (folder / "chat_template.jinja").write_text(LLADA_JINJA)
    assert generate("--model", folder, "--prompt", "hello", *SHORT).out != raw


@pytest.mark.parametrize(("name", "chats"), CASES["names of models"])
def test_a_base_model_is_told_by_its_name_and_continues_its_prompt(tmp_path, name, chats):
    """Published ones have the template of those trained from them."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    folder = write_llada(tmp_path / name, chat_template=LLADA_JINJA)
    asked = ("--model", folder, "--prompt", "hello", *SHORT)
    chat, raw = answer(*asked, "--chat"), answer(*asked, "--no-chat")
    assert answer(*asked) == (chat if chats else raw) != (raw if chats else chat)


def test_causal_models_are_sent_to_the_server(tmp_path):
    assert "repro serve" in refusal("--model", "tiny-qwen2", "--prompt", "hello")


def test_a_template_needs_jinja(tmp_path, monkeypatch):
    folder = write_llada(tmp_path / "model", chat_template=LLADA_JINJA)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _environment.cache_clear()
    said = refusal("--model", folder, "--prompt", "hello")
    assert "needs jinja2, which is missing: pip install 'dllm-serve-repro[hub]'" in said
    assert generate("--model", folder, "--prompt", "hello", "--no-chat", *SHORT).code == 0


def test_standard_input(tmp_path):
    """Without the line break a shell puts behind a text; any other is the text's."""
    folder = write_llada(tmp_path / "model")
    for text in ("hello", "two\nlines", "ends\n", "é"):
        typed = generate("--model", folder, "--prompt", text, *SHORT)
        assert generate("--model", folder, "--prompt", "-", *SHORT, stdin=(text + "\n").encode()) == typed
    assert generate("--model", folder, "--prompt", "-", *SHORT, stdin=b"hello") == generate(
        "--model", folder, "--prompt", "hello", *SHORT
    )
    assert "prompt is empty" in refusal("--model", folder, "--prompt", "-")
    assert "standard input is not UTF-8" in refusal("--model", folder, "--prompt", "-", stdin=b"\xff\xfe")


def test_prompts_are_checked_before_the_weights_are_read(tmp_path):
    folder = write_llada(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not a tensor in it")
    asked = ("--model", folder, "--gen-length", "64", "--prompt")
    limit = LLADA.max_len
    (tmp_path / "ids").write_text(f"1 {MASK}")
    assert f"hold the mask id {MASK}: remove it" in refusal(*asked[:-1], "--prompt-ids", tmp_path / "ids")
    assert "model.safetensors is damaged" in refusal(*asked, "a <|mdm_mask|> b"), "a mask that is spelt out is text"
    assert f"prompt of {limit - 63} tokens + gen_length=64 exceeds the model's max_sequence_length={limit}" in refusal(
        *asked, "x" * (limit - 63)
    )
    assert "model.safetensors is damaged" in refusal(*asked, "x" * (limit - 64))


# ---- answers -------------------------------------------------------------------------------------


def test_text_ends_at_the_first_stop_token(tmp_path):
    folder = write_llada(tmp_path / "model")
    backend, reasons = load_tokenizer(folder).backend, []
    for seed in range(8):
        asked = ("--model", folder, "--prompt", "hello", "--gen-length", "32", "--temperature", "3", "--seed", seed)
        found = answer(*asked)
        ids = found["token_ids"]
        ends = [i for i, token in enumerate(ids) if token in (EOS, EOT)]
        assert found["finish_reason"] == ("stop" if ends else "length")
        assert found["text"] == backend.decode(ids[: ends[0]] if ends else ids)
        assert generate(*asked).out == f"{found['text']}\n"
        reasons.append((found["finish_reason"], EOT in ids))
    assert {reason for reason, _ in reasons} == {"stop", "length"}
    assert ("stop", True) in reasons


def test_masks_a_sampler_leaves_are_not_text(tmp_path):
    folder = write_llada(tmp_path / "model", mask_gain=40.0)
    found = answer("--system", "llada", "--model", folder, "--prompt", "hello", *SHORT)
    assert MASK in found["token_ids"]
    assert "mask" not in str(found["text"])
    # dLLM-Serve never commits one.
    assert MASK not in answer("--model", folder, "--prompt", "hello", *SHORT)["token_ids"]


def test_ids_are_printed_where_there_is_no_tokenizer(tmp_path):
    folder, file = write_llada(tmp_path / "model"), tmp_path / "ids"
    file.write_text("5 6 7")
    asked = ("--prompt-ids", file, *SHORT)
    text = generate("--model", folder, *asked)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ids = answer("--model", folder, *asked)["token_ids"]
    bare = generate("--model", folder, *asked)
    assert bare.out.split() == [str(token) for token in ids]
    assert text.out != bare.out
    assert "lacks tokenizer_config.json" in refusal("--model", folder, "--prompt", "x")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("text", ["5 6 7", "[5, 6, 7]", "5,6,7\n", '{"prompt_ids": [5, 6, 7]}'])
def test_forms_of_a_file_of_ids(tmp_path, text, encoding):
    (tmp_path / "ids").write_text(text, encoding=encoding)
    assert read_prompt_ids(tmp_path / "ids") == (5, 6, 7)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1" + "0" * 5000 + "]", "1" + "0" * 5000], ids=range(3))
def test_what_is_too_deep_or_long_is_no_list_of_ids(folders, tmp_path, text):
    (tmp_path / "ids").write_text(text, encoding="utf-8")
    assert "is not a list of integers" in refusal("--model", folders["llada"], "--prompt-ids", tmp_path / "ids")


# ---- hub ids -------------------------------------------------------------------------------------


def test_a_hub_id(tmp_path):
    """From the hub's cache, as a download leaves it; and what is not there, offline, in one line."""
    pytest.importorskip("huggingface_hub")
    commit, repo = "0" * 40, tmp_path / "hub" / "models--owner--tiny-instruct"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    folder = write_llada(repo / "snapshots" / commit, shards=2, chat_template=LLADA_JINJA)
    asked = ("--prompt", "hi", *SHORT)

    def by_id(name: str) -> Result:
        """In a process of its own, as the hub's library reads the environment when it is imported."""
        hub = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        return repro_in_a_process(REPO, "generate", "--model", name, *asked, **hub)

    assert by_id("owner/tiny-instruct") == generate("--model", folder, *asked)
    assert "(LocalEntryNotFoundError)" in refused(by_id("owner/absent"), "model='owner/absent'")


# ---- what has no meaning is refused --------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"llada": write_llada(root / "llada"), "dream": write_dream(root / "dream")}


def test_a_shape_has_no_tokenizer(tmp_path):
    asked = ("--model", "llada-8b", "--weights", "random")
    assert "is a shape without a tokenizer" in refusal(*asked, "--prompt", "hello")


@pytest.mark.parametrize(("family", "options"), CASES["options of generate"])
def test_options_that_have_an_effect(folders, family, options):
    asked = ("--model", folders[family], "--prompt", "hello", "--gen-length", "32", *options.split())
    first, again = answer(*asked), answer(*asked)
    assert first == again
    assert len(first["token_ids"]) == 32


# ---- what a method makes of the settings ---------------------------------------------------------


def test_settings_of_a_loop_without_blocks():
    asked = GenerationConfig(gen_length=64, block_length=32, steps=64)
    whole = replace(asked, block_length=64)
    for system, options in (("dream", {}), ("dllm-cache", {}), ("fast-dllm", {"cache": "none"})):
        assert method(system).generation("dream", options, asked) == whole
    for system, family, options in (
        ("fast-dllm", "dream", {}),
        ("sparse-dllm", "dream", {}),
        ("dllm-serve", "dream", {}),
        ("fast-dllm", "llada", {"cache": "none"}),
        ("dllm-cache", "llada", {}),
        ("llada", "llada", {}),
    ):
        assert method(system).generation(family, options, asked) == asked


def test_the_threshold_behind_an_algorithms_name():
    asked = GenerationConfig(gen_length=64, block_length=32, steps=64)
    named = {"alg": "confidence_threshold"}
    assert method("fast-dllm").generation("dream", named, asked).threshold == FAST_THRESHOLD == 0.9
    assert method("fast-dllm").generation("dream", named, replace(asked, threshold=0.3)).threshold == 0.3
    assert method("fast-dllm").generation("dream", {"alg": "entropy"}, asked).threshold is None


def test_checked_options_are_what_runs(folders):
    asked = GenerationConfig(gen_length=64, steps=64)
    options = GenerateOptions(system="dream", model=str(folders["dream"]), generation=asked, knobs={})
    prepared = prepare_generation(options)
    assert prepared.method is method("dream")
    assert prepared.sampler == method("dream").sampler("dream", {})
    assert prepared.generation.block_length == prepared.generation.gen_length
    assert prepared.request((1, 2, 3)).generation == prepared.generation
    with pytest.raises(UserError, match="is empty"):
        prepared.request(())


def test_requests_of_a_bench_run_carry_it(folders):
    def prepared(
        system: str, executor: str = "torch", platform: str = "cpu-tiny", **knobs: object
    ) -> list[GenerationConfig]:
        shape = {"num_prompts": 3, "gen_length": 32, "steps": 32, "input_len": 12, "length_scale": 1.0, **knobs}
        cell = a_cell(system, platform=platform, executor=executor, **shape)
        return [request.generation for request in prepare(cell).workload.requests]

    dream = {"model": str(folders["dream"])}
    assert {g.block_length for g in prepared("dream", alg="entropy", **dream)} == {32}
    assert {g.block_length for g in prepared("dream", batch_size=1, **dream)} == {32}
    with refuses("alg='origin'"):
        prepared("dream", **dream)
    assert {g.block_length for g in prepared("fast-dllm", cache="none", **dream)} == {32}
    assert {g.block_length for g in prepared("fast-dllm", block_length=16, **dream)} == {16}
    named = {"alg": "confidence_threshold", "batch_size": 1}
    assert {g.threshold for g in prepared("fast-dllm", **named, **dream)} == {0.9}
    for system, alg in (("fast-dllm", "confidence_threshold"), ("dream", "origin")):
        with pytest.raises(UserError, match=f"alg='{alg}' cannot be simulated"):
            prepared(system, "roofline", "rtx4090", alg=alg, model="dream-7b")
    for name, value in (("cfg_scale", 1.0), ("temperature", 0.5), ("alg_temp", 0.5)):
        with pytest.raises(UserError, match=f"{name}={value} has no effect with executor='roofline'"):
            prepared("llada", "roofline", "rtx4090", **{name: value})
    with refuses("transfer_ratio=2"):
        prepared("dllm-cache", transfer_ratio=2)


def test_the_files_of_a_checkpoint_are_enough(folders, tmp_path):
    """A copy without anything else but what is read; no code, no pickles."""
    kept = ("config.json", "model.safetensors", "tokenizer_config.json", "vocab.json", "merges.txt")
    (tmp_path / "copy").mkdir()
    for name in kept:
        shutil.copy(folders["dream"] / name, tmp_path / "copy" / name)
    asked = ("--system", "dream", "--prompt", "hello", "--gen-length", "8")
    assert generate("--model", tmp_path / "copy", *asked) == generate("--model", folders["dream"], *asked)


def test_a_template_that_is_a_folder_is_said_in_a_sentence(tmp_path):
    folder = write_llada(tmp_path / "model")
    before = checkpoint_digest(folder)
    (folder / "chat_template.jinja").mkdir()
    assert checkpoint_digest(folder) == before
    assert "chat_template.jinja is a folder" in refusal("--model", folder, "--prompt", "hello")
