"""Import result files of other load generators as runs against an endpoint, so that ``compare`` and ``export`` can use them.

Each reader takes the times and counts of single requests, from which we compute our metrics, and never a tool's own summary. Times
count from sending, unless the tool says when a request was due. An answer ends with its last token, if the tool records that."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from engines.data import read_bytes
from engines.errors import UserError, require
from repro.families.http.record import CHUNKS, HTTP, tables_of
from repro.families.http.system import EXECUTOR
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment
from repro.runs.http_driver import Exchange, Reply
from repro.runs.provenance import collect
from repro.runs.record import Obtained, RunRecord
from repro.runs.store import Store, StoredRun, pack

SYSTEM = "openai-http"
ASSUMED_FIRST = 1
"""Tokens of the first piece, for tools that keep only the first and the last time, and divide by all tokens but one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as a tool records it. Times are in seconds on the tool's clock."""

    sent_s: float
    pieces_s: Sequence[float]
    """When pieces came: all of them, or only the first and the last."""
    prompt_len: int
    output_len: int
    has_all: bool = True
    """Whether ``pieces_s`` holds all pieces, because the tool keeps every gap."""
    piece_tokens: Sequence[int] | None = None
    """Tokens of each piece, if the tool keeps them."""
    error: str | None = None
    is_cut: bool = False
    """Whether the tool ended its run before the answer, which it then leaves out of its numbers."""
    due_s: float | None = None
    """When the request was due; None if the tool does not say."""

    @property
    def begun_s(self) -> float:
        """The time from which its times count."""
        return self.sent_s if self.due_s is None else min(self.due_s, self.sent_s)


Reader = Callable[[Any], list[Answer]]


def _times(ttft: float, gaps: Sequence[float], sent_s: float) -> list[float]:
    """Return when pieces came: none if the time to the first is 0, which SGLang's tool writes of an answer without text."""
    if ttft == 0:
        return []
    return [*accumulate((ttft, *gaps), initial=sent_s)][1:]


def _vllm(result: Mapping[str, Any]) -> list[Answer]:
    """Read the result of ``vllm bench serve --save-detailed``."""
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls", "errors")
    return [
        Answer(sent_s=sent, pieces_s=_times(ttft, gaps, sent), prompt_len=prompt, output_len=output, error=_line(error))
        for sent, prompt, output, ttft, gaps, error in zip(*(result[name] for name in names), strict=True)
    ]


def _sglang(result: Mapping[str, Any]) -> list[Answer]:
    """Read the result of SGLang's ``bench_serving --output-details``. It has no times of sending. So we let requests take the places
    of ``max_concurrency`` in turn, and let the last answer end with the run."""
    rows = [*zip(*(result[name] for name in ("input_lens", "output_lens", "ttfts", "itls", "errors")), strict=True)]
    if not rows:
        return []
    durations = [ttft + sum(gaps) for _, _, ttft, gaps, _ in rows]
    free = [0.0] * min(int(result.get("max_concurrency") or len(rows)), len(rows))
    answers = []
    for (prompt, output, ttft, gaps, error), seconds in zip(rows, durations, strict=True):
        sent = min(free)
        free[free.index(sent)] = sent + seconds
        pieces = _times(ttft, gaps, sent)
        answers.append(Answer(sent_s=sent, pieces_s=pieces, prompt_len=prompt, output_len=output, error=_line(error)))
    delay = max(0.0, float(result["duration"]) - max(free))
    last = max(range(len(answers)), key=lambda place: [*answers[place].pieces_s[-1:]])
    answer = answers[last]
    stamps = [stamp + delay for stamp in answer.pieces_s]
    answers[last] = replace(answer, sent_s=answer.sent_s + delay, pieces_s=stamps)
    return answers


def _ends(first: float, last: float) -> list[float]:
    """Return the times of the first and the last piece, which may be one."""
    return [first] if last == first else [first, last]


_NONE: Mapping[str, Any] = {"output_token_times": (), "output_tokens": 0}


