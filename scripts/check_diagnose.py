"""Does diagnose find what was planted? Six runs of the demo's recipe on SmolLM2, five of them spoilt on purpose.

    python scripts/check_diagnose.py --gsm8k DIR [--place DIR] [--healthy runs/demo] [--out docs/results/diagnose.json]

The healthy run is the demo's own; the others are shorter, and each is spoilt the way a faulty pipeline would do it: GSM8K's
solutions, written by people, as responses; a feature store whose masks are shifted by one token; a store whose rows were
rendered by a template without the default system turn; a draft vocabulary of 256; 20 steps. What is in --place is used again.
--gsm8k holds gsm8k_train.jsonl and gsm8k_test.jsonl with question and answer. Exits with 1 where a verdict is another.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np

from draftsmith.console import note
from draftsmith.data.examples import Examples, prepare
from draftsmith.data.extract import extract
from draftsmith.data.manifest import Identity, Manifest
from draftsmith.data.store import KeptRow, Shard, Store, write_shard
from draftsmith.data.tally import Tally
from draftsmith.eval.diagnose import diagnose
from draftsmith.recipes.schema import load_recipe, shipped
from draftsmith.target import Target
from draftsmith.train.loop import train

ROWS, HELD_OUT, STEPS, SHORT = 320, 48, 100, 20
PROMPTS, NEW_TOKENS = 20, 48
DEMO = shipped()["demo"].parent / "demo"
SPOILT = {
    "responses": ["data.train={place}/gsm8k_train.jsonl", "data.held_out={place}/gsm8k_test.jsonl"],
    "mask": ["data.features=store", "data.store={place}/shifted"],
    "template": ["data.features=store", "data.store={place}/bare"],
    "vocabulary": ["data.features=store", "data.store={place}/sound", "head.draft_vocab=256"],
    "training": ["data.features=store", "data.store={place}/sound", f"train.max_steps={SHORT}"],
}


def first_rows(source: Path, count: int, out: Path) -> None:
    """The first rows of a JSONL file."""
    out.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")


def encoded(file: Path, target: Target, template: str) -> Examples:
    """The conversations of a file as a chat template renders them."""
    own, target.tokenizer.chat_template = target.tokenizer.chat_template, template
    try:
        return prepare(str(file), target.tokenizer, target.vocab_size, 320, Tally())
    finally:
        target.tokenizer.chat_template = own


def without_default(template: str) -> str:
    """A ChatML template that gives no system turn to a chat without one."""
    head, loop, rest = template.partition("{% if loop.first and messages[0]['role'] != 'system' %}")
    end = rest.index("{% endif %}") + len("{% endif %}")
    assert loop, "the template adds no default system turn"
    return head + rest[end:]


def shift_masks(sound: Path, target: Target, out: Path) -> None:
    """A store's rows with their masks one token late."""
    store = Store(sound)
    rows = [store.read(row) for row in range(len(store))]
    late = [replace(example, mask=np.append(False, example.mask[:-1])) for example, _ in rows]
    identity = Identity.of(target, late, store.identity.taps, "bfloat16")
    out.mkdir()
    kept = [KeptRow.of(row, own, features, identity) for row, (own, (_, features)) in enumerate(zip(late, rows, strict=True))]
    write_shard(out / "shard-00000.safetensors", identity, kept)
    entry = Shard(out / "shard-00000.safetensors", identity.digest).entry
    Manifest(identity=identity, about={"target": target.name}, shards=[entry]).write(out)


def plant(place: Path, gsm8k: Path, target: Target, taps: list[int]) -> None:
    """Data and stores of all runs."""
    for part, count in (("train", ROWS), ("heldout", HELD_OUT)):
        first_rows(DEMO / f"{part}.jsonl", count, place / f"{part}.jsonl")
    for part, count in (("train", ROWS), ("test", HELD_OUT)):
        first_rows(gsm8k / f"gsm8k_{part}.jsonl", count, place / f"gsm8k_{part}.jsonl")
    template = target.tokenizer.chat_template
    for name, text in (("sound", template), ("bare", without_default(template))):
        if not (place / name).exists():
            note(f"keeping the states of the store {name}")
            extract(target, encoded(place / "train.jsonl", target, text), taps, place / name, "bfloat16", batch_tokens=2048)
    if not (place / "shifted").exists():
        shift_masks(place / "sound", target, place / "shifted")


def spoil(name: str, place: Path) -> Path:
    """Train one spoilt run, unless it is there."""
    out = place / name
    if (out / "head").exists():
        return out
    common = [f"data.train={place}/train.jsonl", f"data.held_out={place}/heldout.jsonl", f"output={out}", "eval.prompts=0"]
    own = [change.format(place=place) for change in SPOILT[name]]
    note(f"training the run {name}")
    train(load_recipe("demo", [*common, f"train.max_steps={STEPS}", *own]), force=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--place", type=Path, help="where data, stores and runs are kept (default: a temporary folder)")
    parser.add_argument("--healthy", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/diagnose.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = (options.place or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe("demo")
        plant(place, options.gsm8k, Target.load(recipe.target.name, recipe.target.dtype), recipe.head.taps or [])
        results: dict[str, dict[str, Any]] = {}
        for planted in ("none", *SPOILT):
            run = options.healthy if planted == "none" else spoil(planted, place)
            note(f"diagnosing the run with {planted} planted")
            began = time.perf_counter()
            found = diagnose(run, limit=PROMPTS, max_new=NEW_TOKENS)
            results[planted] = {"found": found["dominant"], "seconds": round(time.perf_counter() - began), **short(found)}
            print(f"{planted}: {found['dominant']} ({found['because']})")
    right = [planted == one["found"] for planted, one in results.items()]
    about = {
        "command": "python scripts/check_diagnose.py --gsm8k DIR",
        "cpu": platform.machine(),
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    about |= {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "rows": ROWS, "steps": STEPS, "short_steps": SHORT}
    report = {"about": about, "right": sum(right), "of": len(right), "planted": results}
    options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(right) else 1)


def short(found: dict[str, Any]) -> dict[str, Any]:
    """A diagnosis without what names this machine's places."""
    left_out = {"run", "dominant", "temperature", "target_is_the_heads"}
    return {key: value for key, value in found.items() if key not in left_out}


if __name__ == "__main__":
    main()
