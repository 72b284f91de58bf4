"""Has a text fallen into a loop? Greedy decoding of a small model does, and a head learns nothing from it."""

import re

MOST_REPEATED = 0.6  # fewer distinct word 4-grams than this share of all are a loop
FEWEST_GRAMS = 8  # in a shorter text nothing can be told
TIMES = 4  # how often a passage must stand at the end of a text ...
LETTERS = 80  # ... and how much of the text that must be
LONGEST_PASSAGE = 1000  # letters


def loops(words: list[str]) -> bool:
    """Whether fewer than 60 % of the text's word 4-grams are distinct: the mark of a degenerate loop.

    Words are runs of letters, so a list that only counts upwards loops too.
    """
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(grams) >= FEWEST_GRAMS and len(set(grams)) < MOST_REPEATED * len(grams)


def ends_in_a_loop(text: str) -> bool:
    """Whether the text ends in one passage, of one letter or up to 1,000, four times running and 80 letters in all."""
    for passage in range(1, min(LONGEST_PASSAGE, len(text) // TIMES) + 1):
        through = max(TIMES * passage, LETTERS)
        tail = text[-through:]
        if len(tail) == through and tail[passage:] == tail[:-passage]:
            return True
    return False


def is_a_loop(text: str) -> bool:
    """Whether a text repeats itself, by its words throughout or by its letters at the end."""
    return loops(re.findall(r"[^\W\d_]+", text.lower())) or ends_in_a_loop(text)
