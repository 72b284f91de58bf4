"""A token sequence as text that can be looked at: each token with its borders, and whether it is supervised."""

import unicodedata
from typing import Any

from rich.text import Text

from .chat import Encoded
from .template import letters_behind

LETTER = 4  # no letter is longer than four bytes of UTF-8, so it is whole after as many tokens
LEAD = 8  # pieces decoded in front of another: enough for a decoder to know whether it opens the text
HALF = "\ufffd"  # what decoders write for bytes that are no letter yet
BORDER, OPEN, CLOSE = "│", "⟦", "⟧"
BELONGS_LEFT = "◂"
NOTHING = "∅"
SUPERVISED, READ = "bold green", "dim"
LEGEND = (
    f"{OPEN}supervised{CLOSE} tokens stand in brackets, {BORDER} parts tokens, ⏎ is a newline, "
    f"{BELONGS_LEFT} a further token of the letter before it"
)


def pieces(ids: list[int], tokenizer: Any) -> list[str | None]:
    """What each token adds to the text, special tokens included.

    Where several tokens make one letter (the bytes of an emoji), the first of them has it and the others are None.
    """
    found: list[str | None] = []
    begins = [0]  # of letters and of tokens that are text by themselves: a decoder must not be let in anywhere else
    while (start := len(found)) < len(ids):
        lead = ids[begins[-LEAD:][0] : start]
        first = text = letters_behind(lead, ids[start : start + 1], tokenizer)
        stop = start + 1
        while text.endswith(HALF) and stop < min(start + LETTER, len(ids)):
            before, stop = text, stop + 1
            text = letters_behind(lead, ids[start:stop], tokenizer)
            if not text.endswith(HALF) and text.startswith(before):
                text = HALF  # what came before stands as it was: the file itself holds it
                break
        if text.endswith(HALF):  # no letter comes of it, so each token stands for itself
            text, stop = first, start + 1
        found += [text, *[None] * (stop - start - 1)]
        begins.append(stop)
    return found


def visible(piece: str | None) -> str:
    """A piece with everything in it to be seen, and nothing that would steer a terminal or turn the writing around."""
    if piece is None:
        return BELONGS_LEFT
    return "".join(map(_letter, piece)) or NOTHING


def _letter(letter: str) -> str:
    code = ord(letter)
    if letter == "\n":
        return "⏎\n"
    if letter == "\t":
        return "⇥"
    if code < 32:
        return chr(0x2400 + code)  # Unicode's pictures of the control characters
    if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Cs"):
        return f"⟨{code:04X}⟩"
    return letter


def terminal(example: Encoded, tokenizer: Any) -> Text:
    """The tokens of one conversation for the terminal; the mask can be read without colours, too."""
    text = Text()
    before = False
    for piece, supervised in zip(pieces(example.ids.tolist(), tokenizer), example.mask, strict=True):
        if supervised != before:
            text.append(OPEN if supervised else CLOSE, "bold")
        elif text:
            text.append(BORDER, READ)
        text.append(visible(piece), SUPERVISED if supervised else READ)
        before = supervised
    text.append(CLOSE if before else "", "bold")
    return text
