"""What stands on the terminal."""

import io

import pytest
from rich.console import Console

from draftsmith import console


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_terminal_is_too_narrow_for_the_count_and_the_time_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "stderr", terminal)
    bar = console.Progress("training", 12000, done=10)
    bar.advance(5, "loss 2.346, τ-sim 1.83, 12.3k tokens/s (9.1k supervised), 35.2 GiB")
    terminal.print(bar.bar.make_tasks_table(bar.bar.tasks))
    assert isinstance(terminal.file, io.StringIO)
    words = terminal.file.getvalue().split()
    assert {"training", "15/12000", "-:--:--", "2.346,", "12.3k", "supervised),", "GiB"} <= set(words)
