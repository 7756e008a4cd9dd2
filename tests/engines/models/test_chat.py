"""Prompts rendered for LLaDA and Dream, tokenizers as they publish them, and answers cut at their end."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import DREAM
from support.tiny_models import MHA
from support.tokenizers import BYTES, CHATML_JINJA, LLADA_JINJA, write_dream_tokenizer, write_tokenizer
from tokenizers import normalizers

from engines.errors import UserError
from engines.models.causal_text import load_causal_text
from engines.models.chat import (
    EMBEDDED_CHAT,
    ROLES,
    Answer,
    ChatTemplate,
    Message,
    cut_at_end,
    end_token_ids,
    load_chat_template,
    parse_messages,
)
from engines.models.checkpoint import checkpoint_dir
from engines.models.tokenizer import byte_level_bpe, load_tokenizer, longest_token

messages_of_any_kind = st.lists(
    st.builds(Message, role=st.sampled_from(ROLES), content=st.text(max_size=20)), min_size=1, max_size=4
)


def template(family: str, source: str | None = None, **special: str) -> ChatTemplate:
    return ChatTemplate(family=family, source=source, special_tokens=special)


def said(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in turns]


# ---- formats -----------------------------------------------------------------------------------


def test_llada_format():
    messages = said(("system", " Be brief. "), ("user", "Hi\n"), ("assistant", "Hello"), ("user", "Bye"))
    assert template("llada").render(messages) == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_dream_format_is_chatml():
    assert template("dream").render(said(("user", " Hi "), ("assistant", "Hello"))) == (
        "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@given(messages_of_any_kind)
def test_built_in_formats_equal_the_templates(messages):
    bos = "<|startoftext|>"
    assert template("llada").render(messages) == template("llada", LLADA_JINJA, bos_token=bos).render(messages)
    assert template("dream").render(messages) == template("dream", CHATML_JINJA).render(messages)


def test_where_a_template_comes_from(tmp_path):
    assert load_chat_template(tmp_path, "llada").source is None
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps({"bos_token": {"content": "<s>", "special": True}, "unk_token": None, "add_bos_token": False})
    )
    built_in = load_chat_template(tmp_path, "llada")
    assert (built_in.source, built_in.special_tokens) == (None, {"bos_token": "<s>"})
    assert built_in.render(said(("user", "x"))).startswith("<s><|start_header_id|>user")
    path.write_text(json.dumps({"chat_template": "A"}))
    assert load_chat_template(tmp_path, "dream").render(said(("user", "x"))) == "A"
    path.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert load_chat_template(tmp_path, "dream").source == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_chat_template(tmp_path, "dream").source == "J"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(UserError, match=r"chat_template\.jinja is a folder"):
        load_chat_template(tmp_path, "dream")


def test_bad_template_entries_are_refused(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}]}))
    with pytest.raises(UserError, match=r"chat templates \['tool_use'\]: name one of them 'default'"):
        load_chat_template(tmp_path, "dream")
    path.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(UserError, match="chat_template of type int"):
        load_chat_template(tmp_path, "dream")
    with pytest.raises(UserError, match="family='qwen' has no chat format: use one of llada, dream"):
        load_chat_template(tmp_path, "qwen")


def test_templates_run_in_the_environment_they_are_written_for():
    # Blocks on lines of their own leave no blank lines; loop controls and an unescaped tojson exist.
    source = "{% for m in messages %}\n  {% if loop.index0 == 1 %}\n    {% break %}\n  {% endif %}\n{{ m | tojson }}\n{% endfor %}\n"
    text = template("dream", source).render(said(("user", "<é>"), ("user", "second")))
    assert text == '{"role": "user", "content": "<é>"}\n'


def test_conversations_of_several_threads_do_not_mix():
    """They are rendered by one process."""
    pytest.importorskip("jinja2", reason="needs the extra hub: jinja2 is not installed")
    rendered = template("dream", CHATML_JINJA).render
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: rendered(said(("user", f"turn {i}"))), range(40)))
    assert all(f"turn {i}<" in text for i, text in enumerate(found))


@pytest.mark.parametrize("content", ["Ben has 3.", " Story: Ben has 3.\n", "Story: Ben has 3.\nAnswer:"])
def test_the_embedded_model_is_asked_as_it_was_trained(content):
    """Its checkpoint has no template, and its tokenizer no tokens of turns."""
    tokenizer = load_tokenizer(checkpoint_dir("tiny"))
    wanted = "Story: Ben has 3.\nAnswer:"
    assert EMBEDDED_CHAT.encode(tokenizer, said(("user", content))) == tokenizer.encode(wanted)
    assert (
        EMBEDDED_CHAT.render(said(("system", "Count."), ("user", "How many?"))) == "Story: Count.\nHow many?\nAnswer:"
    )


def test_a_missing_jinja_names_the_fix_and_the_built_in_formats_need_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"needs jinja2, which is missing: pip install 'dllm-serve-repro\[hub\]'"):
        template("llada", LLADA_JINJA).render(said(("user", "x")))
    assert template("llada").render(said(("user", "x")))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([{"role": "user"}], r"message has \['role'\]: give an object with exactly role and content"),
        ([{"role": "user", "content": "x", "name": "n"}], "exactly role and content"),
        (["hello"], "message has str"),
        ([{"role": "robot", "content": "x"}], "role='robot' is unknown: use one of system, user, assistant"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content of type list is not text"),
    ],
)
def test_messages_are_strict(raw, message):
    assert parse_messages([{"role": "user", "content": "x"}]) == (Message(role="user", content="x"),)
    with pytest.raises(UserError, match=message):
        parse_messages(raw)


def test_an_empty_conversation_is_refused():
    with pytest.raises(UserError, match="messages is empty"):
        template("llada").render([])


# ---- ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [{}, {"chat_template": LLADA_JINJA}], ids=["built-in", "stored"])
def test_bos_comes_once_with_a_chat_and_never_with_a_raw_prompt(tmp_path, stored):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, **stored))
    bos = tokenizer.backend.token_to_id("<|startoftext|>")
    ids = load_chat_template(tmp_path, "llada").encode(
        tokenizer, said(("user", "Hi"), ("assistant", "Ho"), ("user", "!"))
    )
    assert ids[0] == bos
    assert ids.count(bos) == 1
    headers = [tokenizer.backend.token_to_id(t) for t in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")]
    assert [ids.count(header) for header in headers] == [4, 4, 3]
    assert bos not in tokenizer.encode("Hi")
    # The processor does add one when asked to, so the counts above could have been off.
    assert tokenizer.backend.encode("Hi").ids[0] == bos


def test_a_format_is_not_spelt_out_to_a_tokenizer_without_its_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(
        UserError, match=r"no chat template, and its tokenizer has no <\|im_start\|> for the dream format"
    ):
        template("dream").encode(tokenizer, said(("user", "Hi")))
    # A checkpoint's own template may use whatever it likes.
    assert template("dream", "{{ messages[0].content }}").encode(tokenizer, said(("user", "Hi"))) == tokenizer.encode(
        "Hi"
    )


def test_a_mask_the_tokenizer_does_not_register_is_the_models(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    mask = tokenizer.backend.token_to_id("<|mdm_mask|>")
    assert tokenizer.mask_token_id == mask
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": 10_000}))
    with pytest.raises(UserError, match="mask_token=None, which the tokenizer does not hold"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="mask_token=None"):
        load_tokenizer(tmp_path)
    write_tokenizer(tmp_path, mask_token={"content": "<|eot_id|>"})
    assert load_tokenizer(tmp_path).mask_token_id == tokenizer.backend.token_to_id("<|eot_id|>")


def test_text_never_shows_masks_and_padding_rows_do_not_crash(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("ab")
    noisy = [ids[0], tokenizer.mask_token_id, 99_999, ids[1], tokenizer.eos_token_id, ids[0]]
    assert tokenizer.decode(noisy) == "ab"


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ([], Answer((), "length")),
        ([5, 6], Answer((5, 6), "length")),
        ([5, 126348, 126081, 6], Answer((5,), "stop")),
        ([5, 6, 126081], Answer((5, 6), "stop")),
        ([126081, 5], Answer((), "stop")),
    ],
)
def test_answers_end_at_the_first_end_token(ids, answer):
    assert cut_at_end(ids, {126081, 126348}) == answer


@given(st.lists(st.integers(0, 9)), st.frozensets(st.integers(0, 9)))
def test_a_cut_answer_is_the_longest_prefix_without_end_tokens(ids, ends):
    kept, reason = cut_at_end(ids, ends)
    assert list(kept) == ids[: len(kept)]
    assert not ends & set(kept)
    assert (reason == "length") == (len(kept) == len(ids)) == (not ends & set(ids))


def test_end_tokens_are_the_models_and_the_formats(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    eot = tokenizer.backend.token_to_id("<|eot_id|>")
    assert end_token_ids(MHA.config, tokenizer) == {MHA.config.eos_token_id, eot}
    # This tokenizer has no <|im_end|>.
    assert end_token_ids(DREAM, tokenizer) == {DREAM.eos_token_id}


# ---- Dream's tokenizer files -------------------------------------------------------------------


def test_dreams_tokenizer_is_built_from_its_vocabulary(tmp_path):
    tokenizer = load_tokenizer(write_dream_tokenizer(tmp_path))
    base = len(BYTES) + 5
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.vocab_size) == (base, base + 5, base + 6)
    # 'hello' and ' hello' are one token each; the end of the first word is not glued to the second's blank.
    assert tokenizer.encode("hello hello") == [len(BYTES) + 3, len(BYTES) + 4]
    prompt = load_chat_template(tmp_path, "dream").encode(tokenizer, said(("user", "hello")))
    assert prompt[0] == base + 1
    assert prompt.count(base + 2) == 1
    assert end_token_ids(DREAM, tokenizer) == {DREAM.eos_token_id, base + 2}


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_causal_and_block_checkpoints_may_have_a_vocabulary_and_merges_alone(tmp_path, kind):
    assert load_causal_text(tmp_path) is None
    write_dream_tokenizer(tmp_path, tokenizer_class=kind)
    assert not (tmp_path / "tokenizer.json").exists()
    text = load_causal_text(tmp_path)
    assert text is not None
    assert text.encode("hello hello") == (len(BYTES) + 3, len(BYTES) + 4)
    assert text.end_ids == {len(BYTES) + 5}
    write_dream_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer")
    assert load_causal_text(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'll pay 123 now", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "Ġnow"]),
        ("IT'S", ["IT", "'S"]),
        ("a  b", ["a", "Ġ", "Ġb"]),
        ("x!!\n\n  y", ["x", "!!ĊĊ", "Ġ", "Ġy"]),
        ("end \n", ["end", "ĠĊ"]),
        ("(call)", ["(call", ")"]),
    ],
)
def test_text_is_cut_as_qwen2_does(tmp_path, text, pieces):
    backend = load_tokenizer(write_dream_tokenizer(tmp_path)).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_any_text_survives_dreams_tokenizer(tmp_path_factory):
    tokenizer = load_tokenizer(write_dream_tokenizer(tmp_path_factory.mktemp("dream")))

    @given(st.text(max_size=40).filter(lambda text: "<" not in text))
    def survives(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.backend.normalizer.normalize_str(text)

    survives()
    # Composed and decomposed letters are the same text.
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_tokenizers_of_unknown_rules_and_wrong_ids_are_refused(tmp_path):
    write_dream_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(UserError, match=r"lacks tokenizer\.json .*tokenizer_class='GPT2Tokenizer'"):
        load_tokenizer(tmp_path)
    write_dream_tokenizer(tmp_path, added_tokens_decoder={"9999": {"content": "<|mask|>"}})
    with pytest.raises(UserError, match=r"added token '<\|mask\|>' should have id 9999"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("not a merge at all\n")
    with pytest.raises(UserError, match=r"merges\.txt are not a BPE vocabulary"):
        byte_level_bpe(tmp_path / "vocab.json", tmp_path / "merges.txt", {})


def test_no_token_stands_for_more_bytes_than_the_longest(tmp_path):
    plain = load_tokenizer(checkpoint_dir("tiny"))
    assert longest_token(plain.backend) == len("<|startoftext|>")
    normal = load_tokenizer(write_tokenizer(tmp_path)).backend
    before = longest_token(normal)
    normal.normalizer = normalizers.NFKC()
    assert longest_token(normal) == 4 * before
    assert len(normal.encode("\N{MATHEMATICAL BOLD CAPITAL A}", add_special_tokens=False).ids) == 1, "four bytes"
