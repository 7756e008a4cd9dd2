"""``repro verify-baselines``: on the embedded cases, on a folder of one's own, and on folders that are not right."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.command import Result, refused, repro, table_of
from support.make_golden import SAMPLERS
from support.tables import data_beside

from engines.models import loader
from repro.checks.blocks import FOLDER_VARIABLE
from repro.checks.goldens import GOLDEN_DIR, read_cases
from repro.families.block.settings import RULES

Content = dict[str, Any]
SPOILT = data_beside(__file__, "spoilt_goldens")


def verify(*arguments: object) -> Result:
    return repro("verify-baselines", *arguments)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Two cases, the second one tie-sensitive, and their checkpoint."""

    path: Path
    content: Content

    def write(self) -> Path:
        (self.path / "cases.json").write_text(json.dumps(self.content))
        return self.path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    content = json.loads((GOLDEN_DIR / "cases.json").read_text())
    of_mha = [case for case in content["cases"] if case["checkpoint"] == "llada-mha"]
    cases = [
        next(case for case in of_mha if case["method"] == "fast_dllm_dual_cache"),
        next(case for case in of_mha if case["method"] == "sparse_dllm" and case["tie_sensitive"]),
    ]
    shutil.copytree(GOLDEN_DIR / "checkpoints" / "llada-mha", tmp_path / "checkpoints" / "llada-mha")
    checkpoints = {"llada-mha": content["checkpoints"]["llada-mha"]}
    return Folder(path=tmp_path, content={**content, "checkpoints": checkpoints, "cases": cases})


@pytest.mark.long
def test_the_embedded_cases_pass(monkeypatch):
    """Every committed case, in this one place. They share a few checkpoints, which are loaded once."""
    monkeypatch.setattr(loader, "load_model", cache(loader.load_model))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    result = verify("--json")
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)["methods"]
    blocks = [row for row in rows if row["method"].startswith("block ")]
    assert [row["method"] for row in blocks] == [f"block {rule}" for rule in sorted(RULES)]
    assert all((row["verdict"], row["passed"], row["cases"]) == ("pass", 4, 4) for row in blocks)
    rows = [row for row in rows if row not in blocks]
    assert [row["method"] for row in rows] == sorted(SAMPLERS)
    for row in rows:
        assert row["verdict"] == "pass"
        assert row["failed"] == {}
        assert row["passed"] == row["cases"] > 0
        assert row["tie_sensitive_passed"] == row["tie_sensitive_cases"]
        assert row["not_required"] == 0
    total = sum(row["cases"] + row["tie_sensitive_cases"] for row in rows)
    assert total == len(json.loads((GOLDEN_DIR / "cases.json").read_text())["cases"])


def test_a_folder_of_ones_own(folder):
    result = verify("--golden", folder.write())
    assert result.code == 0
    lines = result.out.splitlines()
    assert [[*row.values()] for row in table_of(result.out)[:2]] == [
        ["fast_dllm_dual_cache", "pass", "1 of 1", "-"],
        ["sparse_dllm", "pass", "0 of 0", "1 of 1"],
    ]
    assert lines[-1] == "2 of 2 required cases pass."


@pytest.mark.parametrize("case", [0, 1])
def test_a_wrong_id_fails(folder, case):
    """Also where ties decide: the order of equals is given."""
    entry = folder.content["cases"][case]
    entry["expected_ids"][-1] += 1
    wrong = entry["expected_ids"]
    says = f"token {len(wrong) - 1} is {wrong[-1] - 1}, recorded {wrong[-1]}"
    result = verify("--golden", folder.write(), "--json")
    assert result.code == 1
    rows = {row["method"]: row for row in json.loads(result.out)["methods"]}
    assert rows[entry["method"]]["verdict"] == "FAIL"
    assert rows[entry["method"]]["failed"] == {entry["id"]: says}
    assert sum(bool(row["failed"]) for row in rows.values()) == 1
    printed = verify("--golden", folder.path)
    assert printed.code == 1
    assert f" failed: {entry['id']}: {says} " in " ".join(printed.out.split())
    assert printed.out.splitlines()[-1] == "1 of 2 required cases pass."
    assert "FAIL" in printed.out


def test_other_differences_fail_too(folder):
    dual, sparse = folder.content["cases"]
    dual["nfe"] += 1
    sparse["expected_ids"].append(1)
    rows = json.loads(verify("--golden", folder.write(), "--json").out)["methods"]
    assert [list(row["failed"].values()) for row in rows] == [
        [f"{dual['nfe'] - 1} forward passes, recorded {dual['nfe']}"],
        [f"{len(sparse['expected_ids']) - 1} tokens, recorded {len(sparse['expected_ids'])}"],
    ]


def test_what_a_librarys_order_decides_is_not_required(folder):
    del folder.content["ties"]
    folder.content["cases"][1]["expected_ids"][0] += 1
    result = verify("--golden", folder.write())
    assert result.code == 0
    assert "0 of 1" in result.out
    assert "1 of 1 required cases pass." in result.out
    row = json.loads(verify("--golden", folder.path, "--json").out)["methods"][1]
    assert (row["verdict"], row["failed"], row["not_required"]) == ("pass", {}, 1)


