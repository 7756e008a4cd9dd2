"""Files of other tools as our runs, and our runs in their formats. Those in ``files`` were recorded against
``repro serve``, and are cut to what is read of them. Those named blocks came from a block-diffusion model, four tokens an event;
``written`` makes files whose numbers are known."""

import json
from pathlib import Path

import pytest
from support.command import refused, repro

from repro.interchange.exported import report_of, trace_of
from repro.interchange.imported import READERS, import_file, read_benchmarks
from repro.runs.store import Store
from repro.workbench.comparison import folder_of

FILES = Path(__file__).with_name("files")
SENT, TTFT, GAP, TOKENS = 0.5, 0.2, 0.05, 5
"""Ten requests, one every half second: the first token after 200 ms, and four more every 50 ms."""


def written(tool: str, folder: Path) -> Path:
    """Ten such requests, as the tool writes them."""
    sent = [100 + SENT * place for place in range(10)]
    gaps = [GAP] * (TOKENS - 1)
    latency = TTFT + sum(gaps)
    lists = {"input_lens": [8] * 10, "output_lens": [TOKENS] * 10, "ttfts": [TTFT] * 10, "itls": [gaps] * 10}
    lists["errors"] = [""] * 10
    path = folder / f"{tool}.json"
    match tool:
        case "vllm":
            told = json.dumps({**lists, "start_times": sent, "duration": 5.0})
        case "sglang":
            told = json.dumps({**lists, "duration": 4.9, "max_concurrency": 1}) + "\n"
        case "inference-perf":
            stamps = [[start + TTFT + GAP * token for token in range(TOKENS)] for start in sent]
            told = json.dumps(
                [
                    {
                        "start_time": start,
                        "end_time": start + latency + 0.3,
                        "error": None,
                        "info": {
                            "request_metrics": {"text": {"input_tokens": 8}},
                            "response_metrics": {"output_tokens": TOKENS, "output_token_times": own},
                        },
                    }
                    for start, own in zip(sent, stamps, strict=True)
                ]
            )
        case "aiperf":
            values = {"time_to_first_token": 1e3 * TTFT, "request_latency": 1e3 * latency}
            values |= {"input_sequence_length": 8, "output_sequence_length": TOKENS}
            metrics = {name: {"value": value, "unit": "ms"} for name, value in values.items()}
            lines = [{"metadata": {"request_start_ns": int(1e9 * start)}, "metrics": metrics} for start in sent]
            told = "\n".join(map(json.dumps, lines))
    path.write_text(told)
    return path


@pytest.mark.parametrize("tool", ["vllm", "sglang", "inference-perf", "aiperf"])
def test_a_file_gives_the_numbers_of_its_requests(tool, tmp_path):
    path = written(tool, tmp_path)
    assert read_benchmarks(path)[0][0] == tool
    (run,) = import_file(path, Store(tmp_path / "runs"), dataset="d", platform="p")
    assert run.validity.valid, run.validity.reasons
    mean = {name: run.summary[name]["mean"] for name in ("ttft_s", "tpot_s", "e2el_s")}
    assert mean == pytest.approx({"ttft_s": TTFT, "tpot_s": GAP, "e2el_s": 0.4}, rel=1e-6)
    # AIPerf keeps no gaps; all others every one.
    assert run.summary["itl_s"]["mean"] == (None if tool == "aiperf" else pytest.approx(GAP))
    assert run.summary["throughput_tok_s"] == pytest.approx(10 * TOKENS / 4.9)


