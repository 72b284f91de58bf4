"""draftsmith's own EAGLE-3 behind the contract of its neighbours: the training loop's step, given states and no target.

Of the target only the ends are loaded (``Ends``), as with data.engine and data.features: store.
"""
# pyright: reportMissingImports=false

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from driver import Data, Row, Settings, serve
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from draftsmith.data.features import FeatureBatch
from draftsmith.data.vocab import holding
from draftsmith.ends import Ends
from draftsmith.heads.kinds import KINDS
from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.target import Features
from draftsmith.train.prepare import parameter_groups, rate
from draftsmith.train.run import Run


class Given:
    """A source of the rows that a step was asked for."""

    lost = 0

    def __init__(self, data: Data) -> None:
        self.data = data
        self.rows: list[Row] = []
        self.lengths = np.zeros(0, np.int32)

    def take(self, rows: list[Row]) -> None:
        self.rows, self.lengths = rows, np.array([len(row.ids) for row in rows], np.int32)

    def batch(self, rows: list[int]) -> FeatureBatch:
        chosen = [self.rows[i] for i in rows]
        lines = self.data.padded(chosen)
        return FeatureBatch(lines.ids, lines.mask, Features(lines.taps, lines.last), None, sum(len(row.ids) for row in chosen))

    def expect(self, rows: Iterable[int]) -> None:
        pass

    def flush(self) -> None:
        pass


class Ours:
    def __init__(self, data: Data, settings: Settings) -> None:
        target = Ends.load(str(data.place / "target"), "float32")
        changes = [f"head.depths={settings.depths}", f"train.seed={settings.seed}", f"train.max_steps={settings.steps}"]
        if not settings.own:
            changes += [f"train.lr={settings.lr}", f"train.betas={list(settings.betas)}", f"train.clip={settings.clip}"]
            changes += [f"train.weight_decay={settings.weight_decay}", f"train.warmup={settings.warmup / settings.steps}"]
        self.recipe: Recipe = load_recipe("demo", changes)
        section, kind = self.recipe.head, KINDS["eagle3"]
        options = kind.Options.model_validate(section.options)
        self.head = kind.create(target, options, data.bench["taps"], settings.depths, data.ends["target_ids"], False)
        accelerator = Accelerator(mixed_precision="no", cpu=True)
        made = self.recipe.train
        groups = parameter_groups(self.head, made.lr)
        optimizer = torch.optim.AdamW(groups, lr=made.lr, betas=made.betas, weight_decay=made.weight_decay, fused=True)
        wrapped, optimizer = accelerator.prepare(self.head, optimizer)
        scheduler = LambdaLR(optimizer.optimizer, partial(rate, recipe=self.recipe, steps=settings.steps))
        self.given, self.done = Given(data), 0
        vocabulary = holding(data.ends["target_ids"], torch.ones(target.vocab_size, dtype=torch.long))
        self.run = Run(
            self.recipe, accelerator, target, wrapped, optimizer, scheduler, self.given, self.given, vocabulary, {}, Path()
        )

    def parameters(self) -> list[Tensor]:
        return list(self.head.parameters())

    def step(self, batches: list[list[Row]]) -> float:
        self.given.take([row for rows in batches for row in rows])
        settings = self.recipe.train
        settings.batch_size, settings.micro_batch_size = len(self.given.rows), len(batches[0])
        sums = self.run.advance(self.done + 1, list(range(len(self.given.rows))))
        self.done += 1
        return sums.report(self.run.shares)["loss"]

    def save(self, place: Path) -> None:
        place.mkdir(parents=True)
        self.head.save(place)


serve(Ours)
