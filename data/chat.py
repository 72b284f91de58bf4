"""From a conversation to token ids and the mask of what the assistant wrote, by the target's own chat template."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from ..errors import UserError
from .conversations import Conversation

PLACEHOLDER = "draftsmith-reply"
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROMPT_THINKS = re.compile(r"<think>\s*(</think>\s*)?\Z")  # a generation prompt that opens a thought, and may close it
NO_THOUGHT = re.compile(r"(<think>)?\s*</think>\s*")  # an empty thought, or the rest of one that the prompt opened
NO_SUPERVISION = "no supervised tokens"


@dataclass(frozen=True)
class Encoded:
    """One conversation as the target reads it: ``ids`` int32 [time]; ``mask`` bool [time], True on the assistant's tokens."""

    ids: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Turn:
    """The texts of one assistant turn: all that is fed before it, what the target writes, and what follows.

    ``ending`` runs from the reply's end through the end-of-turn token, ``rest`` is what the template adds after that.
    """

    prompt: str
    reply: str
    ending: str
    rest: str

    @property
    def written(self) -> str:
        return self.reply + self.ending


def render(messages: Sequence[dict[str, Any]], tokenizer: Any, where: str, answer_next: bool = False) -> str:
    """The chat template's text, with the generation prompt if ``answer_next``; ``where`` names the messages in a UserError."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: set tokenizer.chat_template and save it with the target.")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer_next)
    except jinja2.TemplateError as error:
        raise UserError(
            f"{where}: the chat template refuses the messages ({error}): mend them or use another template."
        ) from error


def tokens(text: str, tokenizer: Any) -> list[int]:
    """Flat ids; the template wrote the special tokens, so the tokenizer adds none (no second BOS)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert all(isinstance(token, int) for token in ids), "the tokenizer must give one flat list of ids"
    return list(ids)


