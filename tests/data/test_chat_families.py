"""Mask exactness: every family of templates against every shape of conversation, adversarial texts included."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from draftsmith.data import chat
from draftsmith.data.chat import Encoded, Refused, encode, prompt_ids
from draftsmith.data.conversations import Conversation
from draftsmith.data.template import check_vocabulary, template_of, tokens
from draftsmith.data.tokenized import Tokenized
from draftsmith.errors import UserError


def load_families() -> Any:
    spec = importlib.util.spec_from_file_location("templates", Path(__file__).with_name("templates.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["templates"] = module
    spec.loader.exec_module(module)
    return module


templates = load_families()
FAMILIES = {family.name: family for family in templates.FAMILIES}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "look it up", "parameters": {"type": "object"}}}]
WORDS = [
    "hi",
    "the cat",
    "Why?",
    "é",
    "e\u0301",
    "\u0301",
    "👋🏽",
    "שלום",
    "猫",
    " ",
    "\n",
    "\n\n",
    "  \n",
    "\t",
    "x" * 30,
    "0.5",
]
LETTERS = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="▁")  # ▁ is how some tokenizers write a space


def texts(family: Any) -> st.SearchStrategy[str]:
    piece = st.sampled_from([*WORDS, *family.markers, "<think>", "</think>"]) | st.text(LETTERS, max_size=4)
    usual = st.sampled_from(["hello there", "it is so.", "no", "\nyes", " well", "so\n", "the cat: one", ""])
    return usual | st.lists(piece, max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, family: Any) -> Conversation:
    content = texts(family)
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []
    tools = TOOLS if family.has_tools and draw(st.booleans()) else None
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(content)})
        if tools and draw(st.booleans()):
            calls = [
                {"type": "function", "function": {"name": "look", "arguments": {"for": draw(st.sampled_from(["a", "ü\n"]))}}}
            ]
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", "", "wait"])), "tool_calls": calls})
            messages.append({"role": "tool", "content": draw(content)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(content)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(st.sampled_from(["hm", "so\nit", "\nwell \n", "the cat?"]))
        if draw(st.integers(0, 7)) == 0:
            answer["weight"] = 0
        messages.append(answer)
    return Conversation(messages, "chats.jsonl", 3, draw(st.sampled_from(["stop", "stop", "length"])), tools)


def runs(example: Encoded, tokenizer: Any) -> list[str]:
    """The text of each run of supervised tokens, as it reads in its place."""

    def text(end: int) -> str:
        return tokenizer.decode(example.ids[:end], clean_up_tokenization_spaces=False)

    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask.astype(int), [0]])))
    return [text(b)[len(text(a)) :] for a, b in edges.reshape(-1, 2)]


def written(family: Any, conversation: Conversation, messages: list[dict[str, Any]], i: int) -> tuple[str, str] | None:
    """What the target writes in turn i, and the ending it writes after that; None where that cannot be told."""
    said = family.said(messages, i)
    if said is None:
        return None
    if conversation.finish == "length" and i == len(messages) - 1:
        return said, ""
    own_end = family.ends_call and messages[i].get("tool_calls") and conversation.tools
    return said, family.ends_call(messages, i) if own_end else family.end


def expected(family: Any, conversation: Conversation, example: Encoded) -> list[str]:
    """The runs that must be supervised: all turns but those that a reason known to the family leaves out."""
    tokenizer = family.tokenizer
    turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and m.get("weight") != 0]
    messages, ids = conversation.messages[: turns[-1] + 1], example.ids.tolist()
    wanted = []
    for i in turns:
        parts = written(family, conversation, messages, i)
        is_last = i == turns[-1]
        if parts is None or any(stop in parts[0] for stop in family.stops) or not (is_last or family.stands(messages, i)):
            continue
        fed = prompt_ids(messages[:i], tokenizer, conversation.tools)
        joined = ids[: len(fed)] != fed or (family.greedy and "".join(parts)[:1].isspace())
        if "".join(parts) and (is_last or not joined):
            wanted.append(family.unified("".join(parts)))
    return wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_covers_exactly_what_the_target_writes(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    seen = {"supervised": 0, "refused": 0}

    @settings(max_examples=150, derandomize=True, deadline=None, database=None)
    @given(conversations(family))
    def check(conversation: Conversation) -> None:
        turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and m.get("weight") != 0]
        try:
            example = encode(conversation, tokenizer, None)
        except Refused as refused:
            seen["refused"] += 1
            assert_refused_rightly(family, conversation, turns[-1], refused)
            return
        assert len(example.ids) == len(example.mask)
        if not turns:
            assert len(example.ids) == 0
            return
        messages = conversation.messages[: turns[-1] + 1]
        fed = prompt_ids(messages[:-1], tokenizer, conversation.tools)
        assert example.ids[: len(fed)].tolist() == fed  # a server's
        assert runs(example, tokenizer) == expected(family, conversation, example)
        seen["supervised"] += int(example.mask.any())
        last = encode(conversation, tokenizer, None, only_last=True)
        assert last.ids.tolist() == example.ids.tolist()
        assert not last.mask[: len(fed)].any()
        assert last.mask[len(fed) :].tolist() == example.mask[len(fed) :].tolist()

    check()
    assert seen["supervised"] > 40, seen  # the property was tried


def assert_refused_rightly(family: Any, conversation: Conversation, last: int, refused: Refused) -> None:
    """That a refusal names a reason that the family's own rules, or its tokenizer, bear out."""
    messages = conversation.messages[: last + 1]
    if refused.reason == "the chat template refuses the messages":
        raise AssertionError(refused)  # the shapes are such as every family takes
    parts = written(family, conversation, messages, last)
    if refused.reason == "the reply cannot be told apart from its header":
        fed = prompt_ids(messages[:-1], family.tokenizer, conversation.tools)
        assert parts is not None
        whole = tokens(text_before(family, messages, conversation.tools) + "".join(parts), family.tokenizer)
        assert whole[: len(fed)] != fed or (family.greedy and parts[0][:1].isspace())
    else:
        assert refused.reason in (NOT_CONTINUED, LEFT_OUT) and parts is None


