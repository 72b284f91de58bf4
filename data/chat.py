"""From a conversation to token ids and the mask of what the assistant wrote, by the target's own chat template."""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from .conversations import Conversation
from .replies import Chat, Turn, prepared
from .template import Refused, letters, render, template_of, tokens
from .tokenized import Tokenized

NO_SUPERVISION = "no supervised tokens"

# What was not supervised, or changed: the notes of an Encoded.
REWRITTEN = "an earlier turn is rewritten by the template"
JOINED = "an earlier reply joins its header"
UNSAFE = "an earlier turn has no safe span"
WEIGHTLESS = "a turn has weight 0"
STOPPED = "a reply holds an end-of-turn token"
UNTAGGED = "the template's generation tags leave a turn out"
THOUGHTLESS = "the template adds an empty thought"
FOLDED = "reasoning is written into the content as <think>"
TOOLLESS = "the template does not show the tools"
CUT = "cut at max_length"


@dataclass(frozen=True)
class Encoded:
    """One conversation as the target reads it: ``ids`` int32 [time]; ``mask`` bool [time], True on the assistant's tokens.

    ``notes``: what was not supervised or was changed, in the constant phrases above, each once.
    """

    ids: np.ndarray
    mask: np.ndarray
    notes: tuple[str, ...] = ()


