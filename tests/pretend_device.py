"""A simulated accelerator for tests on machines without one.

Tensors on it report the device "meta" and hold their data on the CPU, so that results can be compared with the CPU's.
Mixing devices in an operation raises an error, as on CUDA, and each wait of the host for the device is counted:

    with PretendDevice() as device:
        model.to("meta")(features_on_the_cpu)   # RuntimeError: mixed devices in embedding.default
    device.syncs                                # {"train_bi_encoder.py:1469 tolist": 12}

Not simulated: kernels that round differently, streams, memory, pinning, fused optimizers, NCCL.
"""

import contextlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
# Operations that accept CPU tensors on CUDA: an index is copied to the device; a copy may be between devices.
INDEXING = {"index.Tensor", "index_put_.default", "index_put.default", "_index_put_impl_.default"}
COPYING = {"_to_copy.default", "copy_.default"}
# Operations whose output size depends on the data: the host waits for it.
SIZED_BY_DATA = {"nonzero.default", "masked_select.default", "_unique2.default", "bincount.default"}


class OnDevice(torch.Tensor):
    """A tensor that reports the device "meta" and holds its data in a CPU tensor."""

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
        return PretendDevice.active.run(func, args, kwargs or {})

    def __getitem__(self, index):  # torch would create the index on the device
        return super().__getitem__(torch.as_tensor(index) if isinstance(index, list) else index)

    def __deepcopy__(self, memo):
        return self.detach().clone().requires_grad_(self.requires_grad)

    def tolist(self):
        PretendDevice.active.count("tolist")
        return on_cpu(self.detach()).tolist()


def on_cpu(value):
    """Return the data of a tensor on the device; any other value unchanged."""
    return value.on_cpu if isinstance(value, OnDevice) else value


def on_device(value):
    """Return a tensor moved to the device; any other value unchanged."""
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


class PretendDevice(TorchDispatchMode):
    """A context in which the device "meta" holds data. syncs: {"file:line operation": number of waits of the host};
    operations: number of operations on the device.

    An operation that mixes tensors of the device and the CPU raises RuntimeError.
    """

    active = None

    def __enter__(self):
        self.syncs, self.operations, self.tensor = {}, 0, torch.tensor
        PretendDevice.active = self

        def tensor(data, *args, device=None, **kwargs):  # torch.tensor does not dispatch to this mode
            made = self.tensor(data, *args, **kwargs)
            return made if device is None else made.to(device)

        torch.tensor = tensor
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, PretendDevice.active = self.tensor, None
        return super().__exit__(*error)

    @contextlib.contextmanager
    def paused(self):
        """A context in which "meta" is torch's own device again, on which transformers builds models to load."""
        patched, torch.tensor = torch.tensor, self.tensor
        try:
            with _disable_current_modes():
                yield
        finally:
            torch.tensor = patched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def count(self, operation):
        """Count a wait under the innermost stack frame that is in neither a library nor this file."""
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
        """Run an operation; its result is on the device named by `device`, else on this one if any input is."""
        name = f"{func._schema.name.split('::')[1]}.{func._overloadname}"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        any_on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        requested = kwargs.get("device")
        to_device = any_on_device if requested is None else torch.device(requested).type == DEVICE.type
        non_blocking = kwargs.get("non_blocking") or (name == "copy_.default" and len(args) > 2 and args[2])
        if requested is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": "cpu"}
        if any_on_device:
            self.operations += 1
            cpu_tensors = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
            if cpu_tensors and name not in INDEXING | COPYING:
                raise RuntimeError(f"mixed devices in {name}: {[tuple(tensor.shape) for tensor in cpu_tensors]}")
            if cpu_tensors and name in INDEXING:
                if not isinstance(args[0], OnDevice):
                    raise RuntimeError(f"mixed devices in {name}: an index on the device into a CPU tensor")
                self.count("index on the CPU")
            if name == "copy_.default":
                to_device = isinstance(args[0], OnDevice)
            masks = name in INDEXING and any(
                isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
            )
            leaves = name in COPYING and not to_device
            if name == "_local_scalar_dense.default" or name in SIZED_BY_DATA or masks or leaves:
                self.count(name)
        if to_device and name in COPYING and not non_blocking and not all(isinstance(t, OnDevice) for t in tensors):
            self.count("blocking copy to the device")
        result = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        if (
            name.split(".")[0].endswith("_")
            and not name.startswith("_")
            and args
            and isinstance(args[0], torch.Tensor)
        ):
            return args[0]  # changed in place
        return tree_map(on_device, result) if to_device else result
