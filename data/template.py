"""What a chat template does: found out once per tokenizer, by trying it on a chat of two turns."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

QUESTION, REPLY, THOUGHT, CALLED = "draftsmith-question", "draftsmith-reply", "draftsmith-thought", "draftsmith_call"
TOOL = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": CALLED,
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": CALLED}}, "required": ["x"]},
    },
}
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROMPT_THINKS = re.compile(r"<think>\s*(</think>\s*)?\Z")  # a generation prompt that opens a thought, and may close it


class Refused(UserError):
    """What is wrong with one conversation; ``reason`` is the same few words for every conversation with this fault."""

    def __init__(self, sentence: str, reason: str = "") -> None:  # the default lets the exception be pickled
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Template:
    """What holds for every conversation that this template renders for this tokenizer.

    ``ending``: from a reply's last letter through the end-of-turn token; ``rest``: what follows it after a last reply, as
    text and as ids. ``before``: what the template writes between its generation prompt and a last reply, an empty thought
    for instance. ``stops``: the ids at which the target stops writing. ``cuts``: special tokens of the template, with
    their ids, at which the tokenizer splits any text before it looks at the letters. ``greedy`` finds, at the end of a
    text, a special token that swallows the white space behind it. ``known``: the ids of a few pieces that every
    conversation has.
    """

    ending: str
    rest: str
    rest_ids: tuple[int, ...]
    before: str
    stops: frozenset[int]
    cuts: dict[str, int]
    greedy: re.Pattern[str] | None
    known: dict[str, list[int]]
    reads_reasoning: bool
    shows_tools: bool
    tagged: bool


def template_of(tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> Template:
    """The facts about the tokenizer's template (the one for tools, where it has a separate one), cached.

    Raises UserError where the tokenizer has no template, or one in which no reply has a safe span.
    """
    state = (len(tokenizer), str(tokenizer.special_tokens_map))  # a tokenizer may be changed after it was tried
    return _learnt(tokenizer, template_text(tokenizer, tools), state)


def template_text(tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> str:
    """The Jinja text. Raises UserError where there is none."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: set tokenizer.chat_template and save it with the target.")
    return tokenizer.get_chat_template(None, tools)


def render(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    where: str,
    answer_next: bool = False,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool | None = None,
) -> str:
    """The chat template's text, with the generation prompt if ``answer_next``; ``where`` names the messages.

    ``thinking`` is what the template reads as ``enable_thinking``; None leaves the name undefined.

    Raises Refused where the template refuses the messages, UserError where there is no template.
    """
    text = template_text(tokenizer, tools)
    told = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=text, tokenize=False, add_generation_prompt=answer_next, **told
        )
    except Exception as error:  # a template is a program of its own and may raise anything
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise Refused(
            f"{where}: the chat template refuses the messages ({said}): mend them or use another template.",
            "the chat template refuses the messages",
        ) from error


def tokens(text: str, tokenizer: Any) -> list[int]:
    """Flat ids; the template wrote the special tokens, so the tokenizer adds none (no second BOS)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert all(isinstance(token, int) for token in ids), "the tokenizer must give one flat list of ids"
    return list(ids)


def letters(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of the ids as it stands, special tokens and white space included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def letters_behind(before: list[int], ids: list[int], tokenizer: Any) -> str:
    """The text that ``ids`` add behind the ids ``before``: some decoders drop the space that opens a text."""
    lead, whole = letters(before, tokenizer), letters(before + ids, tokenizer)
    return whole[len(lead) :] if whole.startswith(lead) else letters(ids, tokenizer)


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError where the template itself writes tokens beyond the model's ``vocab_size``.

    A tokenizer that is smaller than the model (a padded vocabulary) is right, and so is a larger one whose surplus tokens
    no chat holds; ``chat.check_ids`` tells the conversations that do.
    """
    asked = render([{"role": "user", "content": QUESTION}], tokenizer, "a sample question", answer_next=True)
    answered = render(_sample(content=REPLY), tokenizer, "a sample chat")
    beyond = max([*tokens(asked, tokenizer), *tokens(answered, tokenizer)])
    if beyond >= vocab_size:
        raise UserError(
            f"the chat template writes {tokenizer.convert_ids_to_tokens(beyond)!r} (token {beyond}), which is beyond the "
            f"target's {vocab_size} tokens: use the target's own tokenizer."
        )


