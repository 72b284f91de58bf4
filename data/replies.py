"""What the target writes in each of its turns, and what it has been fed before: as texts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers.utils.chat_template_utils import render_jinja_template

from .template import PROMPT_THINKS, Refused, Template, render, template_text

NO_THOUGHT = re.compile(r"(<think>)?\s*</think>\n*")  # an empty thought, or the rest of one that the prompt opened


@dataclass(frozen=True)
class Turn:
    """The texts of one assistant turn: all that is fed before it, what the target writes, and what follows.

    ``ending`` runs from the reply's end through the end-of-turn token, ``rest`` is what the template adds after that.
    ``thoughtless``: the prompt holds an empty thought that the template wrote in the target's place.
    """

    prompt: str
    reply: str
    ending: str
    rest: str
    thoughtless: bool = False

    @property
    def written(self) -> str:
        return self.reply + self.ending


@dataclass(frozen=True)
class Chat:
    """A conversation through its last supervised turn, as the template takes it; ``where`` names it in a UserError."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tokenizer: Any
    template: Template
    where: str

    def rendered(self, count: int, answer_next: bool = False) -> str:
        return render(self.messages[:count], self.tokenizer, self.where, answer_next, self.tools)

    def turn(self, i: int) -> Turn:
        """The texts of message ``i``, an assistant's, as if it were the last. Raises Refused where its span is not safe."""
        prompt, whole, message = self.rendered(i, answer_next=True), self.rendered(i + 1), self.messages[i]
        ending, rest = self.template.ending, self.template.rest
        if whole.startswith(prompt):
            body = whole[len(prompt) :]
            if message.get("tool_calls") and not body.endswith(ending + rest):
                ending, rest = self.end_of_call(body)
            reply = body.removesuffix(ending + rest)
            thought = self.empty_thought(reply, message)
            if ending and body.endswith(ending + rest) and _holds(reply[len(thought) :], message):
                return Turn(prompt + thought, reply[len(thought) :], ending, rest, bool(thought))
        reply = self.thought_continued(prompt, message["content"])
        if reply is None:
            raise self.refused(whole.startswith(prompt))
        return Turn(prompt, reply, ending, rest)

    def refused(self, continues: bool) -> Refused:
        """Why a turn has no safe span; ``continues``: its text begins as the target would begin it."""
        if continues:
            reason = "the chat template leaves out part of the reply"
            mend = "mend the reply or use another template"
        else:
            reason = "the reply does not continue the generation prompt"
            mend = "use another template, or answers that keep their reasoning where the prompt opens a <think> block"
        return Refused(f"{self.where}: {reason}, so no safe span can be supervised: {mend}.", reason)

    def empty_thought(self, reply: str, message: dict[str, Any]) -> str:
        """What the template writes at the head of a reply in the target's place, or nothing."""
        before = self.template.before
        found = NO_THOUGHT.match(before if before and reply.startswith(before) else reply)
        if not found or _squeezed(message["content"]).startswith(_squeezed(found.group())):
            return ""
        return found.group()

    def end_of_call(self, body: str) -> tuple[str, str]:
        """The special token with which a tool call ends, where an answer ends otherwise, and the white space behind it."""
        named = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        end = max((token for token in named if body.rstrip().endswith(token)), key=len, default="")
        return end, body[len(body.rstrip()) :]

    def thought_continued(self, prompt: str, content: str) -> str | None:
        """What the target writes after a generation prompt that opens a thought which the rendered reply does not show."""
        thinks = PROMPT_THINKS.search(prompt)
        if thinks and thinks.group(1) and "</think>" not in content:  # the prompt closed the thought: the answer follows
            return content
        if thinks and not thinks.group(1) and content.lstrip().startswith("<think>"):
            thought, fed = content.lstrip(), thinks.group()
            return thought.removeprefix(fed) if thought.startswith(fed) else thought.removeprefix("<think>").lstrip()
        return None

    def tags(self, text: str) -> list[tuple[int, int]] | None:
        """The letters that the template's generation tags mark; None where it has none or ``text`` is not what they mark."""
        if not self.template.tagged:
            return None
        wholes, marks = cast(Any, render_jinja_template)(
            [self.messages],
            tools=self.tools,
            chat_template=template_text(self.tokenizer, self.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return marks[0] if wholes[0].startswith(text) else None


def prepared(messages: Sequence[dict[str, Any]], template: Template) -> tuple[list[dict[str, Any]], bool]:
    """The messages as the template takes them, and whether some reasoning was written into its content."""
    ready, folded = [], False
    for message in messages:
        message = {key: value for key, value in message.items() if key != "weight"}
        if message.get("reasoning_content") and not template.reads_reasoning:
            thought = message.pop("reasoning_content").strip("\n")
            message["content"] = f"<think>\n{thought}\n</think>\n\n" + message["content"].lstrip("\n")
            folded = True
        ready.append(message)
    return ready, folded


def _holds(reply: str, message: dict[str, Any]) -> bool:
    """Whether a rendered reply holds all that the message says, one after the other, whatever became of white space."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
    if not calls and "reasoning_content" not in message and message["content"] in reply:
        return True
    text, place = _squeezed(reply), 0
    for part in map(_squeezed, (message.get("reasoning_content", ""), message["content"], *calls)):
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def _squeezed(text: str) -> str:
    return "".join(text.split())
