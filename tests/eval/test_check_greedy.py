"""A sample of scripts/check_greedy.py on the small real target; its full result is docs/results/greedy.json."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import chain
from draftsmith.target import Target

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_greedy.py"


@pytest.fixture(scope="module")
def check_greedy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_greedy", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.smollm2
def test_six_prompts_are_decoded_as_transformers_does(check_greedy: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results" / "greedy.json"
    arguments = ["--prompts", "6", "--max-new", "12", "--steps", "6", "--out", str(out)]
    assert check_greedy.main(arguments) == 0
    report = json.loads(out.read_text())
    assert report["lossless"] and report["command"].endswith(" ".join(arguments))
    drafts = [(case["proposer"], case["draft"]) for case in report["cases"]]
    assert drafts == [("fresh eagle3", "chain:5"), ("fresh eagle3", "tree:3x2x1x1"), ("fresh medusa", "tree:3x2x1x1")]
    for case in report["cases"]:
        assert case["equal"] + len(case["near_ties"]) == 6 and case["different"] == []
        assert case["tau"] > 1 and case["emitted_tokens"] <= 6 * 12  # some drafts were accepted


def test_a_wrong_text_is_reported(check_greedy: ModuleType, lively_target: Target) -> None:
    prompts = [[5, 9, 33], [8, 8]]
    texts = [check_greedy.library_text(lively_target_with_end(lively_target), prompt, 8) for prompt in prompts]
    wrong = [texts[0], [*texts[1][:3], (texts[1][3] + 1) % 128, *texts[1][4:]]]
    heads = check_greedy.KINDS["eagle3"]
    head = heads.create(lively_target, heads.Options(), None, 2, check_greedy.torch.arange(128)).eval()
    for given, equal, batch in ((texts, 2, 1), (texts, 2, 2), (wrong, 1, 1)):
        case = check_greedy.compare("fresh", HeadProposer(head, chain(2)), lively_target, prompts, given, 8, batch)
        assert case["equal"] == equal and case["lossless"] == (equal == 2)
    assert [(place["prompt"], place["token"]) for place in case["different"]] == [(1, 3)]


def lively_target_with_end(target: Target) -> Target:
    """The same model; generate wants an end token to name."""
    twin = Target(target.model, None, "twin")
    twin.eos_ids = frozenset([127])
    return twin
