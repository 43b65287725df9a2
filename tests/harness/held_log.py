"""A shard's event log whose events are safe when the test says so."""

import threading


class HeldLog:
    """Events are safe by `sync`."""

    def __init__(self) -> None:
        self.events, self.safe_lsn = [], 0
        self._held, self._lock = [], threading.Lock()

    @property
    def held(self) -> int:
        """Answers that wait."""
        return len(self._held)

    def status(self):
        return "log", 0, 0, 0.0, ""

    def check_room(self, num_bytes) -> None:
        pass

    def append(self, event, outcome) -> int:
        self.events.append(event)
        return len(self.events)

    def when_safe(self, lsn, call, refuse=None) -> None:
        with self._lock:
            if lsn > self.safe_lsn:
                self._held.append(call)
                return
        call()

    def sync(self) -> None:
        """All that was appended is safe."""
        with self._lock:
            self.safe_lsn, held, self._held = len(self.events), self._held, []
        for call in held:
            call()
