"""ReDrafter: its arithmetic beside a plain re-implementation, a warm start that repeats the target, and Apple's directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, make_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.tree import chain
from draftsmith.heads.base import DraftHead, supervised
from draftsmith.heads.drafting import draft
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.redrafter import RedrafterHead, RedrafterOptions
from draftsmith.target import Target

NAMES = {
    "lm_head.0.linear.weight": (64, 64),
    "lm_head.0.linear.bias": (64,),
    "lm_head.1.linear.weight": (64, 64),
    "lm_head.1.linear.bias": (64,),
    "lm_head.2.weight": (128, 64),
    "rnn_u.weight": (32, 32),
    "rnn_u.bias": (32,),
    "rnn_w.weight": (32, 32),
}
REDRAFTERS = [case for case, (kind, _) in CASES.items() if kind == "redrafter"]


def plain_logits(head: DraftHead, context: Tensor, tokens: list[int], target: Target) -> Tensor:
    """What the drafter says behind ``tokens``, the first of which the target wrote: one vector at a time."""
    w, options = head.state_dict(), head.options
    state = torch.zeros(32)
    for token in tokens:
        embedding = target.embed.get_parameter("weight")[token]
        if options.rnn:
            summed = w["rnn_w.weight"] @ embedding + w["rnn_u.weight"] @ state + w["rnn_u.bias"]
            state = summed * summed.sigmoid()
        else:
            state = state + embedding
    x = torch.cat([context, state])
    if options.exit_dim:
        x = w["input_proj.weight"] @ x + w["input_proj.bias"]
    for layer in range(options.num_layers):
        inner = w[f"lm_head.{layer}.linear.weight"] @ x + w[f"lm_head.{layer}.linear.bias"]
        x = x + inner * inner.sigmoid()
    return w[f"lm_head.{options.num_layers}.weight"] @ x


@pytest.mark.parametrize("case", REDRAFTERS)
def test_the_arithmetic_is_that_of_the_paper(tiny_target: Target, case: str) -> None:
    """The training forward and a drafted chain, projection included, which the reference leaves out in training."""
    head = make_head(tiny_target, case)
    ids = torch.randint(3, 111, (1, 14), generator=torch.Generator().manual_seed(4))
    features = tiny_target.features(ids, [])
    depths = head.predict(ids, supervised(torch.ones_like(ids).bool(), 4), features, tiny_target)
    for i, depth in enumerate(depths):
        for t, logits in zip(depth.rows.tolist(), depth.logits, strict=True):
            seen = ids[0, t + 1 : t + 2 + i].tolist()
            torch.testing.assert_close(logits, plain_logits(head, features.last[0, t], seen, tiny_target), rtol=1e-4, atol=1e-4)
    drafted = draft(head, head.new_state(), features.rows((0, slice(0, 9))), ids[0, :10], chain(6), tiny_target).tokens
    seen = ids[0, 9:10].tolist()
    for token in drafted:  # one more than it was trained for: the weights are the same at every depth
        assert token == head.target_ids[plain_logits(head, features.last[0, 8], seen, tiny_target).argmax()]
        seen.append(token)


@pytest.mark.parametrize("exit_dim", [None, 32, 48, 80])
def test_a_warm_head_starts_from_the_targets_last_guess(tiny_target: Target, exit_dim: int | None) -> None:
    ids = torch.arange(5, 25)[None]
    head = RedrafterHead.create(tiny_target, RedrafterOptions(exit_dim=exit_dim), None, 2, torch.arange(128))
    features = tiny_target.features(ids, [])
    guess = head.begin(head.new_state(), features.rows(0), torch.arange(5, 26), tiny_target)
    torch.testing.assert_close(guess.logits, tiny_target.logits(features.last[0, -1:]), rtol=1e-4, atol=1e-4)


def test_a_warm_head_narrower_than_the_target_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="exit_dim of at least the target's width 32, not 16: set head.options.init_lm_head"):
        RedrafterHead.create(tiny_target, RedrafterOptions(exit_dim=16), None, 2, torch.arange(128))


# -- Apple's directory ---------------------------------------------------------------------------------------------


def whole(target: Target, **options: Any) -> DraftHead:
    torch.manual_seed(3)
    settings = RedrafterOptions(init_lm_head="random", **options)
    head = RedrafterHead.create(target, settings, None, 3, torch.arange(target.vocab_size))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return head.eval()


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("engine", ["apple", "tensorrt-llm-legacy"])
def test_names_shapes_and_fields(tiny_target: Target, engine: str, tmp_path: Path) -> None:
    out = export(whole(tiny_target), tiny_target, engine, tmp_path / "out", draft_length=4)
    assert shapes(out) == NAMES
    found = json.loads((out / "config.json").read_text())
    assert found.pop("draftsmith")["draft_length"] == 4
    assert found == {
        "architectures": ["Drafter"], "model_type": "recurrent_drafting_drafter", "vocab_size": 128, "hidden_size": 32,
        "exit_dim": 64, "num_draft_layers": 2, "num_lookback_tokens": -1, "rnn": True, "dtype": "float32",
        "torch_dtype": "float32",
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"rnn": False, "num_layers": 1}, {"exit_dim": 48}], ids=str)
def test_round_trip(tiny_target: Target, options: dict, tmp_path: Path) -> None:
    head = whole(tiny_target, **options)
    out = export(head, tiny_target, "apple", tmp_path / "out", draft_length=3)
    again = read("apple", "redrafter", out, tiny_target)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {n: t.tolist() for n, t in head.state_dict().items()}
    assert ("input_proj.weight" in shapes(out)) is ("exit_dim" in options)


def published(target: Target, directory: Path, rename: tuple[str, str] = ("", "")) -> dict[str, Tensor]:
    """A directory as Apple's save_pretrained leaves it, with random weights."""
    generator = torch.Generator().manual_seed(6)
    tensors = {name.replace(*rename): torch.randn(shape, generator=generator).half() for name, shape in NAMES.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Drafter"], "exit_dim": 64, "hidden_size": 32, "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": 2, "num_lookback_tokens": -1, "rnn": True, "torch_dtype": "float16",
        "transformers_version": "4.39.3", "vocab_size": 128,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def test_a_published_directory_comes_back_byte_by_byte(tiny_target: Target, tmp_path: Path) -> None:
    tensors = published(tiny_target, tmp_path / "theirs")
    head = import_head(tmp_path / "theirs", tiny_target)
    assert head.kind == "redrafter" and head.config.depths == 5
    out = export(head, tiny_target, "apple", tmp_path / "ours", draft_length=5)
    again = load_file(out / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) and again[name].dtype == torch.float16 for name, tensor in tensors.items())


