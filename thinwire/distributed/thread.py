"""One thread that runs an adapter's communication, first in, first out.

No collective is started in a future's callback, and no two threads use one process group. On CUDA the work runs on a
stream of its own that waits for what was enqueued before it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Item:
    work: Callable[[], None]
    device: torch.device | None
    event: torch.cuda.Event | None  # what was enqueued before it on its device
    failed: Callable[[BaseException], None] | None


class CommunicationThread:
    """A thread that starts with the first work it is given. name: shown by debuggers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: queue.Queue[_Item | None] = queue.Queue()
        self.error: BaseException | None = None  # not raised yet
        self.broken = False  # a work has raised: ranks may not be in step any more
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.thread: threading.Thread | None = None

    def submit(
        self, work: Callable[[], None], device: torch.device | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        """Run work after everything submitted before it.

        device: where its tensors are; on CUDA it waits for what is enqueued there now. failed: gets the error if this
        work raises, or any before it: after an error nothing more is run until `wait` has raised it.
        """
        if self.thread is None:
            self.thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self.thread.start()
        on_cuda = device is not None and device.type == "cuda"
        event = torch.cuda.current_stream(device).record_event() if on_cuda else None
        self.queue.put(_Item(work, device, event, failed))

    def wait(self) -> None:
        """Until all is done; an error on the thread is raised here, once."""
        self.queue.join()
        for device, stream in self.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def close(self) -> None:
        """Run what was submitted, and end the thread."""
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join()
            self.thread = None

    def _loop(self) -> None:
        while (item := self.queue.get()) is not None:
            self._run(item)
            self.queue.task_done()
        self.queue.task_done()

    def _run(self, item: _Item) -> None:
        try:
            if self.error is None:
                with self._stream(item):
                    item.work()
        except BaseException as error:  # handed to `failed` and wait()
            self.error = error
            self.broken = True
        if self.error is not None and item.failed is not None:
            item.failed(self.error)

    def _stream(self, item: _Item) -> AbstractContextManager[object]:
        if item.device is None or item.event is None:
            return nullcontext()
        if item.device not in self.streams:
            self.streams[item.device] = torch.cuda.Stream(item.device)
        stream = self.streams[item.device]
        stream.wait_event(item.event)
        return torch.cuda.stream(stream)
