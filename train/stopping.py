"""How a run is told to stop: what is under way is finished, or left where nothing is lost by that, and a checkpoint saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from ..console import note

AGAIN = 75  # the exit status of a run that was stopped and can go on: EX_TEMPFAIL of sysexits.h, "try again later"


class Interrupted(SystemExit):
    """A signal came while there was nothing to finish."""

    def __init__(self) -> None:
        super().__init__(AGAIN)


class Stopping:
    """Catches SIGTERM and SIGINT while it is entered; ``asked`` is the name of the one that came, None before.

    The first raises Interrupted where the run is ``interruptible``, as it is until its first step and while it is evaluated,
    and is only noted elsewhere. A second one does what it would have done without. Outside the main thread, where signals
    cannot be caught, none are.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.interrupts = True
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.told) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self, yes: bool) -> Iterator[None]:
        """Whether the block may be left in the middle. A signal that came before it counts in it."""
        before, self.interrupts = self.interrupts, yes
        try:
            if yes and self.asked:
                raise Interrupted
            yield
        finally:
            self.interrupts = before

    def told(self, number: int, _: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self.__exit__()
        if self.interrupts:
            note(f"{self.asked}: stopping here")
            raise Interrupted
        note(f"{self.asked}: finishing this step, then saving a checkpoint; a second {self.asked} stops at once")
