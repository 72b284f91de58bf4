"""Draft models: any causal LM of the target's tokenizer, alone or as the target's first layers, and its directory."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from draftsmith.errors import UserError
from draftsmith.eval.tree import chain, full
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import DraftHead
from draftsmith.heads.draft_model import DraftModelHead
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import ENGINES, export
from draftsmith.heads.kinds import load_head
from draftsmith.heads.own_lm import OwnOptions
from draftsmith.target import Features, Target

SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
)
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SLIDING: dict[str, Any] = dict(
    head_dim=8, num_key_value_heads=2, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2
)
LMS: dict[str, Any] = {
    "llama3-rope": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA3),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma3-sliding": Gemma3TextConfig(**SIZES, **SLIDING),
    "gpt2-learned-positions": GPT2Config(
        vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "neox-renamed-tensors": GPTNeoXConfig(**SIZES),
    "qwen3-experts": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


def random_lm(config: Any, seed: int = 0) -> PreTrainedModel:
    """A causal LM whose every weight is random, biases and norms included."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(copy.deepcopy(config)).float()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return lm.eval()


def target_of(config: Any, tokenizer: Any = None) -> Target:
    return Target(random_lm(config), tokenizer, "tiny")


def draft_model(target: Target, depths: int = 1, **options: Any) -> DraftHead:
    return DraftModelHead.create(target, OwnOptions(**options), None, depths, torch.arange(target.vocab_size)).eval()


def predicted(head: DraftHead, ids: Tensor, target: Target) -> list[Tensor]:
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = head.predict(ids, head.taught(ids, mask, 0), target.features(ids, head.config.taps), target)
    return [depth.logits for depth in found]


@pytest.fixture
def saved(tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any]) -> Callable[..., Path]:
    """``saved(config, template="plain")``: an LM's directory with a tokenizer."""

    def save(config: Any, tokenizer: Any = None, dtype: torch.dtype = torch.float32) -> Path:
        lm: Any = random_lm(config, seed=7)
        lm.to(dtype)
        lm.save_pretrained(tmp_path / "lm")
        (tokenizer or tiny_tokenizer_factory()).save_pretrained(tmp_path / "lm")
        return tmp_path / "lm"

    return save


LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)


# -- what it computes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LMS)
@torch.no_grad()
def test_training_and_drafting_are_the_lm_run_plainly(name: str) -> None:
    """Row t at depth i, chains and trees, over several rounds = the last logits of the LM on x_0 .. x_{t+1+i}."""
    target = target_of(LMS[name])
    head = draft_model(target, depths=3, layers=3)
    lm: Any = head.get_submodule("lm")
    ids = torch.randint(3, 111, (1, 20), generator=torch.Generator().manual_seed(0))
    plain = lm(ids).logits[0]
    for depth, logits in enumerate(predicted(head, ids, target)):
        torch.testing.assert_close(logits, plain[1 + depth : -1], atol=1e-4, rtol=1e-4)
    state, nothing = head.new_state(), target.features(ids, []).rows(0)
    for rows in (range(0, 5), range(5, 6), range(6, 9), range(9, 13)):
        t = rows[-1]
        known = ids[0, rows.start : t + 2]
        guess = head.begin(state, nothing.rows(slice(rows.start, rows.stop)), known, target)
        torch.testing.assert_close(guess.logits[0], plain[t + 1], atol=1e-4, rtol=1e-4)
        shape = full([2, 2, 1])
        pair = torch.tensor([99, int(ids[0, t + 2])])
        guess = head.deepen(state, [1, 2], pair, shape, target)
        torch.testing.assert_close(guess.logits[1], plain[t + 2], atol=1e-4, rtol=1e-4)
        guess = head.deepen(state, [5, 4], torch.tensor([int(ids[0, t + 3]), 7]), shape, target)
        torch.testing.assert_close(guess.logits[0], plain[t + 3], atol=1e-4, rtol=1e-4)
        other = torch.cat([ids[0, : t + 2], torch.tensor([99, 7])])[None]
        torch.testing.assert_close(guess.logits[1], lm(other).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LMS)
