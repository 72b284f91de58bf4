"""Training under DeepSpeed (ZeRO-2 and ZeRO-3): what its engine is told, and what it cannot do."""

from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin, is_deepspeed_available
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..errors import UserError
from ..recipes.schema import Recipe


def under_deepspeed(recipe: Recipe, precision: str) -> Accelerator:
    """The accelerator of a launch with DeepSpeed, whose settings the recipe completes; called once the processes are joined.

    The engine clips the gradients and takes the step inside ``backward``, and takes none where their norm is not finite.
    bf16 is autocast over float32 weights, as without it: the engine's own bf16 would hold, and save, the head in bfloat16.
    Raises UserError for what it cannot do.
    """
    if recipe.head.confidence:
        raise UserError(
            "DeepSpeed clips all gradients by one norm, so that a confidence estimate would change what the head learns: set "
            "head.confidence to false, or launch with recipes/accelerate/ddp.yaml or fsdp.yaml."
        )
    plugin = DeepSpeedPlugin()
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch_size,
        "gradient_accumulation_steps": 1,  # ``backward`` is told which one is the last
        "gradient_clipping": recipe.train.clip,
        "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
    }
    accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin)
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise UserError("accelerate runs no DeepSpeed where it is told to use the CPU: unset ACCELERATE_USE_CPU.")
    unset_hf_deepspeed_config()  # under ZeRO-3 transformers would cut up the target as it loads it
    return accelerator


def check_deepspeed() -> None:
    """Raise UserError where it is not installed."""
    if not is_deepspeed_available():
        raise UserError("DeepSpeed is not installed: pip install deepspeed, or launch with recipes/accelerate/fsdp.yaml.")
