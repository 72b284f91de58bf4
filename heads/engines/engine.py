"""What an engine is to an export: a release, and a layout for each kind of head that it loads."""

from dataclasses import dataclass

from ..layouts.layout import Layout


@dataclass(frozen=True)
class Engine:
    """``version``: the release whose loader the layouts were written for. ``layouts`` by head kind; ``others`` says why it
    has no others, as the rest of a sentence."""

    version: str
    layouts: dict[str, Layout]
    others: str
