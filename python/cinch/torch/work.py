"""Work handles of the process group, and the threads that run its calls in order."""

import collections
import datetime
import os
import threading
import time
from typing import Any, Callable, Deque, Optional, Tuple

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from .. import _library
from .errors import timeout_error, torch_error


def seconds(timeout: Any) -> Optional[float]:
    """Returns a timeout of torch in seconds; None for unset, which torch writes as zero or less."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    return value if value > 0 else None


class Worker:
    """Runs jobs one after the other, on a thread that starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: Deque[Tuple["HostWork", Callable[[], None]]] = collections.deque()
        self._changed = threading.Condition()
        self._thread: Optional[threading.Thread] = None
        self._closed = False
        self._process = os.getpid()

    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one whose threads and communicators these are."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child, where no thread would end a call."""
        if self.is_forked():
            raise RuntimeError(
                f"the process group belongs to process {self._process}, and this is its forked child {os.getpid()}: "
                "create a group after the fork, or start the child by spawn"
            )

    def submit(self, work: "HostWork", job: Callable[[], None]) -> None:
        """Queues a job, which ends `work`."""
        self.check_process()
        with self._changed:
            if self._closed:
                raise RuntimeError("the process group was destroyed")
            self._jobs.append((work, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_current(self) -> bool:
        """Whether the calling thread is the worker's."""
        return threading.current_thread() is self._thread

    def help(self, work: "HostWork") -> None:
        """Runs jobs until `work` has ended. For the worker's own thread, where a callback of a future waits."""
        while not work.has_ended():
            with self._changed:
                if not self._jobs:
                    raise RuntimeError("a call waits for itself")
                job = self._jobs.popleft()
            self._end(*job)

    def close(self, timeout: float) -> bool:
        """Takes no more jobs, and waits until those that are queued have ended. Returns whether they have."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None or self.is_current():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._end(*job)
            # A job keeps its tensors alive, so the variable must not outlive it.
            del job

    @staticmethod
    def _end(work: "HostWork", job: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                job()
        except BaseException as error:  # noqa: BLE001 - the error belongs to the caller that waits
            work.finish(error)
        else:
            work.finish(None)


class HostWork(Work):
    """A call that a worker runs. Any thread may wait for it."""

    def __init__(
        self,
        what: str,
        outputs: Any,
        worker: Optional[Worker],
        timeout: Optional[float] = None,
        on_timeout: Optional[Callable[[], None]] = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._what = what
        self._outputs = outputs
        self._worker = worker
        self._on_timeout = on_timeout
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: Optional[BaseException] = None
        #: Future that the end of the call fulfils, and the one that users get.
        self._ending: Optional[Future] = None
        self._future: Optional[Future] = None
        #: Rank that sent, after a receive.
        self.source = source

    def finish(self, error: Optional[BaseException]) -> None:
        """Ends the call. A second end has no effect."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = None if error is None else torch_error(error)
            self._ended.set()
            future = self._ending
            self._on_timeout = None
        if future is not None:
            self._fulfil(future)

    def _fulfil(self, future: Future) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the call has ended and raises its error. A timeout fails the communicator."""
        if self._worker is not None and not self.has_ended():
            self._worker.check_process()
            if self._worker.is_current():
                self._worker.help(self)
        limit = seconds(timeout)
        remaining = limit
        if self._deadline is not None:
            left = max(0.0, self._deadline - time.monotonic())
            remaining = left if limit is None else min(left, limit)
        if not self._ended.wait(remaining):
            self._fail_by_timeout(limit)
        if self._error is not None:
            raise self._error
        self.after_end()
        return True

    def _fail_by_timeout(self, limit: Optional[float]) -> None:
        spent = limit if limit is not None and (self._timeout is None or limit < self._timeout) else self._timeout
        with self._lock:
            on_timeout = self._on_timeout
        self.finish(_library.TimeoutError(f"{self._what} did not end within {spent:g} s"))
        if on_timeout is not None:
            on_timeout()

    def after_end(self) -> None:
        """Runs at the end of a successful wait; does nothing for host memory."""

    def has_ended(self) -> bool:
        """Whether the worker has run the call, with success or not."""
        return self._ended.is_set()

    def is_completed(self) -> bool:
        """Whether the call has ended, with success or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Returns the error of an ended call."""
        return self._error

    def result(self) -> Any:
        """Returns the outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Waits, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """Returns the group rank that sent what a receive received."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future:
        """Returns a future with the outputs. Its callbacks run on the worker's thread.

        After a failed call it raises a RuntimeError with the sentence of the call's error.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._ending = self.new_future()
            # C++, such as DDP's reducer, takes an exception that is set in Python for a value. It takes one that a
            # callback raises for an error.
            self._future = self._ending.then(lambda done: done.value())
            ended = self._ended.is_set()
        if ended:
            self._fulfil(self._ending)
        return self._future

    def new_future(self) -> Future:
        """Creates the future of this call."""
        return Future()


class StreamWork(Work):
    """A call that is queued on a stream. `wait` makes the current stream wait, not the caller."""

    def __init__(self, outputs: Any, device: torch.device, stream: Any, check: Callable[[], None]) -> None:
        super().__init__()
        self._outputs = outputs
        self._device = device
        self._stream = stream
        self._check = check
        self._event = stream.record_event()
        self._future: Optional[Future] = None

    def wait(self, timeout: Any = None) -> bool:
        """Makes the current stream wait for the call, and raises the error of a failed communicator."""
        limit = seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        while deadline is not None and not self._event.query():
            self._raise_failure()
            if time.monotonic() > deadline:
                raise timeout_error(f"a call on {self._device} did not end within {limit:g} s")
            time.sleep(0.0005)
        self._raise_failure()
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def _raise_failure(self) -> None:
        try:
            self._check()
        except _library.Error as error:
            raise torch_error(error) from None

    def is_completed(self) -> bool:
        """Whether the GPU has run the call, or the communicator has failed."""
        return self.exception() is not None or self._event.query()

    def is_success(self) -> bool:
        """Whether the GPU has run the call without an error."""
        return self.exception() is None and self._event.query()

    def exception(self) -> Optional[BaseException]:
        """Returns the error of a failed communicator."""
        try:
            self._check()
        except _library.Error as error:
            return torch_error(error)
        return None

    def result(self) -> Any:
        """Returns the outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Makes the current stream wait, as `wait` does."""
        self.wait()

    def get_future(self) -> Future:
        """Returns a future with the outputs, whose users' streams wait for the call."""
        if self._future is None:
            self._future = Future(devices=[self._device])
            with torch.cuda.stream(self._stream):
                self._future.set_result(self._outputs)
        return self._future


class AllWork(HostWork):
    """Several works as one, which ends when all of them have ended."""

    def __init__(self, works: Any) -> None:
        super().__init__("a coalesced call", [one.result() for one in works], None)
        self._works = list(works)

    def wait(self, timeout: Any = None) -> bool:
        """Waits for all works."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all works have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all works have ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Optional[BaseException]:
        """Returns the first error."""
        return next((error for error in (work.exception() for work in self._works) if error), None)

    def get_future(self) -> Future:
        """Returns a future of all outputs."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [future.wait() for future in done.wait()])
