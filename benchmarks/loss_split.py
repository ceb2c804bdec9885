"""InfoNCE split by rows over P processes: seconds per process, and the error of the summed gradient.

    python benchmarks/loss_split.py [--batch_size 16384] [--dimensions 384] [--processes 1 2 4 8]

Random normalized embeddings of (anchor, positive) rows; the loss is that of train_bi_encoder.py, one part of the rows
after the other, each forward and backward. The gradient summed over the parts is compared with that of P = 1. Writes
loss_split.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=16_384)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="loss_split.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    embeddings = torch.randn(2, args.batch_size, args.dimensions, device=args.device)
    embeddings = F.normalize(embeddings[:1] + embeddings, dim=-1).requires_grad_()  # positives resemble their anchors
    hashes = torch.arange(2 * args.batch_size, device=args.device).view(2, -1)
    results, whole = [], None
    print("| processes | seconds of a process (slowest part) | relative error of the gradient |\n|---|---|---|")
    for processes in args.processes:
        embeddings.grad, seconds = None, []
        for process in range(processes):
            own = torch.arange(args.batch_size, device=args.device).chunk(processes)[process]
            started = time.perf_counter()
            batch = script.WholeBatch(hashes, labels=None, own_rows=own, step=0)
            script.infonce(list(embeddings), batch).backward()
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        whole = embeddings.grad if whole is None else whole
        error = ((embeddings.grad - whole).norm() / whole.norm()).item()
        results.append({"processes": processes, "seconds": max(seconds), "error": error})
        print(f"| {processes} | {max(seconds):.2f} | {error:.1e} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))


if __name__ == "__main__":
    main()
