"""Losses of rows with different numbers of documents, and the masks of false negatives."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

import train_bi_encoder as script

SIZES = [2, 1, 3, 1, 3, 2]
RAGGED = [{"q": f"query {i}", "pos": [f"positive {i}"], "neg": [f"negative {i} {j}" for j in range(size)],
           "s": [i / 5, *(i / 7 - j for j in range(size))]} for i, size in enumerate(SIZES)]  # fmt: skip
# Known positives, which are no negatives: row 2 has one of the query of row 0, row 3 has it as a hard negative, row 4
# with another query; row 5 has that of row 1; row 0 has that of row 2 as its own hard negative.
RAGGED[2]["q"] = RAGGED[0]["q"]
RAGGED[5]["pos"] = [RAGGED[1]["pos"][0].upper().replace(" ", "\n") + " "]  # equal but for white space and case
RAGGED[4]["pos"] = RAGGED[3]["neg"] = RAGGED[2]["pos"]
RAGGED[0]["neg"][1] = RAGGED[2]["pos"][0]


def cosine(texts, *pair):
    return F.cosine_similarity(*(texts[name] for name in pair), dim=0)


def naive_infonce(texts, rows, temperature=0.05, symmetric=False, mask_margin=None, in_batch=True, query=0):
    """Return InfoNCE, one row and document at a time. texts: {(row, 0 for the query, 1 for the positive, ...):
    embedding}. query=1: positives are the queries, and queries the documents."""
    texts_of_rows = [[row["q"], *row["pos"], *row["neg"]] for row in rows]
    lists, loss = [[" ".join(text.split()).casefold() for text in row] for row in texts_of_rows], 0.0
    known = {(row[query], row[1 - query]) for row in lists}
    for i, own in enumerate(lists):
        name, target, scores = (i, query), (i, 1 - query), []
        for j, number in (other for other in texts if (other[1] == 0) == (query == 1)):
            above = (cosine(texts, name, (j, number)) - cosine(texts, name, target)).detach()
            left_out = (own[query], lists[j][number]) in known or not (in_batch or i == j)
            if (j, number) == target or not (left_out or (mask_margin is not None and above > mask_margin)):
                scores.append(cosine(texts, name, (j, number)) / temperature)
        loss = loss + (torch.stack(scores).logsumexp(0) - cosine(texts, name, target) / temperature) / len(rows)
    if symmetric:
        return (loss + naive_infonce(texts, rows, temperature, mask_margin=mask_margin, query=1)) / 2
    return loss


def naive_teacher(loss, texts, rows, temperature=0.05, teacher_temperature=1):
    total = 0.0
    for i, row in enumerate(rows):
        scores = torch.stack([cosine(texts, (i, 0), (i, j + 1)) / temperature for j in range(len(row["s"]))])
        labels = torch.tensor(row["s"], dtype=torch.float64) / teacher_temperature
        if loss == "kl":
            teacher = labels.softmax(0)
            total = total + (teacher * (teacher.log() - scores.log_softmax(0))).sum()
        else:
            total = total + ((scores[0] - scores[1:]) - (labels[0] - labels[1:])).square().mean()
    return total / len(rows)


CASES = [("infonce", {}), ("infonce", {"symmetric": True, "temperature": 0.1}), ("infonce", {"mask_margin": 0.1}),
         ("infonce", {"mask_margin": 0.1, "symmetric": True}), ("infonce", {"in_batch": False}),
         ("infonce", {"in_batch": False, "mask_margin": 0.1}), ("kl", {"teacher_temperature": 1}),
         ("margin_mse", {"teacher_temperature": 1}),
         ("kl", {"infonce": 0.5, "temperature": 0.3, "teacher_temperature": 0.1}),
         ("margin_mse", {"infonce": 0.5, "teacher_temperature": 0.1})]  # fmt: skip


@pytest.mark.parametrize("limit", [None, 20], ids=["whole", "chunks"])
@pytest.mark.parametrize("loss, loss_kwargs", CASES)
def test_loss_and_gradient_of_ragged_rows(bert, monkeypatch, loss, loss_kwargs, limit):
    """They equal those of naive loops without padding; the rows are split into two parts, as for two processes."""
    monkeypatch.setattr(script, "MAX_SCORES", limit or script.MAX_SCORES)
    rows = RAGGED if loss != "infonce" else [*RAGGED[:5], {**RAGGED[5], "neg": []}]
    flags = ["--loss", loss, "--loss_kwargs", json.dumps(loss_kwargs), *["--label_column", "s"] * (loss != "infonce")]
    flags += ["--train_data", "x", "--columns", "q", "pos", "neg", "--model_name_or_path", str(bert)]
    args = script.parse_args([*flags, "--query_prompt", "", "--document_prompt", ""])
    table = pa.Table.from_pylist([row | {script.SOURCE: 0, script.NUMBER: i} for i, row in enumerate(rows)])
    read, _ = script.read_rows(table, [SimpleNamespace(args=args, name="x")], [None, None], 0)
    model = script.load_model(args)
    args.batch_size = 8  # two slots are empty
    args.micro_batch_tokens = 10**6
    batch = script.batch_to_torch(script.make_batch(read, 0, model, args, Accelerator(cpu=True)))
    names = [(i, 0) for i in range(6)]
    names += [(i, j + 1) for i, row in enumerate(rows) for j in range(1 + len(row["neg"]))]
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(len(names), 8, generator=generator, dtype=torch.float64).requires_grad_()
    slots = batch.hashes.shape
    index = torch.full(slots, len(names))  # of each slot among the embeddings
    for number, (i, j) in enumerate(names):
        index[i, j] = number
    columns = F.pad(embeddings, (0, 0, 0, 1))[index].unbind(1)
    parts = torch.arange(0, 8, 2), torch.arange(1, 8, 2)
    loss_fn = script.make_loss(args, model)
    whole = [script.WholeBatch(batch.hashes.T.contiguous(), batch.labels.double(), part, 0) for part in parts]
    found = sum(loss_fn(columns, part) for part in whole)

    texts = dict(zip(names, embeddings))
    weight, options = loss_kwargs.get("infonce", 1.0), {k: v for k, v in loss_kwargs.items() if k != "infonce"}
    expected = 0.0
    if loss == "infonce" or "infonce" in loss_kwargs:
        shared = {k: v for k, v in options.items() if k != "teacher_temperature"}
        expected = weight * naive_infonce(texts, rows, **shared)
    if loss != "infonce":
        expected = expected + naive_teacher(loss, texts, rows, **options)
    gradients = [torch.autograd.grad(value, embeddings)[0] for value in (found, expected)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    if "mask_margin" in loss_kwargs:
        unmasked = naive_infonce(texts, rows, **{**loss_kwargs, "mask_margin": None})
        assert unmasked.item() > found.item() + 0.1


def test_known_positives_of_random_batches():
    """They are those of a loop over rows: texts that occur often, or once, absent rows, rows with fewer documents."""
    random = np.random.default_rng(0)
    for _ in range(300):
        rows, columns = random.integers(1, 9), random.integers(1, 4)
        queries = random.integers(0, random.integers(1, 12), rows)
        documents = random.integers(0, random.integers(1, 12), (columns, rows))
        absent = random.random(rows) < 0.3
        queries[absent], documents[:, absent] = -1, -1
        documents[1:][random.random((columns - 1, rows)) < 0.3] = -1
        pairs, targets = set(zip(queries, documents[0])), random.permutation(rows)[: random.integers(1, rows + 1)]
        expected = [[(queries[i], text) in pairs for text in documents.flatten()] for i in targets]
        texts = torch.tensor(documents).flatten() * 2**58 // 3  # as far apart as hashes
        slots = torch.searchsorted(texts.sort().values, texts)
        found = script.known_positives(torch.tensor(queries), slots, torch.tensor(targets))
        assert found.tolist() == expected
