"""Launched by test_fsdp2.py: a trainer under FSDP2 on CPU processes.

accelerate launch --config_file FSDP2 tests/fsdp2_worker.py SCRIPT FLAGS

Accelerate shards on GPUs only, and gives CPU processes DDP. Told that these processes have a GPU each, it shards over
gloo, by the code that it runs on GPUs.
"""

import importlib
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).parents[1]))
script = importlib.import_module(Path(sys.argv[1]).stem)
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
full_tensor, equalize, sharded, filled = script.full_tensor, script.equalize_micro_batches, [], []


def seen_full_tensor(tensor):
    sharded.append(isinstance(tensor, script.DTensor) and tensor.to_local().numel() < tensor.numel())
    return full_tensor(tensor)


def seen_equalize(local, accelerator):
    result = equalize(local, accelerator)
    filled.extend(not cut for _, cut in local.micro_batches)
    return result


script.full_tensor, script.equalize_micro_batches = seen_full_tensor, seen_equalize
script.main(script.parse_args(sys.argv[2:]))
print(f"{sum(sharded)} tensors were sharded, {sum(filled)} of {len(filled)} micro-batches had no text")
