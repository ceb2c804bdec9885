"""On several processes, gloo compares each collective of all ranks (TORCH_DISTRIBUTED_DEBUG in conftest.py)."""

import pytest
from conftest import launch

COLLECTIVES = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
first, tensor = dist.get_rank() == 0, torch.ones(4)
{collective}
"""
DIFFERENT = {
    "dtype": "dist.all_reduce(tensor if first else tensor.int())",  # without the comparison, a wrong sum
    "shape": "dist.all_reduce(tensor if first else tensor[:2])",
    "collective": "dist.all_reduce(tensor) if first else dist.broadcast(tensor, 0)",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_refused(tmp_path, what):
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES.format(collective=DIFFERENT[what]))
    done = launch(script, processes=2, check=False, timeout=60)
    assert done.returncode and "Detected mismatch between collectives on ranks" in done.stderr
