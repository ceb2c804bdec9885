"""Train a bi-encoder with InfoNCE over whole batches, on one process or several: a template to copy and change.

    python bi_encoder.py --train_data pairs.csv --columns question answer --output_dir runs/first
    accelerate launch --num_processes 2 bi_encoder.py --train_data 'a/*.parquet' b.jsonl --mixing_weights 0.7 0.3 \
        --columns query positive negative --streaming --output_dir runs/second [--resume]

To change: rows -> open_source, read_row; the model, its prompts, or two encoders by Router.for_query_document ->
load_model; weights, rates -> make_optimizer; loss -> infonce; measure -> make_evaluators; step -> main. `step`: steps
before. `extra`: state of your own, tensors and numbers equal on all processes, saved in checkpoints. A process encodes
every P-th text of a batch, and computes the loss of all from all embeddings; the gradient of its own goes back through
micro-batches (Gao et al. 2021), and gradients are summed: the same on any number of both but for dropout. Left out:
DDP (weights may be unused), FSDP, fp16, static models, dot products; checks of CSV, where a stray quote joins rows.
"""

import json
import unicodedata
from dataclasses import dataclass
from itertools import chain, count, islice
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import interleave_datasets, load_dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import batch_to_device
from sentence_transformers.util.distributed import distributed_evaluation
from transformers import HfArgumentParser
from xxhash import xxh3_64_intdigest


@dataclass
class Args:
    train_data: list[str]  # sources: files or globs of CSV, JSON Lines or Parquet, also .gz; or Hub ids
    columns: list[str]  # query, positive, then any number of hard negatives
    output_dir: str  # gets metrics.jsonl, checkpoint.pt and model/
    model_name_or_path: str = "sentence-transformers/all-MiniLM-L6-v2"
    max_length: int | None = None  # tokens of a text; None: the model's
    mixing_weights: list[float] | None = None  # of the sources, with the sum 1; None: they take turns
    streaming: bool = False  # read front to back, not at random from a mapped table
    shuffle_buffer: int = 10_000  # rows of a stream to shuffle together; 0: keep the order, of mapped rows too
    eval_rows: int = 1000  # held out from the beginning of the sources; at most a tenth of a mapped one
    batch_size: int = 64  # rows over all processes
    micro_batch_tokens: int = 2048  # tokens of a forward pass, with padding
    max_graph_tokens: int = 32_768  # with more on a process, encode twice, to keep one graph at a time (grad cache)
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
    """Return the texts that {column: value} means: query, positive, hard negatives; None to leave the row out."""
    texts = [cells[name] for name in args.columns]
    assert all(texts), cells  # it has an empty text
    return texts


def fold(text):
    """Return what is the same of texts that differ in Unicode form, white space or case alone, which count as one."""
    text = text.replace("\u00ad", "").replace("\u200b", "").replace("\ufeff", "")  # as BERT's tokenizer does
    return unicodedata.normalize("NFC", " ".join(text.split()).casefold())


@dataclass
class WholeBatch:
    texts: list  # (B, C)
    hashes: torch.Tensor  # (C, B) int64, equal for texts that fold() gives alike
    step: int
    extra: dict


def read_batch(rows, size, step, extra, args):
    """Return the WholeBatch of the next `size` rows, all of which must have equally many texts."""
    read = (read_row(cells, step, args) for cells in rows)
    texts = [*islice(filter(None, read), size)]
    hashes = []
    for column in zip(*texts, strict=True):
        hashes.append([xxh3_64_intdigest(fold(text).encode()) >> 1 for text in column])  # 63 bits
    return WholeBatch(texts, torch.tensor(hashes), step, extra)


def load_model(args):
    torch.manual_seed(args.seed)  # for weights that the folder lacks: the same on every process
    model = SentenceTransformer(args.model_name_or_path, device="cpu").float()
    model.max_seq_length = args.max_length or model.max_seq_length
    passage = model.prompts.get("passage") or model.prompts.get("corpus", "")  # other names of it
    model.prompts["document"] = model.prompts["document"] or passage
    return model  # with model.prompts["query"] and ["document"], which are saved with it


def make_optimizer(model, args):
    groups = []
    for is_matrix in (True, False):  # biases and norms have no weight decay
        weights = [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == is_matrix]
        groups.append({"params": weights, "weight_decay": 0.01 * is_matrix, "peak": args.learning_rate})
    return torch.optim.AdamW(groups, fused=True)


def encode(model, role, features, accelerator):
    """Return (texts, D) embeddings of a micro-batch; role: "query" or "document"."""
    features = batch_to_device(features, accelerator.device)
    with accelerator.autocast():
        return model(features, task=role)["sentence_embedding"].float()


