"""Small programs for the late device: {name: (what it reports or refuses, program)}; "": nothing.

x: [1, 2, 3, 4], computed in the main stream; side: another stream; host(): pinned ones; later(x): copied to the host.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

ARRIVED = "uses a copy that has not arrived"
WRITTEN = "writes a pinned tensor"
ENDED = "copies from pinned memory that was written before the end"
ORDER = "does not wait for another stream"
REUSED = "reuses freed memory"
FORKED = "Cannot re-initialize CUDA in forked subprocess"

PROGRAMS = {
    # from the device to the host
    "read at once": (ARRIVED, "later(x) + 1"),
    "a view of it read": (ARRIVED, "later(x).view(2, 2)[0].sum()"),
    "tolist at once": (ARRIVED, "later(x).tolist()"),
    "NumPy reads NaN": ("", "assert np.isnan(later(x).numpy()).all()"),
    "integers are poison": ("", "assert (later(x.long()).numpy() > 2**62).all()"),
    "bools are poison": ("", "assert later(x > 2).numpy().tolist() == [True, True, False, False]"),
    "into pinned memory": (ARRIVED, "host().copy_(x, non_blocking=True).sum()"),
    "the event before it": (ARRIVED, "event = main().record_event(); y = later(x); event.synchronize(); y + 1"),
    "an event never recorded": (ARRIVED, "y = later(x); torch.cuda.Event().synchronize(); y + 1"),
    "another stream waited for": (ARRIVED, "y = later(x); side.synchronize(); y + 1"),
    "the device waited for": ("", "y = later(x); torch.cuda.synchronize(); assert y.tolist() == [1, 2, 3, 4]"),
    "its stream": ("", "y = later(x); main().synchronize(); assert y.tolist() == [1, 2, 3, 4]"),
    "its event": ("", "y = later(x); main().record_event().synchronize(); assert y.tolist() == [1, 2, 3, 4]"),
    "an item of its stream": ("", "y = later(x); x.sum().item(); assert y.tolist() == [1, 2, 3, 4]"),
    "its event polled": ("", "y, event, asked = later(x), main().record_event(), 0\n"
                             "while not event.query(): asked += 1\n"
                             "assert asked and y.tolist() == [1, 2, 3, 4]"),  # fmt: skip
    "blocking": ("", "assert host().copy_(x).tolist() == x.to('cpu').tolist() == [1, 2, 3, 4]"),
    "a view taken before, read after": ("", "y = later(x).numpy(); main().synchronize(); assert y.tolist()[3] == 4"),
    "its source written behind it": ("", "y = later(x); x.zero_(); main().synchronize(); assert y.tolist()[3] == 4"),
    "its source freed": ("", "y = later(x); del x; z = ones(); main().synchronize(); assert y.tolist()[3] == 4"),
    "an empty copy": ("", "y = later(x[:0]); y.tolist(); torch.zeros(0).sum()"),
    # from the host to the device
    "its source written": (WRITTEN, "y = host(); z = y.to(x.device, non_blocking=True); y.zero_()"),
    "written by NumPy": (ENDED, "y = host(); z = y.to(x.device, non_blocking=True); y.numpy()[:] = 0; z.sum().item()"),
    "a buffer used again": (WRITTEN, "y = host()\nfor i in (1, 2): y.fill_(i); z = y.to(x.device, non_blocking=True)"),
    "written after a wait": ("", "y = host(); z = y.to(x.device, non_blocking=True); main().synchronize(); y.zero_()"),
    "pageable and written": ("", "y = torch.ones(4); z = y.to(x.device, non_blocking=True); y.zero_()"),
    "pinned and blocking": ("", "y = host(); z = y.to(x.device); y.zero_(); assert z.tolist() == [1] * 4"),
    "a pinned source freed": ("", "z = host().to(x.device, non_blocking=True); host(); assert z.tolist() == [1] * 4"),
    # streams
    "side reads main": (ORDER, "with torch.cuda.stream(side): y = x * 2"),
    "side reads main after it": ("", "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2"),
    "main reads side": (ORDER, "with torch.cuda.stream(side): y = ones()\ny.tolist()"),
    "main reads side by an event": ("", "event = torch.cuda.Event()\n"
                                        "with torch.cuda.stream(side): y = ones(); event.record()\n"
                                        "event.wait(); y.tolist()"),  # fmt: skip
    "the host waits between": ("", "torch.cuda.synchronize()\nwith torch.cuda.stream(side): y = x * 2\n"
                                   "side.synchronize(); y.tolist()"),  # fmt: skip
    "an event too early": (ORDER, "event = main().record_event(); x.add_(1); side.wait_event(event)\n"
                                  "with torch.cuda.stream(side): y = x * 2"),  # fmt: skip
    "written after a read": (ORDER, "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2\nx.zero_()"),
    "both read": ("", "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2\nx * 3"),
    "a chain of three": ("", "other = torch.cuda.Stream(); other.wait_stream(main()); side.wait_stream(other)\n"
                             "with torch.cuda.stream(side): y = x * 2"),  # fmt: skip
    "shapes are no reads": ("", "with torch.cuda.stream(side): y = ones()\ntorch.empty_like(y.view(2, 2)).shape"),
    "freed while side reads": (REUSED, "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2\n"
                                       "del x; z = ones()"),  # fmt: skip
    "record_stream": ("", "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2; x.record_stream(side)\n"
                          "del x; z = ones()"),  # fmt: skip
    "freed after waiting": ("", "side.wait_stream(main())\nwith torch.cuda.stream(side): y = x * 2\n"
                                "main().wait_stream(side); del x; z = ones()"),  # fmt: skip
    "copied by side": (ORDER, "with torch.cuda.stream(side): y = later(x)\nside.synchronize()"),
    "backward": ("", "x.requires_grad_(); (x * x).sum().backward(); assert x.grad.tolist() == [2, 4, 6, 8]"),
    # processes
    "in a forked process": (FORKED, "with pool() as forked: forked.submit(torch.ones, 4, device='cuda').result()"),
}  # fmt: skip


def run():
    """Run all programs in this process; return {name: what the device reports or refuses}."""
    import numpy as np
    import torch
    from strict_device import StrictDevice

    names = {
        "np": np,
        "torch": torch,
        "main": lambda: torch.cuda.current_stream(),  # as patched
        "host": lambda: torch.ones(4).pin_memory(),
        "ones": lambda: torch.ones(4, device="cuda"),
        "later": lambda tensor: tensor.to("cpu", non_blocking=True),
        "pool": partial(ProcessPoolExecutor, 1, multiprocessing.get_context("fork")),
    }
    found = {}
    with StrictDevice() as device:
        for name, (_, program) in PROGRAMS.items():
            scope = names | {"x": torch.arange(4.0).to("cuda") + 1, "side": torch.cuda.Stream()}
            error = []
            try:
                exec(compile(program, "program", "exec"), scope)
            except Exception as raised:
                error = [repr(raised)]
            torch.cuda.synchronize()
            found[name] = [*device.reports, *error]
            device.reports.clear()
    return found