def test_a_self_draft_of_all_layers_is_the_target(name: str) -> None:
    target = target_of(LMS[name])
    head = draft_model(target, layers=4)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(predicted(head, ids, target)[0], target.model(ids).logits[0, 1:-1], atol=1e-5, rtol=1e-5)
    found = generate(target, head, [5, 6, 7], chain(4), 20)
    assert found.tokens == generate(target, None, [5, 6, 7], chain(1), 20).tokens
    assert found.accepted[:-1] == [4] * (len(found.accepted) - 1)


@pytest.mark.parametrize("name", LMS)
def test_a_self_draft_has_copies_of_the_first_layers(name: str) -> None:
    target = target_of(LMS[name])
    own = draft_model(target, layers=2).get_submodule("lm").state_dict()
    theirs = target.model.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in own.items())
    assert {key for key in theirs if key not in own} == {key for key in theirs if ".2." in key or ".3." in key}
    assert not {t.data_ptr() for t in own.values()} & {t.data_ptr() for t in theirs.values()}


def test_an_eighth_of_the_targets_layers_is_the_default() -> None:
    assert draft_model(target_of(LLAMA)).config.layer["num_hidden_layers"] == 1
    deep = target_of(llama(num_hidden_layers=17))
    assert draft_model(deep).config.layer["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=128, hidden_size=32, n_layer=4, n_head=4),
        MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=4),
    ],
    ids=["alibi", "recurrent"],
)
def test_an_lm_that_no_mask_steers_is_refused(config: Any) -> None:
    with pytest.raises(UserError, match="with which no tree can be drafted"):
        draft_model(target_of(config), layers=2)


# -- a sibling -------------------------------------------------------------------------------------------------


def test_a_sibling_drafts_with_its_own_weights(saved: Callable[..., Path], tiny_target: Target, tmp_path: Path) -> None:
    small = llama(hidden_size=16, num_hidden_layers=3, tie_word_embeddings=True)
    directory = saved(small)
    ids = torch.arange(5, 25)[None]
    head = draft_model(tiny_target, model=str(directory))
    lm = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(predicted(head, ids, tiny_target)[0], lm(ids).logits[0, 1:-1])
    head.save(tmp_path)
    for file in directory.iterdir():
        file.unlink()
    assert torch.equal(predicted(load_head(tmp_path), ids, tiny_target)[0], lm(ids).logits[0, 1:-1])
    assert len(head.tensors()) == len(lm.state_dict())  # target_ids in the place of the tied output head


def test_a_sibling_can_be_pruned(saved: Callable[..., Path], tiny_target: Target) -> None:
    head = draft_model(tiny_target, model=str(saved(LLAMA)), layers=2)
    assert head.config.layer["num_hidden_layers"] == 2
    with pytest.raises(UserError, match="options.layers is 5, but .* has 4 layers"):
        draft_model(tiny_target, layers=5)


@pytest.mark.parametrize("rows", [136, 112])
def test_padding_rows_are_left_out_or_filled_up(saved: Callable[..., Path], tiny_target: Target, rows: int) -> None:
    """The tokenizer has 111 tokens, the target 128 rows."""
    directory = saved(llama(vocab_size=rows))
    head = draft_model(tiny_target, model=str(directory))
    ids = torch.arange(5, 25)[None]
    logits, theirs = predicted(head, ids, tiny_target)[0], AutoModelForCausalLM.from_pretrained(directory)(ids).logits[0, 1:-1]
    kept = min(rows, 128)
    torch.testing.assert_close(logits[:, :kept], theirs[:, :kept])
    torch.testing.assert_close(logits[:, kept:], theirs[:, -1:].expand(-1, 128 - kept))


def test_an_lm_with_fewer_rows_than_tokens_is_refused(saved: Callable[..., Path], tiny_target: Target) -> None:
    with pytest.raises(UserError, match="has 110 embedding rows, but 'tiny' has 111 tokens"):
        draft_model(tiny_target, model=str(saved(llama(vocab_size=110))))