def cut(lengths, max_tokens):
    """Return lists of places, the longest text first: at most max_tokens each, of which at most 1/16 is padding."""
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


def make_micro_batches(model, texts, args, accelerator):
    """Return [(role, indices, features)] of this process' part of [(role, text)]."""
    micro_batches = []
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index][1]))  # equal work for all processes
    for role in ("document", "query"):
        chosen = [index for index in by_length if texts[index][0] == role]
        mine = chosen[accelerator.process_index :: accelerator.num_processes]
        encoded = mine or chosen[:1]  # a stand-in, whose embedding is not used: of no text there are no features
        features = model.preprocess([texts[index][1] for index in encoded], prompt=model.prompts[role], task=role)
        mask = features["attention_mask"]
        for places in cut(mask.sum(1).tolist(), args.micro_batch_tokens):
            used = mask[places].any(0)  # columns that are not padding in all of these texts
            tensors = {name: value[places][:, used] for name, value in features.items() if torch.is_tensor(value)}
            indices = [mine[place] for place in places if mine]
            micro_batches.append((role, indices, {**features, **tensors}))
    return micro_batches


def gather(outputs, slots, shape, accelerator):
    """Return the (B, C, D) embeddings of all processes, without graphs; outputs: (texts, D) of each micro-batch."""
    own = torch.cat(outputs).detach()
    embeddings = own.new_zeros(*shape, own.shape[1])
    embeddings[slots] = own
    return accelerator.reduce(embeddings, "sum")


def infonce(embeddings, whole, temperature=0.05):
    """Return InfoNCE of C (B, D) tensors. Masked: an equal query, and what any row has as the positive of one."""
    queries, *documents = whole.hashes.to(embeddings[0].device)
    equal_queries = (queries[:, None] == queries).float()  # (B, B)
    equal_texts = (documents[0][:, None] == torch.cat(documents)).float()  # (B, (C - 1) B)
    masked = (equal_queries @ equal_texts > 0) | (queries[:, None] == torch.cat(documents))
    masked.fill_diagonal_(False)
    scores = embeddings[0] @ torch.cat(embeddings[1:]).T / temperature
    return -scores.masked_fill(masked, -torch.inf).log_softmax(1).diagonal().mean()


def forward_backward(model, batch, args, accelerator):
    """Set the gradient of the batch's loss in the weights, and return the loss: the same on all processes."""
    texts = []
    for query, *documents in batch.texts:
        texts += [("query", query), *(("document", document) for document in documents)]
    roles, indices, features = zip(*make_micro_batches(model, texts, args, accelerator))
    keep_graphs = sum(part["input_ids"].numel() for part in features) <= args.max_graph_tokens

    def forward(number):  # with the same dropout in a second pass and in a resumed run
        torch.manual_seed(hash((args.seed, batch.step, accelerator.process_index, number)))
        return encode(model, roles[number], features[number], accelerator)[: len(indices[number])]

    with torch.set_grad_enabled(keep_graphs):
        outputs = [*map(forward, range(len(roles)))]
    shape = batch.hashes.T.shape  # (B, C)
    slots = torch.unravel_index(torch.tensor([*chain.from_iterable(indices)]).long(), shape)  # rows, columns
    embeddings = gather(outputs, slots, shape, accelerator).requires_grad_()
    loss = infonce(F.normalize(embeddings, dim=-1).unbind(1), batch)
    loss.backward()
    gradients = embeddings.grad[slots].split([*map(len, outputs)])
    for number, gradient in enumerate(gradients):
        output = outputs[number] if keep_graphs else forward(number)
        output.backward(gradient)
    for weight in model.parameters():
        if weight.requires_grad:
            own = torch.zeros_like(weight) if weight.grad is None else weight.grad  # others may have a gradient
            weight.grad = accelerator.reduce(own, "sum")
    return loss.item()


def make_evaluators(rows):
    """Return {measure: evaluator}: each query of held-out rows searches the positives of all."""
    relevant = {}
    for query, positive, *_ in rows:
        relevant.setdefault(fold(query), set()).add(fold(positive))
    queries = {fold(texts[0]): texts[0] for texts in rows}  # by ids, the same for equal texts
    documents = {fold(texts[1]): texts[1] for texts in rows}
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant, name="held_out")
    return {"held_out_cosine_ndcg@10": evaluator} if rows else {}


def evaluate(model, evaluators, accelerator):
    """Return {measure: value}, the same on all processes, which share the encoding."""
    found = {}
    model.eval()
    for measure, evaluator in evaluators.items():
        with distributed_evaluation(model) as is_main:  # in float32: cosines in bf16 would tie
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
    evaluators = make_evaluators(read_batch(first_rows, args.eval_rows, 0, {}, args).texts)
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
        batch = read_batch(rows, args.batch_size, step, state["extra"], args)
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
