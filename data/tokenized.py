"""Which tokens a stretch of a text is, without tokenizing all that stands before it again."""

from typing import Any

from .template import Template, tokens


class Tokenized:
    """A text and its ``ids``. ``encoding`` is the fast tokenizers' own record of the letters behind each id, or None."""

    def __init__(self, text: str, tokenizer: Any, template: Template) -> None:
        self.text, self.tokenizer, self.template = text, tokenizer, template
        lean = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
        batch = tokenizer(text, add_special_tokens=False, **lean)
        self.ids: list[int] = batch["input_ids"]
        self.encoding: Any = batch.encodings[0] if tokenizer.is_fast else None

    def index(self, end: int) -> int | None:
        """How many of the ids are those of ``text[:end]``; None where the text behind ``end`` changes them."""
        if end == len(self.text):
            return len(self.ids)
        first, own = self._split_before(end) or (0, tokens(self.text[:end], self.tokenizer))
        return first + len(own) if self.ids[first : first + len(own)] == own else None

    def swallowed(self, place: int) -> bool:
        """Whether the letter at ``place`` is white space that a special token before it takes in."""
        behind = self.text[place : place + 1].isspace() and self.template.greedy
        return bool(behind and behind.search(self.text, 0, place))

    def _split_before(self, end: int) -> tuple[int, list[int]] | None:
        """(k, own), so that the ids of ``text[:end]`` are ``ids[:k] + own``; None where that is not certain.

        It is certain where the whole text was split at the last of the template's special tokens before ``end``: the
        splitting goes from left to right, and what is between two of them is tokenized without regard to the rest.
        """
        cut, token = max(((self.text.rfind(token, 0, end), token) for token in self.template.cuts), default=(-1, ""))
        place = self.encoding.char_to_token(cut) if cut >= 0 else None
        if place is None or self.ids[place] != self.template.cuts[token] or self.encoding.token_to_chars(place)[0] != cut:
            return None
        piece = self.text[cut:end]
        return place, self.template.known.get(piece) or tokens(piece, self.tokenizer)