def _inference_perf(requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Read ``per_request_lifecycle_metrics.json``. Each token has a time, and tokens of one event have the same. We prefer the server's
    count of tokens, because the tool counts those of the text and misses tokens without text."""
    answers = []
    for request in requests:
        error, info = _line((request.get("error") or {}).get("error_msg")), request["info"]
        # A failed request may have no answer at all.
        answer: Mapping[str, Any] = info["response_metrics"] if error is None else _NONE
        events = Counter(answer["output_token_times"])
        answers.append(
            Answer(
                sent_s=request["start_time"],
                pieces_s=[*events],
                piece_tokens=[*events.values()],
                prompt_len=info["request_metrics"]["text"]["input_tokens"],
                output_len=(answer.get("server_usage") or {}).get("completion_tokens") or answer["output_tokens"],
                error=error,
            )
        )
    return answers


_NOT_STREAMED = "an answer was not streamed, so nobody knows when its first token came: measure with streaming"


def _guidellm(result: Mapping[str, Any]) -> list[Answer]:
    """Read the JSON of one benchmark. Its latency ends with the stream, so we find the last token's time from the mean gap."""
    (benchmark,) = result["benchmarks"]
    # In a closed loop it takes the end of an answer for the time at which the next request is due, and has no such metric.
    is_open = (benchmark.get("metrics") or {}).get("request_scheduled_latency") is not None
    answers = []
    for request in benchmark["requests"]["successful"]:
        sent, num = request["request_start_time"], request["output_tokens"]
        require(request["time_to_first_token_ms"] is not None, _NOT_STREAMED)
        first = sent + request["time_to_first_token_ms"] / 1e3
        last = first + (request["inter_token_latency_ms"] or 0.0) / 1e3 * (num - 1)
        answers.append(
            Answer(
                sent_s=sent,
                pieces_s=_ends(first, last),
                prompt_len=request["prompt_tokens"],
                output_len=num,
                has_all=False,
                due_s=_due_of(request["info"]["timings"]) if is_open else None,
            )
        )
    for request in benchmark["requests"]["errored"]:
        sent = request["request_start_time"] or 0.0
        error = _line((request.get("info") or {}).get("error")) or "failed"
        answers.append(
            Answer(sent_s=sent, pieces_s=[], prompt_len=request["prompt_tokens"] or 0, output_len=0, error=error)
        )
    cut = Answer(sent_s=0.0, pieces_s=[], prompt_len=0, output_len=0, is_cut=True)
    return answers + [cut] * len(benchmark["requests"].get("incomplete") or ())


def _due_of(timings: Mapping[str, Any]) -> float:
    """Return when GuideLLM should have sent a request: at its scheduled time, but not before the turn before it was answered."""
    return max(timings["targeted_start"], timings["predecessor_completed"] or 0.0)


def _aiperf(requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Read ``profile_export.jsonl``. Its inter-token latency is the time per token after the first."""
    answers = []
    for request in requests:
        if request["metadata"].get("benchmark_phase", "profiling") != "profiling":
            continue
        sent = request["metadata"]["request_start_ns"] / 1e9
        values = {name: value["value"] for name, value in request["metrics"].items()}
        error = (request.get("error") or {}).get("message")
        is_ok = error is None
        require(not is_ok or "time_to_first_token" in values, _NOT_STREAMED)
        first, last = (
            sent + values[name] / 1e3 if is_ok else sent for name in ("time_to_first_token", "request_latency")
        )
        answers.append(
            Answer(
                sent_s=sent,
                pieces_s=_ends(first, last) if is_ok else [],
                prompt_len=int(values.get("input_sequence_length", 0)),
                output_len=int(values.get("output_sequence_length", 0)),
                has_all=False,
                error=_line(error),
            )
        )
    return answers


def _line(error: object) -> str | None:
    return " ".join(str(error).split())[:200] or None if error else None


READERS: Mapping[str, Reader] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
    "inference-perf": _inference_perf,
}
_FILES = (
    "vllm bench serve --save-detailed, SGLang's bench_serving --output-details, AIPerf's profile_export.jsonl, GuideLLM's JSON, or "
    "inference-perf's per_request_lifecycle_metrics.json"
)


def tool_of(content: Any) -> str | None:
    """The tool that wrote a file, judged by its content; None if we do not know it."""
    first = content[0] if isinstance(content, list) and content else content
    match first:
        case {"metadata": {"request_start_ns": _}, "metrics": _}:
            return "aiperf"
        case {"start_time": _, "info": _}:
            return "inference-perf"
        case {"benchmarks": [_, *_]}:
            return "guidellm"
        case {"start_times": _, "itls": _, "input_lens": _}:
            return "vllm"
        case {"itls": _, "ttfts": _, "output_lens": _, "duration": _}:
            return "sglang"
    return None


Benchmark = tuple[str, list[Answer]]
"""A tool and its requests, in order of sending."""


def read_benchmarks(path: Path) -> list[Benchmark]:
    """Return all benchmarks of a file, such as the rates of a sweep. Raises UserError for any other file."""
    text = read_bytes("file", path).decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except ValueError:
        data = _read_json_lines(path, text)
    tool = tool_of(data)
    require(tool is not None, f"file={str(path)!r} holds no requests of a tool that is known: give {_FILES}")
    assert tool is not None
    parts = data if isinstance(data, list) else [data]
    if tool == "guidellm":
        parts = [{"benchmarks": [each]} for part in parts for each in part["benchmarks"]]
    elif tool in ("aiperf", "inference-perf"):
        parts = [parts]
    return [(tool, _answers_of(tool, part, path)) for part in parts]


def _answers_of(tool: str, benchmark: Any, path: Path) -> list[Answer]:
    try:
        answers = READERS[tool](benchmark)
    except UserError as error:
        raise UserError(f"file={str(path)!r}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"file={str(path)!r} is not as {tool} writes it ({type(error).__name__}: {error}): give {_FILES}"
        ) from error
    require(_whole(answers) != [], f"file={str(path)!r} holds no request: give a file with some")
    checked = [_checked(f"file={str(path)!r}, request {n}:", answer) for n, answer in enumerate(answers, start=1)]
    return sorted(checked, key=lambda answer: answer.begun_s)


def _checked(request: str, answer: Answer) -> Answer:
    """Return the answer with whole counts of tokens. Raises UserError for a time or a count that is no finite number."""
    times = [stamp for stamp in (answer.begun_s, answer.sent_s, *answer.pieces_s) if not _is_finite(stamp)]
    require(not times, f"{request} one of its times is {times[:1]}, no finite number: take the request out")
    for name, value in (("prompt_len", answer.prompt_len), ("output_len", answer.output_len)):
        is_count = _is_finite(value) and value >= 0 and value == int(value)
        require(is_count, f"{request} {name}={value!r} is no number of tokens: take the request out")
    return replace(answer, prompt_len=int(answer.prompt_len), output_len=int(answer.output_len))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _read_json_lines(path: Path, text: str) -> list[Any]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"file={str(path)!r} is no JSON and has no JSON lines: give {_FILES}") from error


def record_of(tool: str, answers: Sequence[Answer]) -> RunRecord:
    """Return the record of a run against an endpoint, as far as the tool's file goes."""
    warnings, answers = [*_warnings(tool, answers)], _whole(answers)
    start = answers[0].begun_s
    exchanges = [_exchange(number, answer, start) for number, answer in enumerate(answers)]
    tables = tables_of(exchanges)
    requests = tables["requests"]
    for number in (n for n, answer in enumerate(answers) if _has_unknown_tokens(answer)):
        requests["first_tokens"][number] = requests["first_by"][number] = None
    if not all(answer.has_all for answer in answers):
        # The gap between the first and the last piece is no gap between tokens.
        tables[CHUNKS] = {name: [] for name in tables[CHUNKS]}
        requests["num_chunks"] = [answer.output_len for answer in answers]
        requests["first_by"] = ["one each" if answer.error is None else None for answer in answers]
    for name in ("finish_lag_s", "usage_lag_s", "close_lag_s", "text_bytes"):
        requests[name] = [None] * len(answers)
    facts = {
        "endpoint": {"tool": tool},
        "requested_rate": None,
        "ignore_eos": False,
        "goodput": {},
        "tokens_counted_by": dict(Counter(method for method in tables["requests"]["counted_by"] if method is not None)),
        "warnings": warnings,
    }
    return RunRecord(tables=tables, manifest={"obtained": "measured", "facts": facts})


def _whole(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if not answer.is_cut]


def _warnings(tool: str, answers: Sequence[Answer]) -> Iterator[str]:
    if any(answer.due_s is not None for answer in answers):
        yield f"imported of {tool}: times count from when requests were due, its own but request_scheduled_latency from sending"
    else:
        yield f"imported of {tool}: times count from sending, since its file does not say when requests were due"
    if tool == "sglang":
        yield "its file has no times of sending: only lengths of answers and of the whole run are its own"
        yield "its tokens are those that were asked for, unless the server sends usage with every event"
    if num_cut := sum(answer.is_cut for answer in answers):
        yield f"{num_cut} requests are left out: the tool ended its run before their answers"
    if not all(answer.has_all for answer in answers):
        yield "its file does not say how many tokens an answer's first event has: the time per token (tpot) takes one"
    if unknown := sum(map(_has_unknown_tokens, answers)):
        yield (
            f"{unknown} answers have other events than tokens, and the file does not say how many each has: no time per token "
            f"(tpot, itl), gaps between events are icl"
        )


def _tokens_of(answer: Answer) -> Sequence[int | None]:
    """Tokens of each piece. None if pieces and tokens differ in number and the tool does not say how many each has."""
    num = len(answer.pieces_s)
    if num == 1:
        return [answer.output_len]
    if not answer.has_all:
        return [ASSUMED_FIRST, None][:num]
    if answer.piece_tokens is not None and sum(answer.piece_tokens) == answer.output_len:
        return answer.piece_tokens
    return [1] * num if num == answer.output_len else [None] * num


def _has_unknown_tokens(answer: Answer) -> bool:
    """Whether it is unknown how many tokens came with the first piece and how many after it."""
    return answer.error is None and answer.has_all and len(answer.pieces_s) > 1 and None in _tokens_of(answer)


def _exchange(number: int, answer: Answer, start: float) -> Exchange:
    due, sent = answer.begun_s - start, answer.sent_s - start
    is_ok = answer.error is None and answer.output_len > 0 < len(answer.pieces_s)
    pieces = [stamp - start for stamp in answer.pieces_s]
    reply = Reply(
        chunks_s=pieces,
        chunk_tokens=[*_tokens_of(answer)],
        chunk_reads=[*range(len(pieces))],
        prompt_tokens=answer.prompt_len,
        completion_tokens=answer.output_len,
        counted_by="usage",
    )
    return Exchange(
        session_id=number,
        turn=0,
        due_s=due,
        queued_s=sent,
        sent_s=sent,
        ended_s=pieces[-1] if is_ok else None,
        reply=reply if is_ok else None,
        error=None if is_ok else answer.error or "the tool saw no token of its answer",
    )


# -- the run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImportedDeployment:
    """The deployment of a run that another tool made."""

    record: RunRecord
    basis: str
    obtained: ClassVar[Obtained] = "measured"
    modules: ClassVar[tuple[str, ...]] = (__name__,)
    is_tied_here: ClassVar[bool] = True

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.record.facts

    def check_machine(self) -> None:
        """Any machine can read a file."""

    def run(self, workload: object, on_progress: object = None) -> RunRecord:
        return self.record


def import_file(
    path: Path,
    store: Store,
    *,
    dataset: str,
    platform: str,
    seed: int = 0,
    benchmarks: Sequence[Benchmark] | None = None,
) -> list[StoredRun]:
    """Store each benchmark of the file as a run of ``openai-http``, with the name of the tool as a knob, and its number if the file has
    several. ``benchmarks`` is the result of ``read_benchmarks`` if the file was read before."""
    found = read_benchmarks(path) if benchmarks is None else benchmarks
    basis = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    runs = []
    for number, (tool, answers) in enumerate(found, start=1):
        knobs: dict[str, str | int] = {"tool": tool, "basis": basis}
        if len(found) > 1:
            knobs["benchmark"] = number
        cell = Cell(
            system=SYSTEM, dataset=dataset, platform=platform, executor=EXECUTOR, seed=seed, knobs=(*knobs.items(),)
        )
        runs.append(_stored(store, cell, answers))
    return runs


def _stored(store: Store, cell: Cell, answers: Sequence[Answer]) -> StoredRun:
    tool, basis = (str(cell.knob_values[name]) for name in ("tool", "basis"))
    deployment = ImportedDeployment(record=record_of(tool, answers), basis=basis)
    place = {"cpu": None, "cores": None, "threads": None, "torch": None}
    experiment = Experiment(cell=cell, deployment=deployment, workload=None, place=place)
    answers = _whole(answers)
    took = max((each.pieces_s[-1] for each in answers if each.pieces_s), default=answers[0].sent_s) - answers[0].sent_s
    provenance = collect(obtained="measured", elapsed_s=took)
    assert experiment.family is HTTP
    store.root.mkdir(parents=True, exist_ok=True)
    return store.put(pack(experiment, deployment.record, provenance))
