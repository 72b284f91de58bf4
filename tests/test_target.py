"""Every family of targets, tiny and random: its parts are found, its taps are the library's, its tree pass is exact."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEPTH, FAMILIES, GQA, HIDDEN, LLAMA3, NORMS, VOCAB, build
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from draftsmith.errors import UserError
from draftsmith.eval.tree import chain, full
from draftsmith.fetch import DEMO_TARGET, load_tokenizer, local_path
from draftsmith.heads.base import Shape
from draftsmith.target import Features, Target


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {name: build(config) for name, config in FAMILIES.items()}


@pytest.fixture(params=list(FAMILIES))
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Target:
    return targets[request.param]


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal within ``tolerance`` of the largest number."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


# -- its parts -------------------------------------------------------------------------------------------------


def test_the_logits_are_the_models_own(target: Target) -> None:
    ids = random_ids(2, 14)
    with torch.no_grad():
        expected = target.model(input_ids=ids).logits
    close(target.logits(target.features(ids, []).last), expected, 1e-6)
    assert "forward" not in target.decoder.__dict__  # the decoder answers for itself again
    close(target.model(input_ids=ids).logits, expected, 1e-6)


def test_gradients_flow_to_the_hidden_state_and_to_nothing_else(target: Target) -> None:
    last = torch.randn(3, HIDDEN, requires_grad=True)
    target.logits(last).logsumexp(-1).sum().backward()
    assert last.grad is not None and last.grad.abs().min(-1).values.gt(0).any()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.model.parameters())


def test_taps_are_the_librarys_hidden_states(target: Target) -> None:
    ids = random_ids(1, 12)
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    features = target.features(ids, range(DEPTH + 1))
    assert features.taps.shape == (1, 12, (DEPTH + 1) * HIDDEN)
    *below, top = features.taps.chunk(DEPTH + 1, -1)
    for tap, state in enumerate(below):
        close(state, states[tap], 1e-6)
    close(features.last, states[-1], 1e-6)
    assert target.final_norm is not None and (top - features.last).abs().max() > 0.1  # the top tap is not normed yet
    close(target.final_norm(top), features.last, 1e-6)


def test_its_parts_are_found_without_their_names(targets: dict[str, Target]) -> None:
    for name, target in targets.items():
        expected = target.model.get_submodule(NORMS.get(name, "model.norm"))
        assert target.final_norm is expected, name
        assert (target.depth, target.hidden_size, target.vocab_size, target.max_positions) == (DEPTH, HIDDEN, VOCAB, 64), name
        assert len(target.layers) == DEPTH and target.layers[0] in list(target.decoder.modules())
        tied = target.output_head.weight is target.embed.weight  # type: ignore[union-attr]
        assert tied == target.config.tie_word_embeddings, name


def test_case_18_a_padded_row_has_its_own_features(target: Target) -> None:
    lengths = (5, 9, 14)
    ids = random_ids(3, 14)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    together = target.features(ids, [1, DEPTH])
    for row, length in enumerate(lengths):
        alone = target.features(ids[row : row + 1, :length], [1, DEPTH])
        close(together.last[row, :length], alone.last[0])
        close(together.taps[row, :length], alone.taps[0])


def test_sequences_packed_into_a_row_do_not_see_each_other(target: Target) -> None:
    lengths = (5, 9, 14)
    rows = [random_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = target.features(torch.cat(rows, 1), [1, DEPTH], positions)
    for row, taps, last in zip(rows, packed.taps.split(lengths, 1), packed.last.split(lengths, 1), strict=True):
        alone = target.features(row, [1, DEPTH])
        close(last, alone.last)
        close(taps, alone.taps)
    assert target.keeps_packed_apart()


def test_a_target_that_mixes_packed_sequences_is_told(monkeypatch: pytest.MonkeyPatch, targets: dict[str, Target]) -> None:
    target = targets["llama"]
    forward = target.decoder.forward
    monkeypatch.setattr(target.decoder, "forward", lambda position_ids=None, **rest: forward(**rest))
    assert not target.keeps_packed_apart()


# -- the tree pass ---------------------------------------------------------------------------------------------


def path_to(node: int, shape: Shape) -> list[int]:
    """The nodes from the root to ``node``."""
    return [*path_to(shape.parents[node - 1], shape), node] if node else [0]


def run_tree(target: Target, prefix: Tensor, tokens: Tensor, shape: Shape, taps: list[int]) -> tuple[Any, Tensor, Any]:
    """Prefill, then one verify pass: the cache, its logits and features."""
    cache = target.new_cache()
    target.prefill(prefix, cache, taps)
    logits, features = verify_one(target, tokens, len(prefix), shape, cache, taps)
    return cache, logits, features


def verify_one(target: Target, tokens: Tensor, past: int, shape: Shape, cache: Any, taps: list[int]) -> tuple[Tensor, Features]:
    """A verify pass of one sequence: logits [nodes, V] and features [nodes]."""
    positions, seen = past + torch.tensor(shape.depths), torch.from_numpy(shape.seen)
    logits, features = target.verify(tokens[None], positions[None], seen[None], [past], cache, taps)
    return logits[0], features.rows(0)


@pytest.mark.parametrize("shape", [Shape("none", (), ()), chain(5), full([3, 2, 1])], ids=lambda s: s.name)
@pytest.mark.parametrize("prefix_length", [1, 13])
def test_a_tree_pass_equals_a_plain_forward_of_every_path(target: Target, shape: Shape, prefix_length: int) -> None:
    prefix, tokens = random_ids(prefix_length), random_ids(len(shape.parents) + 1, seed=2)
    _, logits, features = run_tree(target, prefix, tokens, shape, [0, 2, DEPTH])
    for node in range(len(tokens)):
        ids = torch.cat([prefix, tokens[path_to(node, shape)]])[None]
        with torch.no_grad():
            close(logits[node], target.model(input_ids=ids).logits[0, -1])
        plain = target.features(ids, [0, 2, DEPTH])
        close(features.last[node], plain.last[0, -1])
        close(features.taps[node], plain.taps[0, -1])


def test_prefill_gives_the_last_logits_and_every_feature(target: Target) -> None:
    ids = random_ids(13)
    logits, features = target.prefill(ids, target.new_cache(), [1, 3])
    plain = target.features(ids[None], [1, 3])
    close(features.taps, plain.taps[0])
    close(features.last, plain.last[0])
    close(logits, target.logits(plain.last[0, -1]))


@pytest.mark.parametrize("path", [[0], [0, 2], [0, 3, 8], [0, 1, 4]], ids=str)
def test_case_20c_after_a_rejection_the_cache_is_a_fresh_prefill(target: Target, path: list[int]) -> None:
    shape = full([3, 2])
    prefix, tokens = random_ids(13), random_ids(len(shape.parents) + 1, seed=2)
    cache, *_ = run_tree(target, prefix, tokens, shape, [])
    target.keep(cache, [len(prefix)], [path])
    fresh = target.new_cache()
    target.prefill(torch.cat([prefix, tokens[path]]), fresh, [])
    assert cache.get_seq_length() == len(prefix) + len(path)
    layers: Any = zip(cache.layers, fresh.layers, strict=True)
    for ours, theirs in layers:
        close(ours.keys, theirs.keys)
        close(ours.values, theirs.values)
    following = random_ids(4, seed=3)
    past = len(prefix) + len(path)
    ours, theirs = (verify_one(target, following, past, chain(3), c, [])[0] for c in (cache, fresh))
    close(ours, theirs)


def test_layers_whose_state_cannot_be_rolled_back_are_refused() -> None:
    target = build(FAMILIES["llama"])
    target.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(UserError, match="linear_attention"):
        target.new_cache()


# -- who it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taps", "message"), [([5], "0 to 4"), ([-1], "outside"), ([2, 1], r"write \[1, 2\]"), ([1, 1], "distinct")]
)
def test_wrong_taps_are_refused(taps: list[int], message: str, targets: dict[str, Target]) -> None:
    with pytest.raises(UserError, match=message):
        targets["llama"].check_taps(taps)
    targets["llama"].check_taps([0, 2, 4])
    targets["llama"].check_taps([])


def test_the_generation_config_names_the_end_tokens() -> None:
    model = build(FAMILIES["llama"]).model
    model.generation_config = GenerationConfig(eos_token_id=[2, 7])
    assert Target(model, None, "tiny").eos_ids == {2, 7}
    model.generation_config = GenerationConfig()
    assert Target(model, None, "tiny").eos_ids == {2}
    model.config.eos_token_id = None
    assert Target(model, None, "tiny").eos_ids == frozenset()


def test_the_fingerprint_tells_targets_apart(tiny_tokenizer_factory: Callable[..., Any]) -> None:
    def fingerprint(template: str = "plain", dtype: torch.dtype = torch.float32, **change: Any) -> str:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**(GQA | change)), dtype=dtype)
        return Target(model, tiny_tokenizer_factory(template), "tiny").fingerprint

    assert fingerprint() == fingerprint(dtype=torch.bfloat16) == fingerprint()
    changed = [fingerprint("generation"), fingerprint(rope_parameters=LLAMA3), fingerprint(num_key_value_heads=4)]
    assert len({fingerprint(), *changed}) == 4


def test_the_fingerprint_sees_how_text_is_split(tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> None:
    split = tiny_tokenizer_factory()
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    assert split.get_vocab() == tiny_target.tokenizer.get_vocab()
    assert Target(tiny_target.model, split, "tiny").fingerprint != tiny_target.fingerprint


# -- files -----------------------------------------------------------------------------------------------------


def test_case_12_a_tied_target_loads_from_one_file(tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any]) -> None:
    built = build(FAMILIES["llama-tied"])
    built.model.save_pretrained(tmp_path)
    tiny_tokenizer_factory().save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    loaded = Target.load(str(tmp_path), dtype="float32")
    ids = random_ids(1, 9)
    close(loaded.logits(loaded.features(ids, []).last), built.logits(built.features(ids, []).last), 1e-6)
    assert loaded.tokenizer.chat_template and not any(p.requires_grad for p in loaded.model.parameters())
    assert Target.load(str(tmp_path), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_what_is_no_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be loaded .*: give a model directory"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("file", ["gguf/tiny.gguf", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_cut_file_is_refused_in_one_sentence(saved: Path, tmp_path: Path, file: str, share: float) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(str(tmp_path / file if file.endswith("gguf") else tmp_path))


GGUF_NAMES = (
    ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"), ("model.layers", "blk"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
)  # fmt: skip


def write_gguf(path: Path, target: Target, tokens: list[str], splitting: str = "default") -> None:
    """The tiny Llama as llama.cpp would store it: names, metadata and the permuted query and key rows."""
    gguf = pytest.importorskip("gguf")
    config, writer = target.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "1 2", "Ċ Ċ"])
    writer.add_token_types([1] * len(tokens))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in target.model.state_dict().items():
        for old, new in GGUF_NAMES:
            name = name.replace(old, new)
        for kind, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if kind in name and "norm" not in name:
                rows = tensor.shape[0] // heads // 2
                tensor = tensor.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, targets: dict[str, Target], tiny_tokenizer_factory: Callable[..., Any]
) -> Path:
    """The tiny Llama as a model directory, and as a GGUF file in a folder of it."""
    path = tmp_path_factory.mktemp("saved")
    targets["llama"].model.save_pretrained(path)
    tiny_tokenizer_factory().save_pretrained(path)
    (path / "gguf").mkdir()
    write_gguf(path / "gguf" / "tiny.gguf", targets["llama"], GGUF_TOKENS)
    return path


GGUF_TOKENS = [*"<unk> <s> </s> a b ab 1 2 12 Ċ ĊĊ".split(), *(f"<{i}>" for i in range(VOCAB - 11))]


@pytest.mark.parametrize(("splitting", "tokens"), [("default", ["Ċ", "Ċ", "12", "ab"]), ("smollm", ["ĊĊ", "1", "2", "ab"])])
def test_a_gguf_file_says_how_its_text_is_split(
    tmp_path: Path, targets: dict[str, Target], splitting: str, tokens: list[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", targets["llama"], GGUF_TOKENS, splitting)
    tokenizer = Target.load(str(tmp_path / "tiny.gguf"), dtype="float32").tokenizer
    assert tokenizer.tokenize("\n\n12ab") == tokens
    tokenizer.save_pretrained(tmp_path / "plain")
    assert load_tokenizer(tmp_path / "plain").tokenize("\n\n12ab") == tokens


@pytest.mark.smollm2
def test_the_demos_target_reads_digits_one_by_one() -> None:
    """What its own tokenizer does: digits pull no space or newline into their tokens."""
    tokenizer = load_tokenizer(local_path(DEMO_TARGET))
    assert tokenizer.tokenize("in 2024\n\n1. one") == ["in", "Ġ", "2", "0", "2", "4", "ĊĊ", "1", ".", "Ġone"]


def test_a_gguf_file_loads_as_an_ordinary_model(saved: Path, tmp_path: Path, targets: dict[str, Target]) -> None:
    built = targets["llama"]
    loaded = Target.load(str(saved / "gguf" / "tiny.gguf"), dtype="float32")
    assert loaded.eos_ids == {2} and loaded.tokenizer.chat_template == "{{ messages[0].content }}"
    assert not hasattr(loaded.config, "quantization_config")
    ids = random_ids(1, 9)
    close(loaded.logits(loaded.features(ids, []).last), built.logits(built.features(ids, []).last))
    loaded.model.save_pretrained(tmp_path / "plain")  # what a quantized model would refuse
