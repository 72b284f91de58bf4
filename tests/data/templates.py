"""Small chat templates that behave as those of the large families do, each with a small tokenizer of its kind.

Written for the tests: the texts are our own, the behaviours are the families'. What a family's target writes for a message,
and which turns stand later as they were written, is stated here in Python, apart from the code under test.
"""

import functools
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

TEXT = (
    "the sun is out and the cat sat on the mat.\n\nWhy? Because: it is so.\n a list:\n - one\n - two\n\n\nuser: what is it?\n"
    "assistant: it is the cat.  It was the sun\t\tand the other one, é ü 猫 👋 שלום.\r\n\n<think>\nhm\n</think>\n\nso it is. "
) * 3

# -- tokenizers ----------------------------------------------------------------------------------------------------


def byte_level(normalizer: Any = None, words: str | None = None) -> Tokenizer:
    """As GPT-2's (``words`` None) or Llama-3's and Qwen's, which split by their own expression, a newline run by itself."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    before = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*before, split])  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if normalizer:
        core.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))  # type: ignore[call-arg]
    return core


def metaspace(scheme: str) -> Tokenizer:
    """As sentencepiece's: spaces are ▁, unknown letters are bytes.

    ``scheme``: "first" and "always" put a ▁ before the text or before each piece between special tokens; "legacy" does so
    by a normalizer, as Llama-2's files; "never" puts none, as Gemma's.
    """
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    learner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, show_progress=False))  # type: ignore[call-arg]
    learnt = json.loads(learner.to_str())["model"]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate([*head, *learnt["vocab"]])}
    merges = [tuple(pair) for pair in learnt["merges"]]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme in ("first", "always"):
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[assignment]
    else:
        prepend = [normalizers.Prepend("▁")] if scheme == "legacy" else []
        core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return core


def finished(
    core: Tokenizer, template: str, specials: list[AddedToken], *, bos: str | None, eos: str, pad: str | None, adds_bos: bool
) -> PreTrainedTokenizerFast:
    core.add_tokens(specials)
    if adds_bos:
        core.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))])  # type: ignore[assignment]
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **{name: text for name, text in named.items() if text})
    tokenizer.chat_template = template
    return tokenizer


def special(*texts: str, **flags: Any) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def plain(*texts: str, normalized: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=False, normalized=normalized) for text in texts]


LLAMA3_WORDS = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# -- templates -----------------------------------------------------------------------------------------------------

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
SMOLLM2 = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a small helper.<|im_end|>\n' }}{% endif -%}\n"
    + CHATML
)
TAGGED = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
LLAMA3 = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif -%}
{{ '<|eot_id|>' }}
{%- for m in turns -%}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}{{ 'Functions:\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{% endif -%}
{%- if m.tool_calls -%}
{%- for c in m.tool_calls -%}
{{ '{"name": "' + c.function.name + '", "parameters": ' + c.function.arguments | tojson + '}' }}
{%- endfor -%}
{{ '<|eom_id|>' if tools else '<|eot_id|>' }}
{%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set said, thought = m.content, '' -%}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in said -%}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thought) -%}
{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}
{%- else %}{{ said }}{% endif -%}
{%- for c in m.tool_calls -%}
{{ ('\n' if said or not loop.first else '') + '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}
"""
GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set turns = messages[1:] -%}
{%- else %}{% set lead = '' %}{% set turns = messages %}{% endif -%}
{%- for m in turns -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}{% endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (lead if loop.first else '') }}
{{- m.content | trim }}
{{- '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""
MISTRAL = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set turns = messages[1:] -%}
{%- else %}{% set lead = '' %}{% set turns = messages %}{% endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in turns %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{{ '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif -%}
{%- for m in turns -%}
{%- if m.role == 'user' %}{{ '[INST] ' + (lead if loop.index0 == ns.asked else '') + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{ '[RESULTS] ' + m.content + ' [/RESULTS]' }}
{%- elif m.tool_calls -%}
{{ '[CALLS] [' }}
{%- for c in m.tool_calls -%}
{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}
{%- endfor -%}
{{ ']' + eos_token }}
{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif -%}
{%- endfor -%}
"""
PHI = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor -%}
{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""
DEEPSEEK = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif -%}
"""
VICUNA = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% set turns = messages[1:] -%}
{%- else %}{{ 'A chat between a curious user and a helper. ' }}{% set turns = messages %}{% endif -%}
{%- for m in turns -%}
{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + eos_token }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}
"""

# -- families ------------------------------------------------------------------------------------------------------

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``said(messages, i)``: what the target writes in turn i before its ending; None where the template hides part of it.

    ``stands(messages, i)``: whether turn i stands, in the text of all the messages, behind its prompt as it was written.
    ``end``: how a turn ends; ``stops``: texts at which the target stops. ``markers``: what a text may hold to mislead.
    ``supplied(messages, i)``: what the template puts between turn i's generation prompt and the reply, if i is the last.
    """

    name: str
    make: Callable[[], PreTrainedTokenizerFast]
    said: Callable[[Messages, int], str | None]
    end: str
    stops: tuple[str, ...]
    markers: tuple[str, ...]
    stands: Callable[[Messages, int], bool] = lambda messages, i: True
    supplied: Callable[[Messages, int], str] = lambda messages, i: ""
    ends_call: Callable[[Messages, int], str] | None = None
    unified: Callable[[str], str] = str
    has_tools: bool = False
    greedy: bool = False

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.make()


def folded(message: dict[str, Any]) -> str:
    """A message's text with its reasoning as the target writes it, for templates that know only the text."""
    thought = message.get("reasoning_content")
    if not thought:
        return message["content"]
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + message["content"].lstrip("\n")


def as_it_is(messages: Messages, i: int) -> str:
    return folded(messages[i])


def trimmed(messages: Messages, i: int) -> str:
    return folded(messages[i]).strip()


def called(message: dict[str, Any], arguments: str) -> list[str]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return [f'{{"name": "{c["name"]}", "{arguments}": {json.dumps(c["arguments"], ensure_ascii=False)}}}' for c in calls]


def llama3_said(messages: Messages, i: int) -> str | None:
    calls = "".join(called(messages[i], "parameters"))
    said = trimmed(messages, i)
    return said if not calls else calls if not said else None


def qwen3_parts(message: dict[str, Any]) -> tuple[str, str, str] | None:
    """Thought, answer and calls; None where the template loses part of the text."""
    text, thought = message["content"], message.get("reasoning_content")
    if thought is None:
        thought = ""
        if "</think>" in text:
            head, answer = text.split("</think>")[0], text.split("</think>")[-1]
            thought = head.rstrip("\n").split("<think>")[-1].lstrip("\n")
            kept = "".join(f"<think>{thought}</think>{answer}".split())
            if "".join(text.split()) not in kept:
                return None
            text = answer.lstrip("\n")
    calls = called(message, "arguments")
    parts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return thought.strip("\n"), text.lstrip("\n"), "\n".join([""] * bool(parts and text) + parts)


def qwen3_said(messages: Messages, i: int) -> str | None:
    parts = qwen3_parts(messages[i])
    if parts is None:
        return None
    thought, answer, calls = parts
    if qwen3_supplied(messages, i):
        return answer + calls if "</think>" not in messages[i]["content"] else None
    return f"<think>\n{thought}\n</think>\n\n{answer}{calls}"


def qwen3_supplied(messages: Messages, i: int) -> str:
    """An empty thought is the template's own, unless the message spells one out."""
    parts = qwen3_parts(messages[i])
    if parts is None or parts[0].strip() or "".join(messages[i]["content"].split()).startswith("<think></think>"):
        return ""
    return f"<think>\n{parts[0]}\n</think>\n\n"


def qwen3_stands(messages: Messages, i: int) -> bool:
    later = any(message["role"] == "user" for message in messages[i:])
    parts = qwen3_parts(messages[i])
    return not later and parts is not None and bool(parts[0].strip())


def mistral_said(messages: Messages, i: int) -> str | None:
    calls = called(messages[i], "arguments")
    said = trimmed(messages, i)
    return " " + said if not calls else "[CALLS] [" + "".join(calls) + "]" if not said else None


def mistral_stands(messages: Messages, i: int) -> bool:
    later = any(message["role"] == "user" for message in messages[i:])
    return not (later and messages[0]["role"] == "system" and messages[0]["content"] + "\n\n")


def deepseek_said(messages: Messages, i: int) -> str | None:
    """The prompt has opened the thought: a reply without one does not continue it."""
    text = folded(messages[i]).lstrip()
    if not text.startswith("<think>"):
        return None
    return text[len("<think>\n") :] if text.startswith("<think>\n") else text[len("<think>") :].lstrip()


def deepseek_stands(messages: Messages, i: int) -> bool:
    """Only a thought that was never closed is not taken out."""
    text = folded(messages[i])
    return text.startswith("<think>\n") and "</think>" not in text


def spaced(text: str) -> str:
    """As a tokenizer reads a text that puts a space before each piece behind a special token."""
    return re.sub(r"(<s>)(?!<s>|</s>)(?=.)", r"\1 ", text, flags=re.DOTALL)


def without_swallowed(text: str) -> str:
    return re.sub(r"(<\|(?:end|user|assistant|system)\|>)\s+", r"\1", text)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


IM = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = special("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
THINK = plain("<think>", "</think>", "<tool_call>", "</tool_call>")
TURNS = special("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
BARS = special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") + plain("<｜User｜>", "<｜Assistant｜>", normalized=True)
ANGLES = special("<s>", "</s>")
PHIS = special("<|endoftext|>") + special("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", rstrip=True)
IM_MARKS = ("<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\n", "assistant\n")

FAMILIES = [
    Family(
        "smollm2",
        lambda: finished(byte_level(), SMOLLM2, IM, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", adds_bos=False),
        as_it_is,
        "<|im_end|>",
        ("<|im_end|>",),
        IM_MARKS,
    ),
    Family(
        "tagged",
        lambda: finished(byte_level(), TAGGED, IM, bos=None, eos="<|endoftext|>", pad=None, adds_bos=False),
        as_it_is,
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        IM_MARKS,
    ),
    Family(
        "llama3",
        lambda: finished(
            byte_level(words=LLAMA3_WORDS), LLAMA3, HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>", pad=None, adds_bos=True
        ),
        llama3_said,
        "<|eot_id|>",
        ("<|eot_id|>",),
        ("<|eot_id|>", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>", "<|end_header_id|>"),
        ends_call=lambda messages, i: "<|eom_id|>",
        has_tools=True,
    ),
    Family(
        "qwen3",
        lambda: finished(
            byte_level(normalizers.NFC(), LLAMA3_WORDS), QWEN3, IM + THINK, bos=None, eos="<|im_end|>", pad="<|endoftext|>",
            adds_bos=False,
        ),
        qwen3_said,
        "<|im_end|>",
        ("<|im_end|>",),
        (*IM_MARKS, "<tool_call>", "<think>\n\n</think>\n\n"),
        qwen3_stands,
        qwen3_supplied,
        unified=nfc,
        has_tools=True,
    ),
    Family(
        "gemma",
        lambda: finished(metaspace("never"), GEMMA, TURNS, bos="<bos>", eos="<eos>", pad="<eos>", adds_bos=True),
        trimmed,
        "<end_of_turn>",
        ("<end_of_turn>", "<eos>"),
        ("<end_of_turn>", "<end_of_turn>\n<start_of_turn>model\n", "<bos>", "<start_of_turn>user\n", "model\n"),
    ),
    Family(
        "mistral",
        lambda: finished(metaspace("legacy"), MISTRAL, ANGLES, bos="<s>", eos="</s>", pad=None, adds_bos=True),
        mistral_said,
        "</s>",
        ("</s>",),
        ("[INST]", " [/INST]", "</s>", "</s>[INST] ", "<s>", "[CALLS] "),
        mistral_stands,
        unified=spaced,
        has_tools=True,
    ),
    Family(
        "phi",
        lambda: finished(
            metaspace("first"), PHI, ANGLES + PHIS, bos="<s>", eos="<|endoftext|>", pad="<|endoftext|>", adds_bos=False
        ),
        as_it_is,
        "<|end|>",
        ("<|end|>", "<|endoftext|>"),
        ("<|end|>", "<|end|>\n<|assistant|>\n", "<|user|>\n", "<|endoftext|>", "<|assistant|>"),
        unified=without_swallowed,
        greedy=True,
    ),
    Family(
        "deepseek",
        lambda: finished(
            byte_level(normalizers.Sequence([])), DEEPSEEK, BARS + THINK[:2], bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>", pad="<｜end▁of▁sentence｜>", adds_bos=True,
        ),
        deepseek_said,
        "<｜end▁of▁sentence｜>",
        ("<｜end▁of▁sentence｜>",),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜><｜User｜>", "<｜Assistant｜><think>\n", "<think>\n"),
        deepseek_stands,
    ),
    Family(
        "vicuna",
        lambda: finished(metaspace("always"), VICUNA, ANGLES, bos="<s>", eos="</s>", pad="<unk>", adds_bos=False),
        lambda messages, i: " " + folded(messages[i]),
        "</s>",
        ("</s>",),
        ("USER: ", " ASSISTANT:", "</s>", "</s>USER: hi ASSISTANT: ", "ASSISTANT"),
    ),
]  # fmt: skip
