"""docs/scale.md says what scripts/scale.py computes, and its arithmetic is that of known models."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def scale() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "scripts" / "scale.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("HF_HUB_OFFLINE", "1")  # else the script sets it, and for good
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def computed(scale: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("HF_HUB_OFFLINE", "1")
        return scale.computed()


def test_the_page_has_the_tables_that_the_script_prints(scale: Any, computed: dict[str, Any]):
    page = (ROOT / "docs" / "scale.md").read_text()
    missing = [table for table in scale.tables(computed) if table not in page]
    assert not missing, "run python scripts/scale.py, and put its tables into docs/scale.md"
    assert json.loads((ROOT / "docs" / "results" / "scale.json").read_text()) == json.loads(json.dumps(computed))


def test_states_and_passes_are_counted_as_one_would_by_hand(computed: dict[str, Any]):
    of = computed["cases"]["8B"]
    online, store, through, engine = of["modes"]
    tokens = 1_000_000 * 1000
    assert store["disk_bytes"] == tokens * 4 * 4096 * 2 == through["disk_bytes"]
    assert (store["disk_read_bytes"], through["disk_read_bytes"]) == (2 * store["disk_bytes"], store["disk_bytes"])
    assert engine["engine_bytes"] == 2 * store["disk_bytes"] and online["disk_bytes"] == online["engine_bytes"] == 0
    assert online["target_flops"] == engine["target_flops"] == 2 * store["target_flops"]
    assert of["target_flops"] == pytest.approx(2 * (8.03e9 - 2 * 128256 * 4096), rel=0.03), "two for every weight of a layer"
    assert len({each["head_flops"] for each in of["modes"]}) == 1


def test_a_token_meets_a_small_part_of_a_trillion_parameters(computed: dict[str, Any]):
    """Moonshot AI states 32 billion activated parameters, embedding and output head among them."""
    of = computed["cases"]["1T"]
    assert of["parameters"] > 1e12
    assert of["target_flops"] / 2e9 + 2 * 163840 * 7168 / 1e9 == pytest.approx(32, rel=0.05)
