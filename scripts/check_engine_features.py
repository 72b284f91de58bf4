"""Are an engine's hidden states the target's own, and is a head that learns from them the same head? Against real vLLM.

Starts vLLM's server on loopback in float32, told to extract hidden states, and asks it for conversations: layer by layer the
states must equal those of the target in this process. ``draftsmith data extract --engine`` is killed with SIGKILL on its way
and started again: its store must equal one that the target wrote. A short training run online from the engine must have the
loss curve of one from the target. The sentences for a real server that does not fit are read, too. Leaves
runs/engine/report.json; exits with status 1 unless all of it holds.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm_server import CONTEXT, PYTHON, extracting, require_engine, server

from draftsmith.console import note
from draftsmith.data.chat import Encoded
from draftsmith.data.engine import Engine, layers_for
from draftsmith.data.store import Store
from draftsmith.ends import Ends
from draftsmith.errors import UserError
from draftsmith.fetch import DEMO_TARGET, local_path
from draftsmith.target import Target

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # of a state's norm, and of a loss: float32 sums in another order
MAX_LENGTH = 192
SMALL = (  # the command line with shards so small that a short extraction has several
    "from functools import partial; from draftsmith.data import extract; from draftsmith.cli import main; "
    "extract.extract = partial(extract.extract, shard_bytes=2**22); main()"
)


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    cut(ROOT / "recipes/demo/train.jsonl", options.out / "train.jsonl", options.rows)
    cut(ROOT / "recipes/demo/heldout.jsonl", options.out / "heldout.jsonl", options.rows // 4)
    path, began = local_path(DEMO_TARGET), time.perf_counter()
    target = Target.load(path, "float32")
    taps = (2, target.depth // 2, target.depth - 3)
    layers = layers_for(taps, target.depth)
    seconds: dict[str, float] = {}
    extract(options, path, taps, "own")
    examples = [Store(options.out / "own").example(row) for row in range(options.rows)]
    with server(options.vllm_python, path, DEMO_TARGET, options.out / "engine.log", extracting(layers, options.out / "hs")) as (
        url,
        version,
    ):
        seconds["engine_start"] = time.perf_counter() - began
        ends = Ends.load(path, "float32")
        states = timed(seconds, "states", lambda: compare_states(target, ends, url, layers, examples))
        store = timed(seconds, "extraction", lambda: kill_and_resume(options, path, taps, url))
        online = timed(seconds, "training", lambda: train(options, path, taps, url, "engine"))
        refusals = timed(seconds, "refusals", lambda: refused(ends, url, layers))
    left = sorted(file.name for file in (options.out / "hs").iterdir())
    own = timed(seconds, "training_own", lambda: train(options, path, taps, None, "target"))
    curve = compare_curves(online, own)
    dead = tell(lambda: Engine(url, layers, tries=2).connect(ends, 1))
    gone = dead.replace(url.removesuffix("/v1"), "http://127.0.0.1")
    refusals.append({"asked": "a server that is gone", "seen": gone, "ok": "start the engine, or mend" in gone})
    report = {
        "engine": {"name": "vllm", "version": version},
        "target": DEMO_TARGET,
        "layers": list(layers),
        "states": states,
        "extraction": store,
        "training": curve,
        "read_bytes": {"ends": size_of(ends), "target": size_of(target)},
        "files_left": len(left),
        "refusals": refusals,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    report["equal"] = bool(
        max(states["relative_difference"].values()) < TOLERANCE
        and store["largest_relative_difference"] < TOLERANCE
        and store["killed_before_the_end"]
        and curve["largest_relative_difference"] < TOLERANCE
        and ends.fingerprint == target.fingerprint
        and not [name for name in left if name not in store["left_by_the_kill"]]
        and all(entry["ok"] for entry in refusals)
    )
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    note(f"states of {states['tokens']} tokens, relative differences: {states['relative_difference']}")
    note(
        f"store after a kill at {store['shards_at_kill']} shards: {store['largest_relative_difference']:.1e} from the target's"
    )
    note(f"loss over {len(curve['engine'])} reports: {curve['largest_relative_difference']:.1e} from the target's run")
    note("\n".join(f"{'as expected' if entry['ok'] else 'NOT as expected'}: {entry['asked']}" for entry in refusals))
    return 0 if report["equal"] else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a vLLM server's hidden states with the target's in this process.")
    parser.add_argument("--rows", type=int, default=16, help="conversations to train on; a quarter as many are held out")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/engine")
    parser.add_argument("--vllm-python", type=Path, default=PYTHON)
    options = parser.parse_args()
    require_engine(options.vllm_python)
    return options


def cut(source: Path, out: Path, rows: int) -> None:
    with source.open(encoding="utf-8") as file, out.open("w", encoding="utf-8") as written:
        written.writelines(line for line, _ in zip(file, range(rows), strict=False))


def timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - start
    return result


def size_of(target: Target) -> int:
    """Bytes of the weights that are in memory; tied ones once."""
    return sum(parameter.nbytes for parameter in target.model.parameters() if not parameter.is_meta)


# -- states ------------------------------------------------------------------------------------------------------------


def compare_states(target: Target, ends: Ends, url: str, layers: Sequence[int], examples: Sequence[Encoded]) -> dict[str, Any]:
    """How far the engine's states are from the target's, layer by layer, and the last hidden state: the worst token of all."""
    engine = Engine(url, layers)
    told = engine.connect(ends, max(len(example.ids) for example in examples))
    worst = dict.fromkeys([*map(str, layers), "last"], 0.0)
    tokens = 0
    for example in examples[:8]:
        ids = torch.tensor(example.ids, dtype=torch.int64)
        theirs = engine.ask(ids.tolist()).states
        ours = target.features(ids[None], layers)
        pairs = dict(
            zip(map(str, layers), zip(theirs.unbind(1), ours.taps[0].chunk(len(layers), -1), strict=True), strict=True)
        )
        pairs["last"] = ends.final_norm(theirs[None, :, -1])[0], ours.last[0]  # type: ignore[misc]
        for name, (one, other) in pairs.items():
            worst[name] = max(worst[name], apart(one, other))
        tokens += len(ids)
    engine.close()
    return {"tokens": tokens, "relative_difference": worst, "version": told["version"]}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of a token's states [tokens, hidden], over their norm."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


# -- the store ---------------------------------------------------------------------------------------------------------


def command(options: argparse.Namespace, path: str, taps: Sequence[int], name: str, *more: object) -> list[str]:
    line = [sys.executable, "-c", SMALL, "data", "extract", options.out / "train.jsonl"]
    line += ["--target", path, "--out", options.out / name, "--taps", ",".join(map(str, taps)), "--dtype", "float32"]
    line += ["--target-dtype", "float32", "--max-length", MAX_LENGTH, "--batch-tokens", 512, "--json", *more]
    return list(map(str, line))


def extract(options: argparse.Namespace, path: str, taps: Sequence[int], name: str, *more: object) -> dict[str, Any]:
    done = subprocess.run(command(options, path, taps, name, *more), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"data extract ended with status {done.returncode}: see its last words above.")
    return json.loads(done.stdout)


def kill_and_resume(options: argparse.Namespace, path: str, taps: Sequence[int], url: str) -> dict[str, Any]:
    """Kill an extraction when it has written some of its shards, start it again, and hold the store against the target's."""
    partial, small = options.out / ".served.partial", ("--engine", url, "--in-flight", 4)
    process = subprocess.Popen(command(options, path, taps, "served", *small), stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(partial.glob("shard-*.safetensors"))) < 2:
        time.sleep(0.05)
    before_the_end = process.poll() is None
    process.kill()
    process.wait()
    at_kill = len(list(partial.glob("shard-*.safetensors")))
    time.sleep(5)  # the engine finishes what it was asked
    left = sorted(file.name for file in (options.out / "hs").iterdir())
    report = extract(options, path, taps, "served", *small)
    store, own = Store(options.out / "served"), Store(options.out / "own")
    worst = 0.0
    for row in range(options.rows):
        (one, ours), (other, theirs) = store.read(row), own.read(row)
        same = one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()
        parts = zip(ours.taps.chunk(len(taps), -1), theirs.taps.chunk(len(taps), -1), strict=True)
        worst = max(worst, float("inf") if not same else apart(ours.last, theirs.last), *(apart(*pair) for pair in parts))
    return {
        "rows": report["rows"],
        "tokens": report["tokens"],
        "shards": report["shards"],
        "shards_at_kill": at_kill,
        "shards_kept": report["shards_kept"],
        "killed_before_the_end": before_the_end,
        "left_by_the_kill": left,
        "tokens_per_s": round(report["tokens_per_s"], 1),
        "largest_relative_difference": worst,
    }


