"""Hidden-state files as vLLM's connector, speculators and hs-connectors write and read them: one safetensors file a sequence.

A file holds ``token_ids`` int64 [tokens] and ``hidden_states`` [tokens, layers, hidden]; with ``hidden_states_scales`` float32
[tokens, 1, 1] its states are float8 numbers in units of these. The last layer is the state that the final norm reads. Nothing
in it names the layers or the model. While its writer is at work it holds a lock on a file of the same name and ``.lock``.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

STATES, SCALES, IDS = "hidden_states", "hidden_states_scales", "token_ids"
POLL = 0.01  # seconds between two looks at a file that is being written


class NoStates(Exception):
    """A file that is missing, damaged or no file of hidden states, in words that follow its name."""


def load(path: Path, locked: float = 0.0, missing: float = 0.0) -> tuple[Tensor, Tensor]:
    """A file's token ids int64 [tokens] and its states [tokens, layers, hidden] in its dtype (float8: in bfloat16), on the CPU.

    ``locked``: seconds to wait for its writer; ``missing``: for a file that is not there, or not whole, though nobody holds its
    lock, as on network file systems. Raises NoStates.
    """
    wait_for_writer(path, locked)
    end = time.monotonic() + missing
    while True:
        try:
            return checked(load_file(path))
        except (OSError, SafetensorError) as error:
            if time.monotonic() >= end:
                raise NoStates("is not there" if isinstance(error, FileNotFoundError) else f"is damaged ({error})") from error
        time.sleep(POLL)


def wait_for_writer(path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    with suppress(FileNotFoundError), open(lock_of(path)) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise NoStates(f"is still being written after {seconds:g} s") from error
            time.sleep(POLL)


def checked(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids, states = tensors.get(IDS), tensors.get(STATES)
    if ids is None or states is None:
        raise NoStates(f"has no {IDS if ids is None else STATES}")
    if ids.ndim != 1 or states.ndim != 3 or len(ids) != len(states) or not states.is_floating_point():
        raise NoStates(f"holds {STATES} of shape {list(states.shape)} for {IDS} of shape {list(ids.shape)}")
    if states.dtype.itemsize == 1:
        if SCALES not in tensors or tensors[SCALES].shape != (len(ids), 1, 1):
            raise NoStates(f"holds float8 {STATES} without {SCALES} of shape {[len(ids), 1, 1]}")
        states = (states.float() * tensors[SCALES].float()).to(torch.bfloat16)
    return ids.long(), states


def save(path: Path, ids: Tensor, states: Tensor) -> None:
    """Write ids [tokens] and states [tokens, layers, hidden] as one file."""
    save_file({IDS: ids.long().contiguous(), STATES: states.contiguous()}, path)
    path.chmod(0o644)


def remove(path: Path) -> None:
    """Delete a file and its lock."""
    for each in (path, lock_of(path)):
        with suppress(FileNotFoundError):
            os.remove(each)


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
