"""A simulated CUDA device for tests on machines without a GPU (torch's CPU build, g++).

It refuses or reports what CUDA, NCCL and flash attention refuse and a CPU does not. Tensors on it report cuda:0, so
Accelerate, autocast, fused AdamW and GradScaler take their CUDA paths with CUDA's lists of kernels to autocast; they
hold their data on the CPU, so that results can be compared with the CPU's. Import it before torch:

    with StrictDevice(flash=True, mixed="bf16") as device:  # under RANK, WORLD_SIZE...: gloo stands in for NCCL
        script.main(script.parse_args(flags))               # RuntimeError("STRICT: ...") at what CUDA refuses
    device.syncs, device.reports, device.collectives        # {"file:line what": count} each

or: python tests/strict_device.py SCRIPT.py '{"flash": true, "mixed": "bf16"}' FLAGS

Refused: mixed devices, indices on the device into CPU tensors, numpy() and pin_memory() of device tensors, pinning or
in-place writes of expanded tensors, collectives on CPU tensors or non-contiguous ones, fused optimizers with mixed
devices or dtypes, flash attention on float32, cu_seqlens that are not int32 or do not fit, kernels without a
deterministic form under use_deterministic_algorithms, the device in forked processes. Reported: waits of the host for
the device, float32 Linear outside autocast, random operations, writes to pinned tensors after a non-blocking copy,
device operations in background threads.
`memory` is the limit of the device in bytes; live tensors beyond it raise OutOfMemoryError.
kind="xpu": a device that is no CUDA.
All ends as late as CUDA allows, except with late=False. What is copied to the host with non_blocking=True is poison
(NaN, the highest integer, the other bool) until the host waits for it. Reported: its use before; writes to pinned
memory before the device has read it; what a stream reads, writes, or reuses once freed, before other streams are done
with it.
Not simulated: rounding, NCCL's timing and order, kernels that lack a dtype, inference mode, backward passes in other
streams.
"""

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections import Counter, namedtuple
from unittest import mock

GUARD = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Hooks : at::CUDAHooksInterface {  // for at::getAccelerator, which the autograd engine asks
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
struct Guard final : impl::DeviceGuardImplInterface {
  Device d;
  explicit Guard(DeviceType type) : d(type, 0) {}
  DeviceType type() const override { return d.type(); }
  Device exchangeDevice(Device) const override { return d; }
  Device getDevice() const override { return d; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, d); }
  Stream getStreamFromGlobalPool(Device, bool = false) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, d); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
