"""Reading the next batch's mirrors from a file store while backward runs: one thread, joined before anything is
written."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from thinwire.memory.store import Key, RamStore


class Prefetch:
    """One background read per step."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, stores: Sequence[RamStore], keys: Sequence[Key]) -> None:
        """Read `keys` of every store in the background; a second call in the same step does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(stores, keys), name="thinwire prefetch")
            self._thread.start()

    def _run(self, stores: Sequence[RamStore], keys: Sequence[Key]) -> None:
        try:
            for store in stores:
                store.prefetch(keys)
        except BaseException as error:  # handed to the thread that joins
            self._error = error

    def join(self) -> None:
        """Wait for the read; an error in it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error
