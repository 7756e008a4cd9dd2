#!/usr/bin/env bash
# opentelemetry-instrumentation-openai 0.62.4 and openinference-instrumentation-openai 0.1.66: the first token is the chunk with the role.
#
# Guess: the time to the first token ends at the first chunk with text. The chunk before it has the role and an empty `content`.
# Seen: a server sends the role at once and the first token after 0.5 s. `gen_ai.server.time_to_first_token` says 0.0 s and the event
#   "First Token Stream Event" is at 0.0 s. `streaming_time_to_generate` has the wait for the first token in it, so the time per token is too long instead.
#   If the role comes with the first token, both say 0.5 s.
# Who is hurt: TTFT in a dashboard. It measures when the server chose to send the role, before or after the prefill, and differs by server alone.
#
# Needs bash, and Python 3.12 or later as $PYTHON or python3.12; two minutes. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install --no-compile opentelemetry-instrumentation-openai==0.62.4 \
  openinference-instrumentation-openai==0.1.66 opentelemetry-sdk==1.45.2 openai==3.57.0 2>"$work/pip" || { cat "$work/pip"; exit 2; }
cat > "$work/measure.py" <<'PY'
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor as Events
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as Metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Stream(BaseHTTPRequestHandler):
    """The first of eight tokens after 0.5 s, and another every 0.1 s. The role comes at once or with the first token."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        role = {"role": "assistant", "content": ""}
        if body["model"] == "early":
            self.chunk(body, role, None)
        for token in range(8):
            time.sleep(0.1 if token else 0.5)
            self.chunk(body, (role if body["model"] == "late" and not token else {}) | {"content": "w "}, "length" if token == 7 else None)
        self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, body, delta, reason):
        event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        event["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Stream)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(*(f"{name} {version(name)}" for name in ("opentelemetry-instrumentation-openai", "openinference-instrumentation-openai", "openai")), sep=", ")
spans, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(spans))
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
seen = {"early": {}, "late": {}}


def stream(model):
    start = time.perf_counter()
    texts = [time.perf_counter() - start for chunk in client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}], stream=True) if chunk.choices[0].delta.content]
    seen[model]["first text"] = texts[0]


stream("late")  # imports and connects
Metrics().instrument(tracer_provider=tracers, meter_provider=MeterProvider([reader]))
for model in seen:
    stream(model)
Metrics().uninstrument()
for metric in (metric for resource in reader.get_metrics_data().resource_metrics for scope in resource.scope_metrics for metric in scope.metrics):
    if "first_token" in metric.name or "time_to_generate" in metric.name:
        for point in metric.data.data_points:
            seen[point.attributes["gen_ai.response.model"]][metric.name] = point.sum
spans.clear()
Events().instrument(tracer_provider=tracers)
for model in seen:
    stream(model)
firsts = [(event, span) for span in spans.get_finished_spans() for event in span.events if event.name.startswith("First Token")]
for model, (event, span) in zip(seen, firsts):
    seen[model][event.name] = (event.timestamp - span.start_time) / 1e9
for model, times in seen.items():
    print(f"role {model}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
early, late = ([seconds for name, seconds in times.items() if "first_token" in name or "First Token" in name] for times in seen.values())
sys.exit(not (len(early) == len(late) == 2 and max(early) < 0.3 and min(late) > 0.45 and min(times["first text"] for times in seen.values()) > 0.45))
PY
"$work/venv/bin/python" "$work/measure.py"
