"""Train a cross-encoder with listwise cross-entropy or bce, on one process or several: a template to copy and change.

    python cross_encoder.py --train_data pairs.csv --columns question answer --output_dir runs/first
    accelerate launch --num_processes 2 cross_encoder.py --train_data 'a/*.parquet' b.jsonl --mixing_weights 0.7 0.3 \
        --columns query positive negative --streaming --output_dir runs/second [--resume]

To change: rows -> open_source, read_row; labels and negatives -> read_batch; the model and its prompt -> load_model;
weights, rates -> make_optimizer; loss -> compute_loss; measure -> make_evaluators; step -> main. `extra`: your state,
equal on all processes. A process scores every P-th pair; the gradient of all scores goes back through micro-batches
(Gao et al. 2021): the same on any number of both but for dropout. Left out: DDP, FSDP, fp16, checks of CSV.
"""

import json
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, count, islice
from math import ceil, nan
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import interleave_datasets, load_dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.util import batch_to_device
from sentence_transformers.util.distributed import distributed_evaluation
from transformers import HfArgumentParser


@dataclass
class Args:
    train_data: list[str]  # sources: files or globs of CSV, JSON Lines or Parquet, also .gz; or Hub ids
    columns: list[str]  # query, positive, then equally many negatives for all rows, or none
    output_dir: str  # gets metrics.jsonl, checkpoint.pt and model/
    model_name_or_path: str = "cross-encoder/ms-marco-MiniLM-L6-v2"
    max_length: int | None = None  # tokens of a pair; None: the model's
    mixing_weights: list[float] | None = None  # of the sources, with the sum 1; None: they take turns
    streaming: bool = False  # read front to back, not at random from a mapped table
    shuffle_buffer: int = 10_000  # rows of a stream to shuffle together; 0: keep the order, of mapped rows too
    eval_rows: int = 1000  # held out from the beginning of the sources; at most a tenth of a mapped one
    batch_size: int = 64  # rows over all processes
    micro_batch_tokens: int = 2048  # tokens of a forward pass, with padding
    max_graph_tokens: int = 32_768  # with more on a process, score twice, to keep one graph at a time (grad cache)
    loss: str = "listwise_ce"  # or bce
    num_negatives: int = 4  # documents of other rows to draw for each row, if --columns names no negatives
    learning_rate: float = 2e-5
    warmup_ratio: float = 0.1  # of the steps
    max_steps: int = 1000
    eval_steps: int = 100
    save_steps: int = 500
    seed: int = 0
    resume: bool = False


def open_source(files, args):
    """Return the rows of a source, a Dataset or, with --streaming, an IterableDataset (`from_generator` makes one)."""
    formats = [name for name in ("csv", "json", "parquet") if f".{name}" in Path(files).name]
    options = {"path": formats[0], "data_files": files} if formats else {"path": files}
    return load_dataset(**options, split="train", streaming=args.streaming).select_columns(args.columns)


def mixed_rows(sources, args):
    """Yield rows without end, epoch after epoch: the same on all processes, and again in a resumed run."""
    options = {"buffer_size": args.shuffle_buffer} if args.streaming else {}
    for seed in count(args.seed):
        parts = [part.shuffle(seed=seed, **options) for part in sources] if args.shuffle_buffer else sources
        rows = iter(interleave_datasets(parts, args.mixing_weights, seed, stopping_strategy="all_exhausted"))
        first = next(rows, None)
        assert first, "--eval_rows leaves no row to train on"
        yield from chain([first], rows)


def read_row(cells, step, args):
    """Return the texts that {column: value} means: query, positive, negatives; None to leave the row out."""
    texts = [cells[name] for name in args.columns]
    assert all(texts) and fold(texts[1]) not in map(fold, texts[2:]), cells  # empty, or the positive is a negative
    return texts


def fold(text):
    """Return what is the same of texts that differ in Unicode form, white space or case alone, which count as one."""
    text = text.replace("\u00ad", "").replace("\u200b", "").replace("\ufeff", "")  # as BERT's tokenizer does
    return unicodedata.normalize("NFC", " ".join(text.split()).casefold())


@dataclass
class Batch:
    texts: list  # (B, 1 + L): query and documents
    labels: torch.Tensor  # (B, L); NaN where a row has fewer documents
    step: int
    extra: dict


