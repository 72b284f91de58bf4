"""Feature stores from the hidden-state files of speculators and hs-connectors, and such files from stores.

In a prepared data set (``input_ids``, ``loss_mask`` and ``seq_len``, saved by the datasets library) lies hidden_states/ with a
file hs_N.safetensors for row N. The files keep the state before the final norm where a store keeps the one behind it: going
in, the target's own norm is applied; coming out, the store must hold the target's depth among its taps, for a norm cannot be
undone.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.arrow_writer import ArrowWriter
from safetensors import SafetensorError, safe_open

from ..console import note
from ..errors import UserError, first_line
from ..outputs import new_directory
from ..target import Features, Target
from .chat import Encoded, EncodedRows
from .engine import normed
from .hidden_states import IDS, NoStates, load, save
from .precision import DTYPES
from .store import Store

FOLDER = "hidden_states"
PREPARED = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int64")),
        "loss_mask": datasets.List(datasets.Value("int64")),
        "seq_len": datasets.Value("int64"),
    }
)
ABSENT, OTHER = "no file", "a file of other tokens"
LOOKED_AT = 8  # rows whose next tokens are scored
PATIENCE = 10.0  # seconds for a file that another process is writing


def file_of(folder: Path, row: int) -> Path:
    return folder / f"hs_{row}.safetensors"


class PreparedRows(EncodedRows):
    """The rows of a prepared data set that have states: those numbered ``kept`` in it.

    Rows without a file, or with one of other tokens, are left out and counted; under ``strict`` they are an error.
    """

    def __init__(self, directory: Path, folder: Path, strict: bool = False) -> None:
        self.table = open_prepared(directory)
        self.folder = folder
        self.kept: list[int] = []
        self.left_out: Counter[str] = Counter()
        for row in range(len(self.table)):
            reason = why_not(file_of(folder, row), self.table[row]["input_ids"])
            if reason and strict:
                raise UserError(f"row {row} of {directory} has {reason} in {folder}: make it, or go without --strict.")
            self.kept += [] if reason else [row]
            self.left_out.update([reason] if reason else [])
        if not self.kept:
            raise UserError(f"{folder} has states of none of the {len(self.table)} rows of {directory}: name its own folder.")
        self.lengths = np.array([len(self.table[row]["input_ids"]) for row in self.kept], np.int32)

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, row: int) -> Encoded:
        found = self.table[self.kept[row]]
        return Encoded(np.array(found["input_ids"], np.int32), np.array(found["loss_mask"], bool))


def open_prepared(directory: Path) -> Any:
    try:
        table: Any = datasets.load_from_disk(str(directory))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory} is no prepared data set ({first_line(error)}): name the folder that speculators made."
        ) from error
    missing = [name for name in ("input_ids", "loss_mask") if name not in getattr(table, "column_names", [])]
    if missing:
        raise UserError(f"{directory} has no column {missing[0]}: name a data set as speculators prepares it.")
    return table


def why_not(path: Path, ids: Sequence[int]) -> str | None:
    """Why a row has no states; None where it has."""
    if not path.exists():
        return ABSENT
    try:
        with safe_open(path, "pt") as file:
            own = file.get_tensor(IDS).tolist()
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({first_line(error)}): make it again, or delete it to go without that row."
        ) from error
    return None if own == list(ids) else OTHER


@dataclass
class FileStates:
    """The states of prepared rows from their files, whose ``layers`` the user names: nothing in them does.

    Raises UserError for a file that has not as many, or is not of the target's hidden size.
    """

    rows: PreparedRows
    target: Target
    layers: Sequence[int]
    taps: Sequence[int]
    ahead: int = 0

    def __post_init__(self) -> None:
        self.target.check_taps(self.layers)
        if self.layers[-1] != self.target.depth:
            raise UserError(
                f"the last of these files' layers is the state before the final norm, {self.target.depth} in "
                f"{self.target.name!r}, and --layers ends with {self.layers[-1]}: write all layers, and that one last."
            )
        odd = sorted(set(self.taps) - set(self.layers))
        if odd:
            raise UserError(f"tap {odd[0]} is none of the layers {list(self.layers)}: choose --taps among them.")

    def expect(self, rows: Iterable[tuple[int, Encoded]]) -> None:
        pass

    def states(self, examples: dict[int, Encoded]) -> dict[int, Features]:
        return {row: self.one(row) for row in examples}

    def one(self, row: int) -> Features:
        path = file_of(self.rows.folder, self.rows.kept[row])
        try:
            _, states = load(path, PATIENCE)
        except NoStates as error:
            raise UserError(f"{path} {error}: make it again, or delete it to go without that row.") from error
        wanted = (len(self.layers), self.target.hidden_size)
        if tuple(states.shape[1:]) != wanted:
            raise UserError(
                f"{path} holds {states.shape[1]} layers of {states.shape[2]} numbers, and {wanted[0]} of {wanted[1]} are "
                "named: name its own target and --layers."
            )
        states = states.to(self.target.device, self.target.dtype)
        columns = [list(self.layers).index(tap) for tap in self.taps]
        return Features(states[:, columns].flatten(1), normed(states[:, -1], self.target))

    @torch.no_grad()
    def nats(self) -> float:
        """What the next tokens of the first rows cost on average under the target's output head, in nats.

        Nothing ties the files to a model: a few nats tell that they are this target's, more than ln(vocabulary) that their last
        layer is not its state before the final norm.
        """
        costs = []
        for row in range(min(LOOKED_AT, len(self.rows))):
            logits = self.target.logits(self.one(row).last[:-1]).float()
            ids = torch.tensor(self.rows[row].ids[1:], dtype=torch.int64, device=logits.device)
            costs.append(torch.nn.functional.cross_entropy(logits, ids, reduction="none"))
        return float(torch.cat(costs).mean())


def export(directory: Path, out: Path, force: bool = False) -> dict[str, Any]:
    """Write a store's rows as a prepared data set with hidden-state files, in the store's dtype (int8: in bfloat16).

    Raises UserError where the store has not the target's depth among its taps.
    """
    store = Store(directory)
    depth, taps = store.identity.target.depth, store.identity.taps
    if depth not in taps:
        listed = ",".join(map(str, [*taps, depth]))
        raise UserError(
            f"{directory} holds no state before the final norm, which these files end with and which the one behind it does "
            f"not give back: extract it again with --taps {listed}."
        )
    if store.manifest.part.of > 1:
        raise UserError(f"{directory} is a part of a store: join the parts first, with draftsmith data merge.")
    kind = store.identity.dtype if store.identity.dtype != "int8" else "bfloat16"
    size = 0
    with new_directory(out, force) as partial:
        (partial / FOLDER).mkdir()
        for row in range(len(store.lengths)):
            example, features = store.read(row, dtype=DTYPES[kind])
            path = file_of(partial / FOLDER, row)
            save(path, torch.tensor(example.ids), features.taps.unflatten(-1, (len(taps), -1)))
            size += path.stat().st_size
        write_prepared(store, partial)
    note(f"the layers of {out / FOLDER} are {list(taps)}; its files do not name them")
    return {"rows": len(store.lengths), "tokens": int(store.lengths.sum()), "layers": list(taps), "dtype": kind, "bytes": size}


def write_prepared(store: Store, directory: Path) -> None:
    """Save the store's ids and masks into the directory, a few rows in memory at a time."""
    arrow = directory / ".rows" / "rows.arrow"  # a folder of its own: a data set refuses to be saved where it lies
    arrow.parent.mkdir()
    with ArrowWriter(path=str(arrow), features=PREPARED) as writer:
        for row in range(len(store.lengths)):
            example = store.example(row)
            ids, mask = example.ids.tolist(), example.mask.astype(int).tolist()
            writer.write({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
        writer.finalize()
    datasets.Dataset.from_file(str(arrow)).save_to_disk(str(directory))
    shutil.rmtree(arrow.parent)
