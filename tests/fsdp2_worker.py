"""Run a trainer under FSDP2 on CPU processes; launched by test_fsdp2.py.

accelerate launch --config_file FSDP2 tests/fsdp2_worker.py SCRIPT FLAGS

Accelerate shards only on GPUs, not on CPUs. If `distributed_type` is MULTI_GPU, it shards over gloo with the code that
it runs on GPUs.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
script = importlib.import_module(Path(sys.argv[1]).stem)
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
gather, repeat, sharded, repeated = script.Checkpoints.gather_tensors, script.repeat_for_fsdp, [], []


def record_gather(checkpoints):
    copies = gather(checkpoints)  # first: state_dict() shards again what an evaluation has left whole
    states = [checkpoints.model.state_dict()]
    states += [state for optimizer in checkpoints.optimizers for state in optimizer.state.values()]
    tensors = [tensor for state in states for tensor in state.values() if tensor.ndim]
    sharded.extend(isinstance(tensor, DTensor) and tensor.to_local().numel() < tensor.numel() for tensor in tensors)
    return copies


def record_repeat(micro_batches, accelerator):
    result = repeat(micro_batches, accelerator)
    repeated.extend(len(indices) == 0 for _, indices, _ in result)
    return result


load_model, deepcopy, to, calls, autocast = script.load_model, script.copy.deepcopy, torch.nn.Module.to, [], []


def record_load(*args):
    model = load_model(*args)
    calls.clear()
    return model


def record_copy(model):
    calls.append("copied")
    return deepcopy(model)


def record_to(module, *args, **options):
    calls.append("moved")
    return to(module, *args, **options)


def record_autocast(module, _):
    if isinstance(module, torch.nn.LayerNorm):
        autocast.append(torch.is_autocast_enabled("cpu"))


script.Checkpoints.gather_tensors, script.repeat_for_fsdp = record_gather, record_repeat
script.load_model, script.copy, torch.nn.Module.to = record_load, SimpleNamespace(deepcopy=record_copy), record_to
torch.nn.modules.module.register_module_forward_pre_hook(record_autocast)


def concatenate(model, *_):
    for module in script.transformers_of(model):
        script.concatenate_inside(module)
    return ""


if "CONCATENATED" in os.environ:  # as on GPUs
    script.concatenate_texts = concatenate
script.main(script.parse_args(sys.argv[2:]))
print(f"{sum(sharded)} tensors were sharded, {sum(repeated)} of {len(repeated)} micro-batches had no text")
print(f"{', '.join(calls[:2])}; {sum(autocast)} of {len(autocast)} LayerNorms ran under autocast")