def test_nor_is_what_a_defect_of_the_recorded_code_decided(folder):
    """It read cache rows that it had never written."""
    params = {
        **folder.content["cases"][1]["params"],
        **UPSTREAM,
        "delay_step": 0,
        "delay0_first_block": "unbuilt_zero_cache",
    }
    folder.content["cases"][1] |= {"method": "dllm_serve_upstream_uniform", "params": params, "tie_sensitive": False}
    folder.content["cases"][1]["expected_ids"][0] += 1
    result = verify("--golden", folder.write(), "--json")
    assert result.code == 0
    assert json.loads(result.out)["methods"][0]["not_required"] == 1


UPSTREAM = {"delay_step": 1, "first_token_rule": True, "head_select": False}


@pytest.mark.parametrize("spoilt", SPOILT["upstream"], ids=str)
def test_upstream_cases_say_which_rule_and_are_what_they_say(folder, spoilt):
    """Neither the paper's rule nor the other selection is run in place of what was recorded."""
    case = folder.content["cases"][1]
    params = case["params"] | UPSTREAM | spoilt["params"]
    case |= {"method": "dllm_serve_upstream_uniform", "params": {k: v for k, v in params.items() if v is not None}}
    refused(verify("--golden", folder.write(), "--json"), spoilt["says"])


def test_params_that_recorded_cases_carry_are_taken(folder):
    case = folder.content["cases"][1]
    sparse = case["params"] | {"threshold": None, "temperature": 0.0, "remasking": "low_confidence", "cfg_scale": 0.0}
    serve = case["params"] | UPSTREAM | {"max_num_batched_tokens": 512}
    folder.content["cases"] = [
        case | {"params": sparse},
        case | {"method": "dllm_serve_upstream_uniform", "params": serve},
        case | {"method": "dllm_serve_upstream_uniform", "params": serve | {"first_token_rule": False}},
        case
        | {"method": "dllm_serve_upstream_uniform", "params": serve | {"delay_step": 0, "delay0_first_block": "built"}},
    ]
    cases = read_cases(folder.write())
    assert [case.options.knobs.get("compat") for case in cases] == [None, "upstream", None, None]
    assert all(case.required for case in cases)


def test_a_block_length_without_blocks(tmp_path):
    content = json.loads((GOLDEN_DIR / "cases.json").read_text())
    case = next(case for case in content["cases"] if case["method"] == "dream_vanilla")
    content |= {"cases": [case], "checkpoints": {"dream": content["checkpoints"]["dream"]}}
    shutil.copytree(GOLDEN_DIR / "checkpoints" / "dream", tmp_path / "checkpoints" / "dream")
    case["params"] |= {"alg_temp": 0.0, "block_length": case["params"]["gen_length"]}
    assert len(read_cases(Folder(path=tmp_path, content=content).write())) == 1
    for key, value, says in (
        ("block_length", 4, "has params block_length=4, but method 'dream_vanilla' has no blocks: remove it"),
        ("alg_temp", 1.0, "has params alg_temp=1.0, but method 'dream_vanilla' applies 0: correct it"),
        ("remasking", "random", "has params remasking='random', which method 'dream_vanilla' does not apply"),
    ):
        changed = {**content, "cases": [case | {"params": case["params"] | {key: value}}]}
        refused(verify("--golden", Folder(path=tmp_path, content=changed).write()), f"case {case['id']!r}, {says}")


def spoil(folder: Folder, case: Mapping[str, Any]) -> None:
    """Removes a file, or sets or drops one value of cases.json."""
    if "remove" in case:
        place = folder.path / case["remove"]
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        return
    *keys, last = case.get("drop") or case["at"]
    at: Any = folder.content
    for key in keys:
        at = at[key]
    if "drop" in case:
        del at[last]
    else:
        at[last] = case["to"]


@pytest.mark.parametrize("case", SPOILT["folders"], ids=str)
def test_a_folder_that_is_not_right(folder, case):
    spoil(folder, case)
    refused(verify("--golden", folder.write(), "--json"), case["says"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON (line 1)"),
        ("{", "is not JSON"),
        ("[1, 2]", "holds a list, not an object: restore the file"),
        ("null", "holds a NoneType, not an object"),
        ("\xff", "is not UTF-8 text"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1' + "0" * 5000 + "}", "a number too long"),
    ],
    ids=range(7),
)
def test_a_file_that_is_not_right(folder, text, says):
    (folder.path / "cases.json").write_text(text, encoding="latin-1")
    result = verify("--golden", folder.path)
    refused(result, "cases.json")
    refused(result, says)


def test_a_byte_order_mark_is_no_content(folder):
    folder.write()
    (folder.path / "cases.json").write_text((folder.path / "cases.json").read_text(), encoding="utf-8-sig")
    assert len(read_cases(folder.path)) == 2


def test_no_folder(tmp_path):
    refused(verify("--golden", tmp_path), "has no cases.json: give a folder of golden cases")
    refused(verify("--golden", tmp_path / "no"), "has no cases.json: give a folder of golden cases")
