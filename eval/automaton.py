"""A suffix automaton that grows a token at a time and counts: what followed a run of tokens, and how often.

Blumer et al., 1985; over several texts, Mohri, Moreno and Weinstein, 2009. A state stands for all runs of tokens that end at
the same places; ``link`` leads to the state of the longest of their suffixes that ends at more places.
"""

from collections.abc import Iterable, Iterator


class Automaton:
    """Every run of tokens in the texts read. State 0 is the empty run.

    For every state: ``follow`` maps a next token, in the order they first came, to the state of the run with it; ``longest``
    is the length of its longest run, ``count`` at how many places its runs end. ``last`` is the whole text's state. A text
    of n tokens takes at most 2n states; a token costs a step for every state that the text's end is in.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.longest = [0]
        self.count = [0]
        self.last = 0
        self.read = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Read on in the current text."""
        for token in tokens:
            self.append(token)

    def restart(self) -> None:
        """End the current text: the next token begins another one."""
        self.last = self.read = 0

    def append(self, token: int) -> None:
        follow, link = self.follow, self.link
        state = self.last
        if token in follow[state]:  # at a restart's heels: an earlier text went this way
            self.last = self.reached(state, token)
        else:
            self.last = self.add({}, -1, self.read + 1, 0)
            while state >= 0 and token not in follow[state]:
                follow[state][token] = self.last
                state = link[state]
            link[self.last] = self.reached(state, token) if state >= 0 else 0
        self.read += 1
        count, state = self.count, self.last
        while state:
            count[state] += 1
            state = link[state]

    def reached(self, state: int, token: int) -> int:
        """The state of the longest run of ``state`` with ``token`` behind it: parted from longer ones that share its state."""
        shared = self.follow[state][token]
        if self.longest[shared] == self.longest[state] + 1:
            return shared
        own = self.add(dict(self.follow[shared]), self.link[shared], self.longest[state] + 1, self.count[shared])
        self.link[shared] = own
        while state >= 0 and self.follow[state].get(token) == shared:
            self.follow[state][token] = own
            state = self.link[state]
        return own

    def add(self, follow: dict[int, int], link: int, longest: int, count: int) -> int:
        self.follow.append(follow)
        self.link.append(link)
        self.longest.append(longest)
        self.count.append(count)
        return len(self.link) - 1

    def ends(self) -> Iterator[tuple[int, int]]:
        """The ends of the current text that stood before, longest first: state and length. Those that share a state, and
        so what follows, are given once, by the longest."""
        yield from self.suffixes(self.link[self.last] if self.last else 0)

    def matches(self, tokens: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The same for the ends of other tokens, where they stand in the texts read."""
        state = length = 0
        for token in tokens:
            while state and token not in self.follow[state]:
                state = self.link[state]
                length = self.longest[state]
            if token in self.follow[state]:
                state, length = self.follow[state][token], length + 1
        if state:
            yield state, length
            yield from self.suffixes(self.link[state])

    def suffixes(self, state: int) -> Iterator[tuple[int, int]]:
        while state:
            yield state, self.longest[state]
            state = self.link[state]
