"""Measures how long the parts of a step take, by the clock of the device that runs them."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

STEP_PARTS = ("attention", "gemm", "logits", "selection", "commit", "metadata", "idle")
"""The parts of a profiled step, by the device's time if there is one. ``gemm`` is the rest of the layers, ``logits`` the head and its
reduction. ``selection`` chooses and packs retained rows, ``commit`` ranks and writes tokens. The device waited for ``metadata``, and had no
work in ``idle``."""

MAX_IN_FLIGHT = 2
"""Most steps that the host hands to a device: one that runs, and the next."""

_FORWARD = ("attention", "gemm", "logits", "selection")


class DeviceTimes(NamedTuple):
    """The times that a device took for one step, known once it is over."""

    forward_s: float
    parts: Mapping[str, float] | None = None


class StepTimer:
    """Times one step: ``begin``, ``lap`` after each part, ``end``. This timer is a host's, whose operations are over when they return."""

    detailed = False
    """Whether laps inside the model are taken, too."""

    def begin(self, *, detailed: bool) -> None:
        self.detailed = detailed
        self._parts = dict.fromkeys(STEP_PARTS, 0.0)
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap to ``part``, one of STEP_PARTS."""
        now = perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def lap_inside(self, part: str) -> None:
        """``lap`` at a place inside the model."""
        if self.detailed:
            self.lap(part)

    def end(self) -> DeviceTimes | None:
        """End the step and return its times; None if the device has not got there yet."""
        return _times(self._parts, self.detailed)

    def rest(self) -> None:
        """Book the time from here to the next step to no part."""

    def wait(self) -> None:
        """Return when every step is over."""

    def times(self) -> Mapping[int, DeviceTimes]:
        """Return step number, from 0 -> times, for steps since the last call that ``end`` left open. Waits."""
        return {}

    def abandon(self) -> None:
        """Forget the step that began, because it failed."""


class CudaTimer(StepTimer):
    """Times steps by events in the stream; ``begin`` waits until at most one step is under way, and reads those that are over."""

    def __init__(self, new_event: "Callable[[], torch.cuda.Event]") -> None:
        self._new_event = new_event
        self._num_ended = 0
        self._under_way: deque[tuple[int, bool, list[tuple[str, torch.cuda.Event]]]] = deque()
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        self._previous_end: torch.cuda.Event | None = None
        self._times: dict[int, DeviceTimes] = {}

    def begin(self, *, detailed: bool) -> None:
        while len(self._under_way) >= MAX_IN_FLIGHT:
            self._finish_oldest()
        self.detailed = detailed
        self._marks = []
        self.lap("idle")

    def lap(self, part: str) -> None:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append((part, event))

    def end(self) -> None:
        self._under_way.append((self._num_ended, self.detailed, self._marks))
        self._num_ended += 1
        self._marks = []

    def rest(self) -> None:
        self.wait()
        if self._previous_end is not None:
            self._free.append(self._previous_end)
            self._previous_end = None

    def wait(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def times(self) -> Mapping[int, DeviceTimes]:
        self.wait()
        times, self._times = self._times, {}
        return times

    def abandon(self) -> None:
        self._free += [event for _, event in self._marks]
        self._marks = []

    def _finish_oldest(self) -> None:
        number, detailed, marks = self._under_way.popleft()
        marks[-1][1].synchronize()
        parts = dict.fromkeys(STEP_PARTS, 0.0)
        last = self._previous_end
        for part, event in marks:
            if last is not None:
                parts[part] += last.elapsed_time(event) / 1e3
            last = event
        self._times[number] = _times(parts, detailed)
        if self._previous_end is not None:
            self._free.append(self._previous_end)
        self._free += [event for _, event in marks[:-1]]
        self._previous_end = last


def timer_of(device: "torch.device") -> StepTimer:
    import torch

    return CudaTimer(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else StepTimer()


def _times(parts: Mapping[str, float], detailed: bool) -> DeviceTimes:
    return DeviceTimes(forward_s=sum(parts[part] for part in _FORWARD), parts=dict(parts) if detailed else None)
