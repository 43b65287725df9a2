"""A shard's event log whose events are written, and safe, when the test says so."""

import threading


class HeldLog:
    """`is_two_stage`: events are written by `write`, and safe by `sync`."""

    def __init__(self, *, is_two_stage=False) -> None:
        self.is_two_stage = is_two_stage
        self.events, self.written, self.safe_lsn = [], 0, 0
        self._held, self._held_written, self._lock = [], [], threading.Lock()

    @property
    def held(self) -> int:
        """Answers that wait."""
        return len(self._held) + len(self._held_written)

    def status(self):
        return "log", 0, 0, 0.0

    def check_room(self, num_bytes) -> None:
        pass

    def append(self, event, outcome) -> int:
        self.events.append(event)
        return len(self.events)

    def when_safe(self, lsn, call) -> None:
        with self._lock:
            if lsn > self.safe_lsn:
                self._held.append(call)
                return
        call()

    def when_written(self, lsn, call) -> None:
        with self._lock:
            if lsn > self.written:
                self._held_written.append(call)
                return
        call()

    def write(self) -> None:
        """All that was appended is written, and safe where that is one."""
        with self._lock:
            self.written, held, self._held_written = len(self.events), self._held_written, []
        for call in held:
            call()
        if not self.is_two_stage:
            self.sync()

    def sync(self) -> None:
        """All that is written is safe."""
        with self._lock:
            self.safe_lsn, held, self._held = self.written, self._held, []
        for call in held:
            call()
