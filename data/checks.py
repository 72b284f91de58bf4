"""Do a target's tokenizer, chat template and config go together? Each check is one line: fine or not, and why."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from .chat import REWRITTEN, THOUGHTLESS, UNSAFE, encode
from .conversations import Conversation
from .facts import TargetFacts
from .template import Refused, render, template_of, template_text, tokens

CLOCK = re.compile(r"strftime_now|date_string")
SHOWN = 200  # letters of a default system prompt
ASK, ANSWER = "draftsmith-ask", "draftsmith-answer"
PAST_ANSWERS = {
    "without reasoning": ANSWER,
    "with white space around them": f" {ANSWER} \n",
    "with reasoning": f"<think>\nwell\n</think>\n\n{ANSWER}",
}


@dataclass(frozen=True)
class Check:
    """One finding; ``ok`` False is worth a look before training, and ``says`` tells in one sentence what follows from it."""

    name: str
    ok: bool
    says: str


def check_all(facts: TargetFacts) -> list[Check]:
    """Every check that needs no data.

    Raises UserError where the template leaves no safe span in any conversation, so that no other check means anything.
    """
    return [check for find in CHECKS for check in find(facts)]


def check_tags(facts: TargetFacts) -> Iterator[Check]:
    """Whether the template itself marks what the assistant writes."""
    tagged = template_of(facts.tokenizer).tagged
    how = "are there and narrow the mask" if tagged else "are not there; the mask is found by rendering turn by turn"
    yield Check("chat template", True, f"there is one, and generation tags {how}.")


def check_system_prompt(facts: TargetFacts) -> Iterator[Check]:
    """Whether a chat without a system message gets one, and whether it is the same every day."""
    added = added_prompt(facts.tokenizer)
    says = (
        f"a chat without one is given {shorten(added, SHOWN)!r}, as on a server."
        if added
        else "none is added to a chat without one."
    )
    yield Check("default system prompt", True, says)
    if CLOCK.search(template_text(facts.tokenizer)):
        says = "the template may write today's date, so the same file can give other tokens another day."
        yield Check("date", False, says)


def added_prompt(tokenizer: Any) -> str:
    """What the template writes ahead of a first question and not ahead of a second one, special tokens left out."""
    chat = [_user(ASK), _assistant(ANSWER), _user("draftsmith-second")]
    try:
        alone, whole = render(chat[:1], tokenizer, "a sample question"), render(chat, tokenizer, "a sample chat")
    except Refused:
        return ""
    opening = tokens(alone.partition(ASK)[0], tokenizer)
    header = tokens(whole.rpartition(ANSWER)[2].partition("draftsmith-second")[0], tokenizer)
    while opening and header and opening[-1] == header.pop():
        opening.pop()
    written = tokenizer.decode(opening, skip_special_tokens=True).strip()
    return written.removeprefix("system").lstrip()


def check_bos(facts: TargetFacts) -> Iterator[Check]:
    """Whether a sequence opens with exactly one BOS, where the tokenizer means it to open with one."""
    tokenizer, bos = facts.tokenizer, facts.tokenizer.bos_token_id
    written = tokens(render([_user(ASK)], tokenizer, "a sample question"), tokenizer)
    added = list(tokenizer(ASK)["input_ids"])[:1] == [bos]  # by the tokenizer itself, ahead of plain text
    if bos is None:
        yield Check("BOS", True, "the tokenizer has none.")
    elif written[:2] == [bos, bos]:
        yield Check("BOS", False, "the chat template writes it twice: remove one from the template.")
    elif written[:1] == [bos] and added:
        says = "the chat template writes it and the tokenizer would add another; draftsmith lets the template alone do it."
        yield Check("BOS", True, says)
    elif added:
        says = "plain text is given one and a chat is not: the template leaves it out, so it may not be the model's own."
        yield Check("BOS", False, says)
    else:
        yield Check("BOS", True, "written once." if written[:1] == [bos] else "neither template nor tokenizer writes one.")


def check_end(facts: TargetFacts) -> Iterator[Check]:
    """Whether the model stops at the token with which the template ends a turn."""
    end = tokens(template_of(facts.tokenizer).ending, facts.tokenizer)[-1]
    named, stops = _token(end, facts), ", ".join(_token(i, facts) for i in sorted(facts.eos_ids)) or "no token at all"
    if end in facts.eos_ids:
        yield Check("end of turn", True, f"a turn ends with {named}, at which the model stops.")
    else:
        says = f"a turn ends with {named} and the model stops at {stops}: add {end} to eos_token_id in generation_config.json."
        yield Check("end of turn", False, says)


def check_pad(facts: TargetFacts) -> Iterator[Check]:
    """Whether padding can be mistaken for an end."""
    pad = facts.tokenizer.pad_token_id
    if pad is None:
        yield Check("padding", True, "the tokenizer has no pad token, and none is needed.")
    elif pad in facts.eos_ids:
        says = f"{_token(pad, facts)} ends texts, too; the mask goes by position, so the ends stay supervised."
        yield Check("padding", True, says)
    else:
        yield Check("padding", True, f"{_token(pad, facts)} is no end-of-text token.")


def check_answer(facts: TargetFacts) -> Iterator[Check]:
    """Whether an answer without reasoning can be supervised."""
    try:
        notes = encode(_chat(ANSWER), facts.tokenizer, None).notes
    except Refused as refused:
        says = f"rows whose last answer holds no reasoning are dropped ({refused.reason})."
        yield Check("plain answer", False, says)
        return
    thought = "follows an empty thought that the template writes" if THOUGHTLESS in notes else "follows the header at once"
    yield Check("plain answer", True, f"it {thought}, and all of it is supervised.")


def check_history(facts: TargetFacts) -> Iterator[Check]:
    """Whether an answer is written the same once it is no longer the last one."""
    lost = [how for how, answer in PAST_ANSWERS.items() if _is_rewritten(answer, facts.tokenizer)]
    if not lost:
        yield Check("history", True, "earlier answers stay as they were written.")
    else:
        what = "all of them" if len(lost) == len(PAST_ANSWERS) else f"those {' or '.join(lost)}"
        says = f"the template rewrites earlier answers ({what}): supervised is only what ends a row, so give each turn its own."
        yield Check("history", False, says)


def check_vocabulary(facts: TargetFacts) -> Iterator[Check]:
    """Whether the model has a row for each token."""
    known, rows = len(facts.tokenizer), facts.vocab_size
    if known > rows:
        says = f"the tokenizer has {known} tokens and the model {rows}: rows with one of the last {known - rows} are dropped."
        yield Check("vocabulary", False, says)
    elif known < rows:
        says = f"the model has {rows} rows for {known} tokens, so the last {rows - known} are padding and never written."
        yield Check("vocabulary", True, says)
    else:
        yield Check("vocabulary", True, f"tokenizer and model have {rows} tokens each.")


def check_positions(facts: TargetFacts, longest: int) -> Check:
    """Whether the model has been built for sequences as long as the longest conversation."""
    if longest > facts.max_positions:
        says = f"the longest of {longest} tokens is beyond the model's {facts.max_positions}: lower max_length to that."
        return Check("positions", False, says)
    return Check("positions", True, f"the longest of {longest} tokens fits the model's {facts.max_positions}.")


CHECKS: tuple[Callable[[TargetFacts], Iterator[Check]], ...] = (
    check_tags, check_system_prompt, check_bos, check_end, check_pad, check_answer,
    check_history, check_vocabulary,
)  # fmt: skip


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _chat(*answers: str) -> Conversation:
    messages = [message for answer in answers for message in (_user(ASK), _assistant(answer))]
    return Conversation(messages, "a sample chat", 1)


def _is_rewritten(answer: str, tokenizer: Any) -> bool:
    """Whether the first of two turns with this answer is lost to supervision by the template's doing."""
    try:
        return not {REWRITTEN, UNSAFE}.isdisjoint(encode(_chat(answer, answer), tokenizer, None).notes)
    except Refused:  # an answer of this kind is not for this template
        return False


def _token(token: int, facts: TargetFacts) -> str:
    return f"{facts.tokenizer.convert_ids_to_tokens(token)!r} ({token})"