def swapped(tokenizer: Any) -> None:
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = core["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(core))


def unmerged(tokenizer: Any) -> None:
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["model"]["merges"].remove(["\n", "\n"])
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(core))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "'a' is token 13 of the target and 14 of the draft"),
        (unmerged, r"where the target splits \['\\n\\n', .* the draft splits \['\\n', '\\n'"),
        (lambda t: t.add_tokens(["<new>"]), "'<new>' is token None of the target and 111 of the draft"),
        (lambda t: t.add_tokens([AddedToken("z", special=True)], special_tokens=True), "token .* is special in only one"),
    ],
    ids=["ids", "splitting", "more tokens", "special"],
)
def test_another_tokenizer_is_refused_with_the_first_difference(
    change: Any, said: str, saved: Callable[..., Path], tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]
) -> None:
    tokenizer = tiny_tokenizer_factory()
    change(tokenizer)
    with pytest.raises(UserError, match=f"another tokenizer than 'tiny' .*{said}"):
        draft_model(tiny_target, model=str(saved(LLAMA, tokenizer)))


def test_a_base_model_drafts_for_its_instruct_sibling(
    saved: Callable[..., Path], tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]
) -> None:
    """Its tokenizer names another end and has no chat template, but gives the same ids."""
    tokenizer = tiny_tokenizer_factory("none", pad=None)
    tokenizer.eos_token = "<|endoftext|>"
    draft_model(tiny_target, model=str(saved(LLAMA, tokenizer)))


def test_what_cannot_be_a_draft_model_is_refused(tmp_path: Path, saved: Callable[..., Path], tiny_target: Target) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="options.model: .*nothing' cannot be read"):
        draft_model(tiny_target, model=str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="set head.draft_vocab to null"):
        DraftModelHead.create(tiny_target, OwnOptions(), None, 1, torch.arange(48))
    directory = saved(LLAMA)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="options.model: .*lm' cannot be loaded"):
        draft_model(tiny_target, model=str(directory))


def test_a_shorter_context_is_told(saved: Callable[..., Path], tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    draft_model(tiny_target, model=str(saved(llama(max_position_embeddings=32))))
    assert "was made for 32 tokens, tiny for 64" in capsys.readouterr().err


def test_a_dry_run_reads_no_weights(saved: Callable[..., Path], tiny_target: Target) -> None:
    directory = saved(LLAMA)
    (directory / "model.safetensors").unlink()
    with torch.device("meta"):
        for options in (OwnOptions(model=str(directory), lora=4), OwnOptions(layers=2)):
            head = DraftModelHead.create(tiny_target, options, None, 1, torch.arange(128))
            assert all(parameter.is_meta for parameter in head.parameters())


# -- adapters --------------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained_and_start_as_the_lm(tiny_target: Target) -> None:
    ids = torch.arange(5, 25)[None]
    head = draft_model(tiny_target, layers=2, lora=4)
    trained = {name.split(".")[-3] for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    plain = draft_model(tiny_target, layers=2)
    assert torch.equal(predicted(head, ids, tiny_target)[0], predicted(plain, ids, tiny_target)[0])


def test_merged_adapters_say_what_they_said_apart(tiny_target: Target) -> None:
    ids = torch.arange(5, 25)[None]
    head = make_head(tiny_target, "draft-model-lora")
    merged = head.merged()
    assert merged.config.options["lora"] is None and head.config.options["lora"] == 4
    assert not any("lora" in name for name in merged.state_dict())
    torch.testing.assert_close(
        predicted(merged, ids, tiny_target)[0], predicted(head, ids, tiny_target)[0], atol=1e-4, rtol=1e-4
    )
    assert any("lora" in name for name in head.state_dict())


# -- its directory for engines ---------------------------------------------------------------------------------


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


LAYER = {
    "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32), "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32), "mlp.gate_proj.weight": (64, 32), "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64), "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
}  # fmt: skip
NAMES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()} | {
    "model.embed_tokens.weight": (128, 32), "model.norm.weight": (32,), "lm_head.weight": (128, 32),
}  # fmt: skip