def read_batch(rows, size, num_negatives, step, extra, args):
    """Return the Batch of the next `size` rows. Negatives of a row without any are documents of others."""
    texts = [*islice(filter(None, (read_row(cells, step, args) for cells in rows)), size)]
    known = defaultdict(set)  # {query: itself and its positives in any row, none of which is a negative}, folded
    for query, positive, *_ in texts:
        known[fold(query)] |= {fold(query), fold(positive)}
    pool = {fold(document): document for _, *documents in texts for document in documents}
    random = Random(args.seed + step)  # the same on all processes
    wanted = min([num_negatives, *(len(pool.keys() - some) for some in known.values())])  # fewer of a small batch
    for row in texts:
        left_out = known[fold(row[0])]
        negatives = [text for text in row[2:] if fold(text) not in left_out]
        row[2:] = negatives or random.sample([pool[key] for key in pool if key not in left_out], wanted)
    longest = max(map(len, texts), default=0)
    labels = [[1.0] + [0.0] * (len(row) - 2) + [nan] * (longest - len(row)) for row in texts]
    return Batch(texts, torch.tensor(labels), step, extra)


def load_model(args):
    torch.manual_seed(args.seed)  # for weights that the folder lacks: the same on every process
    model = CrossEncoder(args.model_name_or_path, num_labels=1, device="cpu").float()
    model.max_seq_length = args.max_length or model.max_seq_length
    model.activation_fn = torch.nn.Sigmoid() if args.loss == "bce" else torch.nn.Identity()  # of predict()
    prompt = model.prompts.get(model.default_prompt_name) or ""
    own = model[0].preprocess
    model[0].preprocess = lambda pairs, **more: own([cut_pair(one, model.tokenizer, prompt) for one in pairs], **more)
    return model


def cut_pair(pair, tokenizer, prompt):
    """Return a pair with the same tokens after truncation, which holds all parts of a text beside each other one."""
    size = tokenizer.model_max_length + 16  # the last of these tokens may change with what is missing
    if min(map(len, pair)) <= 4 * size or tokenizer.truncation_side == "left":
        return pair
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    spans = tokenizer([prompt + pair[0], pair[1]], **options)["offset_mapping"]
    if min(map(len, spans)) < size:
        return pair
    counts = (size + 16, size) if len(spans[0]) > len(spans[1]) else (size, size + 16)  # the longer one remains longer
    first, second = (offsets[:count][-1][1] for offsets, count in zip(spans, counts))
    return pair[0][: first - len(prompt)], pair[1][:second]


def make_optimizer(model, args):
    groups = []
    for is_matrix in (True, False):  # biases and norms have no weight decay
        weights = [weight for weight in model.parameters() if (weight.ndim > 1) == is_matrix]
        groups.append({"params": weights, "weight_decay": 0.01 * is_matrix, "peak": args.learning_rate})
    return torch.optim.AdamW(groups, fused=True)


def score(model, features, accelerator):
    """Return (pairs,) logits of a micro-batch."""
    with accelerator.autocast():
        return model(batch_to_device(features, accelerator.device))["scores"].float().squeeze(1)


def cut(lengths, max_tokens):
    """Return lists of places, the longest pair first: at most max_tokens each, of which at most 1/16 is padding."""
    parts = []
    longest = padding = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += longest - lengths[place]
        if not parts or longest * (len(parts[-1]) + 1) > max_tokens or padding > max_tokens / 16:
            parts.append([])
            longest = lengths[place]
            padding = 0
        parts[-1].append(place)
    return parts


def make_micro_batches(model, pairs, args, accelerator):
    """Return [(indices, features)] of this process' part of the (query, document) pairs."""
    by_length = sorted(range(len(pairs)), key=lambda index: sum(map(len, pairs[index])))  # equal work for all
    mine = by_length[accelerator.process_index :: accelerator.num_processes]
    chosen = [pairs[index] for index in mine or by_length[:1]]  # a stand-in, whose score is not used
    features = model.preprocess(chosen, prompt=model.prompts.get(model.default_prompt_name))
    mask = features["attention_mask"]
    micro_batches = []
    for places in cut(mask.sum(1).tolist(), args.micro_batch_tokens):
        used = mask[places].any(0)  # columns that are not padding in all of these pairs
        tensors = {name: value[places][:, used] for name, value in features.items() if torch.is_tensor(value)}
        micro_batches.append(([mine[place] for place in places if mine], {**features, **tensors}))
    return micro_batches


def compute_loss(scores, batch, args):
    """Return the cross-entropy of positives among the documents of their rows, or of all pairs; scores: (B, L)."""
    assert scores.shape[1] > 1 and args.loss in ("listwise_ce", "bce")  # no other row has a document to draw
    labels = batch.labels.to(scores.device)
    given = labels.isfinite()
    if args.loss == "bce":
        return F.binary_cross_entropy_with_logits(scores[given], labels[given])
    return F.cross_entropy(scores.masked_fill(~given, -1e9), labels.nan_to_num())