# -- training ----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace, path: str, taps: Sequence[int], url: str | None, name: str) -> list[dict[str, Any]]:
    """The metrics of a short run online from the engine, or from the target where there is none."""
    recipe = {
        "target": {"name": path, "dtype": "float32", "device": "cpu"},
        "data": {"train": "train.jsonl", "held_out": "heldout.jsonl", "max_length": MAX_LENGTH},
        "head": {"kind": "eagle3", "taps": list(taps), "depths": 2, "draft_vocab": 2048},
        "train": {"batch_size": 4, "micro_batch_size": 2, "lr": 1e-3, "log_every": 1, "precision": "no"},
        "eval": {"prompts": 0},
        "output": str(options.out / f"run-{name}"),
    }
    if url:
        recipe["data"]["engine"] = {"url": url, "in_flight": 4, "ahead": 12}
    file = options.out / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    line = [sys.executable, "-c", "from draftsmith.cli import main; main()", "train", str(file), "--json"]
    if subprocess.run(line, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"training from the {name} failed: see its last words above.")
    return [json.loads(row) for row in (options.out / f"run-{name}" / "metrics.jsonl").open(encoding="utf-8")]


def compare_curves(engine: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any]:
    curves = {
        name: [[row["part"], row["step"], row["loss"], row["tau_sim"]] for row in rows]
        for name, rows in (("engine", engine), ("target", own))
    }
    pairs = list(zip(curves["engine"], curves["target"], strict=True))
    same = all(one[:2] == other[:2] for one, other in pairs)
    worst = max(abs(one[2] - other[2]) / other[2] for one, other in pairs) if same else float("inf")
    return {**curves, "largest_relative_difference": worst}


