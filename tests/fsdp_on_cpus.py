"""Train with the head sharded by FSDP2 on CPU processes: accelerate shards on accelerators alone, so it is told it has some.

accelerate launch ... fsdp_on_cpus.py RECIPE --set ...
"""

import runpy

from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
runpy.run_module("draftsmith.train", run_name="__main__")