extern "C" void register_guard() {
  static Guard guard(DeviceType::CUDA), other(DeviceType::XPU);
  using Made = std::unique_ptr<at::CUDAHooksInterface>;
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs args) -> Made {
    return std::make_unique<Hooks>(args);
  });
  impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard), registrar_of_other(DeviceType::XPU, &other);
}
"""


def register_guard():
    """Give torch's CPU build a device guard and hooks for CUDA that do nothing: autograd and autocast ask for them.
    Before torch is imported, because it asks for the hooks then."""
    if "torch" in sys.modules:
        raise ImportError("import strict_device before torch")
    root, folder = os.path.dirname(importlib.util.find_spec("torch").origin), tempfile.mkdtemp()
    compiled = f"{os.environ.get('STRICT_DEVICE', folder)}/guard.so"  # once for all processes of the tests
    if not os.path.exists(compiled):
        with open(f"{folder}/guard.cpp", "w") as file:
            file.write(GUARD)
        new = f"{compiled}.{os.getpid()}"
        subprocess.run(["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", f"{folder}/guard.cpp",
                        "-o", new, f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"],
                       check=True)  # fmt: skip
        os.replace(new, compiled)
    ctypes.CDLL(f"{root}/lib/libtorch_cpu.so", ctypes.RTLD_GLOBAL)
    ctypes.CDLL(compiled).register_guard()


register_guard()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.utils._device  # noqa: E402
import torch.utils.flop_counter  # noqa: E402, F401 - registers operations, before one is replaced
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

DEVICE = torch.device("cuda", 0)


def inference_mode(mode=True):
    return torch.no_grad()(mode) if callable(mode) else torch.set_grad_enabled(not mode and torch.is_grad_enabled())


torch.inference_mode = inference_mode  # before scripts decorate with it: wrapper tensors do not support the real one

INDEXING = {"index.Tensor", "index_put_.default", "index_put.default", "_index_put_impl_.default",
            "_unsafe_index.Tensor", "_unsafe_index_put.default"}  # fmt: skip
COPYING = {"_to_copy.default", "copy_.default"}
SIZED_BY_DATA = {"nonzero.default", "masked_select.default", "_unique2.default", "bincount.default",
                 "unique_dim.default", "repeat_interleave.Tensor"}  # fmt: skip
# at::globalContext().alertNotDeterministic in the CUDA kernels of torch 2.13 (docs of use_deterministic_algorithms)
NOT_DETERMINISTIC = {"put_", "kthvalue", "histc", "nll_loss2d_forward", "nll_loss2d_backward",
                     "grid_sampler_2d_backward", "reflection_pad1d_backward", "_ctc_loss_backward",
                     "max_pool3d_with_indices_backward"}  # fmt: skip
_pinned = {}  # address of a pinned CPU storage -> whether it was copied without waiting


def refuse(text):
    raise RuntimeError(f"STRICT: {text}")


def overlaps(tensor):
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


class OnDevice(torch.Tensor):
    """A tensor that reports cuda:0 and holds its data in a CPU tensor."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=StrictDevice.active.device, requires_grad=data.requires_grad)  # fmt: skip

    def __init__(self, data):
        self.on_cpu = data
        StrictDevice.active.allocate(data.untyped_storage())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return StrictDevice.active.run(func, args, kwargs or {})

    def __getitem__(self, index):
        return super().__getitem__(torch.as_tensor(index) if isinstance(index, list) else index)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        torch._C.TensorBase.data.__set__(self, other)
        self.on_cpu = other.on_cpu

    def __deepcopy__(self, memo):
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __repr__(self):
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def tolist(self):
        StrictDevice.active.use("tolist", [self])
        StrictDevice.active.count("tolist")
        return on_cpu(self.detach()).tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("STRICT: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        StrictDevice.active.use("numpy", [self])
        StrictDevice.active.count("numpy")
        return on_cpu(self.detach()).numpy()

    def __array__(self, *_):
        return self.numpy()


def map_leaves(function, value):
    """As torch's tree_map, which takes a third of the time of an operation, on lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return type(value)([map_leaves(function, part) for part in value])
    if isinstance(value, dict):
        return {key: map_leaves(function, part) for key, part in value.items()}
    return function(value)


def find_tensors(value):
    """Return the tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in find_tensors(part)]


def on_cpu(value):
    return value.on_cpu if isinstance(value, OnDevice) else value


def on_device(value):
    """Return a tensor as one of the device; a sparse one, which only evaluators of the library make, as it is."""
    is_new = isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.layout == torch.strided
    return OnDevice(value) if is_new else value


def compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
    return isinstance(input, OnDevice) == isinstance(from_, OnDevice)


