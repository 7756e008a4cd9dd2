"""Prompts rendered for LLaDA and Dream, tokenizers as they publish them, and answers cut at their end."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import DREAM
from support.refusals import refuses
from support.tables import data_beside
from support.tiny_models import MHA
from support.tokenizers import BYTES, CHATML_JINJA, LLADA_JINJA, write_dream_tokenizer, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel

from engines.errors import UserError
from engines.models import chat
from engines.models.chat import (
    EMBEDDED_CHAT,
    ROLES,
    ChatAnswer,
    ChatTemplate,
    Message,
    PromptForm,
    cut_at_end,
    end_token_ids,
    load_causal_text,
    load_chat_template,
    parse_messages,
)
from engines.models.checkpoint import EMBEDDED, checkpoint_dir
from engines.models.tokenizer import TextTokenizer, byte_level_bpe, encode_text, load_tokenizer, longest_token

CASES = data_beside(__file__, "chat")
messages_of_any_kind = st.lists(
    st.builds(Message, role=st.sampled_from(ROLES), content=st.text(max_size=20)), min_size=1, max_size=4
)


def template(family: str, source: str | None = None, **special: str) -> ChatTemplate:
    return ChatTemplate(family=family, source=source, special_tokens=special)


def said(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in turns]


# ---- formats -----------------------------------------------------------------------------------


@given(messages_of_any_kind)
def test_built_in_formats_equal_the_templates(messages):
    bos = "<|startoftext|>"
    assert template("llada").render(messages) == template("llada", LLADA_JINJA, bos_token=bos).render(messages)
    assert template("dream").render(messages) == template("dream", CHATML_JINJA).render(messages)


def test_where_a_template_comes_from(tmp_path):
    assert load_chat_template(tmp_path, "llada").source is None
    path = tmp_path / "tokenizer_config.json"
    said_of_tokens = {"bos_token": {"content": "<s>", "special": True}, "unk_token": None, "add_bos_token": False}
    path.write_text(json.dumps(said_of_tokens))
    built_in = load_chat_template(tmp_path, "llada")
    assert (built_in.source, built_in.special_tokens) == (None, {"bos_token": "<s>"})
    assert built_in.render(said(("user", "x"))).startswith("<s><|start_header_id|>user")
    path.write_text(json.dumps({"chat_template": "A"}))
    assert load_chat_template(tmp_path, "dream").render(said(("user", "x"))) == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps({"chat_template": named}))
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
    with refuses("family='qwen'"):
        load_chat_template(tmp_path, "qwen")


def test_templates_run_in_the_environment_they_are_written_for():
    # Blocks on lines of their own leave no blank lines; loop controls and an unescaped tojson exist.
    source = "{% for m in messages %}\n  {% if loop.index0 == 1 %}\n    {% break %}\n  {% endif %}\n{{ m | tojson }}\n{% endfor %}\n"
    text = template("dream", source).render(said(("user", "<é>"), ("user", "second")))
    assert text == '{"role": "user", "content": "<é>"}\n'


NAMES_JINJA = "{% for m in messages %}<{{ m.role }}|{{ m.name }}>{{ m.content | trim }}</>{% endfor %}"
NAMES_JINJA += "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"


def test_a_conversation_is_rendered_in_the_form_it_is_asked_in():
    jinja = template("dream", NAMES_JINJA)
    turns = parse_messages([{"role": "user", "content": "a ", "name": "n"}, {"role": "assistant", "content": "b "}])
    assert jinja.render(turns) == "<user|n>a</><assistant|>b</><assistant>"
    assert jinja.render(turns, PromptForm(variables={"mood": "!"})) == "<user|n>a</><assistant|>b</><assistant>!"
    assert jinja.render(turns, PromptForm(add_generation_prompt=False)) == "<user|n>a</><assistant|>b</>"
    # As it is trimmed.
    assert jinja.render(turns, PromptForm(continue_final_message=True)) == "<user|n>a</><assistant|>b"
    chatml = template("dream")
    assert chatml.render(turns, PromptForm(continue_final_message=True)).endswith("<|im_start|>assistant\nb ")
    assert chatml.render(turns, PromptForm(add_generation_prompt=False)).endswith("b <|im_end|>\n")
    with pytest.raises(UserError, match="continue_final_message"):
        template("dream", "nothing").render(turns, PromptForm(continue_final_message=True))
    shortened = template("dream", "{{ messages[-1].content[-30:] }}")
    with pytest.raises(UserError, match="continue_final_message"):
        shortened.render(said(("assistant", "long")), PromptForm(continue_final_message=True))


def test_a_developer_is_the_system_of_a_template_that_knows_none():
    turns = said(("user", "a"), ("developer", "b"), ("system", "c"))
    jinja = template("dream", NAMES_JINJA)
    assert jinja.render(turns) == "<system|>b\n\nc</><user|>a</><assistant>"
    knowing = template("dream", NAMES_JINJA + "{# 'developer' #}")
    assert knowing.render(turns).startswith("<user|>a</><developer|>b</>")


TOOLS_JINJA = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};{% endfor %}"
)


def test_calls_of_tools_are_rendered_by_a_template_that_shows_them_and_else_refused():
    call = {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}]}
    raw = [{"role": "assistant", "content": "", **call}, {"role": "tool", "content": "8", "tool_call_id": "1"}]
    messages = parse_messages(raw)
    form = PromptForm(variables={"tools": [{"function": {"name": "add"}}]})
    assert template("dream", TOOLS_JINJA).render(messages, form) == '[add]assistant: <add {"a": 3}>;tool: 8;'
    for other in (template("dream"), template("dream", CHATML_JINJA), EMBEDDED_CHAT):
        with refuses("messages have 'tool_calls', which the chat template does not show"):
            other.render(messages)
    assert "8" in template("dream", CHATML_JINJA).render(messages[1:]), "it shows any role"
    with refuses("messages have 'tool', which the chat template does not show"):
        template("dream", "{{ messages[0].role }}").render(messages[1:])


def test_templates_may_ask_for_the_date():
    assert template("dream", "{{ strftime_now('%Y') }}").render(said(("user", "x"))).isdigit()


@pytest.mark.parametrize("content", ["Ben has 3.", " Story: Ben has 3.\n", "Story: Ben has 3.\nAnswer:"])
def test_the_embedded_model_is_asked_as_it_was_trained(content):
    """Its checkpoint has no template, and its tokenizer no tokens of turns."""
    tokenizer = load_tokenizer(checkpoint_dir("tiny"))
    wanted = "Story: Ben has 3.\nAnswer:"
    assert EMBEDDED_CHAT.encode(tokenizer, said(("user", content))) == tokenizer.encode(wanted)
    turns = said(("system", "Count."), ("user", "How many?"))
    assert EMBEDDED_CHAT.render(turns) == "Story: Count.\nHow many?\nAnswer:"


def test_a_missing_jinja_names_the_fix_and_the_built_in_formats_need_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(chat, "_environment", chat._environment.__wrapped__)
    with pytest.raises(UserError, match=r"needs jinja2, which is missing: pip install 'dllm-serve-repro\[hub\]'"):
        template("llada", LLADA_JINJA).render(said(("user", "x")))
    assert template("llada").render(said(("user", "x")))


@pytest.mark.parametrize(("raw", "message"), CASES["messages"])
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
    turns = said(("user", "Hi"), ("assistant", "Ho"), ("user", "!"))
    ids = load_chat_template(tmp_path, "llada").encode(tokenizer, turns)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    headers = [tokenizer.backend.token_to_id(t) for t in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")]
    assert [ids.count(header) for header in headers] == [4, 4, 3]
    assert bos not in tokenizer.encode("Hi")
    # The processor does add one when asked to, so the counts above could have been off.
    assert tokenizer.backend.encode("Hi").ids[0] == bos


def test_a_format_is_not_spelt_out_to_a_tokenizer_without_its_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    turns = said(("user", "Hi"))
    sentence = r"no chat template, and its tokenizer has no <\|im_start\|> for the dream format"
    with pytest.raises(UserError, match=sentence):
        template("dream").encode(tokenizer, turns)
    # A checkpoint's own template may use whatever it likes.
    assert template("dream", "{{ messages[0].content }}").encode(tokenizer, turns) == tokenizer.encode("Hi")


def test_a_mask_the_tokenizer_does_not_register_is_the_models(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    mask = tokenizer.backend.token_to_id("<|mdm_mask|>")
    assert tokenizer.mask_token_id == mask
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": 10_000}))
    with refuses("mask_token=None"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    with refuses("mask_token=None"):
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
        ([], ChatAnswer((), "length")),
        ([5, 6], ChatAnswer((5, 6), "length")),
        ([5, 126348, 126081, 6], ChatAnswer((5,), "stop")),
        ([5, 6, 126081], ChatAnswer((5, 6), "stop")),
        ([126081, 5], ChatAnswer((), "stop")),
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


def test_a_bad_word_is_told_behind_a_blank_where_it_takes_as_many_tokens(tmp_path):
    write_dream_tokenizer(tmp_path, tokenizer_class="Qwen2Tokenizer")
    text = load_causal_text(tmp_path)
    hello, blank_hello, a = len(BYTES) + 3, len(BYTES) + 4, BYTES.index("a")
    assert text.spellings(["hello"]) == text.spellings([" hello"]) == ((hello,), (blank_hello,))
    assert text.spellings(["a", "hello"]) == ((a,), (hello,), (blank_hello,))
    with pytest.raises(UserError, match="bad_words"):
        text.spellings([" "])


@pytest.mark.parametrize(("text", "pieces"), CASES["pieces"])
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


# ---- text is text ------------------------------------------------------------------------------


def _words(*added: AddedToken, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A word is a token; the mask may be one of the words too."""
    words = ["?", "a", "b", "<mask>", "[MASK]"]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


