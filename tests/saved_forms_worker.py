"""Train, and keep what the model in memory gives in each evaluation; or load saved models: see test_saved_forms.py.

saved_forms_worker.py train SCRIPT FLAGS   writes outputs.pt into --output_dir: a dict of each evaluation
saved_forms_worker.py load                 reads folders of runs, one a line, and writes loaded.pt into each
"""

import copy
import importlib
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

OWN = [0, 1, 3, 2]  # a measure by evaluation: that of the second step is the best


def record(given, outputs, found):
    """Add {(kind, text or pair): output}."""
    for key, output in zip(given, outputs, strict=True):
        found[key] = torch.as_tensor(output).detach().float().cpu().clone()


def keys_of(name, texts):
    kind = {"predict": "pair", "encode_query": "query", "encode_document": "document"}[name]
    return [(kind, *([text] if isinstance(text, str) else text)) for text in texts]


def similarities(model, found):
    """Return those of all queries and documents, in the order of their texts."""
    parts = [torch.stack([found[key] for key in sorted(found) if key[0] == kind]) for kind in ("query", "document")]
    return {("similarity",): model.similarity(*parts)}


def trained_outputs(script, model, rows, args, accelerator):
    """Return the outputs of rows as a step of training gets them."""
    batch = script.make_batch(rows, 0, model, args, accelerator)
    outputs = []
    for role, _, features in batch.micro_batches:
        features = script.convert_arrays(features)
        if hasattr(script, "score"):
            outputs.append(script.score(model, features, accelerator))
        else:
            outputs.append(script.encode(model, role, features, accelerator))
    keys = []
    for slot, column in zip(*batch.slots.tolist()):
        row = rows[slot]
        if hasattr(script, "score"):
            keys.append(("pair", row.query, row.documents[column]))
        else:
            keys.append(("document", row.documents[column - 1]) if column else ("query", row.query))
    found = {}
    record(keys, torch.cat(outputs), found)
    return found


def train(name, *flags):
    """Run a trainer. Its evaluators encode and predict as ever; what they get is kept."""
    script = importlib.import_module(name)
    measured = {}
    evaluations = []
    opened = []

    def recorded(kind, name):
        method = getattr(kind, name)

        def call(model, texts, *more, **options):
            outputs = method(model, texts, *more, **options)
            record(keys_of(name, texts), outputs, measured)
            return outputs

        setattr(kind, name, call)

    for kind, method in (SentenceTransformer, "encode_query"), (SentenceTransformer, "encode_document"):
        recorded(kind, method)
    recorded(CrossEncoder, "predict")
    evaluate, open_evaluators = script.evaluate, script.open_evaluators

    def evaluate_recorded(model, evaluators, accelerator):
        measures = evaluate(model, evaluators, accelerator)
        if accelerator.mixed_precision != "no":  # what the same weights give in float32, which a file has
            model = copy.deepcopy(model).float()
            kind = accelerator.distributed_type
            accelerator = SimpleNamespace(device=accelerator.device, num_processes=1, distributed_type=kind)
            accelerator.autocast = torch.no_grad  # without autocast
            measured.clear()
            evaluate(model, evaluators, accelerator)
        data, args = opened
        rows = [row for _, rows in data.held_out for row in rows]
        with torch.no_grad():
            trained = trained_outputs(script, model.eval(), rows, args, accelerator)
        model.train()
        if not hasattr(script, "score"):
            measured.update(similarities(model, measured))
        evaluations.append({"measured": dict(measured), "trained": trained})
        measured.clear()
        return measures | {"own": OWN[len(evaluations) - 1]}

    def open_recorded(data, model, args):
        opened[:] = data, args
        return open_evaluators(data, model, replace(args, metric_for_best_model=None))  # `own`, if any: of this file

    script.evaluate, script.open_evaluators = evaluate_recorded, open_recorded
    if "FSDP_VERSION" in os.environ:
        sys.argv[1:] = [name, *flags]
        runpy.run_path(str(Path(__file__).with_name("fsdp2_worker.py")), run_name="__main__")
    else:
        script.main(script.parse_args([*flags]))
    if os.environ.get("RANK", "0") == "0":
        torch.save(evaluations, Path(flags[flags.index("--output_dir") + 1], "outputs.pt"))


def load(folder):
    """Write what the saved model gives for the texts or pairs that the run has measured."""
    evaluation = torch.load(folder / "outputs.pt")[-1]
    given = list(evaluation["trained"])
    found = {"measured": {}, "trained": {}}
    if given[0][0] == "pair":
        model = CrossEncoder(str(folder / "model"), device="cpu")
        pairs = [key[1:] for key in given]
        record(given, model.predict(pairs), found["measured"])
        record(given, model.predict(pairs, activation_fn=torch.nn.Identity()), found["trained"])
    else:
        model = SentenceTransformer(str(folder / "model"), device="cpu")
        for name in ("encode_query", "encode_document"):
            texts = [key[1] for key in given if name.endswith(key[0])]
            record(keys_of(name, texts), getattr(model, name)(texts), found["trained"])
        found["measured"] = {key: found["trained"][key] for key in evaluation["measured"] if key != ("similarity",)}
        found["measured"] |= similarities(model, found["measured"])
    torch.save(found, folder / "loaded.pt")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*sys.argv[2:])
    for line in sys.stdin if sys.argv[1] == "load" else ():
        load(Path(line.rstrip()))
        print("loaded", flush=True)
