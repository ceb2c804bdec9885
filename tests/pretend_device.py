"""A pretended accelerator for tests on a machine without one.

Tensors on it report the device "meta" and hold their data on the CPU, so results can be compared with those of the
CPU. An operation that mixes devices raises, as CUDA's do, and what would make the host wait for the device is counted:

    with PretendedDevice() as device:
        model.to("meta")(features_on_the_cpu)   # RuntimeError: mixed devices in embedding.default
    device.syncs                                # {"train_bi_encoder.py:1607 _local_scalar_dense.default": 12}

What it does not show: kernels that differ in their last bits, streams, memory, pinning, fused optimizers, NCCL.
"""

import contextlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
# Operations to which CUDA lets a CPU tensor: an index is copied to the device, a copy is between devices.
INDEXING = {"index.Tensor", "index_put_.default", "index_put.default", "_index_put_impl_.default"}
COPYING = {"_to_copy.default", "copy_.default"}
# Operations whose result has a size that only the device knows.
SIZED_BY_DATA = {"nonzero.default", "masked_select.default", "_unique2.default", "bincount.default"}


class OnDevice(torch.Tensor):
    """A tensor that reports the device "meta" and holds its data, a tensor, on the CPU."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data):
        self.on_cpu = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendedDevice.active.run(func, args, kwargs or {})

    def __getitem__(self, index):  # torch would make the index of a list on the device of the tensor
        return super().__getitem__(torch.as_tensor(index) if isinstance(index, list) else index)

    def __deepcopy__(self, memo):
        return self.detach().clone().requires_grad_(self.requires_grad)

    def tolist(self):
        PretendedDevice.active.count("tolist")
        return on_cpu(self.detach()).tolist()


def on_cpu(value):
    """The data of a tensor on the device; any other value as it is."""
    return value.on_cpu if isinstance(value, OnDevice) else value


def on_device(value):
    """A tensor put on the device; any other value as it is."""
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


class PretendedDevice(TorchDispatchMode):
    """A context in which the device "meta" holds data; `syncs` is {"file:line operation": times that the host waited},
    `operations` the number of those that ran on it.

    Raises RuntimeError for an operation that mixes tensors of the device and the CPU.
    """

    active = None

    def __enter__(self):
        self.syncs, self.operations, self.tensor = {}, 0, torch.tensor
        PretendedDevice.active = self

        def tensor(data, *args, device=None, **kwargs):  # torch fills it without asking the mode
            made = self.tensor(data, *args, **kwargs)
            return made if device is None else made.to(device)

        torch.tensor = tensor
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, PretendedDevice.active = self.tensor, None
        return super().__exit__(*error)

    @contextlib.contextmanager
    def paused(self):
        """A context in which "meta" is torch's own again, to load models: transformers builds them on it, empty."""
        patched, torch.tensor = torch.tensor, self.tensor
        try:
            with _disable_current_modes():
                yield
        finally:
            torch.tensor = patched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def count(self, operation):
        """Count a wait under the innermost line that is neither a library's nor of this file."""
        frame, place = sys._getframe(1), "a library"
        while frame:
            file = frame.f_code.co_filename
            if file != __file__ and "site-packages" not in file and "/lib/python" not in file:
                place = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
                break
            frame = frame.f_back
        where = f"{place} {operation}"
        self.syncs[where] = self.syncs.get(where, 0) + 1

    def run(self, func, args, kwargs):
        """The result of an operation, on the device where one of its tensors is or where `device` names it."""
        name = f"{func._schema.name.split('::')[1]}.{func._overloadname}"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(isinstance(tensor, OnDevice) for tensor in tensors)
        wanted = kwargs.get("device")
        onto = here if wanted is None else torch.device(wanted).type == DEVICE.type
        non_blocking = kwargs.get("non_blocking") or (name == "copy_.default" and len(args) > 2 and args[2])
        if wanted is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": "cpu"}
        if here:
            self.operations += 1
            strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
            if strangers and name not in INDEXING | COPYING:
                raise RuntimeError(f"mixed devices in {name}: {[tuple(tensor.shape) for tensor in strangers]}")
            if strangers and name in INDEXING:
                if not isinstance(args[0], OnDevice):
                    raise RuntimeError(f"mixed devices in {name}: an index on the device into a CPU tensor")
                self.count("index on the CPU")
            if name == "copy_.default":
                onto = isinstance(args[0], OnDevice)
            masks = name in INDEXING and any(
                isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
            )
            leaves = name in COPYING and not onto
            if name == "_local_scalar_dense.default" or name in SIZED_BY_DATA or masks or leaves:
                self.count(name)
        if onto and name in COPYING and not non_blocking and not all(isinstance(t, OnDevice) for t in tensors):
            self.count("blocking copy to the device")
        result = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        if (
            name.split(".")[0].endswith("_")
            and not name.startswith("_")
            and args
            and isinstance(args[0], torch.Tensor)
        ):
            return args[0]  # changed in place
        return tree_map(on_device, result) if onto else result