def forward_backward(model, batch, args, accelerator):
    """Set the gradient of the batch's loss in the weights, and return the loss: the same on all processes."""
    pairs = [(query, text) for query, *documents in batch.texts for text in documents]
    indices, features = zip(*make_micro_batches(model, pairs, args, accelerator))
    keep_graphs = sum(part["input_ids"].numel() for part in features) <= args.max_graph_tokens

    def forward(number):  # with the same dropout in a second pass and in a resumed run
        torch.manual_seed(hash((args.seed, batch.step, accelerator.process_index, number)))
        return score(model, features[number], accelerator)[: len(indices[number])]

    with torch.set_grad_enabled(keep_graphs):
        outputs = [*map(forward, range(len(features)))]
    places = batch.labels.isfinite().nonzero()  # (pairs, 2)
    slots = places[[*chain.from_iterable(indices)]].unbind(1)
    scores = outputs[0].new_zeros(batch.labels.shape)  # (B, L)
    scores[slots] = torch.cat(outputs).detach()  # of this process
    scores = accelerator.reduce(scores, "sum").requires_grad_()
    loss = compute_loss(scores, batch, args)
    loss.backward()
    for number, gradient in enumerate(scores.grad[slots].split([*map(len, outputs)])):
        (outputs[number] if keep_graphs else forward(number)).backward(gradient)
    for weight in [weight for weight in model.parameters() if weight.requires_grad]:
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad  # others may have a gradient
        weight.grad = accelerator.reduce(own, "sum")
    return loss.item()


def make_evaluators(rows):
    """Return {measure: evaluator}: each query of held-out rows ranks the documents of its row."""
    samples = [{"query": query, "positive": best, "negative": others} for query, best, *others in rows if others]
    return {"held_out_ndcg@10": CrossEncoderRerankingEvaluator(samples, name="held_out")} if samples else {}


def evaluate(model, evaluators, accelerator):
    """Return {measure: value}, the same on all processes, which share the encoding."""
    found = {}
    model.eval()
    for measure, evaluator in evaluators.items():
        with distributed_evaluation(model) as is_main:  # in float32: scores in bf16 would tie
            if is_main:
                found[measure] = float(evaluator(model)[measure])
    model.train()
    return broadcast_object_list([found])[0]


def main(args):
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # else processes on CPUs form no group
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for each shape anew: 4 times as slow on an H200
    assert accelerator.mixed_precision != "fp16"  # it requires a gradient scaler; bf16 does not
    output = Path(args.output_dir)
    metrics = output / "metrics.jsonl"
    checkpoint = output / "checkpoint.pt"
    warmup = min(ceil(args.warmup_ratio * args.max_steps), args.max_steps - 1)
    sources = [open_source(files, args) for files in args.train_data]
    most = args.eval_rows // len(sources)
    shares = [most if args.streaming else min(most, len(source) // 10) for source in sources]
    first_rows = chain.from_iterable(source.take(share) for source, share in zip(sources, shares))
    evaluators = make_evaluators(read_batch(first_rows, args.eval_rows, 9, 0, {}, args).texts)
    rows = mixed_rows([source.skip(share) for source, share in zip(sources, shares)], args)
    model = load_model(args).to(accelerator.device).train()
    optimizer = make_optimizer(model, args)
    state = {"step": 0, "extra": {}, "metrics": "", "args": vars(args) | {"resume": True, "sources": str(sources)}}
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=accelerator.device.type, weights_only=True)
        assert state["args"] | {"output_dir": args.output_dir} == vars(args) | {"sources": str(sources)}  # or changed
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=args.resume)
        metrics.write_text(state["metrics"])

    def log(record):
        if accelerator.is_main_process:
            print(record)
            with metrics.open("a") as file:
                print(json.dumps(record), file=file)

    if evaluators and not state["step"]:
        log({"step": 0} | evaluate(model, evaluators, accelerator))
    for step in range(args.max_steps):
        batch = read_batch(rows, args.batch_size, args.num_negatives, step, state["extra"], args)
        if step < state["step"]:  # trained on before the checkpoint
            continue
        factor = step / warmup if step < warmup else (args.max_steps - step) / (args.max_steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        loss = forward_backward(model, batch, args, accelerator)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        record = {"step": done, "loss": loss, "grad_norm": norm.item()}
        if done == args.max_steps or done % args.eval_steps == 0:
            record |= evaluate(model, evaluators, accelerator)
        log(record)
        if accelerator.is_main_process and done % args.save_steps == 0:
            saved = state | {"step": done, "metrics": metrics.read_text()}
            saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, output / "checkpoint.part")
            (output / "checkpoint.part").replace(checkpoint)  # a kill leaves the old one or the new one
    if accelerator.is_main_process:
        model.save_pretrained(output / "model", create_model_card=False)
    accelerator.end_training()


if __name__ == "__main__":
    main(*HfArgumentParser(Args).parse_args_into_dataclasses())
