"""A tokenizer and a target small enough to build in every test."""

import atexit
import copy
import os
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets.config
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.target import Target

# tests leave the user's cache alone, those that start processes too
CACHE = Path(tempfile.mkdtemp(prefix="draftsmith-datasets-"))
datasets.config.HF_DATASETS_CACHE = CACHE
os.environ["HF_DATASETS_CACHE"] = str(CACHE)
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [
    ("\n", "\n"),
    ("\n", " "),
    (" ", "t"),
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("o", "u"),
    ("e", "s"),
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}OPEN{{ m['content'] + '<|im_end|>' }}CLOSE"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
# As Qwen3's: past turns lose their reasoning, the last one shows its own or an empty thought.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in m['content'] else '' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ answer }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As DeepSeek-R1's: the prompt opens the thought and no rendered reply shows one.
THINKING_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TEMPLATES = {
    "plain": CHATML.replace("OPEN", "").replace("CLOSE", ""),
    "generation": CHATML.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}"),
    "generation-dash": CHATML.replace("OPEN", "{%- generation -%}").replace("CLOSE", "{%- endgeneration -%}"),
    "strict": STRICT + CHATML.replace("OPEN", "").replace("CLOSE", ""),
    "thinking": THINKING,
    "thinking-prompt": THINKING_PROMPT,
    "none": None,
}


def build_tokenizer(template: str = "plain", pad: str | None = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Letters, a few merged pairs (two newlines among them) and three special tokens: 111 ids, any printable ASCII text.

    ``template``: a name in TEMPLATES or a template's own text. ``pad``: None for no pad token, "<|im_end|>" for pad == eos.
    """
    letters = list(string.printable[:95]) + ["\n", "\t", "\r"]
    vocab = {token: i for i, token in enumerate(SPECIALS + letters + ["".join(pair) for pair in MERGES])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    named = {"pad_token": pad} if pad else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIALS[1], eos_token=SPECIALS[2], unk_token=SPECIALS[0], **named
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state for the whole process; every test starts from none."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def one_thread():
    """For runs that are compared to the bit with those of other processes: sums are rounded by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_tokenizer_factory() -> Callable[..., Any]:
    """``factory(template="plain", pad="<|endoftext|>")``: see ``build_tokenizer``."""
    return build_tokenizer


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random four-layer Llama in float32 with the tiny tokenizer; frozen, so one serves every test."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).float(), build_tokenizer(), "tiny")


@pytest.fixture(scope="session")
def lively_target(tiny_target: Target) -> Target:
    """The tiny target with larger weights and no end token: its greedy texts wander instead of repeating one token."""
    config = copy.deepcopy(tiny_target.config)
    config.eos_token_id = None
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    model.generation_config.eos_token_id = None
    return Target(model, None, "lively")
