"""What a run of prefill instances records: a request is one turn, done with its first token."""

from __future__ import annotations

from repro.runs.record import Column

STEPS, MOVES, INSTANCES = "steps", "moves", "instances"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="session_id", kind="int", meaning="the conversation it is a turn of"),
    Column(name="turn", kind="int", meaning="0 is the first"),
    Column(name="length_class", kind="str", meaning="short or long, by the run's boundary"),
    Column(name="history", kind="int", meaning="tokens whose K/V was there"),
    Column(name="instance", kind="int", nullable=True, meaning="where it was prefilled"),
    Column(
        name="violated", kind="bool", meaning="whether its first token came later than the objective allows, or never"
    ),
    Column(name="counted", kind="bool", meaning="whether it arrived in the measured window"),
)
STEP_COLUMNS: tuple[Column, ...] = (
    Column(name="instance", kind="int", meaning="where it ran"),
    Column(name="start_s", kind="float", meaning="begin"),
    Column(name="duration_s", kind="float", meaning="how long it took"),
    Column(name="tokens", kind="int", meaning="tokens prefilled"),
    Column(name="padded_tokens", kind="int", meaning="tokens computed, a graph's padding included"),
    Column(name="num_short", kind="int", meaning="short requests in it"),
    Column(name="num_long", kind="int", meaning="long requests in it"),
    Column(name="num_finished", kind="int", meaning="requests whose last token it computed"),
    Column(name="mode", kind="str", meaning="eager, fallback, graph LxB or rung N"),
)
MOVE_COLUMNS: tuple[Column, ...] = (
    Column(name="time_s", kind="float", meaning="when the controller moved an instance"),
    Column(name="instance", kind="int", meaning="which"),
    Column(name="to", kind="str", meaning="pool it went to"),
    Column(name="short_pressure", kind="float", meaning="P_s of Algorithm 2"),
    Column(name="long_pressure", kind="float", meaning="P_l"),
    Column(name="num_short", kind="int", meaning="n_s afterwards"),
)
INSTANCE_COLUMNS: tuple[Column, ...] = (
    Column(name="instance", kind="int", meaning="its number"),
    Column(name="pool", kind="str", nullable=True, meaning="its pool at the end; null without pools"),
    Column(name="busy_s", kind="float", meaning="time in steps"),
    Column(name="num_steps", kind="int", meaning="steps"),
    Column(name="num_finished", kind="int", meaning="requests finished"),
    Column(name="tokens", kind="int", meaning="tokens prefilled"),
    Column(name="padded_tokens", kind="int", meaning="tokens computed, padding included"),
)