def _sample(**reply: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", **reply}]


@functools.lru_cache(maxsize=16)
def _learnt(tokenizer: Any, text: str, state: tuple[int, str]) -> Template:
    def tried(messages: list[dict[str, Any]], **options: Any) -> str:
        return tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False, **options)

    def shows(mark: str, messages: list[dict[str, Any]], **options: Any) -> bool:
        try:
            return mark in tried(messages, **options)
        except Exception:
            return False

    question, chat = _sample()[:1], _sample(content=REPLY)
    try:
        asked, fed, whole = tried(question), tried(question, add_generation_prompt=True), tried(chat)
    except Exception as error:
        raise UserError(f"the chat template refuses a plain question and answer ({error}): use another template.") from error
    before = _before_reply(asked, fed, whole)
    named = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    ending, rest, end = _ending(whole, named)
    cuts = _cuts(tokenizer, fed + whole)
    header = fed[max((fed.rfind(cut) for cut in cuts if cut in fed), default=0) :]
    pieces = {header, *cuts}
    return Template(
        ending=ending,
        rest=rest,
        rest_ids=tuple(tokens(end + rest, tokenizer)[1:]),
        before=before,
        stops=frozenset(tokenizer.convert_tokens_to_ids([end]) + [tokenizer.eos_token_id]) - {None},
        cuts=cuts,
        greedy=_greedy(tokenizer, fed + whole),
        known={piece: tokens(piece, tokenizer) for piece in pieces},
        reads_reasoning=shows(THOUGHT, _sample(content=REPLY, reasoning_content=THOUGHT)),
        shows_tools=shows(CALLED, question, tools=[TOOL]),
        tagged=bool(GENERATION_TAG.search(text)),
    )


def _before_reply(asked: str, fed: str, whole: str) -> str:
    """What stands between the generation prompt and the reply; empty where the prompt opens a thought that is not shown.

    Raises UserError where the reply's first token cannot be told.
    """
    if REPLY in whole and whole.startswith(fed):
        before = whole[len(fed) : whole.index(REPLY)]
        if asked == fed and before.strip():
            raise UserError(
                "the chat template ignores add_generation_prompt, so a reply's first token is unknown: make it write "
                f"{before!r} when add_generation_prompt is set."
            )
        return before
    if REPLY in whole and not PROMPT_THINKS.search(fed):
        raise UserError(
            "a reply does not continue the chat template's generation prompt, so no safe span can be supervised: "
            "use a template whose generation prompt is the reply's own header."
        )
    return ""


def _ending(whole: str, named: set[str]) -> tuple[str, str, str]:
    """What follows the reply: through its end-of-turn token, after that, and the token itself."""
    tail = whole.rpartition(REPLY)[2]
    ends = [(tail.find(token), -len(token)) for token in named if token.strip() and token in tail]
    if REPLY not in whole or not ends:
        raise UserError(
            "the chat template writes no end-of-turn token after a reply, so no safe span can be supervised: "
            "use a template that closes the assistant's turn with a special token."
        )
    begin, length = min(ends)
    return tail[: begin - length], tail[begin - length :], tail[begin : begin - length]


def _cuts(tokenizer: Any, sample: str) -> dict[str, int]:
    """The template's special tokens at which what stands before has no say in how what follows is tokenized.

    The library for fast tokenizers matches added tokens from left to right in the raw text, and normalizes and splits what
    is between them each by itself; with one of them in front no piece counts as the text's beginning.
    """
    if not tokenizer.is_fast:
        return {}
    plain = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if str(token).strip() and not (token.normalized or token.single_word or token.lstrip)
    }
    return {text: number for text, number in plain.items() if text in sample and tokens(text, tokenizer) == [number]}


def _greedy(tokenizer: Any, sample: str) -> re.Pattern[str] | None:
    greedy = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.rstrip and str(token) in sample]
    return re.compile(f"(?:{'|'.join(map(re.escape, greedy))})\\s*\\Z") if greedy else None
