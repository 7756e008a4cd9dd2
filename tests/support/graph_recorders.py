"""Recorders of forwards that run on any device, one of which counts."""

from collections.abc import Callable

from torch import Tensor

from engines.runtime.graphs import Recording


class EagerRecorder:
    """Runs the forward as it is; what replaying does to metadata, on any device."""

    def record(self, forward: Callable[[], Tensor]) -> Recording:
        return EagerRecording(forward)


class EagerRecording:
    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self.replay = forward

    def release(self) -> None:
        del self.replay


class CountingRecorder:
    """``num_live`` recordings hold what a captured graph would."""

    def __init__(self) -> None:
        self.num_made = self.num_live = self.num_replays = 0

    def record(self, forward: Callable[[], Tensor]) -> Recording:
        self.num_made += 1
        self.num_live += 1
        return _Counted(self, EagerRecorder().record(forward))


class _Counted:
    def __init__(self, recorder: CountingRecorder, recording: Recording) -> None:
        self._recorder, self._recording = recorder, recording

    def replay(self) -> Tensor:
        self._recorder.num_replays += 1
        return self._recording.replay()

    def release(self) -> None:
        self._recorder.num_live -= 1
        self._recording.release()
