"""Whatever a user writes, a name that is given twice is refused: nobody can tell which value was meant."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baselines.servers.admission import AdmissionConfig
from engines.errors import UserError
from repro.families.http.requests import resolve
from repro.files import read_yaml, unreadable_yaml
from repro.prompt import read_prompt_ids
from repro.workloads.dataset import PromptFile
from repro.workloads.dataset_rows import read_lengths, read_prompts, read_rows
from repro.workloads.recorded import read_chats, read_sessions

LENGTHS = PromptFile(path="n.csv", format="lengths_csv", column="n")
READERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a trace": (read_rows, '{"prompt_len": 8, "prompt_len": 9}', "prompt_len"),
    "a trace of Mooncake's": (read_rows, '{"timestamp": 1, "input_length": 1, "timestamp": 2}', "timestamp"),
    "prompts": (lambda path: read_prompts(path, "q"), '{"q": "a", "q": "a"}', "q"),
    "a line within": (lambda path: read_prompts(path, "q"), '{"q": "a", "b": [{"c": 1, "c": 2}]}', "c"),
    "sessions": (lambda path: read_sessions(path, "sessions_jsonl"), '{"rounds": [[1, 2]], "rounds": 3}', "rounds"),
    "an array": (
        lambda path: read_sessions(path, "hotpotqa_distractor"),
        '[{"question": 1, "question": 2}]',
        "question",
    ),
    "chats": (lambda path: read_chats([path]), '{"rounds": [[1, 2]], "rounds": [[3, 4]]}', "rounds"),
    "an array of chats": (lambda path: read_chats([path]), '[{"rounds": [[1, 2]], "rounds": [[3, 4]]}]', "rounds"),
    "a table": (lambda path: read_lengths(path, LENGTHS), "n,m,n\n1,2,3", "n"),
    "ids": (read_prompt_ids, '{"prompt_ids": [1], "prompt_ids": [2]}', "prompt_ids"),
    "a knob": (
        lambda path: resolve("openai-http", {"url": "http://x", "extra": path.read_text()}),
        '{"top_k": 1, "top_k": 2}',
        "top_k",
    ),
    "settings": (lambda path: AdmissionConfig.parse(path.read_text(), policy="laps"), '{"a": 1, "a": 2}', "a"),
}


@pytest.mark.parametrize("what", READERS)
def test_a_name_that_is_given_twice_is_refused(what, tmp_path):
    read, text, name = READERS[what]
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"the (key|column) '{name}' is given twice"):
        read(path)


def test_what_yaml_may_say_of_a_key_again(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("base: &base {a: 1}\nown: {<<: *base, a: 2}\n1: x\n'1': y\n")
    assert read_yaml(path) == {"base": {"a": 1}, "own": {"a": 2}, 1: "x", "1": "y"}
    path.write_text("!!map [a, b]")
    with pytest.raises(unreadable_yaml()):
        read_yaml(path)