def prompt_ids(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """The flat token ids that a server feeds for these messages, generation prompt included.

    Raises UserError where the tokenizer has no chat template or the template refuses the messages.
    """
    return tokens(render(messages, tokenizer, "the prompt", answer_next=True), tokenizer)


def encode(conversation: Conversation, tokenizer: Any, max_length: int | None) -> Encoded:
    """The ids of a conversation up to its last assistant turn, and the mask of what the target itself would write.

    The ids of the last turn are those of its generation prompt followed by those of the reply. A turn is supervised from
    its first token through its end-of-turn token, where the prompt's ids stay a prefix of the whole: an earlier turn
    that the template writes differently later (its reasoning dropped, say) is read and not supervised. ``finish`` "length"
    stops right after the last reply's text. Whatever is beyond ``max_length`` tokens is cut off on the right.

    Raises UserError, naming file and line, where the template refuses the messages or hides where a reply begins or ends.
    """
    where = f"{conversation.file}, line {conversation.row}"
    turns = [i for i, message in enumerate(conversation.messages) if i and message["role"] == "assistant"]
    if not turns:  # nobody asked for a reply that opens the conversation
        return Encoded(np.zeros(0, np.int32), np.zeros(0, bool))
    messages = conversation.messages[: turns[-1] + 1]
    last = _turn(messages, tokenizer, where)
    written = last.reply if conversation.finish == "length" else last.written
    start, ids = _continued(last.prompt, written, tokenizer)
    spans = [(start, len(ids))]
    if conversation.finish != "length":
        whole = _continued(last.prompt, written + last.rest, tokenizer)[1]
        if whole[: len(ids)] != ids:
            raise UserError(f"{where}: the tokenizer joins the end-of-turn token with what follows it: use another template.")
        ids = whole
    spans += _earlier_spans(messages, turns[:-1], last.prompt, ids, tokenizer, where)
    mask = np.zeros(len(ids), bool)
    for begin, end in spans:
        mask[begin:end] = True
    if GENERATION_TAG.search(str(tokenizer.chat_template)):
        _narrow(mask, spans, ids, messages, tokenizer)
    return Encoded(np.array(ids, np.int32)[:max_length], mask[:max_length])


def encode_all(
    conversations: Iterable[Conversation], tokenizer: Any, max_length: int | None, progress: Callable[[int], Any] | None = None
) -> tuple[list[Encoded], dict[str, int]]:
    """Encode every conversation; returns those with something to learn, in order, and how many were dropped by reason.

    ``progress`` is called with 1 for each conversation read. Raises UserError when nothing is kept.
    """
    kept: list[Encoded] = []
    dropped: dict[str, int] = {}
    for conversation in conversations:
        example = encode(conversation, tokenizer, max_length)
        if supervises(example.mask):
            kept.append(example)
        else:
            dropped[NO_SUPERVISION] = dropped.get(NO_SUPERVISION, 0) + 1
        if progress:
            progress(1)
    if not kept:
        raise UserError(
            f"no conversation is left to learn from ({sum(dropped.values())} without supervised tokens): raise max_length "
            f"(now {max_length}) or give conversations with longer answers."
        )
    return kept, dropped


def supervises(mask: np.ndarray) -> bool:
    """Whether some position t has both t+1 and t+2 in the mask [time], as the first draft depth needs."""
    return bool((mask[1:-1] & mask[2:]).any())


def _continued(prompt: str, text: str, tokenizer: Any) -> tuple[int, list[int]]:
    """The length of the prompt's ids, and the ids of prompt and text together, which begin with them.

    Where the text's first letters would merge with the prompt's last ones (a reply that opens with a newline), the two
    are tokenized apart: the prompt is fed before the reply exists.
    """
    fed, whole = tokens(prompt, tokenizer), tokens(prompt + text, tokenizer)
    return len(fed), whole if whole[: len(fed)] == fed else fed + tokens(text, tokenizer)


def _turn(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> Turn:
    """The texts of the last message, an assistant's. Raises UserError where its span cannot be told safely."""
    prompt = render(messages[:-1], tokenizer, where, answer_next=True)
    whole = render(messages, tokenizer, where)
    ending, rest = _ending(messages, tokenizer, where)
    content = messages[-1]["content"]
    if whole.startswith(prompt) and whole.endswith(ending + rest):
        reply = whole[len(prompt) : len(whole) - len(ending + rest)]
        supplied = NO_THOUGHT.match(reply)
        if supplied and not content.lstrip().startswith(supplied.group().strip()):
            prompt, reply = prompt + supplied.group(), reply[supplied.end() :]  # the template's words, not the target's
        headless = prompt == render(messages[:-1], tokenizer, where)
        if headless and not reply.lstrip().startswith(content.strip()):
            raise UserError(
                f"{where}: the chat template ignores add_generation_prompt, so a reply's first token is unknown: mend it."
            )
        return Turn(prompt, reply, ending, rest)
    return Turn(prompt, _thought_continued(prompt, content, where), ending, rest)


def _thought_continued(prompt: str, content: str, where: str) -> str:
    """What the target writes after a generation prompt that opens a thought which the rendered reply does not show."""
    thinks = PROMPT_THINKS.search(prompt)
    if thinks and thinks.group(1):  # the prompt closed the thought: the answer follows
        return content.strip()
    if thinks and content.lstrip().startswith("<think>"):
        return content.strip().removeprefix("<think>").lstrip()
    raise UserError(
        f"{where}: the rendered reply does not continue the template's generation prompt, so no safe span can be "
        "supervised: use another template, or answers that keep their reasoning where the prompt opens a <think> block."
    )


def _ending(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> tuple[str, str]:
    """What the template writes after the last reply, cut behind its end-of-turn token."""
    probe = render([*messages[:-1], {**messages[-1], "content": PLACEHOLDER}], tokenizer, where)
    tail = probe.rpartition(PLACEHOLDER)[2]
    named = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    ends = [(tail.find(token), -len(token)) for token in named if token.strip() and token in tail]
    if PLACEHOLDER not in probe or not ends:
        raise UserError(
            f"{where}: the chat template writes no end-of-turn token after a reply, so no safe span can be supervised: "
            "use a template that closes the assistant's turn with a special token."
        )
    first, length = min(ends)
    return tail[: first - length], tail[first - length :]


def _earlier_spans(
    messages: list[dict[str, Any]], turns: list[int], fed: str, ids: list[int], tokenizer: Any, where: str
) -> list[tuple[int, int]]:
    """Token spans of earlier assistant turns that stand in ``ids`` just as the target wrote them then."""
    spans = []
    for i in turns:
        with contextlib.suppress(UserError):  # the last turn has passed, so it is this turn alone that has no safe span
            turn = _turn(messages[: i + 1], tokenizer, where)
            if not fed.startswith(turn.prompt + turn.written):
                continue
            start, through = _continued(turn.prompt, turn.written, tokenizer)
            if ids[: len(through)] == through:
                spans.append((start, len(through)))
    return spans


def _narrow(
    mask: np.ndarray, spans: list[tuple[int, int]], ids: list[int], messages: list[dict[str, Any]], tokenizer: Any
) -> None:
    """Keep, in place, what the template's generation tags mark. A turn's ending stays, whether or not its tag holds it."""
    if not tokenizer.is_fast:  # the library needs character offsets
        return
    marked = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    if list(marked["input_ids"])[: len(ids)] != ids:  # the reply merged with its prompt: the library's spans are off
        return
    tagged = np.array(marked["assistant_masks"][: len(ids)], bool)
    for start, end in spans:
        mask[start:end] = tagged[start:end]
        if tagged[start:end].any():
            mask[start + int(np.flatnonzero(tagged[start:end])[-1]) : end] = True