def _pieces() -> Tokenizer:
    letters = [(chr(i), -8.0) for i in range(32, 127)]
    made = Tokenizer(Unigram([("<unk>", 0.0), ("<mask>", -1.0), *letters], unk_id=0, byte_fallback=False))
    made.add_special_tokens([AddedToken("<mask>", special=True)])
    return made


def _bytes(*, special: bool) -> Tokenizer:
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    ends = ("<|end|>", "<|mask|>", "<|turn|>")
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text in ends])
    return made


MASKED = {
    "words": (_words(AddedToken("[MASK]")), "[MASK]"),
    "words, normalized": (_words(AddedToken("[MASK]", normalized=True), normalizer=normalizers.NFKC()), "[MASK]"),
    "words, stripped": (_words(AddedToken("[MASK]", lstrip=True, rstrip=True)), "[MASK]"),
    "pieces": (_pieces(), "<mask>"),
    "bytes": (_bytes(special=True), "<|mask|>"),
    "bytes, not special": (_bytes(special=False), "<|mask|>"),
}


@pytest.mark.parametrize("name", MASKED)
def test_no_text_spells_the_mask(name):
    backend, mask = MASKED[name]
    mask_id = backend.token_to_id(mask)
    tokenizer = TextTokenizer(backend=backend, mask_token_id=mask_id, eos_token_id=0)
    for text in (mask, f"a {mask} b", f"a{mask}{mask}", "".join(chr(ord(c) + 0xFEE0) for c in mask)):
        assert mask_id not in tokenizer.encode(text)
        assert mask_id not in tokenizer.encode_batch([text])[0]
        if name.startswith("bytes") and text.isascii():
            assert tokenizer.encode(text) == [backend.token_to_id(backend.encode(c).tokens[0]) for c in text]
    assert tokenizer.encode_batch(["a b", f"{mask}"]) == [tokenizer.encode("a b"), tokenizer.encode(mask)]
    assert tokenizer.encode("a b") == backend.encode("a b", add_special_tokens=False).ids


