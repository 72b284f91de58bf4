"""A target that several processes hold together: its layers sharded (FSDP2) or split (tensor parallel), and who reads what.

The embedding, the final norm and the output head stay whole on every process: heads and losses call them as often as their
own rows ask for, and no process has to wait for another there. What goes through the layers goes through all of a group at
once, so a group's processes must run the target equally often: the recipe refuses what would not.
"""

from typing import Any

from accelerate import Accelerator, DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, share_comm_ctx
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from ..errors import UserError
from ..heads.base import DraftHead
from ..recipes.schema import Recipe
from ..target import Target


def load_target(recipe: Recipe, accelerator: Accelerator) -> Target:
    """The recipe's target on this process's device: whole, or this process's share of one that its group holds.

    Raises UserError where it cannot be shared out as the recipe asks.
    """
    section = recipe.target
    if section.parallel is None:
        return Target.load(section.name, section.dtype, section.device or accelerator.device)
    size = group_size(recipe, accelerator)
    target = Target.load(section.name, section.dtype, "cpu")
    names = ("pp", "dp_replicate", "fsdp", "tp")  # as transformers calls them
    shape = (1, accelerator.num_processes // size, *((size, 1) if section.parallel == "fsdp" else (1, size)))
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
    if section.parallel == "fsdp":
        shards = [fully_shard(layer, mesh=mesh["fsdp"], reshard_after_forward=True) for layer in target.layers]
        share_comm_ctx(shards)  # or every layer would keep a layer's worth of memory for itself
    else:
        split(target, mesh, size)
    target.model.to(accelerator.device)
    target.device = accelerator.device
    return target


def split(target: Target, mesh: Any, size: int) -> None:
    """Cut the layers' weights by the model's own tensor-parallel plan; UserError where transformers has none for it."""
    model: Any = target.model
    whole = {name: "replicate" for name, module in model.named_modules() if module in (target.embed, target.output_head)}
    if not any(name not in whole for name in model.tp_plan):
        raise UserError(f"transformers has no tensor-parallel plan for {type(model).__name__}: set target.parallel to fsdp.")
    heads = getattr(target.config, "num_key_value_heads", None) or target.config.num_attention_heads
    if heads % size:
        raise UserError(
            f"{size} processes cannot split the {heads} key heads of {target.name!r} evenly: set target.group to a divisor."
        )
    config = DistributedConfig(tp_size=size, tp_plan=whole)
    model.maybe_distribute_model(model, config, TransformersDeviceMesh(mesh, mesh))
    del model.config.distributed_config  # how it is held is no part of what it is


def check_held(recipe: Recipe, accelerator: Accelerator, head: DraftHead) -> None:
    """Raise UserError for a head that cannot be trained on a target that several processes hold together."""
    if recipe.target.parallel is None:
        return
    if head.adapts:
        raise UserError(
            f"a {head.kind} head with adapters changes the target's layers, which target.parallel cuts up: leave one "
            "of them out."
        )
    if recipe.eval.prompts and not whole_head(accelerator):
        raise UserError(
            "with target.parallel the verifier runs on every process, which needs the whole head there: launch with DDP, or "
            "set eval.prompts to 0."
        )


def whole_head(accelerator: Accelerator) -> bool:
    """Whether every process holds the whole draft head: not under FSDP and ZeRO-3."""
    plugin = accelerator.deepspeed_plugin
    return accelerator.distributed_type != DistributedType.FSDP and (plugin is None or plugin.zero_stage < 3)


def group_size(recipe: Recipe, accelerator: Accelerator) -> int:
    """How many processes hold one target; UserError where they do not add up to all of them."""
    if recipe.target.parallel is None:
        return 1
    world = accelerator.num_processes
    size = recipe.target.group or world
    if size == 1 or world % size:
        raise UserError(
            f"target.parallel shares a target among several processes: {world} were started, and target.group asks for "
            f"groups of {size}. Launch more with accelerate launch --num_processes, or choose a divisor."
        )
    return size


def readers(recipe: Recipe, accelerator: Accelerator) -> int:
    """How many processes read the same rows: those of a tensor-parallel group."""
    return group_size(recipe, accelerator) if recipe.target.parallel == "tp" else 1


def seat(recipe: Recipe, accelerator: Accelerator) -> tuple[int, int]:
    """Which share of every batch this process reads, and of how many.

    Where several processes read the same rows, all that a step sums over processes counts them as often, in the gradient as
    in the counts that divide it, so that nothing moves.
    """
    alike = readers(recipe, accelerator)
    return accelerator.process_index // alike, accelerator.num_processes // alike