# -- refusals ----------------------------------------------------------------------------------------------------------


def tell(work: Callable[[], Any]) -> str:
    """The sentence that some work ends with."""
    try:
        return f"no error: {work()}"
    except UserError as error:
        return str(error)


def refused(ends: Ends, url: str, layers: Sequence[int]) -> list[dict[str, Any]]:
    """What the client says of a real server that does not fit what is asked."""
    half = Ends.load(ends.name, "bfloat16")
    cases = [
        ("a conversation beyond the context", lambda: Engine(url, layers).connect(ends, CONTEXT), "--max-model-len"),
        ("one layer more", lambda: Engine(url, (1, *layers)).connect(ends, 1), f"extracts {len(layers)} layers"),
        ("another dtype", lambda: Engine(url, layers).connect(half, 1), "computes in float32"),
        ("a model that is not served", lambda: Engine(url, layers, "nobody").connect(ends, 1), "choose data.engine.model from"),
        ("an address without /v1", lambda: Engine(url[:-3], layers).connect(ends, 1), "which ends in /v1"),
    ]
    found = []
    for asked, work, said in cases:
        seen = tell(work)
        found.append({"asked": asked, "seen": seen.replace(url.removesuffix("/v1"), "http://127.0.0.1"), "ok": said in seen})
    return found


if __name__ == "__main__":
    start = time.perf_counter()
    try:
        status = main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    note(f"{time.perf_counter() - start:.0f} s")
    sys.exit(status)
