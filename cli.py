"""The command line: one thin command per verb."""

import typer

from .train.__main__ import main as train

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("train")(train)


@app.callback()
def draftsmith() -> None:
    """Train, measure and export draft heads for speculative decoding."""


def main() -> None:
    app()
