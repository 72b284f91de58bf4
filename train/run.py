"""One optimizer step, and what it needs."""

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.profiler import record_function

from ..console import Progress, note
from ..data.batches import epoch_plan, share
from ..data.features import FeatureBatch, Source
from ..data.vocab import DraftVocabulary
from ..heads.base import DraftHead
from ..heads.kinds import KINDS
from ..recipes.schema import Recipe
from ..target import Target
from .metrics import DepthSums
from .objectives import Objective
from .pace import Pace
from .rollouts import rollouts
from .sharding import readers, seat, whole_head
from .step import Judge


class Spoilt(Exception):
    """A step without a finite loss or gradient."""


@dataclass
class Run:
    """Everything one step needs."""

    recipe: Recipe
    accelerator: Accelerator
    target: Target
    head: Any  # wrapped by accelerate
    optimizer: Any
    scheduler: Any
    train: Source
    held_out: Source
    vocabulary: DraftVocabulary
    data: dict[str, Any]  # what the examples were made from, and what became of the rows
    out: Path
    plans: dict[int, list[list[int]]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    lr: float = 0.0  # of the last step
    shape: tuple[int, int] = (0, 0)  # lines and tokens a line of the last micro-batch
    chunk: int | None = None  # rows of one piece of the logits: chosen once, so that every step's sums are rounded alike
    spoilt_in_a_row: int = 0

    @property
    def objective(self) -> Objective:
        return Objective(**self.recipe.objective.model_dump())

    @property
    def shares(self) -> torch.Tensor:
        """The weight of every depth's mean loss [depths]."""
        return self.objective.shares(self.recipe.head.depths)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train.lengths) // self.recipe.train.batch_size)

    @property
    def steps(self) -> int:
        return self.recipe.train.max_steps or self.recipe.train.epochs * self.steps_per_epoch

    def global_batch(self, step: int) -> list[int]:
        """The rows of a global batch, the same on every process and after every restart."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self.plans:
            lengths = self.train.lengths.tolist()
            self.plans = {epoch: epoch_plan(lengths, self.recipe.train.batch_size, self.recipe.train.seed, epoch)}
        return self.plans[epoch][index]

    def micro_batches(self, source: Source, rows: list[int]) -> Iterator[FeatureBatch]:
        """This process's share of a global batch; where its rows have run out, one row that teaches and counts for nothing."""
        for own in share(rows, *seat(self.recipe, self.accelerator), self.recipe.train.micro_batch_size):
            batch = source.batch(own or rows[:1])
            if not own:
                batch.mask.zero_()
                batch.tokens = 0
            yield batch

    def own_rows(self, batches: Iterable[list[int]]) -> Iterator[int]:
        """The rows that this process reads of global batches, in the order in which it does."""
        place = seat(self.recipe, self.accelerator)
        for rows in batches:
            for own in share(rows, *place, self.recipe.train.micro_batch_size):
                yield from own or rows[:1]

    def advance(self, step: int, rows: list[int]) -> DepthSums:
        """One optimizer step over one global batch.

        Every depth's loss is divided by its count of taught rows in the whole global batch, so neither padding, nor
        the cut into micro-batches and processes, nor the number of depths moves the learning rate. A batch without any
        is no step. Raises Spoilt, and leaves the head as it was, where the loss or its gradient is not finite.
        """
        end = min(self.steps, (step - 1) // self.steps_per_epoch * self.steps_per_epoch + self.steps_per_epoch)
        self.train.expect(self.own_rows(self.global_batch(later) for later in range(step - 1, end)))
        with record_function("hidden states"):  # a name in the traces of --profile, as below
            batches = list(self.micro_batches(self.train, rows))
        if step > self.steps * (1 - self.recipe.train.on_policy):
            batches = [self.rollouts(batch, step) for batch in batches]
        taught = [self.taught(batch, step) for batch in batches]
        own = [torch.stack([maps.sum() for maps in each]) for each in taught]
        counts = torch.as_tensor(self.accelerator.reduce(torch.stack(own).sum(0), reduction="sum"))
        sums = DepthSums.zeros(self.recipe.head.depths, self.accelerator.device)
        leads = self.accelerator.process_index % readers(self.recipe, self.accelerator) == 0
        self.pace.count(batches if leads else [])
        if not counts.any():
            note(f"rows {rows} supervise nothing: no step is taken")
            self.pace.skipped += 1
            return sums
        total = torch.zeros((), device=counts.device)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            self.accelerator.sync_gradients = last  # DeepSpeed steps where it is told so
            with self.accelerator.autocast(), nullcontext() if last else self.accelerator.no_sync(self.head):
                with record_function("head and losses"):
                    loss, seen = self.judged(batch, taught[i], counts)
                total += loss.detach()
                with record_function("backward"):
                    # Gradients are averaged over processes; the sum is what is wanted. And a loss that is not finite makes them
                    # so everywhere, that no process takes the step.
                    self.accelerator.backward(loss * (self.accelerator.num_processes + 0 * total))
            sums.add(seen)
        norms = [float(norm) for norm in self.clip()]
        self.lr = self.scheduler.get_last_lr()[0]
        finite = all(map(math.isfinite, norms))
        if finite:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if not finite:
            raise Spoilt(f"its loss is not finite, or its gradient (norm {norms[-1]:.3g})")
        return sums

    def judged(self, batch: FeatureBatch, taught: list[torch.Tensor], counts: torch.Tensor) -> tuple[torch.Tensor, DepthSums]:
        """The loss of a batch, every depth's divided by its count, and the batch's metrics."""
        lines, time = batch.ids.shape
        self.shape = (lines, time)
        zero3 = self.accelerator.deepspeed_plugin is not None and not whole_head(self.accelerator)
        judge = Judge(batch, self.target, self.objective, counts, self.chunk, zero3)
        loss, sums = self.head(judge, batch.ids, taught, batch.features, self.target, batch.positions)
        self.chunk = judge.chunk
        return loss, sums

    def anywhere(self, here: bool | torch.Tensor) -> bool:
        """Whether it holds on any process. All must ask."""
        flag = torch.as_tensor(here, dtype=torch.float32, device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum"))

    def clip(self) -> list[Any]:
        """Clip the gradients; returns their norms before, the head's last. A confidence estimate has a norm of its own, so that
        the head learns the same with it as without."""
        beside = self.accelerator.unwrap_model(self.head).confidence
        own = set(beside.parameters()) if beside is not None else set()
        rest = [parameter for parameter in self.head.parameters() if parameter not in own]
        return [self.accelerator.clip_grad_norm_(part, self.recipe.train.clip) for part in (list(own), rest) if part]

    def taught(self, batch: FeatureBatch, step: int) -> list[torch.Tensor]:
        """The rows of a batch that this step teaches, map by map; a kind that samples draws anew at every step."""
        head: DraftHead = self.accelerator.unwrap_model(self.head)
        return head.taught(batch.ids, batch.mask, self.recipe.train.seed + step)

    def rollouts(self, batch: FeatureBatch, step: int) -> FeatureBatch:
        head: DraftHead = self.accelerator.unwrap_model(self.head)
        length = min(self.recipe.train.rollout, head.deepest or self.recipe.train.rollout)
        return rollouts(head, batch, self.target, length, self.recipe.train.seed + step)

    @torch.no_grad()
    def held_out_sums(self) -> DepthSums:
        """This process's sums over its share of the held-out rows."""
        sums = DepthSums.zeros(self.recipe.head.depths, self.accelerator.device)
        rows, size = list(range(len(self.held_out.lengths))), self.recipe.train.batch_size
        self.head.eval()
        with Progress("held-out", len(rows), show=self.accelerator.is_main_process) as bar:
            for first in range(0, len(rows), size):
                self.held_out.expect(self.own_rows(rows[i : i + size] for i in range(first, len(rows), size)))
                for batch in self.micro_batches(self.held_out, rows[first : first + size]):
                    with self.accelerator.autocast():
                        taught = self.taught(batch, 0)
                        sums.add(self.judged(batch, taught, torch.stack([own.sum() for own in taught]))[1])
                bar.advance(size)
        self.head.train()
        return sums

    def snapshot(self) -> DraftHead | None:
        """The head as it stands, whole and unwrapped, on the main process; None on the others. All must call it."""
        state = self.accelerator.get_state_dict(self.head)
        if not self.accelerator.is_main_process:
            return None
        return self.built(state)

    def copied(self) -> DraftHead:
        """A copy of the head that this process holds whole."""
        return self.built(self.accelerator.unwrap_model(self.head).state_dict())

    def built(self, state: dict[str, Any]) -> DraftHead:
        config = self.accelerator.unwrap_model(self.head).config
        head = KINDS[config.kind](config)
        head.load_state_dict(state)
        return head.to(self.target.device).eval()