def apply_to(module, *given, apply=torch.nn.Module._apply):
    """Do as Module._apply does, but tied weights stay one, as they do where `compatible` holds for two devices."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    first = {weight: name for name, weight in reversed(weights.items())}
    result = apply(module, *given)
    for name, weight in weights.items():
        if first[weight] != name:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first[weight]))
    return result


class Event:
    """A moment: `clock` has of each stream the number of the last operation before it."""

    def __init__(self, *_, **__):
        self.clock, self.asked = Counter(), False

    def record(self, stream=None):
        self.clock = Counter((stream or StrictDevice.active.stream()).clock)

    def wait(self, stream=None):
        (stream or StrictDevice.active.stream()).wait_event(self)

    def synchronize(self):
        StrictDevice.active.count("event", self.clock)

    def query(self):  # not yet; but when asked again
        self.asked = not self.asked
        if not self.asked:
            StrictDevice.active.arrive(self.clock)
        return not self.asked


class Stream(Event):
    """A stream of the device: its moment is now."""

    def wait_event(self, other):
        self.clock |= other.clock  # the higher number of each stream

    wait_stream = wait_event

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


# A copy that has not ended. values: what the host will get, or what it held when the copy to the device was asked for.
Copy = namedtuple("Copy", "stream time host values to_host place")
# A storage on the device. owner: the stream that reuses it once it is freed, unless in use by `recorded` ones.
Memory = namedtuple("Memory", "owner writes uses recorded")  # uses, and those that write: {stream: (time, place)}


def poison(tensor):
    if tensor.dtype == torch.bool:
        return tensor.logical_not_()
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(math.nan if is_real else torch.iinfo(tensor.dtype).max)


def attend(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
           deterministic=False):  # fmt: skip
    """Return what flash attention computes of CPU tensors (texts, tokens, heads, D)."""
    dtype = q.dtype  # computed in float32: not every CPU has the kernel of half precision
    q, k, v = (part.transpose(1, 2).float() for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    window = (window_size[0], 0 if causal else window_size[1])
    before, after = (len(distance) if side < 0 else side for side in window)
    mask = (distance <= before) & (distance >= -after)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=softmax_scale)
    return out.transpose(1, 2).contiguous().to(dtype)


class FlashAttention(torch.autograd.Function):
    """One operation of the device, as the kernel is: `attend` computes it of CPU tensors."""

    @staticmethod
    def forward(context, attend, *parts):
        StrictDevice.active.use("flash attention", parts)
        with _disable_current_modes(), torch.enable_grad():
            context.parts = [part.on_cpu.detach().requires_grad_() for part in parts]
            context.result = attend(*context.parts)
            result = context.result.detach()
        return on_device(result)

    @staticmethod
    def backward(context, gradient):
        StrictDevice.active.use("flash attention's gradient", [gradient])
        with _disable_current_modes():
            gradients = torch.autograd.grad(context.result, context.parts, gradient.on_cpu)
        return None, *map(on_device, gradients)


@functools.cache
def written_arguments(func):
    """Return the positions and the names of the arguments that an operation writes to."""
    kinds = [argument.alias_info for argument in func._schema.arguments]
    written = [index for index, kind in enumerate(kinds) if kind and kind.is_write]
    return written + [func._schema.arguments[index].name for index in written]


@functools.cache
def name_of_script(file):
    in_library = file == __file__ or any(part in file for part in ("site-packages", "/lib/python", "<"))
    return None if in_library else os.path.basename(file)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class StrictDevice(TorchDispatchMode):
    active = None

    def __init__(self, flash=False, mixed="no", memory=80 * 2**30, late=True, kind="cuda"):
        super().__init__()
        self.device = torch.device(kind, 0)
        self.flash, self.mixed, self.memory, self.late = flash, mixed, memory, late
        self.allocated, self.peak, self.storages = 0, 0, {}  # {address of a storage: Memory}
        self.main, self.local, self.times, self.host = Stream(), threading.local(), Counter(), Counter()
        self.copies, self.freed, self.process = [], [], os.getpid()
        self.syncs, self.reports, self.collectives, self.randoms = Counter(), Counter(), Counter(), Counter()
        self.operations, self.thread, self.seeded, self.objects = 0, threading.get_ident(), 0, False

    # ---- patches

    def unreported(self, function):
        """Return a function whose own reports are left out: those of a trial in float32, which is tested elsewhere."""

        def call(*given):
            with mock.patch.object(self, "reports", Counter()):
                return function(*given)

        return call

    def __enter__(self):
        StrictDevice.active, self.patches, cuda = self, [], torch.cuda

        def is_cuda(*_):
            return self.device.type == "cuda"

        self.make_tensor, self.seed, self.make_list = torch.tensor, torch.manual_seed, torch.Tensor.tolist
        torch.utils._device._device_constructors()  # cached, before torch.tensor is replaced
        properties = types.SimpleNamespace(major=9, minor=0, total_memory=self.memory, multi_processor_count=132,
                                           name="simulated", warp_size=32)  # fmt: skip
        for owner, name, value in [
            (cuda, "_lazy_init", lambda: None), (torch.xpu, "_lazy_init", lambda: None),
            (torch.xpu, "device_count", lambda: 1), (torch.xpu, "set_device", lambda *_: None),
            (cuda, "is_available", is_cuda), (cuda, "is_initialized", is_cuda), (cuda, "device_count", lambda: 1),
            (cuda, "current_device", lambda: 0), (cuda, "set_device", lambda *_: None),
            (cuda, "synchronize", lambda *_: self.count("synchronize", self.times)),
            (cuda, "empty_cache", lambda: None), (cuda, "Stream", Stream), (cuda, "Event", Event),
            (cuda, "current_stream", self.stream), (cuda, "default_stream", lambda *_: self.main),
            (cuda, "stream", self.in_stream), (cuda, "set_stream", self.set_stream),
            (torch.Tensor, "record_stream", lambda t, stream: self.memory_of(t).recorded.append(stream)),
            (torch.Tensor, "tolist", lambda t: self.use_host("tolist", [t]) or self.make_list(t)),
            (cuda, "get_device_name", lambda *_: "simulated"),
            (cuda, "get_device_capability", lambda *_: (9, 0)), (cuda, "get_device_properties", lambda *_: properties),
            (cuda, "is_bf16_supported", lambda *_, **__: True), (cuda, "manual_seed_all", lambda *_: None),
            (cuda, "manual_seed", lambda *_: None), (cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.accelerator, "is_available", lambda: True), (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "set_device_index", lambda *_: None),
            (torch.accelerator, "memory_allocated", lambda *_: self.allocated),
            (torch.accelerator, "max_memory_allocated", lambda *_: self.peak),
            (torch.accelerator, "reset_peak_memory_stats", lambda *_: setattr(self, "peak", self.allocated)),
            (torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(self.device.type)),
            (dist.Logger, "set_runtime_stats_and_log", lambda _: None),  # DDP's timer of CUDA is not in a CPU build
            (torch, "tensor", self.tensor), (torch, "manual_seed", self.manual_seed),
            (torch.Tensor, "pin_memory", lambda t, *_: self.pin_memory(t)),
            (torch.Tensor, "is_pinned", lambda t, *_: self.pinned(t)),
            (torch, "_has_compatible_shallow_copy_type", compatible), (torch.nn.Module, "_apply", apply_to),
            (dist, "is_nccl_available", lambda: True),
            (dist.distributed_c10d, "is_nccl_available", lambda: True),
            (dist, "init_process_group", self.init_process_group),
            (torch.ops.aten, "_flash_attention_forward", self.aten_flash),
        ]:  # fmt: skip
            self.patches.append(mock.patch.object(owner, name, value))
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier"):
            self.patches.append(mock.patch.object(dist, name, self.counted(name, getattr(dist, name))))
        self.patches.append(mock.patch("accelerate.utils.imports.is_cuda_available", is_cuda))
        self.patches.append(mock.patch("accelerate.state.is_cuda_available", is_cuda, create=True))
        self.patches.append(mock.patch("accelerate.state.is_xpu_available", lambda *_: not is_cuda()))
        self.patch_saving()
        if self.flash:
            self.install_flash()
        for patch in self.patches:
            patch.start()
        self.hook = torch.nn.modules.module.register_module_forward_pre_hook(self.before_module)
        return super().__enter__()

    def __exit__(self, *error):
        self.arrive(self.times)
        for patch in reversed(self.patches):
            patch.stop()
        self.hook.remove()
        return super().__exit__(*error)

    def patch_saving(self):  # safetensors reads addresses, which the simulated tensors lack
        import safetensors.torch
        import transformers

        write, owners = safetensors.torch.save_file, [transformers.PreTrainedModel]
        write_model = safetensors.torch.save_model

        def to_cpu(tensors):
            return {name: on_cpu(tensor.detach()).contiguous() for name, tensor in tensors.items()}

        def saving(save):
            def save_pretrained(model, folder, **options):
                state = options.pop("state_dict", None) or model.state_dict()
                return save(model, folder, state_dict=to_cpu(state), **options)

            return save_pretrained

        def save_file(tensors, *args, **options):
            return write(to_cpu(tensors), *args, **options)

        def save_model(model, *args):
            return write(to_cpu(model.state_dict()), *args)

        modules = [name for name in sys.modules if name.startswith(("sentence_", "safetensors.t"))]
        for module in map(sys.modules.get, modules):
            for name, value in list(vars(module).items()):
                if value is write or value is write_model:
                    replacement = save_file if value is write else save_model
                    self.patches.append(mock.patch.object(module, name, replacement))
        if importlib.util.find_spec("peft"):
            owners.append(importlib.import_module("peft").PeftModel)
        for owner in owners:
            self.patches.append(mock.patch.object(owner, "save_pretrained", saving(owner.save_pretrained)))

    def allocate(self, storage):
        """Count the bytes of a storage until it is freed; raise OutOfMemoryError beyond the limit."""
        if storage._cdata in self.storages or not storage.nbytes():
            return
        stream, place = self.stream(), self.late and self.place()
        for uses in [uses for owner, uses in self.freed if owner is stream]:
            self.check(f"{place} reuses freed memory and", uses)
        self.freed = [(owner, uses) for owner, uses in self.freed if owner is not stream]
        now = {stream: (self.times[stream], f"{place} makes it")}
        self.storages[storage._cdata] = Memory(stream, now, dict(now), [])
        weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.allocated += storage.nbytes()
        self.peak = max(self.peak, self.allocated)
        if self.allocated > self.memory:
            used = f"{self.allocated:,} bytes of {self.memory:,}"
            raise torch.OutOfMemoryError(f"CUDA out of memory: {used} (simulated)")

    def free(self, address, size):
        memory = self.storages.pop(address)
        self.allocated -= size
        uses = {stream: use for stream, use in memory.uses.items() if stream not in [memory.owner, *memory.recorded]}
        self.freed += [(memory.owner, uses)] * bool(uses)

    # ---- streams

    def stream(self, *_):
        return getattr(self.local, "stream", self.main)  # that of this thread

    def set_stream(self, stream):
        self.local.stream = stream

    @contextlib.contextmanager
    def in_stream(self, stream):
        before, self.local.stream = self.stream(), stream or self.stream()
        try:
            yield
        finally:
            self.local.stream = before

    def memory_of(self, tensor):
        return isinstance(tensor, OnDevice) and self.storages.get(tensor.on_cpu.untyped_storage()._cdata)

    def use(self, name, tensors, written=()):
        """Add an operation to the current stream; written: ids of tensors. Report what other streams still use."""
        stream, place = self.stream(), self.late and f"{self.place()} {name}"
        stream.clock |= self.host
        self.times[stream] += 1
        stream.clock[stream] = self.times[stream]
        for tensor in tensors if self.late else ():
            if memory := self.memory_of(tensor):
                self.check(place, memory.uses if id(tensor) in written else memory.writes)
                memory.uses[stream] = self.times[stream], place
                memory.writes.update({stream: memory.uses[stream]} if id(tensor) in written else {})

    def check(self, place, uses):
        for stream, (time, other) in uses.items():
            if time > self.stream().clock[stream]:
                self.reports[f"{place} does not wait for another stream: {other}"] += 1

    def use_host(self, name, tensors):
        """Report what the host uses before it has arrived."""
        for copy in self.copies:
            if copy.to_host and address(copy.host) in [address(t) for t in tensors if not isinstance(t, OnDevice)]:
                self.reports[f"{self.place()} {name} uses a copy that has not arrived: {copy.place}"] += 1

    def delay(self, host, to_host):
        """Let a copy end when the host waits for it."""
        if not host.numel():
            return
        host, values, stream = host.data, host.data.clone(), self.stream()
        self.copies.append(Copy(stream, self.times[stream], host, values, to_host, self.place()))
        if to_host:
            poison(host)

    def arrive(self, clock):
        """End the copies before a moment that the host has waited for."""
        self.host |= clock
        ended = [copy for copy in self.copies if copy.time <= self.host[copy.stream]]
        self.copies = [copy for copy in self.copies if copy.time > self.host[copy.stream]]
        for copy in ended:
            with _disable_current_modes(), torch.no_grad():
                if copy.to_host:
                    copy.host.copy_(copy.values)
                elif not torch.allclose(copy.host, copy.values, rtol=0, atol=0, equal_nan=True):
                    self.reports[f"{copy.place} copies from pinned memory that was written before the end"] += 1
                if address(copy.host) in _pinned:
                    _pinned[address(copy.host)] = False

    def tensor(self, data, *args, device=None, **kwargs):  # torch.tensor does not dispatch to the mode
        if device is None or torch.device(device).type != self.device.type:
            return self.make_tensor(data, *args, device=device, **kwargs)
        return self.make_tensor(data, *args, device="cpu", **kwargs).to(device)

    def manual_seed(self, seed):
        self.seeded = 0
        self.randoms[f"{self.place()} torch.manual_seed"] += 1
        return self.seed(seed)

    def pinned(self, tensor):
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in _pinned

    def pin_memory(self, tensor, *_):
        self.check_process("pin_memory")
        if isinstance(tensor, OnDevice):
            refuse("cannot pin 'torch.cuda.Tensor' only dense CPU tensors can be pinned")
        if overlaps(tensor):
            refuse("pin_memory of an expanded tensor: more than one element refers to a single memory location")
        copy = tensor.detach().clone()
        address = copy.untyped_storage().data_ptr()
        _pinned[address] = False
        weakref.finalize(copy, _pinned.pop, address, None)
        return copy

    def init_process_group(self, backend=None, **kwargs):
        self.collectives[f"init_process_group {backend} {sorted(kwargs)}"] += 1
        return self.patched_init("gloo", **{k: v for k, v in kwargs.items() if k != "device_id"})

    patched_init = staticmethod(dist.init_process_group)

    def counted(self, name, function):
        def called(*args, **kwargs):
            self.collectives[f"{self.place()} {name}"] += 1
            if name != "barrier":
                self.count(name)
            kwargs.pop("device_ids", None)
            self.objects = True  # gloo's tensors of object collectives and barriers are on the CPU
            try:
                return function(*args, **kwargs)
            finally:
                self.objects = False

        return called

    # ---- flash attention

    def install_flash(self):
        from transformers import modeling_flash_attention_utils as utils
        from transformers.modeling_utils import PreTrainedModel

        process = utils._lazy_define_process_function(self.flash_varlen)
        for name, value in [
            ("_flash_fn", self.flash_func), ("_flash_varlen_fn", self.flash_varlen), ("_flash_with_kvcache_fn", None),
            ("_pad_fn", utils._pad_input), ("_unpad_fn", utils._unpad_input), ("_process_flash_kwargs_fn", process),
            ("_process_with_kvcache_kwargs_fn", dict), ("_loaded_implementation", "flash_attention_2"),
        ]:  # fmt: skip
            self.patches.append(mock.patch.object(utils, name, value, create=True))  # older ones lack some
        for name in ("_flash_attn_can_dispatch", "_flash_attn_2_can_dispatch"):  # of newer and of older transformers
            patch = mock.patch.object(PreTrainedModel, name, lambda *_, **__: True, create=True)
            self.patches.append(patch)

    def check_flash(self, q, k, v):  # flash-attention 2.8, csrc/flash_attn/flash_api.cpp, mha_fwd and mha_varlen_fwd
        where = self.place()
        for tensor in (q, k, v):
            if not isinstance(tensor, OnDevice):
                refuse(f"{where} flash attention: Input tensor must be on CUDA")
            if tensor.dtype not in (torch.float16, torch.bfloat16):
                refuse(f"{where} FlashAttention only support fp16 and bf16 data type, not {tensor.dtype}")
            if tensor.dtype != q.dtype:
                refuse(f"{where} flash attention: query, key and value must have the same dtype")
            if tensor.stride(-1) != 1 or tensor.shape[-1] > 256 or tensor.shape[-1] % 8:
                refuse(f"{where} flash attention: last dimension not contiguous, or head_dim not 8, 16, ... 256")

    def flash_func(self, q, k, v, *options, **more):
        self.check_flash(q, k, v)
        return FlashAttention.apply(lambda *parts: attend(*parts, *options, **more), q, k, v)

    def flash_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                     softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                     deterministic=False):  # fmt: skip
        self.check_flash(q, k, v)
        for ends, total, longest in ((cu_seqlens_q, len(q), max_seqlen_q), (cu_seqlens_k, len(k), max_seqlen_k)):
            if not isinstance(ends, OnDevice) or ends.dtype != torch.int32 or not ends.is_contiguous():
                refuse(f"cu_seqlens must be contiguous int32 on CUDA, not {ends}")
            if not isinstance(longest, int):
                refuse(f"max_seqlen must be an int for the C++ signature, not {type(longest)}")
            values = on_cpu(ends.detach()).tolist()
            sizes = [b - a for a, b in zip(values, values[1:])]
            if len(values) < 2 or values[0] or values[-1] != total or max(sizes) > longest or min(sizes) < 0:
                refuse(f"cu_seqlens {values[:3]}...{values[-1]} does not fit {total} tokens, max_seqlen {longest}")

        def attend_within_texts(*parts):
            texts = zip(*(part[None].split(sizes, 1) for part in parts))
            return torch.cat([attend(*text, dropout_p, softmax_scale, causal, window_size)[0] for text in texts])

        return FlashAttention.apply(attend_within_texts, q, k, v)

    def aten_flash(self, q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, causal, return_debug_mask, scale=None,
                   window_size_left=-1, window_size_right=-1):  # fmt: skip
        window = (window_size_left, window_size_right)
        return (self.flash_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, scale, causal, window),)

    # ---- operations

    def before_module(self, module, args):
        outside = self.mixed != "no" and not torch.is_autocast_enabled("cuda")
        if outside and isinstance(module, torch.nn.Linear) and args[0].dtype == torch.float32:
            self.reports[f"{self.place()} float32 Linear outside autocast"] += 1

    def place(self):
        """Return file:line of the innermost stack frame that is in neither a library nor this file."""
        frame, place = sys._getframe(1), "a library"
        while frame:
            if name := name_of_script(frame.f_code.co_filename):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return place

    def count(self, operation, clock=None):
        """Count a wait of the host: for all of the current stream, or for what comes before a moment."""
        self.syncs[f"{self.place()} {operation}"] += 1
        self.arrive(self.stream().clock if clock is None else clock)

    def check_process(self, name):
        if os.getpid() != self.process:
            refuse(f"{self.place()} {name}: Cannot re-initialize CUDA in forked subprocess")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        namespace, base = func._schema.name.split("::")
        name = f"{base}.{func._overloadname}"
        tensors = find_tensors((args, kwargs))
        any_here = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if namespace == "c10d":
            return self.run_collective(func, name, args, kwargs, tensors)
        requested = kwargs.get("device")
        made_here = requested is not None and torch.device(requested).type == self.device.type
        if not any_here and not made_here and not _pinned and not self.copies:
            return func(*args, **kwargs)
        if requested is not None and torch.device(requested).type == "meta":
            return func(*args, **kwargs)
        to_device = any_here if requested is None else made_here
        non_blocking = kwargs.get("non_blocking") or (name == "copy_.default" and len(args) > 2 and args[2])
        if requested is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": "cpu"}
        inplace = base.endswith("_") and not base.startswith("_") and args and isinstance(args[0], torch.Tensor)
        if any_here or made_here:
            self.check_process(name)
        if self.late and not func.is_view:
            self.use_host(name, tensors)
            if any_here or made_here:
                given = dict(enumerate(args)) | kwargs
                writes = find_tensors([given[key] for key in written_arguments(func) if key in given])
                no_values = name.startswith(("empty", "new_")) or "_like." in name  # such use the shape alone
                self.use(name, [] if no_values else tensors, set(map(id, writes)))
        if any_here:
            self.operations += 1
            if threading.get_ident() != self.thread and threading.current_thread().name.startswith("ThreadPool"):
                self.reports[f"{self.place()} {name} on the device in a background thread"] += 1
            host = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
            if host and name not in INDEXING | COPYING:
                refuse(f"{self.place()} mixed devices in {name}: {[tuple(tensor.shape) for tensor in host]}")
            if name in INDEXING:
                if not isinstance(args[0], OnDevice):
                    refuse(f"{self.place()} {name}: indices should be either on cpu or on the same device")
                if host:
                    self.count("index on the CPU", {})
                if "put" in name and not args[2].dim() and not isinstance(args[2], OnDevice):
                    self.count("a number is written to indices: it is copied to the device", {})  # seen on an H200
                if "put" in name and args[2].dim() and not isinstance(args[2], OnDevice):
                    refuse(f"{self.place()} {name}: values on the CPU")
                if "put" in name and args[2].dtype != args[0].dtype:
                    refuse(f"{self.place()} {name}: source and destination dtypes differ")
            if inplace and overlaps(args[0]):
                refuse(f"{self.place()} {name}: more than one element of the written-to tensor refers to one location")
            if "_fused_adam" in name or "_fused_sgd" in name:
                self.check_fused(name, args, kwargs)
            if name == "copy_.default":
                to_device = isinstance(args[0], OnDevice)
            masks = name in INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in find_tensors(args[1:2]))
            leaves_device = name in COPYING and not to_device
            if name == "_local_scalar_dense.default" or name in SIZED_BY_DATA or masks or leaves_device:
                later = leaves_device and non_blocking
                self.count(name + " (non-blocking to the host!)" * bool(later), {} if later and self.late else None)
            if torch.Tag.nondeterministic_seeded in func.tags and not name.startswith(("empty", "_scaled")):
                self.seeded += 1
                self.randoms[f"{self.place()} {name}"] += 1
            if torch.are_deterministic_algorithms_enabled():
                if base in NOT_DETERMINISTIC or (base == "cumsum" and args[0].is_floating_point()) or (
                    base == "_embedding_bag_dense_backward" and args[7] == 2):  # fmt: skip
                    refuse(f"{self.place()} {name} has no deterministic CUDA implementation")
                if base in ("mm", "addmm", "bmm") and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
                    refuse(f"{self.place()} {name}: CUBLAS_WORKSPACE_CONFIG must be set")
        written = inplace and not isinstance(args[0], OnDevice) and self.pinned(args[0])
        if written and _pinned[args[0].untyped_storage().data_ptr()]:
            self.reports[f"{self.place()} {name} writes a pinned tensor after a non-blocking copy from it"] += 1
        if to_device and name in COPYING and not all(isinstance(t, OnDevice) for t in tensors):
            source = args[1] if name == "copy_.default" else args[0]
            if source.dim() and not (non_blocking and self.pinned(source)):
                kind = " (non_blocking, but not pinned)" * bool(non_blocking)
                self.count("blocking copy to the device" + kind, {} if non_blocking else None)
            elif source.dim() and non_blocking:
                _pinned[source.untyped_storage().data_ptr()] = True
                if self.late:
                    self.delay(source, to_host=False)
        result = func(*map_leaves(on_cpu, args), **map_leaves(on_cpu, kwargs))
        if any_here and leaves_device and non_blocking and self.late:
            self.delay(args[0] if inplace else result, to_host=True)
        if inplace:
            return args[0]
        if base == "_amp_update_scale_":
            return args[0]
        if base.startswith(("_fused_", "_amp_foreach")) or (base.startswith("_foreach") and base.endswith("_")):
            return result
        return map_leaves(on_device, result) if to_device else result

    def check_fused(self, name, args, kwargs):  # ATen/native/ForeachUtils.h, check_fast_path_restrictions
        lists = [value for value in args if isinstance(value, list | tuple) and value]
        for tensors in lists:
            if not all(isinstance(tensor, OnDevice) for tensor in tensors):
                refuse(f"{name}: a list with tensors that are not on the device: the kernel would read invalid memory")
        if len({tensor.dtype for part in lists[:4] for tensor in part}) > 1:
            refuse(f"{name}: params, grads, exp_avgs and exp_avg_sqs must have same dtype, device, and layout")
        if any(a.stride() != b.stride() for part in lists[1:4] for a, b in zip(lists[0], part) if a.dim()):
            self.reports[f"{name}: strides of parameters and states differ"] += 1

    def run_collective(self, func, name, args, kwargs, tensors):
        self.collectives[f"{self.place()} {name}"] += 1
        if self.late:
            self.use(name, tensors, set(map(id, tensors)))
        for tensor in tensors:
            if not isinstance(tensor, OnDevice) and not self.objects and "barrier" not in name:
                refuse(f"{self.place()} {name}: No backend type associated with device type cpu (NCCL)")
            if not tensor.is_contiguous():
                refuse(f"{self.place()} {name}: Tensors must be contiguous")
        given = list(map_leaves(on_cpu, args))
        if name == "_allgather_base_.default":  # NCCL compares numbers of elements, gloo shapes
            if given[0].numel() != given[1].numel() * dist.get_world_size() or given[0].dtype != given[1].dtype:
                refuse(f"{self.place()} {name}: output tensor size must be world_size times input tensor size")
            given[0] = given[0].view(-1, *given[1].shape[1:])
        if len({tensor.dtype for tensor in tensors}) > 1:
            refuse(f"{self.place()} {name}: tensors of several dtypes")
        result = func(*given, **map_leaves(on_cpu, kwargs))
        if name == "_allgather_base_.default":
            return (args[0], *result[1:])
        if not isinstance(result, tuple):
            return result
        # the tensors are changed in place: give the caller its own
        return (args[0], *result[1:]) if isinstance(args[0], list) else result


if __name__ == "__main__":  # python strict_device.py SCRIPT.py '{"flash": true, "mixed": "bf16"}' FLAGS
    import json

    import torch._dynamo  # noqa: F401 (it inspects torch's functions, hence before they are replaced)

    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[1]))
    script = importlib.import_module(os.path.basename(sys.argv[1]).removesuffix(".py"))
    options = json.loads(sys.argv[2])
    os.environ["ACCELERATE_MIXED_PRECISION"] = options.get("mixed", "no")  # what `accelerate launch` would set
    device, status = StrictDevice(**options), 0
    try:
        with device:
            script.main(script.parse_args(sys.argv[3:]))
    except Exception:
        import traceback

        traceback.print_exc()
        status = 1
    for name in ("syncs", "reports", "collectives", "randoms") if os.environ.get("RANK", "0") == "0" else ():
        print(name, *(f"\n  {times:6} {where}" for where, times in getattr(device, name).most_common()))
    sys.stdout.flush()
    os._exit(status)