@pytest.mark.parametrize("rename", [("lm_head.", "lm_heads."), ("lm_head.", "0.")])
def test_the_older_names_are_read(tiny_target: Target, rename: tuple[str, str], tmp_path: Path) -> None:
    tensors = published(tiny_target, tmp_path / "theirs", rename)
    head = import_head(tmp_path / "theirs", tiny_target)
    assert torch.equal(head.state_dict()["lm_head.2.weight"], tensors["lm_head.2.weight".replace(*rename)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 48}, "hidden_size 48, and tiny has 32"),
        ({"vocab_size": 200}, "vocab_size 200, and tiny has 128"),
        ({"num_draft_layers": 3}, r"'lm_head\.2\.linear\.bias' has shape None"),
        ({"rnn": False}, r"'rnn_u\.bias' has shape \(32,\)"),
        ({"exit_dim": 48}, r"'input_proj\.bias' has shape None"),
    ],
)
def test_a_directory_that_disagrees_with_itself_or_the_target_is_refused(
    tiny_target: Target, change: dict, said: str, tmp_path: Path
) -> None:
    published(tiny_target, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=said):
        import_head(tmp_path / "theirs", tiny_target)


def test_a_reduced_vocabulary_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="drafts 48 of 128 tokens.*draft_vocab null"):
        export(make_head(tiny_target, "redrafter"), tiny_target, "apple", tmp_path / "out", draft_length=3)
    assert not list(tmp_path.iterdir())
