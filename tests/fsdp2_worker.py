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
whole, even_out, sharded, filled = script.whole, script.even_out, [], []


def seen_whole(tensor):
    sharded.append(isinstance(tensor, script.DTensor) and tensor.to_local().numel() < tensor.numel())
    return whole(tensor)


def seen_even_out(share, accelerator):
    share = even_out(share, accelerator)
    filled.extend(not cut for _, cut in share.micro_batches)
    return share


script.whole, script.even_out = seen_whole, seen_even_out
script.main(script.parse_args(sys.argv[2:]))
print(f"{sum(sharded)} tensors were in parts, {sum(filled)} of {len(filled)} micro-batches were for no text")