@pytest.mark.parametrize("engine", [name for name, engine in ENGINES.items() if "draft_model" in engine.layouts])
@pytest.mark.parametrize("case", ["draft-model", "draft-model-lora"])
def test_the_export_is_an_ordinary_lm(engine: str, case: str, tiny_target: Target, tmp_path: Path) -> None:
    head = make_head(tiny_target, case)
    out = export(head, tiny_target, engine, tmp_path / "out", draft_length=3)
    assert shapes(out) == NAMES
    found = json.loads((out / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "num_hidden_layers": 2, "head_dim": 8,
        "num_key_value_heads": 2, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float32", "dtype": "float32", "eos_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    assert found | wanted == found and "draft_vocab_size" not in found and "pard_token" not in found
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_target.tokenizer.get_vocab()
    again = import_head(out, tiny_target)
    assert again.kind == "draft_model" and again.config.depths == 3
    assert {name: t.tolist() for name, t in again.tensors().items()} == {
        name: t.tolist() for name, t in head.merged().tensors().items()
    }


@pytest.mark.parametrize("name", LMS)
def test_transformers_loads_the_export_and_drafts_with_it(name: str, tmp_path: Path) -> None:
    """Bit for bit the head's logits; greedy text with it is the target's own, and no longer draft than was asked for."""
    target = target_of(LMS[name])
    head = draft_model(target, layers=2)
    out = export(head, target, "transformers", tmp_path / "out", draft_length=3)
    lm = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(5, 25)[None]
    assert torch.equal(predicted(head, ids, target)[0], lm(ids).logits[0, 1:-1])
    assert lm.generation_config.num_assistant_tokens == 3
    plain = target.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assisted = target.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, assistant_model=lm)
    assert torch.equal(plain, assisted)


def test_llama3_ropes_are_told_in_both_forms(tmp_path: Path) -> None:
    target = target_of(LMS["llama3-rope"])
    out = export(draft_model(target, layers=2), target, "vllm", tmp_path / "out", draft_length=3)
    found = json.loads((out / "config.json").read_text())
    assert found["rope_parameters"] == LLAMA3
    assert found["rope_theta"] == 5e5 and found["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}


def test_a_bfloat16_target_is_served_in_bfloat16(tmp_path: Path) -> None:
    target = Target(random_lm(LLAMA).bfloat16(), None, "tiny")
    out = export(draft_model(target, layers=2), target, "vllm", tmp_path / "out", draft_length=3)
    found = json.loads((out / "config.json").read_text())
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LMS)
def test_any_lms_directory_is_imported_and_written_again_byte_for_byte(
    name: str, dtype: torch.dtype, saved: Callable[..., Path], tmp_path: Path, tiny_target: Target
) -> None:
    published = saved(LMS[name], dtype=dtype)
    head = import_head(published, tiny_target, "draft_model")
    ids = torch.arange(5, 25)[None]
    lm = AutoModelForCausalLM.from_pretrained(published)
    assert torch.equal(predicted(head, ids, tiny_target)[0], lm(ids).logits[0, 1:-1])
    again = load_file(export(head, tiny_target, "vllm", tmp_path / "again", draft_length=3) / "model.safetensors")
    first = load_file(published / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) and tensor.dtype == again[key].dtype for key, tensor in first.items())


def test_an_old_config_is_read(saved: Callable[..., Path], tiny_target: Target) -> None:
    """As transformers 4 wrote it: flat RoPE keys and torch_dtype."""
    directory = saved(LMS["llama3-rope"])
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype", "float32")}
    (directory / "config.json").write_text(json.dumps(config))
    head = import_head(directory, tiny_target, "draft_model")
    assert head.config.layer["rope_parameters"] == LLAMA3


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor 'model.norm.weight'"),
        (lambda t: t.update(stray=torch.zeros(2)), "has no place for the tensor 'stray'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(127, 32)}), r"'lm_head.weight' has shape \[127, 32\].* \[128, 32\]"),
    ],
)
def test_an_import_names_every_mismatch(damage: Any, said: str, saved: Callable[..., Path], tiny_target: Target) -> None:
    directory = saved(LLAMA)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        import_head(directory, tiny_target, "draft_model")


def test_an_imported_config_of_no_lm_is_refused(saved: Callable[..., Path], tiny_target: Target) -> None:
    directory = saved(LLAMA)
    (directory / "config.json").write_text(json.dumps({"model_type": "unheard-of", "architectures": ["Unheard"]}))
    with pytest.raises(UserError, match="tells of no causal LM that transformers knows"):
        import_head(directory, tiny_target, "draft_model")


def test_nothing_is_read_of_the_target(tiny_target: Target) -> None:
    head = make_head(tiny_target, "draft-model")
    ids = torch.arange(5, 25)[None]
    rows = head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0)
    nothing = Features(torch.zeros(1, 20, 0), torch.full((1, 20, 32), float("nan")))
    assert all(depth.logits.isfinite().all() for depth in head.predict(ids, rows, nothing, tiny_target))
