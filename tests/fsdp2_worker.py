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
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
script = importlib.import_module(Path(sys.argv[1]).stem)
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
get_state_dict, equalize, sharded, filled = script.dcp.get_state_dict, script.equalize_micro_batches, [], []


def seen_state_dict(model, optimizer, options):
    states = [model.state_dict(), *optimizer.state_dict()["state"].values()]
    tensors = [tensor for state in states for tensor in state.values() if tensor.ndim]
    sharded.extend(isinstance(tensor, DTensor) and tensor.to_local().numel() < tensor.numel() for tensor in tensors)
    return get_state_dict(model, optimizer, options=options)


def seen_equalize(local, accelerator):
    result = equalize(local, accelerator)
    filled.extend(len(cut) == 0 for _, cut in local.micro_batches)
    return result


script.dcp.get_state_dict, script.equalize_micro_batches = seen_state_dict, seen_equalize
script.main(script.parse_args(sys.argv[2:]))
print(f"{sum(sharded)} tensors were sharded, {sum(filled)} of {len(filled)} micro-batches had no text")
