"""How a run ends, and the background threads."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from torch_grad_exporter.errors import Guard, raised_by_handler


class Ending:
    """The end of a run: its outcome, and that everything is released once. Thread-safe.

    Attributes:
        state: "finished" or "failed", None while the run goes on; the first end counts.
        error: The type of the exception that failed it; not its message, which may hold anything.
        hurried: Whether the end must be quick: a user at the keyboard waits, or a launcher, for which failed ranks wait together.
        no_time: Whether something else follows at once: a signal's handler ended it, or another exporter takes its place. Then the
            end waits for no scrape, unless the user has said for how long.
        closed: Whether everything is released, or about to be.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.state: str | None = None
        self.error: str | None = None
        self.hurried = self.no_time = False
        self.closed = False
        self._several = ranks > 1
        # Reentrant: a signal's handler may close while its own thread is closing.
        self._closing = threading.RLock()

    def close(self) -> bool:
        """Return whether this call is the first, whose caller then releases everything. A run without an end yet is finished."""
        with self._closing:
            first = not self.closed
            self.closed = True
            self.by(None)
            return first

    def after_fork_in_child(self) -> None:
        """Forget the lock, which a thread of the parent may hold; the child has nothing to release."""
        self.closed = True
        self._closing = threading.RLock()

    def by(self, error: BaseException | None) -> None:
        """End the run, by this exception if there is one. Ctrl-C is an intended end, and so is `sys.exit` with success."""
        with self._closing:
            if self.state is None:
                interrupted = isinstance(error, KeyboardInterrupt)
                success = isinstance(error, SystemExit) and error.code in (None, 0)
                failed = error is not None and not success and not interrupted
                self.error = type(error).__name__ if failed else None
                self.hurried = interrupted or (failed and self._several)
                self.no_time |= error is not None and raised_by_handler(error)
                self.state = "failed" if failed else "finished"


class ThreadTime:
    """CPU time of the package's own threads in this process. For any thread and signal handlers: nothing waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._spent = clock, spent
        self._noted = threading.local()
        self._news: deque[float] = deque(maxlen=1000)
        self._adding = threading.Lock()
        self._seconds = 0.0
        self._past = deque([(clock(), 0.0)], maxlen=5)  # times, and the seconds until then, over the last minute

    def note(self) -> None:
        """Count what this thread, which is one of ours, has spent since its last call."""
        spent = self._spent()
        self._news.append(spent - getattr(self._noted, "at", 0.0))
        self._noted.at = spent
        self._add_up()

    def _add_up(self) -> None:
        if not self._adding.acquire(blocking=False):
            return  # another thread adds up; what it misses is added next time
        try:
            while self._news:
                self._seconds += self._news.popleft()
            now = self._clock()
            if now - self._past[-1][0] >= PAST_SECONDS:
                self._past.append((now, self._seconds))
        finally:
            self._adding.release()

    @property
    def seconds(self) -> float:
        """All that was counted."""
        self._add_up()
        return self._seconds

    @property
    def share(self) -> float:
        """The share of one processor in the last minute, or since the import."""
        seconds, (since, before) = self.seconds, self._past[0]
        return (seconds - before) / max(self._clock() - since, PAST_SECONDS)


PAST_SECONDS = 15.0

THREAD_TIME = ThreadTime()


class BackgroundThread:
    """Runs `body` once, in a daemon thread named `torch-grad-exporter-<role>`.

    It may hang: `join` has a time limit, and the end of the program does not wait. In a forked child it does not run, nothing
    starts it, and every method returns at once. `body` has a guard of its own: what it raises ends the thread.
    """

    def __init__(self, role: str, body: Callable[[], object]) -> None:
        self._body = body
        self._thread = threading.Thread(target=self._timed, name=f"torch-grad-exporter-{role}", daemon=True)
        self._process = os.getpid()

    def _timed(self) -> None:
        try:
            self._body()
        finally:
            THREAD_TIME.note()

    def start(self) -> None:
        """Start it, once. Raises `RuntimeError` if the system has no more threads."""
        if os.getpid() == self._process:
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has started and not ended; false in a forked child."""
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most this long; return whether it has. Called by the thread itself it returns at once."""
        if self.running and self._thread is not threading.current_thread():
            self._thread.join(None if seconds is None else max(0.0, seconds))
        return not self.running


class BackgroundLoop(BackgroundThread):
    """Calls each of `work` repeatedly in a `BackgroundThread`, until it is stopped, and then `last`.

    An iteration begins `pause` seconds after the end of the one before, or at once after a `wake`; with None only after a `wake`.
    A function returns the seconds before each iteration. One iteration runs at a time: however often it is requested meanwhile,
    one more follows. Each call is behind `guard`, so a failure costs that call alone.

    Only `start` and waiting take a lock, so all methods may be called from any thread, also from the loop's own, and from a
    signal's handler, whatever it has interrupted.
    """

    def __init__(
        self,
        role: str,
        *work: Callable[[], object],
        guard: Guard,
        pause: float | Callable[[], float] | None = None,
        last: Callable[[], object] | None = None,
    ) -> None:
        self._work = work
        self._guard = guard
        self._pause = pause
        self._last = last
        self._stopping = False
        # The only thing to wait for that a signal handler may wake while it interrupts another wake, and that works in a forked
        # child whatever the parent's threads were doing.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        super().__init__(role, self._run)

    def wake(self) -> None:
        """Begin an iteration at once, or after the one under way; before `start`, the first one."""
        self._wakes.put(None)

    def stop(self) -> None:
        """Let the iteration under way finish, and begin no other; return at once. Idempotent."""
        self._stopping = True
        self.wake()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called, for work that takes its time."""
        return self._stopping

    def close(self, seconds: float) -> bool:
        """Stop it and wait for its end, at most this long; return whether it has ended, else it is left behind. Idempotent."""
        self.stop()
        return self.join(seconds)

    def _run(self) -> None:
        while self._goes_on():
            for action in self._work:
                self._guard(action)
            THREAD_TIME.note()
        if self._last is not None:
            self._guard(self._last)

    def _goes_on(self) -> bool:
        """Wait until the next iteration is due; return whether there is one."""
        pause = self._pause() if callable(self._pause) else self._pause
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=None if pause is None else min(max(0.0, pause), threading.TIMEOUT_MAX))
        while not self._wakes.empty():
            self._wakes.get()
        return not self._stopping
