"""Compute the gradient of one step of sparse and multi-vector models; launched by test_kinds.py.

accelerate launch tests/kinds_worker.py MODELS SOURCE OUTPUT NAME ...
"""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script

TEACHER = "--columns docstring code wrong worse --label_column scores --loss"
FLOPS = '--loss_kwargs {"query_flops":0.01,"document_flops":0.02,"flops_ramp":0'
CASES = {
    "splade": f"--columns docstring code {FLOPS}}}",
    "splade lists": f'--columns docstring code lists --num_negatives 2 {FLOPS},"mask_margin":1}}',
    "splade margin_mse": f'{TEACHER} margin_mse {FLOPS},"teacher_temperature":0.05}}',
    "cosine SparseCoSENTLoss": "--columns docstring code --label_column label --loss SparseCoSENTLoss",
    "router": f"--columns docstring code wrong {FLOPS}}}",
    "colbert": "--columns docstring code wrong",
    "colbert symmetric": '--columns docstring code --loss_kwargs {"symmetric":true}',
    "colbert lists": '--columns docstring code lists --num_negatives 2 --loss_kwargs {"mask_margin":0.1}',
    "colbert margin_mse": f'{TEACHER} margin_mse --loss_kwargs {{"teacher_temperature":0.05}}',
    "colbert kl": f'{TEACHER} kl --loss_kwargs {{"teacher_temperature":0.05,"infonce":0.5}}',
    "mean": '--columns docstring code wrong --loss_kwargs {"in_batch":false}',
    "fixed": "--columns docstring code wrong",
    "min": "--columns docstring code wrong",
}
# (micro_batch_tokens, grad_cache, MAX_SCORES)
SETTINGS = [(128, True, 2**26), (128, False, 2**14), (10**6, True, 2**14), (10**6, False, 2**26)]

folder, source, output, *names = sys.argv[1:]
accelerator = Accelerator(cpu=True)
gradients = {}
for name in names:
    path = f"{folder}/{name.split()[0]}"
    common = ["--model_name_or_path", path, "--train_data", source, "--eval_rows", "0", "--query_prompt", ""]
    common += ["--document_prompt", "", "--batch_size", "21", "--dropout", "0"]
    args = script.parse_args([*common, *CASES[name].split()])
    model = script.load_model(args).train()  # without gradients a sparse model overwrites what it activates
    data = script.open_data(args)
    script.set_max_steps(data, args)
    table = next(script.row_batches(data.sources, data.weights, args))
    loss_fn = script.make_loss(data.sources[0].args, model)
    for args.micro_batch_tokens, args.grad_cache, script.MAX_SCORES in SETTINGS:
        model.zero_grad()
        local = script.local_batches(iter([table]), 0, data, args, accelerator)
        ((rows, index, more),) = islice(local, 1)
        batch = script.batch_to_torch(replace(script.make_batch(rows, index, model, args, accelerator), **more))
        loss = script.forward_backward(model, batch, args, accelerator, loss_fn)
        assert not batch.error, batch.error
        script.reduce_gradients(model, accelerator)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found = gradient, accelerator.reduce(loss).item()
        gradients[name, args.micro_batch_tokens, args.grad_cache, script.MAX_SCORES] = found
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