class EncodedRows(Sequence[Encoded], ABC):
    """Encoded conversations that lie elsewhere and are read one by one."""

    @abstractmethod
    def read(self, row: int) -> Encoded:
        """The conversation ``row``, 0 <= row < len(self)."""

    @overload
    def __getitem__(self, row: int) -> Encoded: ...
    @overload
    def __getitem__(self, row: slice) -> list[Encoded]: ...
    def __getitem__(self, row: int | slice) -> Encoded | list[Encoded]:
        if isinstance(row, slice):
            return [self.read(i) for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self.read(row % len(self))


@dataclass(frozen=True)
class Span:
    """What the target wrote in one turn: letters ``begin`` to ``end`` of the text, tokens ``start`` to ``stop`` of the ids.

    The end-of-turn token and what stands before it in the ending are the last ``closing`` letters.
    """

    begin: int
    end: int
    start: int
    stop: int
    closing: int


def prompt_ids(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """The flat token ids that a server feeds for these messages, generation prompt included.

    ``thinking`` is told to a template that asks for ``enable_thinking``; None leaves it its default.

    Raises UserError where the tokenizer has no chat template or the template refuses the messages.
    """
    if any("reasoning_content" in message for message in messages):
        messages, _ = prepared(messages, template_of(tokenizer, tools))
    text = render(messages, tokenizer, "the prompt", answer_next=True, tools=tools, thinking=thinking)
    return tokens(text, tokenizer)


def encode(conversation: Conversation, tokenizer: Any, max_length: int | None, only_last: bool = False) -> Encoded:
    """The ids of a conversation up to its last assistant turn, and the mask of what the target itself would write.

    The ids of the last turn are those of its generation prompt followed by those of the reply. A turn is supervised from
    its first token through its end-of-turn token, where the prompt's ids stay a prefix of the whole: an earlier turn
    that the template writes differently later (its reasoning dropped, say) is read and not supervised. Turns of weight 0
    are not supervised, and with ``only_last`` no turn but the last. ``finish`` "length" stops right after the last reply's
    text. Whatever is beyond ``max_length`` tokens is cut off on the right.

    Raises Refused, naming file and row, where this conversation has no safe span for its last turn; UserError where the
    template or the tokenizer leaves none in any conversation.
    """
    template = template_of(tokenizer, conversation.tools)
    asked = [i for i, message in enumerate(conversation.messages) if i and message["role"] == "assistant"]
    turns = [i for i in asked if conversation.messages[i].get("weight", 1) != 0]
    notes = [WEIGHTLESS] * (len(turns) < len(asked)) + [TOOLLESS] * bool(conversation.tools and not template.shows_tools)
    if not turns:  # nobody asked for a reply that opens the conversation
        return Encoded(np.zeros(0, np.int32), np.zeros(0, bool), tuple(notes))
    messages, folded = prepared(conversation.messages[: turns[-1] + 1], template)
    chat = Chat(messages, conversation.tools, tokenizer, template, f"{conversation.file}, row {conversation.row}")
    last = chat.turn(turns[-1])
    notes += [FOLDED] * folded + [THOUGHTLESS] * last.thoughtless

    ids, read, last_span = _last_span(chat, last, conversation.finish == "length")
    found = [_earlier_span(chat, i, last.prompt, read) for i in turns[:-1] if not only_last]
    notes += [why for why in found if isinstance(why, str)]
    mask = np.zeros(len(ids), bool)
    tags = chat.tags(last.prompt + last.written)
    for span in [*(span for span in found if isinstance(span, Span)), last_span]:
        why = _supervise(mask, span, ids, tags, read)
        notes += [why] if why else []
    notes += [CUT] * (max_length is not None and len(ids) > max_length)
    return Encoded(np.array(ids, np.int32)[:max_length], mask[:max_length], tuple(dict.fromkeys(notes)))


def supervises(mask: np.ndarray) -> bool:
    """Whether some position t has both t+1 and t+2 in the mask [time], as the first draft depth needs."""
    return bool((mask[1:-1] & mask[2:]).any())


def check_ids(example: Encoded, vocab_size: int, where: str) -> None:
    """Raise Refused where a conversation (its place is ``where``) holds a token beyond the model's ``vocab_size``."""
    largest = int(example.ids.max(initial=0))
    if largest >= vocab_size:
        raise Refused(
            f"{where}: token {largest} is beyond the target's {vocab_size} tokens: use the target's own tokenizer or remove "
            "that token's text.",
            "a token beyond the target's vocabulary",
        )


def _last_span(chat: Chat, last: Turn, is_cut: bool) -> tuple[list[int], Tokenized, Span]:
    """The ids of the whole conversation, the text they begin with as it was tokenized, and the last turn's span.

    Where the reply's first letters would merge with the prompt's last ones (a reply that opens with a newline), the two
    are tokenized apart: the prompt is fed before the reply exists. ``is_cut``: the target wrote no ending.
    """
    written, rest = (last.reply, "") if is_cut else (last.written, last.rest)
    begin, end = len(last.prompt), len(last.prompt) + len(written)
    read = Tokenized(last.prompt + written + rest, chat.tokenizer, chat.template)
    start, stop = read.index(begin), read.index(end)
    ids = read.ids
    if start is None or stop is None or read.swallowed(begin):
        read = Tokenized(last.prompt, chat.tokenizer, chat.template)
        own = _apart(read, written, chat)
        start, stop = len(read.ids), len(read.ids) + len(own)
        ids = read.ids + own + list(chat.template.rest_ids if rest else ())
    return ids, read, Span(begin, end, start, stop, 0 if is_cut else len(last.ending))


def _apart(read: Tokenized, written: str, chat: Chat) -> list[int]:
    """The ids of ``written`` behind the prompt ``read``, tokenized by itself. Raises Refused where no ids give that text."""

    def decoded(ids: list[int]) -> str:
        return unicodedata.normalize("NFKC", letters(ids, chat.tokenizer))  # as far as a tokenizer may go in unifying letters

    wanted = unicodedata.normalize("NFKC", decoded(read.ids) + written)
    for front in ("", next(iter(chat.template.cuts), "")):  # some put a space before a text's first word, not before a later
        own = tokens(front + written, chat.tokenizer)[bool(front) :]
        if decoded(read.ids + own) == wanted:
            return own
    raise Refused(
        f"{chat.where}: the reply's first letters merge with its header and cannot be tokenized apart: mend the reply.",
        "the reply cannot be told apart from its header",
    )


def _earlier_span(chat: Chat, i: int, fed: str, read: Tokenized) -> Span | str:
    """The span of an earlier assistant turn that stands in ``fed`` just as the target wrote it then, or why there is none."""
    try:
        turn = chat.turn(i)
    except Refused:  # the last turn has passed, so it is this turn alone that has no safe span
        return UNSAFE
    begin, end = len(turn.prompt), len(turn.prompt) + len(turn.written)
    if not (fed.startswith(turn.prompt) and fed.startswith(turn.written, begin)):
        return REWRITTEN
    start, stop = read.index(begin), read.index(end)
    if start is None or stop is None or read.swallowed(begin):
        return JOINED
    return Span(begin, end, start, stop, len(turn.ending))


def _supervise(mask: np.ndarray, span: Span, ids: list[int], tags: list[tuple[int, int]] | None, read: Tokenized) -> str | None:
    """Set a turn's tokens in ``mask``, in place, or say why not. Of a turn with tags only what they mark is supervised."""
    if read.template.stops.intersection(ids[span.start : span.stop - (span.closing > 0)]):
        return STOPPED  # the target would not have gone on
    marked = np.ones(span.stop - span.start, bool) if tags is None else _tagged(span, tags, read)
    mask[span.start : span.stop] = marked
    return None if marked.any() else UNTAGGED


def _tagged(span: Span, tags: list[tuple[int, int]], read: Tokenized) -> np.ndarray:
    """Which tokens of a span the tags mark: bool [tokens]. The turn's ending stays, whether or not its tag holds it."""
    own = [(a, b) for a, b in tags if a < span.end and b > span.begin]
    marked = np.zeros(span.stop - span.start, bool)
    whole = any(a <= span.begin and b >= span.end - span.closing for a, b in own)
    if not own or whole:
        return marked | whole
    if read.encoding is None or span.stop > len(read.ids):  # no record of the letters behind the ids
        return ~marked
    for token in range(span.start, span.stop):
        begin, end = read.encoding.token_to_chars(token)
        marked[token - span.start] = any(begin < b and end > a for a, b in own)
    if marked.any():
        marked[np.flatnonzero(marked)[-1] :] = True
    return marked
