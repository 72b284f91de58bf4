"""What a run says on the terminal: notes and progress bars, on stderr so that stdout stays one JSON document."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

import datasets
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from .errors import UserError

Force = Annotated[bool, typer.Option(help="replace what exists")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]
Debug = Annotated[bool, typer.Option(help="show the traceback of a mistake, too")]  # read by run_command_line

Out = Annotated[Path, typer.Option(help="the directory to write")]
Seed = Annotated[int, typer.Option(help="of everything drawn at random")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]

stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """One line for the person who watches."""
    stderr.print(text, markup=False, soft_wrap=True)


def show(document: Any, as_json: bool, text: Any) -> None:
    """The command's answer on stdout: the document as JSON, or the text for a reader."""
    if as_json:
        json.dump(document, sys.stdout)
        print()
    else:
        Console(highlight=False, markup=False, soft_wrap=True).print(text)


def command_line(**settings: Any) -> typer.Typer:
    """An application whose help and errors are plain text."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def run_command_line(app: Callable[[], object]) -> None:
    """Run the process's command line. A user's mistake ends it with one sentence on stderr and status 2."""
    if not stderr.is_terminal:
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    try:
        app()
    except UserError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


class Progress:
    """A progress bar with an estimate; silent when stderr is piped or ``show`` is False."""

    def __init__(self, title: str, total: int, done: int = 0, show: bool = True) -> None:
        kept = Column(no_wrap=True)
        columns = (
            TextColumn("{task.description}", table_column=kept),
            BarColumn(10 if stderr.width < 140 else 40, table_column=kept),
            MofNCompleteColumn(table_column=kept),
            TimeRemainingColumn(table_column=kept),
            TextColumn("{task.fields[extra]}", table_column=Column()),  # alone takes a second line on a narrow terminal
        )
        hidden = not (show and stderr.is_terminal)
        # the estimate looks back an hour: steps of half a minute and pauses between them are usual
        self.bar = RichProgress(*columns, console=stderr, disable=hidden, transient=True, speed_estimate_period=3600)
        self.task = self.bar.add_task(title, total=total, completed=done, extra="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def advance(self, steps: int = 1, extra: str = "") -> None:
        """Move on by ``steps`` and show ``extra`` behind the bar."""
        self.bar.update(self.task, advance=steps, extra=extra)

    def name(self, title: str, extra: str = "") -> None:
        """Say in front of the bar what is being done now."""
        self.bar.update(self.task, description=title, extra=extra)

    def reach(self, done: int) -> None:
        """Stand at ``done`` steps in all."""
        self.bar.update(self.task, completed=done)
