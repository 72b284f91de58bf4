"""Prompt look-up: draft what once followed the n-gram that the text now ends with.

Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023), with the choices of vLLM 0.32's
``ngram`` method (v1/spec_decode/ngram_proposer.py): the longest n-gram wins, of its occurrences the first one.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import UserError
from ..heads.base import Draft
from .lookups import LookUp, chained, form_of
from .proposers import NOTHING, Text
from .tree import Settings, positive


@dataclass
class Index:
    """Where every n-gram of a text's first ``read`` tokens ended for the first time: the place behind its last token."""

    first: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0


class NGram(LookUp):
    """Chains of at most ``length`` tokens behind a match of ``least`` to ``most`` tokens."""

    name = "ngram"

    def __init__(self, length: int = 5, most: int = 4, least: int = 1) -> None:
        if least > most:
            raise UserError(f"ngram matches {least} tokens at least and {most} at most: give a min that is no larger than max.")
        self.length, self.sizes = length, range(least, most + 1)

    @classmethod
    def read(cls, settings: str) -> Self:
        """Read ``5,max=4,min=1``: the draft's length, and how many tokens must match; all of it may be left out."""
        size, *rest = settings.split(",")
        try:
            given = Settings(rest, {"max", "min"})
            return cls(positive(size or "5"), given.count("max", 4), given.count("min", 1))
        except ValueError as error:
            raise UserError(f"ngram:{settings} cannot be read ({error}): write ngram:5 or ngram:5,max=4,min=1.") from error

    def described(self) -> dict[str, Any]:
        return form_of(f"ngram:{self.length},max={self.sizes[-1]},min={self.sizes[0]}", self.length)

    def begin(self, prompt: list[int]) -> Index:
        index = Index()
        self.extend(index, prompt)
        return index

    def extend(self, index: Index, tokens: list[int]) -> None:
        """Take in the tokens that the index has not read."""
        for end in range(index.read + 1, len(tokens) + 1):
            for size in self.sizes:
                if size <= end:
                    index.first.setdefault(tuple(tokens[end - size : end]), end)
        index.read = len(tokens)

    def draft(self, text: Text) -> Draft:
        tokens, index = text.tokens, text.state
        self.extend(index, tokens)
        for size in reversed(self.sizes):
            if size < len(tokens) and (end := index.first[tuple(tokens[-size:])]) < len(tokens):
                return chained(tokens[end : end + min(self.length, text.room)])
        return NOTHING
