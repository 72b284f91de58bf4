"""A server on loopback that speaks the protocol of vLLM's hidden-states connector: a target's states in files, or faults."""

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from serving import Reply, Server, serving
from torch import Tensor

from draftsmith.data.hidden_states import IDS, STATES
from draftsmith.target import Target

Spoil = Callable[[dict[str, Tensor]], Any]


@contextmanager
def extracting(
    target: Target,
    layers: Sequence[int],
    folder: Path,
    before: Callable[[dict[str, Any], int], Reply | None] = lambda *_: None,
    spoil: Spoil = lambda tensors: None,
    slow: float = 0.0,
) -> Iterator[Server]:
    """Serve the target's states of ``layers``. ``before(body, tries)`` may answer otherwise; ``spoil`` may change what a file
    holds; it is written ``slow`` seconds after the answer, under its lock.
    """
    numbers, alone = itertools.count(), threading.Lock()
    folder.mkdir(exist_ok=True)

    def answer(body: dict[str, Any], tries: int) -> Reply:
        if other := before(body, tries):
            return other
        ids = torch.tensor(body["prompt"])
        with alone:  # hooks of two threads in one model would see each other's states
            features = target.features(ids[None], layers)
        states = features.taps[0].unflatten(-1, (len(layers), -1)).clone()
        tensors = {IDS: ids, STATES: states}
        spoil(tensors)
        path = folder / f"cmpl-{next(numbers)}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(slow)
            save_file(tensors, path)
            os.close(lock)

        threading.Thread(target=write).start()
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if "logprobs" in body:
            top = target.logits(features.last[0, -1]).log_softmax(-1).topk(body["logprobs"])
            named = {f"token_id:{token}": chance for chance, token in zip(*map(Tensor.tolist, top), strict=True)}
            choice["logprobs"] = {"top_logprobs": [named]}
        return Reply(value={"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}})

    with serving(answer, owner="vllm") as server:
        yield server
