import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.data.chat import Encoded, Refused, encode, prompt_ids, supervises
from draftsmith.data.conversations import Conversation
from draftsmith.errors import UserError

HEADER = "{{ '<|im_start|>' + m['role'] + '\n' }}"
TAGGED = (
    f"{{% for m in messages %}}{HEADER}{{% if m['role'] == 'assistant' %}}BODY"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADER_IN_TAG = (
    f"{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{{% generation %}}{HEADER}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    f"{{% else %}}{HEADER}{{{{ m['content'] + '<|im_end|>\n' }}}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(*texts: str, finish: str = "stop") -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], "chats.jsonl", 7, finish)


def supervised(example: Encoded, tokenizer: Any) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask.astype(int), [0]])))
    return [tokenizer.decode(example.ids[a:b]) for a, b in edges.reshape(-1, 2)]


# -- CASE 01: the mask does not depend on how the template is written ----------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "plain",
        "generation",
        "generation-dash",
        "strict",
        TAGGED.replace("BODY", "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"),
        TAGGED.replace("BODY", "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"),
        HEADER_IN_TAG,
    ],
)
def test_every_spelling_of_the_template_gives_the_replies_and_their_ends(tiny_tokenizer_factory: Any, template: str) -> None:
    tokenizer = tiny_tokenizer_factory(template)
    conversation = chat("hi", "hello there", "and the rest?", "no.")
    example = encode(conversation, tokenizer, None)
    assert supervised(example, tokenizer) == ["hello there<|im_end|>", "no.<|im_end|>"]
    assert example.ids.tolist() == tokenizer.apply_chat_template(conversation.messages, tokenize=True)["input_ids"]
    assert (example.ids.dtype, example.mask.dtype) == (np.int32, np.bool_)
    assert len(example.ids) == len(example.mask)


def test_generation_tags_may_leave_a_turn_out(tiny_tokenizer_factory: Any) -> None:
    body = "{% if loop.last %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    tokenizer = tiny_tokenizer_factory(
        TAGGED.replace("BODY", body + "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}")
    )
    assert supervised(encode(chat("a", "bc", "d", "ef"), tokenizer, None), tokenizer) == ["ef<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "mend"),
    [
        (TAGGED.replace("BODY", "{{ m['content'] + '\n' }}"), "no end-of-turn token"),
        (TAGGED.replace("BODY", "{{ 'hidden<|im_end|>' }}"), "no end-of-turn token"),
        (
            TAGGED.replace("BODY", "{{ m['content'] + '<|im_end|>\n' }}").split("{% if add_gen")[0],
            "ignores add_generation_prompt",
        ),
        (
            TAGGED.replace("BODY", "{{ m['content'] + '<|im_end|>\n' }}").replace("<|im_start|>assistant\n", "assistant:"),
            "does not continue the chat template's generation prompt",
        ),
    ],
)
def test_a_template_without_a_safe_span_is_refused(tiny_tokenizer_factory: Any, template: str, mend: str) -> None:
    with pytest.raises(UserError, match=mend) as caught:
        encode(chat("hi", "hello"), tiny_tokenizer_factory(template), None)
    assert not isinstance(caught.value, Refused)  # it is no one row's fault


def test_no_chat_template(tiny_tokenizer_factory: Any) -> None:
    sentence = "no chat template: set tokenizer.chat_template and save it with the target"
    with pytest.raises(UserError, match=sentence):
        encode(chat("hi", "hello"), tiny_tokenizer_factory("none"), None)
    with pytest.raises(UserError, match=sentence):
        prompt_ids([{"role": "user", "content": "hi"}], tiny_tokenizer_factory("none"))