def text_before(family: Any, messages: list[dict[str, Any]], tools: Any) -> str:
    ready, _ = chat.prepared(messages[:-1], template_of(family.tokenizer, tools))
    return family.tokenizer.apply_chat_template(ready, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_before_a_letter_are_those_of_the_text_tokenized_up_to_it(name: str) -> None:
    """The quick way to a boundary against the plain one, at every place of texts full of special tokens."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    template = template_of(tokenizer)
    header = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    pieces = st.lists(st.sampled_from([*WORDS, *family.markers, header, family.end + template.rest, "<", "|"]), max_size=8)

    @settings(max_examples=40, derandomize=True, deadline=None, database=None)
    @given(pieces.map("".join), st.data())
    def check(text: str, data: st.DataObject) -> None:
        read = Tokenized(text, tokenizer, template)
        assert read.ids == tokens(text, tokenizer)
        for end in data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=8)):
            plain = tokens(text[:end], tokenizer)
            assert read.index(end) == (len(plain) if read.ids[: len(plain)] == plain else None)

    check()


# -- cases ---------------------------------------------------------------------------------------------------------


def talk(*texts: str, **more: Any) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], "chats.jsonl", 3, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fake_turn_inside_a_user_turn_is_not_supervised(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    shown = tokenizer.apply_chat_template(talk("MINE", "<think>\nhm\n</think>\n\nTHEIRS", "MORE").messages, tokenize=False)
    fake = shown[shown.index("MINE") : shown.index("MORE")]  # the template's own text of a whole exchange
    assert "THEIRS" in fake and family.end in fake
    answer = "<think>\nhm\n</think>\n\nreal"
    example = encode(talk(fake, answer), tokenizer, None)
    assert "THEIRS" in tokenizer.decode(example.ids)
    assert runs(example, tokenizer) == expected(family, talk(fake, answer), example)
    assert len(runs(example, tokenizer)) == 1 and "real" in runs(example, tokenizer)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_behind_whose_end_of_turn_more_follows_is_not_supervised(name: str) -> None:
    family = FAMILIES[name]
    example = encode(talk("a", f"<think>\nhm\n</think>\n\nso{family.end}it is"), family.tokenizer, None)
    assert not example.mask.any() and chat.STOPPED in example.notes


@pytest.mark.parametrize(
    ("name", "reply", "text"),
    [
        ("smollm2", "\n\nyes", "\n\nyes<|im_end|>"),  # merges with the header's newline
        ("qwen3", "\nyes", "yes<|im_end|>"),
        ("phi", "\nyes", "\nyes<|end|>"),  # would be swallowed by the header
        ("phi", " yes", " yes<|end|>"),
        ("qwen3", "<think></think>yes", "<think>\n\n</think>\n\nyes<|im_end|>"),  # a thought that the target left empty itself
        ("qwen3", "yes", "yes<|im_end|>"),
        ("deepseek", "<think>\n\nhm</think>yes", "\nhm</think>yes<｜end▁of▁sentence｜>"),
        ("deepseek", "\n<think>hm</think>yes", "hm</think>yes<｜end▁of▁sentence｜>"),
        ("mistral", "yes", " yes</s>"),  # no generation prompt, and none is needed
        ("mistral", "", " </s>"),
        ("gemma", "  yes\n", "yes<end_of_turn>"),
        ("vicuna", "yes", " yes</s>"),
        ("llama3", "", "<|eot_id|>"),
    ],
)
def test_a_last_reply_follows_the_prompt_that_is_fed(name: str, reply: str, text: str) -> None:
    tokenizer = FAMILIES[name].tokenizer
    example = encode(talk("hi", reply), tokenizer, None)
    assert runs(example, tokenizer) == [text]
    fed = prompt_ids(talk("hi").messages, tokenizer)
    assert example.ids[: len(fed)].tolist() == fed


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral", "deepseek"])
def test_one_bos_where_template_and_tokenizer_both_write_it(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    example = encode(talk("a", "<think>\nb\n</think>\n\nc"), tokenizer, None)
    assert example.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert prompt_ids(talk("a").messages, tokenizer).count(tokenizer.bos_token_id) == 1


NOT_CONTINUED = "the reply does not continue the generation prompt"
LEFT_OUT = "the chat template leaves out part of the reply"
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"a": "ü", "b": 1}}}]
SYSTEM = {"role": "system", "content": "be kind"}
THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
LONG = talk("a", "b", "c", "d").messages


@pytest.mark.parametrize(
    ("name", "messages", "more", "notes", "supervised"),
    [
        ("smollm2", LONG, {}, (), 2),
        ("smollm2", LONG, {"max_length": 48}, (chat.CUT,), 1),
        ("smollm2", [*LONG[:2], {"role": "user", "content": "c"}, THOUGHT], {}, (chat.FOLDED,), 2),
        ("smollm2", talk("a", "\n\nb", "c", "d").messages, {}, (chat.JOINED,), 1),
        ("smollm2", talk("a", "b<|im_end|>", "c", "d").messages, {}, (chat.STOPPED,), 1),
        ("smollm2", LONG, {"tools": TOOLS}, (chat.TOOLLESS,), 2),
        ("smollm2", [LONG[0], {**LONG[1], "weight": 0}, *LONG[2:]], {}, (chat.WEIGHTLESS,), 1),
        ("smollm2", [*LONG[:3], {**LONG[3], "weight": 0}], {}, (chat.WEIGHTLESS,), 1),
        ("smollm2", [*LONG[:3], {**LONG[3], "weight": 1}], {}, (), 2),
        ("qwen3", [LONG[0], THOUGHT], {}, (), 1),
        ("qwen3", [LONG[0], THOUGHT, LONG[2], THOUGHT], {}, (chat.REWRITTEN,), 1),
        ("qwen3", LONG, {}, (chat.THOUGHTLESS, chat.REWRITTEN), 1),
        ("mistral", [SYSTEM, *LONG], {}, (chat.REWRITTEN,), 1),
        ("mistral", LONG, {}, (), 2),
        ("deepseek", [LONG[0], THOUGHT, LONG[2], THOUGHT], {}, (chat.FOLDED, chat.REWRITTEN), 1),
        ("deepseek", [*LONG[:3], THOUGHT], {}, (chat.FOLDED, chat.UNSAFE), 1),
        ("phi", talk("a", " b", "c", "d").messages, {}, (chat.JOINED,), 1),
        ("smollm2", [LONG[1], *LONG], {}, (), 2),
    ],
)
def test_what_was_not_supervised_is_said(name: str, messages: list, more: dict, notes: tuple, supervised: int) -> None:
    tokenizer = FAMILIES[name].tokenizer
    conversation = Conversation(messages, "chats.jsonl", 3, tools=more.get("tools"))
    example = encode(conversation, tokenizer, more.get("max_length"))
    assert example.notes == notes
    assert len(runs(example, tokenizer)) == supervised
    last = encode(conversation, tokenizer, more.get("max_length"), only_last=True)
    assert len(runs(last, tokenizer)) <= 1 and not {chat.REWRITTEN, chat.JOINED, chat.UNSAFE} & set(last.notes)


def test_a_turn_of_weight_0_at_the_end_is_left_out_with_all_that_follows_the_last_weighted_one() -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer
    messages = [*LONG[:3], {**LONG[3], "weight": 0}]
    whole = encode(Conversation(LONG[:2], "chats.jsonl", 3), tokenizer, None)
    assert encode(Conversation(messages, "chats.jsonl", 3), tokenizer, None).ids.tolist() == whole.ids.tolist()
    nothing = Conversation([LONG[0], {**LONG[1], "weight": 0}], "chats.jsonl", 3)
    assert len(encode(nothing, tokenizer, None).ids) == 0


def test_a_template_that_rewrites_history_at_the_same_length_is_noticed() -> None:
    tokenizer = templates.finished(
        templates.byte_level(),
        "{{ '<|im_start|>system\n' ~ messages | selectattr('role', 'eq', 'user') | list | length ~ ' questions<|im_end|>\n' }}"
        + templates.CHATML,
        templates.IM, bos=None, eos="<|im_end|>", pad=None, adds_bos=False,
    )  # fmt: skip
    example = encode(talk("a", "b", "c", "d"), tokenizer, None)
    assert runs(example, tokenizer) == ["d<|im_end|>"] and example.notes == (chat.REWRITTEN,)


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("gemma", [*LONG[:1], *LONG[:2]], "the chat template refuses the messages"),
        ("deepseek", LONG, NOT_CONTINUED),
        ("deepseek", talk("a", "x</think><think>\ny").messages, LEFT_OUT),
        ("qwen3", talk("a", "x<think>y</think>z").messages, LEFT_OUT),
        ("llama3", [LONG[0], {**LONG[1], "tool_calls": CALLS}], LEFT_OUT),  # "b" stands in the call by chance
        ("vicuna", [LONG[0], {"role": "assistant", "content": "", "tool_calls": CALLS}], LEFT_OUT),
    ],
)
def test_a_conversation_without_a_safe_span_is_refused_with_its_place(name: str, messages: list, reason: str) -> None:
    with pytest.raises(Refused, match="chats.jsonl, row 3: ") as refused:
        encode(Conversation(messages, "chats.jsonl", 3), FAMILIES[name].tokenizer, None)
    assert refused.value.reason == reason


def test_a_thinking_template_with_and_without_reasoning() -> None:
    """CASE 05."""
    tokenizer = FAMILIES["qwen3"].tokenizer
    messages = [{"role": "user", "content": "a"}, THOUGHT, {"role": "user", "content": "c"}, THOUGHT]
    spelled = [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"} if m is THOUGHT else m for m in messages]
    for conversation in (messages, spelled):
        example = encode(Conversation(conversation, "f", 1), tokenizer, None)
        fed = prompt_ids(conversation[:3], tokenizer)
        assert example.ids.tolist() == fed + tokenizer("<think>\nhm\n</think>\n\nyes<|im_end|>\n").input_ids
        assert "hm" not in tokenizer.decode(fed)  # history follows the template
        assert example.mask.tolist() == [False] * len(fed) + [True] * (len(example.ids) - len(fed) - 1) + [False]
    example = encode(talk("a", "b", "c", "yes"), tokenizer, None)
    fed = tokenizer.apply_chat_template(
        talk("a", "b", "c").messages, tokenize=True, add_generation_prompt=True, enable_thinking=False
    )["input_ids"]
    assert tokenizer.decode(fed).endswith("<think>\n\n</think>\n\n")
    assert example.ids.tolist() == fed + tokenizer("yes<|im_end|>\n").input_ids
    assert runs(example, tokenizer) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3", '<tool_call>\n{"name": "look", "arguments": {"a": "ü", "b": 1}}\n</tool_call><|im_end|>'),
        ("llama3", '{"name": "look", "parameters": {"a": "ü", "b": 1}}<|eom_id|>'),
        ("mistral", '[CALLS] [{"name": "look", "arguments": {"a": "ü", "b": 1}}]</s>'),
    ],
)
def test_tool_calls_are_supervised_and_their_results_are_not(name: str, call: str) -> None:
    """CASE 07. (The reader gives the arguments as one dict, whatever the file held.)"""
    family = FAMILIES[name]
    asks = {"role": "assistant", "content": "", "tool_calls": CALLS}
    if name == "qwen3":
        asks, call = {**asks, "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\n" + call
    messages = [LONG[0], asks, {"role": "tool", "content": '{"found": 1}'}, THOUGHT]
    example = encode(Conversation(messages, "f", 1, tools=TOOLS), family.tokenizer, None)
    answer = family.said(messages, 3) + family.end
    assert runs(example, family.tokenizer) == [call, answer] and chat.TOOLLESS not in example.notes
    text = family.tokenizer.decode(example.ids)
    assert '{"found": 1}' in text and "look it up" in text and "None" not in text and "null" not in text


class Counting(PreTrainedTokenizerFast):
    """Counts the letters that it is given."""

    letters = 0

    def __call__(self, text: Any, **options: Any) -> Any:
        self.letters += len(text)
        return super().__call__(text, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cost_is_linear_in_the_length(name: str) -> None:
    plain = FAMILIES[name].tokenizer
    tokenizer = Counting(
        tokenizer_object=plain.backend_tokenizer, **{key: str(token) for key, token in plain.special_tokens_map.items()}
    )
    tokenizer.chat_template = plain.chat_template
    conversation = talk(*["a few words", "<think>\nhm\n</think>\n\nand some more"] * 60)
    encode(talk("a", "<think>\nhm\n</think>\n\nb"), tokenizer, None)  # learns the template
    tokenizer.letters = 0
    example = encode(conversation, tokenizer, None)
    assert tokenizer.letters < 2.5 * len(plain.decode(example.ids)) + 500


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python, as those are that no file of the fast library exists for: one id a letter."""

    def __init__(self, **options: Any) -> None:
        self.alphabet = [*map(chr, range(32, 127)), "\n"]
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.alphabet)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.alphabet.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.alphabet[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


@pytest.mark.parametrize("template", ["CHATML", "TAGGED", "QWEN3"])
def test_a_tokenizer_that_keeps_no_record_of_letters(template: str) -> None:
    tokenizer = Letters(bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = getattr(templates, template)
    assert not tokenizer.is_fast
    example = encode(talk("a", "\nb", "c", "<think>\nhm\n</think>\n\nd"), tokenizer, None)
    first = ["\nb<|im_end|>"] if template != "QWEN3" else []
    assert runs(example, tokenizer) == [*first, "<think>\nhm\n</think>\n\nd<|im_end|>"]


@pytest.mark.parametrize(("end", "flags"), [("||", {}), ("<w>", {"single_word": True}), ("<n>", {"normalized": True})])
def test_odd_special_tokens_are_no_place_to_cut_unless_the_text_was_split_there(end: str, flags: dict) -> None:
    odd = AddedToken(end, special=not flags.get("normalized"), **{"normalized": False, **flags})
    tokenizer = templates.finished(
        templates.metaspace("legacy"),
        "{% for m in messages %}{{ m.content + END }}{% endfor %}".replace("END", repr(end)),
        [odd, AddedToken("</s>", special=True)],
        bos=None, eos="</s>", pad=None, adds_bos=False,
    )  # fmt: skip
    template = template_of(tokenizer)
    for text in (f"a{end}", f"a {end}b", f"a |{end}|b{end} c", f"a{end} {end}|", f"{end} {end}{end}b{end}"):
        read = Tokenized(text, tokenizer, template)
        for place in range(len(text) + 1):
            plain = tokens(text[:place], tokenizer)
            assert read.index(place) == (len(plain) if read.ids[: len(plain)] == plain else None), (text, place)


def test_tokens_beyond_the_models_vocabulary() -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer
    check_vocabulary(tokenizer, len(tokenizer))
    check_vocabulary(tokenizer, len(tokenizer) + 100)  # a padded vocabulary
    with pytest.raises(
        UserError, match=r"the chat template writes '<\|im_end\|>' \(token \d+\), .* use the target's own tokenizer"
    ):
        check_vocabulary(tokenizer, len(tokenizer) - 1)
    larger = templates.finished(
        templates.byte_level(), templates.CHATML, templates.special("<|im_start|>", "<|im_end|>", "[PAD]"), bos=None,
        eos="<|im_end|>", pad="[PAD]", adds_bos=False,
    )  # fmt: skip
    check_vocabulary(larger, len(larger) - 1)  # no template writes the padding token
    chat.check_ids(encode(talk("a", "b"), larger, None), len(larger) - 1, "f, row 1")
    with pytest.raises(Refused, match="f, row 2: token .* is beyond the target's") as refused:
        chat.check_ids(encode(talk("a [PAD]", "b"), larger, None), len(larger) - 1, "f, row 2")
    assert refused.value.reason == "a token beyond the target's vocabulary"
    chat.check_ids(encode(talk("a"), larger, None), 1, "f, row 3")  # nothing to hold one
