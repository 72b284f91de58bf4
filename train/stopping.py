"""How a run is told to stop: the step that is under way is finished and saved first."""

import signal
import threading
from types import FrameType
from typing import Any, Self

from ..console import note

AGAIN = 75  # the exit status of a run that was stopped and can go on: EX_TEMPFAIL of sysexits.h, "try again later"


class Stopping:
    """Catches SIGTERM and SIGINT while it is entered; ``asked`` is the name of the one that came, None before.

    A second one does what it would have done without. Outside the main thread, where signals cannot be caught, none are.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.told) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def told(self, number: int, _: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self.__exit__()
        note(f"{self.asked}: finishing this step, then saving a checkpoint; a second {self.asked} stops at once")