def test_what_was_recorded_gives_what_the_tool_says(tmp_path):
    told = json.loads((FILES / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    summary = import_file(FILES / "guidellm.json", Store(tmp_path), dataset="d", platform="p")[0].summary
    theirs = {name: each["successful"]["mean"] for name, each in told.items()}
    assert 1e3 * summary["ttft_s"]["mean"] == pytest.approx(theirs["time_to_first_token_ms"], rel=1e-6)
    assert 1e3 * summary["tpot_s"]["mean"] == pytest.approx(theirs["inter_token_latency_ms"], rel=1e-6)
    # Its latency ends with the stream, ours with the last token.
    assert summary["e2el_s"]["mean"] < theirs["request_latency"]


def test_times_of_an_open_loop_count_from_when_requests_were_due(tmp_path):
    """GuideLLM tells that of every request, and takes it for a measure only where a schedule set it."""
    told = json.loads((FILES / "guidellm.json").read_text())
    (benchmark,) = told["benchmarks"]
    requests = benchmark["requests"]["successful"]
    for request in requests:
        timings = {"targeted_start": request["request_start_time"] - 0.25, "predecessor_completed": None}
        request["info"] = {"timings": timings}
    # A turn is not due before the answer to the turn before it.
    timings["predecessor_completed"] = requests[-1]["request_start_time"]
    (tmp_path / "closed.json").write_text(json.dumps(told))
    benchmark["metrics"]["request_scheduled_latency"] = {}
    (tmp_path / "open.json").write_text(json.dumps(told))
    names = (FILES / "guidellm.json", tmp_path / "closed.json", tmp_path / "open.json")
    sent, closed, opened = (import_file(path, Store(tmp_path), dataset="d", platform="p")[0] for path in names)
    assert closed.summary == sent.summary
    later = 0.25 * (len(requests) - 1) / len(requests)
    for name in ("ttft_s", "e2el_s"):
        assert opened.summary[name]["mean"] == pytest.approx(sent.summary[name]["mean"] + later)
    assert opened.summary["ttft_sent_s"]["mean"] == pytest.approx(sent.summary["ttft_s"]["mean"])
    assert "times count from when requests were due" in str(opened.validity.warnings)
    assert "late by the harness" in str(opened.validity.reasons)


def test_an_answer_that_its_tool_saw_no_token_of_has_no_time(tmp_path):
    """SGLang's tool writes 0 for the first token of an answer without text."""
    path = written("sglang", tmp_path)
    told = json.loads(path.read_text())
    told["ttfts"][3], told["itls"][3] = 0.0, []
    path.write_text(json.dumps(told))
    (run,) = import_file(path, Store(tmp_path / "runs"), dataset="d", platform="p")
    assert run.summary["ttft_s"]["mean"] == pytest.approx(TTFT)
    assert "1 of 10 requests failed, the first with: the tool saw no token" in str(run.validity.reasons)
    told["ttfts"], told["itls"] = [0.0] * 10, [[]] * 10
    path.write_text(json.dumps(told))
    (run,) = import_file(path, Store(tmp_path / "none"), dataset="d", platform="p")
    assert run.summary["num_requests"]["failed"] == 10


@pytest.mark.parametrize(
    ("file", "latency_ms", "tokens_s"),
    [("aiperf.jsonl", 1076.8666916666666, 42.25506272695804), ("vllm.json", 1187.3165458333308, 26.746114241951194)],
)
def test_what_others_recorded_gives_what_they_say(file, latency_ms, tokens_s, tmp_path):
    """Each answer came in one event, so that TTFT is latency. Their time ends with the run, ours with the last token."""
    summary = import_file(FILES / file, Store(tmp_path), dataset="d", platform="p")[0].summary
    assert 1e3 * summary["ttft_s"]["mean"] == pytest.approx(latency_ms, rel=1e-6)
    assert 1e3 * summary["e2el_s"]["mean"] == pytest.approx(latency_ms, rel=1e-6)
    assert tokens_s < summary["throughput_tok_s"] == pytest.approx(tokens_s, rel=5e-3)


def imported(name, folder):
    return import_file(FILES / name, Store(folder), dataset="d", platform="p")[0]


@pytest.mark.parametrize(
    ("file", "ttft_ms", "itl_ms", "tokens_s", "off"),
    [
        ("sglang.jsonl", 18.002992999754497, 4.030321153344024, 398.0947444286999, 1e-9),
        # Its time ends with the run, ours with the last token.
        ("inference-perf.json", 42.80755339987081, 8.122007159994004, 135.3973599111968, 1e-3),
    ],
)
def test_of_one_token_an_event_all_say_the_same(file, ttft_ms, itl_ms, tokens_s, off, tmp_path):
    summary = (run := imported(file, tmp_path)).summary
    assert 1e3 * summary["ttft_s"]["mean"] == pytest.approx(ttft_ms, rel=1e-9)
    assert 1e3 * summary["itl_s"]["mean"] == pytest.approx(itl_ms, rel=1e-9)
    assert summary["tpot_s"]["mean"] == pytest.approx(summary["itl_s"]["mean"])
    assert summary["throughput_tok_s"] == pytest.approx(tokens_s, rel=off)
    assert run.validity.valid
    assert {*run.table("requests")["first_tokens"]} == {1}


def test_events_of_several_tokens_are_no_tokens(tmp_path):
    """SGLang's ITL is a gap between events. inference-perf gives each token its event's stamp, so that three gaps of four are 0, and
    divides by all tokens but one. We divide by those behind the first event, where the file tells how many it has."""
    told = json.loads((FILES / "sglang-blocks.jsonl").read_text())
    run = imported("sglang-blocks.jsonl", tmp_path / "a")
    assert (run.summary["itl_s"]["mean"], run.summary["tpot_s"]["mean"]) == (None, None)
    assert 1e3 * run.summary["icl_s"]["mean"] == pytest.approx(told["mean_itl_ms"], rel=1e-9)
    assert 1e3 * run.summary["ttft_s"]["mean"] == pytest.approx(told["mean_ttft_ms"], rel=1e-9)
    assert run.summary["throughput_tok_s"] == pytest.approx(told["output_throughput"], rel=1e-9)
    assert "10 answers have other events than tokens" in " ".join(run.validity.warnings)
    assert told["max_output_tokens_per_s"] < told["output_throughput"]  # it takes an event for a token

    run = imported("inference-perf-blocks.json", tmp_path / "b")
    assert 1e3 * run.summary["tpot_s"]["mean"] == pytest.approx(5.3581626866919885 * 15 / 12, rel=1e-9)
    assert run.summary["icl_s"]["mean"] == pytest.approx(4 * run.summary["tpot_s"]["mean"])
    assert not any("events" in warning for warning in run.validity.warnings)


def test_the_server_s_count_of_tokens_goes_before_that_of_the_text(tmp_path):
    told = json.loads((FILES / "inference-perf.json").read_text())
    for each in told:
        each["info"]["response_metrics"]["server_usage"]["completion_tokens"] = 17
    (tmp_path / "usage.json").write_text(json.dumps(told))
    (run,) = import_file(tmp_path / "usage.json", Store(tmp_path / "runs"), dataset="d", platform="p")
    assert run.summary["output_len"]["mean"] == 17
    assert run.summary["tpot_s"]["mean"] is None


def test_each_benchmark_of_a_sweep_is_a_run(tmp_path):
    told = json.loads((FILES / "guidellm.json").read_text())
    first = told["benchmarks"][0]["requests"]
    refused_one = {**first["successful"][0], "request_start_time": None, "info": {"error": "429\nToo Many"}}
    second = {"successful": first["successful"][:10], "errored": [refused_one], "incomplete": [{}] * 3}
    told["benchmarks"].append({"requests": second})
    (tmp_path / "sweep.json").write_text(json.dumps(told))
    for tool, lines in (("vllm", 2), ("sglang", 2)):
        text = written(tool, tmp_path).read_text().strip()
        (tmp_path / f"{tool}s.jsonl").write_text("\n".join([text] * lines))
    store = Store(tmp_path / "runs")
    names = ("sweep.json", "vllms.jsonl", "sglangs.jsonl")
    found = [import_file(tmp_path / name, store, dataset="d", platform="p") for name in names]
    assert [[run.num_requests for run in runs] for runs in found] == [
        [len(first["successful"]), 11],
        [10, 10],
        [10, 10],
    ]
    assert len({run.file for runs in found for run in runs}) == 6
    assert [run.cell.knob_values["benchmark"] for run in found[0]] == [1, 2]
    cut = [["3 requests are left out" in str(run.validity.warnings) for run in runs] for runs in found]
    assert cut == [[False, True], [False, False], [False, False]]
    assert "the first with: 429 Too Many" in str(found[0][1].validity.reasons)
    alone = import_file(FILES / "guidellm.json", store, dataset="d", platform="p")[0]
    assert found[0][0].summary == alone.summary


def test_an_answer_of_one_event_has_no_time_per_token(tmp_path):
    told = json.loads((FILES / "guidellm.json").read_text())
    for request in told["benchmarks"][0]["requests"]["successful"]:
        request["inter_token_latency_ms"] = 0.0
    (tmp_path / "guidellm.json").write_text(json.dumps(told))
    path = written("aiperf", tmp_path)
    path.write_text(path.read_text().replace(f'"value": {1e3 * (TTFT + GAP * 4)}', f'"value": {1e3 * TTFT}'))
    for name in ("guidellm", "aiperf"):
        (run,) = import_file(tmp_path / f"{name}.json", Store(tmp_path / "runs"), dataset="d", platform="p")
        assert run.summary["e2el_s"]["mean"] == pytest.approx(run.summary["ttft_s"]["mean"])
        assert run.summary["tpot_s"]["mean"] is None


def test_two_sides_are_compared(tmp_path):
    for tool in ("vllm", "aiperf"):
        repro("import", written(tool, tmp_path), "--result-dir", tmp_path / tool)
    ran = repro("compare", tmp_path / "vllm", tmp_path / "aiperf", "--metric", "ttft_s.mean")
    assert ran.code == 0, ran
    assert "no change" in ran.out


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"benchmarks": [{}]}', '{"a": 1}\n{"a": 2}', "no"])
def test_other_files_are_refused_in_one_sentence(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert "give vllm bench serve" in refused(repro("import", path, "--result-dir", tmp_path / "runs"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ttfts", float("nan"), "request 1: one of its times is [nan]"),
        ("itls", [float("inf")], "request 1: one of its times is [inf]"),
        ("start_times", True, "request 1: one of its times is [True]"),
        ("output_lens", "3", "request 1: output_len='3' is no number of tokens"),
        ("output_lens", None, "request 1: output_len=None"),
        ("output_lens", -3, "request 1: output_len=-3"),
        ("input_lens", 2.5, "request 1: prompt_len=2.5"),
    ],
)
def test_numbers_that_are_none_are_refused_by_request_and_field(name, value, says, tmp_path):
    path = written("vllm", tmp_path)
    told = json.loads(path.read_text())
    told[name][0] = value
    path.write_text(json.dumps(told))
    refused(repro("import", path, "--result-dir", tmp_path / "runs"), says)


def test_counts_may_be_written_as_fractions(tmp_path):
    path = written("vllm", tmp_path)
    whole = read_benchmarks(path)
    path.write_text(path.read_text().replace(f"[{TOKENS}, ", f"[{TOKENS}.0, "))
    assert read_benchmarks(path) == whole


def test_answers_that_were_not_streamed_are_refused(tmp_path):
    path = written("aiperf", tmp_path)
    path.write_text(path.read_text().replace("time_to_first_token", "else"))
    refused(repro("import", path, "--result-dir", tmp_path / "runs"), "was not streamed")


def test_a_file_is_one_repeat(tmp_path):
    path = written("vllm", tmp_path)
    refused(repro("import", path, path, "--result-dir", tmp_path / "runs"), "is given twice")
    (tmp_path / "none.json").write_text("{}")
    refused(repro("import", path, tmp_path / "none.json", "--result-dir", tmp_path / "runs"), "holds no requests")
    assert not [*tmp_path.rglob("*.gz")], "every file is read before the first is stored"


def test_failed_requests_are_kept_as_failed(tmp_path):
    told = json.loads(written("vllm", tmp_path).read_text())
    told["errors"][3], told["ttfts"][3], told["itls"][3] = "refused\nthere", 0.0, []
    (tmp_path / "bad.json").write_text(json.dumps(told))
    (run,) = import_file(tmp_path / "bad.json", Store(tmp_path / "runs"), dataset="d", platform="p")
    assert run.summary["num_requests"] == {"ok": 9, "failed": 1, "unfinished": 0}
    assert not run.validity.valid
    # Where all failed there is no time, and where a tool keeps no answer of such a request, none is read.
    told = json.loads(written("inference-perf", tmp_path).read_text())
    for each in told:
        each["error"], each["info"]["response_metrics"] = {"error_type": "HTTP Error 400", "error_msg": "no"}, None
    (tmp_path / "bad.json").write_text(json.dumps(told))
    (run,) = import_file(tmp_path / "bad.json", Store(tmp_path / "none"), dataset="d", platform="p")
    assert run.summary["num_requests"] == {"ok": 0, "failed": 10, "unfinished": 0}
    assert set(READERS) == {"vllm", "sglang", "aiperf", "guidellm", "inference-perf"}


def test_a_report_of_llm_d_has_our_numbers_in_its_units(tmp_path):
    import_file(written("vllm", tmp_path), Store(tmp_path / "runs"), dataset="d", platform="p")
    ran = repro("export", tmp_path / "runs", "--format", "llmd-benchmark-report", "--out", tmp_path / "out")
    assert ran.code == 0, ran
    (file,) = (tmp_path / "out").iterdir()
    told = json.loads(file.read_text())
    (run,) = folder_of(tmp_path / "runs").runs
    assert told == json.loads(json.dumps(report_of(run)))
    assert told["version"] == "0.2.1"
    aggregate = told["results"]["request_performance"]["aggregate"]
    assert aggregate["requests"]["total"] == 10
    assert aggregate["latency"]["time_to_first_token"]["units"] == "s"
    assert aggregate["latency"]["time_to_first_token"]["mean"] == pytest.approx(TTFT)
    assert aggregate["throughput"]["output_token_rate"] == {"units": "tokens/s", "mean": pytest.approx(50 / 4.9)}


def test_a_trace_has_every_span_of_a_run(tmp_path):
    (run,) = import_file(written("vllm", tmp_path), Store(tmp_path), dataset="d", platform="p")
    text, count = trace_of(run.file)
    events = json.loads(text)["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert (len(events), len(spans)) == (count, 20)
    first = [each for each in spans if each["name"] == "first output"]
    assert [each["ts"] for each in first] == pytest.approx([1e6 * SENT * place for place in range(10)])
    assert [each["dur"] for each in first] == pytest.approx([1e6 * TTFT] * 10)
    # No two of one thread overlap: they are never two requests at once.
    assert {each["tid"] for each in spans} == {0}
    path = tmp_path / "no.gz"
    path.write_bytes(b"no run")
    assert "holds no run" in refused(repro("trace-events", path, "--out", tmp_path / "t.json"))