def test_other_special_tokens_of_a_text_are_what_they_were():
    backend, mask = MASKED["bytes"]
    tokenizer = TextTokenizer(backend=backend, mask_token_id=backend.token_to_id(mask), eos_token_id=0)
    end, turn = (backend.token_to_id(text) for text in ("<|end|>", "<|turn|>"))
    found = tokenizer.encode(f"<|turn|>{mask}<|end|>")
    assert (found[0], found[-1]) == (turn, end)
    assert backend.decode(found[1:-1]) == mask


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_read_a_mask_as_text(name):
    tokenizer = load_tokenizer(EMBEDDED[name])
    ids = tokenizer.encode("Fill <|mdm_mask|> in")
    assert tokenizer.mask_token_id not in ids
    assert tokenizer.backend.decode(ids) == "Fill <|mdm_mask|> in"


def test_what_is_kept_of_a_text_is_its_end_behind_the_special_tokens():
    backend = _bytes(special=True)
    end = backend.token_to_id("<|end|>")
    backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    letters = backend.encode("abc", add_special_tokens=False).ids
    assert encode_text(backend, "abc", add_special=True, keep=3) == [end, *letters[1:]]
    assert encode_text(backend, "abc", add_special=False, keep=2) == letters[1:]
    assert encode_text(backend, "abc", add_special=True, keep=9) == [end, *letters]