def test_a_refusal_of_the_template_names_file_and_row(tiny_tokenizer_factory: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    with pytest.raises(Refused, match="chats.jsonl, row 7: the chat template refuses the messages .roles must alternate") as no:
        encode(Conversation(turns, "chats.jsonl", 7), tiny_tokenizer_factory("strict"), None)
    assert no.value.reason == "the chat template refuses the messages"
    again = pickle.loads(pickle.dumps(no.value))  # as a worker process hands it on
    assert (str(again), again.reason) == (str(no.value), no.value.reason)
    calls = [
        *chat("a").messages,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]
    adding = TAGGED.replace(
        "BODY", "{% for c in m.tool_calls %}{{ c.function.arguments + '' }}{% endfor %}{{ m['content'] }}<|im_end|>"
    )
    with pytest.raises(Refused, match="chats.jsonl, row 7: the chat template refuses the messages"):  # a TypeError within
        encode(Conversation(calls, "chats.jsonl", 7), tiny_tokenizer_factory(adding), None)
    with pytest.raises(UserError, match="refuses a plain question and answer"):
        encode(chat("a", "b"), tiny_tokenizer_factory("{{ messages[0]['name'] + 'x' }}"), None)
    with pytest.raises(UserError, match="the prompt: the chat template refuses the messages"):
        prompt_ids(turns[:2], tiny_tokenizer_factory("strict"))


# -- the ids are a server's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["plain", "generation"])
@pytest.mark.parametrize("reply", ["\nhello", " hello", "\n\n  hello\n"])
def test_a_reply_that_would_merge_with_its_header_follows_the_fed_prompt(
    tiny_tokenizer_factory: Any, template: str, reply: str
) -> None:
    tokenizer = tiny_tokenizer_factory(template)
    conversation = chat("hi", reply)
    example = encode(conversation, tokenizer, None)
    fed = prompt_ids(conversation.messages[:1], tokenizer)
    merged = tokenizer.apply_chat_template(conversation.messages, tokenize=True)["input_ids"]
    assert merged[: len(fed)] != fed  # the case is real
    assert example.ids[: len(fed)].tolist() == fed
    assert supervised(example, tokenizer) == [reply + "<|im_end|>"]
    assert tokenizer.decode(example.ids) == tokenizer.decode(merged)


@pytest.mark.parametrize("template", ["plain", "generation"])
def test_an_earlier_reply_that_merged_is_read_and_not_supervised(tiny_tokenizer_factory: Any, template: str) -> None:
    tokenizer = tiny_tokenizer_factory(template)
    conversation = chat("hi", "\nhello", "more", "bye")
    example = encode(conversation, tokenizer, None)
    assert example.ids.tolist() == tokenizer.apply_chat_template(conversation.messages, tokenize=True)["input_ids"]
    assert supervised(example, tokenizer) == ["bye<|im_end|>"]


def test_the_bos_of_the_template_is_not_doubled(tiny_tokenizer_factory: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer_factory("{{ '<|endoftext|>' }}" + TAGGED.replace("BODY", "{{ m['content'] + '<|im_end|>\n' }}"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("a").input_ids[0] == 0
    assert encode(chat("a", "b"), tokenizer, None).ids.tolist().count(0) == 1
    assert prompt_ids(chat("a").messages, tokenizer).count(0) == 1


def test_the_default_system_prompt_is_part_of_the_ids(tiny_tokenizer_factory: Any) -> None:
    system = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"
    tokenizer = tiny_tokenizer_factory(system + TAGGED.replace("BODY", "{{ m['content'] + '<|im_end|>\n' }}"))
    example = encode(chat("a", "b"), tokenizer, None)
    assert tokenizer.decode(example.ids).startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na")
    assert supervised(example, tokenizer) == ["b<|im_end|>"]


def test_prompt_ids_are_flat_and_the_librarys(tiny_tokenizer_factory: Any) -> None:
    """CASE 08: the library's own answer is a mapping of length 2."""
    tokenizer = tiny_tokenizer_factory()
    messages = chat("hi").messages
    ids = prompt_ids(messages, tokenizer)
    assert all(type(token) is int for token in ids)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("template", ["plain", "generation"])
def test_a_cut_answer_ends_with_its_text(tiny_tokenizer_factory: Any, template: str) -> None:
    tokenizer = tiny_tokenizer_factory(template)
    example = encode(chat("hi", "yes", "and", "on and o", finish="length"), tokenizer, None)
    assert supervised(example, tokenizer) == ["yes<|im_end|>", "on and o"]
    assert tokenizer.decode(example.ids).endswith("assistant\non and o")


def test_what_follows_the_last_answer_is_left_out(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory()
    assert encode(chat("a", "b", "c"), tokenizer, None).ids.tolist() == encode(chat("a", "b"), tokenizer, None).ids.tolist()


def test_a_reply_that_nobody_asked_for_is_not_supervised(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory()
    greeting = {"role": "assistant", "content": "welcome"}
    assert len(encode(Conversation([greeting], "f", 1), tokenizer, None).ids) == 0
    example = encode(Conversation([greeting, *chat("a", "bc").messages], "f", 1), tokenizer, None)
    assert supervised(example, tokenizer) == ["bc<|im_end|>"]


@pytest.mark.parametrize("pad", [None, "<|im_end|>", "<|endoftext|>"])
def test_the_pad_token_has_no_say(tiny_tokenizer_factory: Any, pad: str | None) -> None:
    """CASE 18: end-of-turn tokens stay supervised when pad == eos, and no pad token is needed."""
    tokenizer = tiny_tokenizer_factory("generation", pad)
    tokenizer.padding_side = "left"
    assert supervised(encode(chat("hi", "yes"), tokenizer, None), tokenizer) == ["yes<|im_end|>"]


# -- CASE 05: thinking templates -----------------------------------------------------------------------------------

THOUGHT, ANSWER = "<think>\nhm hm\n</think>\n\n", "it is so"


def test_reasoning_is_supervised_where_it_is_kept(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory("thinking")
    conversation = chat("a", THOUGHT + "first", "b", THOUGHT + ANSWER)
    example = encode(conversation, tokenizer, None)
    assert supervised(example, tokenizer) == [THOUGHT + ANSWER + "<|im_end|>"]  # the past turn was written with its reasoning
    assert "hm hm" not in tokenizer.decode(example.ids[~example.mask])
    fed = prompt_ids(conversation.messages[:3], tokenizer)
    reply = tokenizer(THOUGHT + ANSWER + "<|im_end|>\n", add_special_tokens=False).input_ids
    assert example.ids.tolist() == fed + reply


def test_an_empty_thought_of_the_template_is_not_supervised(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory("thinking")
    conversation = chat("a", "first", "b", ANSWER)
    example = encode(conversation, tokenizer, None)
    assert supervised(example, tokenizer) == [ANSWER + "<|im_end|>"]
    fed = tokenizer.apply_chat_template(conversation.messages[:3], add_generation_prompt=True, enable_thinking=False)[
        "input_ids"
    ]
    assert example.ids.tolist() == fed + tokenizer(ANSWER + "<|im_end|>\n", add_special_tokens=False).input_ids


def test_an_empty_thought_that_the_target_wrote_is_supervised(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory("thinking")
    own = "<think>\n\n</think>\n\n" + ANSWER
    assert supervised(encode(chat("a", own), tokenizer, None), tokenizer) == [own + "<|im_end|>"]


def test_a_prompt_that_opens_the_thought_is_continued(tiny_tokenizer_factory: Any) -> None:
    tokenizer = tiny_tokenizer_factory("thinking-prompt")
    conversation = chat("a", THOUGHT + "first", "b", THOUGHT + ANSWER)
    example = encode(conversation, tokenizer, None)
    fed = prompt_ids(conversation.messages[:3], tokenizer)
    assert example.ids[: len(fed)].tolist() == fed
    assert supervised(example, tokenizer) == ["hm hm\n</think>\n\n" + ANSWER + "<|im_end|>"]
    with pytest.raises(UserError, match="answers that keep their reasoning"):
        encode(chat("a", ANSWER), tokenizer, None)


def test_a_prompt_that_closes_an_empty_thought_is_continued(tiny_tokenizer_factory: Any) -> None:
    closing = tiny_tokenizer_factory("thinking-prompt").chat_template.replace("<think>\n", "<think>\n\n</think>\n\n")
    tokenizer = tiny_tokenizer_factory(closing)
    example = encode(chat("a", "b", "c", ANSWER), tokenizer, None)
    assert supervised(example, tokenizer) == [ANSWER + "<|im_end|>"]
    assert tokenizer.decode(example.ids).endswith("<think>\n\n</think>\n\n" + ANSWER + "<|im_end|>\n")


# -- CASE 03: rows that teach nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 12, 16, 18, 22])
def test_a_cut_keeps_ids_and_mask_equally_long(tiny_tokenizer_factory: Any, limit: int) -> None:
    tokenizer = tiny_tokenizer_factory()
    whole, cut = encode(chat("a", "bcde"), tokenizer, None), encode(chat("a", "bcde"), tokenizer, limit)
    assert cut.ids.tolist() == whole.ids[:limit].tolist()
    assert cut.mask.tolist() == whole.mask[:limit].tolist()
    assert len(cut.ids) == limit


def test_two_supervised_tokens_in_a_row_are_the_least() -> None:
    assert supervises(np.array([0, 0, 1, 1], bool)) and supervises(np.array([0, 1, 1], bool))
    assert not supervises(np.array([0, 1, 0, 1], bool))
    assert not supervises(np.array([1, 1, 0], bool))  # nothing stands before the first
    assert not supervises(np.zeros(0, bool))


@pytest.mark.smollm2
def test_smollm2_with_its_default_system_prompt() -> None:
    from transformers import AutoTokenizer

    from draftsmith.fetch import DEMO_TARGET, local_path

    tokenizer: Any = AutoTokenizer.from_pretrained(Path(local_path(DEMO_TARGET)))
    conversation = chat("Hi!", "Hello, Zoë 👋", "Bye", "See you\n")
    example = encode(conversation, tokenizer, None)
    assert example.ids.tolist() == tokenizer.apply_chat_template(conversation.messages, tokenize=True)["input_ids"]
    assert supervised(example, tokenizer) == ["Hello, Zoë 👋<|im_end|>", "See you\n<|im_end|>"]
    merging = encode(chat("Hi!", "\n\nSee you"), tokenizer, None)
    fed = prompt_ids(chat("Hi!").messages, tokenizer)
    assert merging.ids.tolist() == fed + tokenizer("\n\nSee you<|im_end|>\n").input_ids
    assert supervised(merging, tokenizer) == ["\n\nSee you<|im_end|>"]
