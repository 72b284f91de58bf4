"""Write what bench_peers.py feeds every toolkit: see Data in driver.py.

    python scripts/peers/make_data.py OUT [--rows 640] [--threads 2]

SmolLM2-135M-Instruct over the first conversations of the demo recipe, in float32, and the draft vocabulary that recipe chooses.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.console import Progress
from draftsmith.data.tally import Tally
from draftsmith.data.vocab import choose, count_tokens, special_ids
from draftsmith.outputs import new_directory
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train.prepare import read_examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = load_recipe("demo", ["target.dtype=float32"])
    target = Target.load(recipe.target.name, "float32")
    examples = read_examples(recipe, "train", target, Tally())
    taps, size = recipe.head.taps, recipe.head.draft_vocab
    assert taps and size, "the demo recipe names them"
    vocabulary = choose(count_tokens(examples, target.vocab_size), size, special_ids(target.tokenizer, target.eos_ids))
    rows = range(min(options.rows, len(examples)))
    parts: dict[str, list[torch.Tensor]] = {"ids": [], "mask": [], "taps": [], "last": []}
    with Progress("hidden states", len(rows)) as bar:
        for row in rows:
            example = examples[row]
            ids = torch.tensor(example.ids).long()
            states = target.features(ids[None], taps)
            for name, part in zip(parts, (ids, torch.tensor(example.mask), states.taps[0], states.last[0]), strict=True):
                parts[name].append(part)
            bar.advance(1)
    ends = torch.tensor([len(ids) for ids in parts["ids"]]).cumsum(0)
    with new_directory(options.out, force=True) as partial:
        save_file(
            {name: torch.cat(own).contiguous() for name, own in parts.items()} | {"ends": ends}, partial / "rows.safetensors"
        )
        own = {"embed": target.model.get_input_embeddings().weight, "lm_head": target.output_head.weight}
        own |= {"norm": target.model.model.norm.weight, "target_ids": vocabulary.target_ids}
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in own.items()}, partial / "ends.safetensors")
        target.model.save_pretrained(partial / "target")
        target.tokenizer_or_refuse().save_pretrained(partial / "target")
        (partial / "target.json").write_text(json.dumps(target.config.to_dict(), indent=1) + "\n")
        bench = {"taps": taps, "draft_vocab": size, "rows": len(rows)}
        (partial / "bench.json").write_text(json.dumps(bench) + "\n")


if __name__ == "__main__":
    main()
