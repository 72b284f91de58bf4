"""What a run says on the terminal: notes and progress bars, on stderr so that stdout stays one JSON document."""

import sys
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

stderr = Console(file=sys.stderr, highlight=False)


def note(text: str) -> None:
    """One line for the person who watches."""
    stderr.print(text, markup=False, soft_wrap=True)


class Progress:
    """A progress bar with an estimate; silent when stderr is piped or ``show`` is False."""

    def __init__(self, title: str, total: int, done: int = 0, show: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[extra]}"))
        self.bar = RichProgress(*columns, console=stderr, disable=not (show and stderr.is_terminal), transient=True)
        self.task = self.bar.add_task(title, total=total, completed=done, extra="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def advance(self, steps: int = 1, extra: str = "") -> None:
        """Move on by ``steps`` and show ``extra`` behind the bar."""
        self.bar.update(self.task, advance=steps, extra=extra)
