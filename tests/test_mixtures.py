"""Sources with columns, prompts and losses of their own."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from conftest import ROOT, TRAINERS, launch, lines_of, metrics, quick_first, train, write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as library

import train_bi_encoder as script


@pytest.fixture(scope="module")
def sources(tmp_path_factory, rows):
    """Three files: triplets, pairs with scores, texts with classes; the last with a null and an empty negative."""
    folder = tmp_path_factory.mktemp("mixture")
    texts = [(row["docstring"][:80], row["code"][:120]) for row in rows[:240]]
    retrieval = [{"question": a, "answer": b, "wrong": texts[i - 1][1]} for i, (a, b) in enumerate(texts[:120])]
    similarity = [{"a": a, "b": texts[i - i % 2][0], "score": i % 6} for i, (a, _) in enumerate(texts[120:180])]
    topics = []
    for i, (a, _) in enumerate(texts[180:240]):
        others = [f"topic {(i + n) % 5}" for n in (1, 2, 3)]
        topics.append({"text": a, "topic": f"topic {i % 5}", "n1": others[0], "n2": others[1] if i % 3 else None,
                       "n3": others[2] if i % 4 else ""})  # fmt: skip
    for name, part in (("retrieval", retrieval), ("similarity", similarity), ("topics", topics)):
        write_jsonl(folder / f"{name}.jsonl", part)
    return folder


def entries(folder, name):
    retrieval = {"path": f"{folder}/retrieval.jsonl", "columns": ["question", "answer", "wrong"], "weight": 0.5}
    similarity = {"path": f"{folder}/similarity.jsonl", "columns": ["a", "b"], "label_column": ["score"],
                  "loss": "CoSENTLoss", "query_prompt": "", "document_prompt": "", "weight": 0.3}  # fmt: skip
    topics = {"path": f"{folder}/topics.jsonl", "columns": ["text", "topic", "n1", "n2", "n3"],
              "query_prompt": "topic of: ", "loss_kwargs": {"in_batch": False}, "weight": 0.2}  # fmt: skip
    if name == "train_cross_encoder":
        similarity |= {"loss": "mse"}
        similarity.pop("document_prompt")
        topics |= {"loss": "ranknet", "columns": ["text", "topic", "n1"], "loss_kwargs": None}
    return [json.dumps(entry) for entry in (retrieval, similarity, topics)]


def flags_for(folder, name, model, output, *more):
    return ["--train_data", *entries(folder, name), "--model_name_or_path", model, "--mix_by", "batch", "--batch_size",
            8, "--max_steps", 10, "--logging_steps", 1, "--learning_rate", 1e-3, "--max_length", 32, "--eval_steps", 5,
            "--save_steps", 4, "--micro_batch_tokens", 200, "--output_dir", output, *more]  # fmt: skip


@pytest.mark.parametrize("name, way", quick_first(product(TRAINERS, [[], ["--streaming", "--eval_rows", "15"]])))
def test_resumed_to_the_bit(name, way, sources, bert, tmp_path):
    flags = flags_for(sources, name, bert, tmp_path / "out", *way)
    train(name, *flags)
    expected = lines_of(tmp_path / "out")
    weights = (tmp_path / "out/model/model.safetensors").read_bytes()
    names = {key for line in expected for key in line if key.startswith("loss_")}
    assert names == {"loss_retrieval", "loss_similarity", "loss_topics"} and "held_out_mean" in expected[-1]
    shutil.rmtree(tmp_path / "out/checkpoints/step_00000010")
    shutil.rmtree(tmp_path / "out/model")
    train(name, *flags, "--resume")
    assert lines_of(tmp_path / "out") == expected
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == weights


def test_gradient_equals_a_loop_over_the_sources(sources, bert, tmp_path):
    """In plain torch, by the library's losses: a batch of each source, its prompts part of the texts."""
    flags = [*map(str, flags_for(sources, "train_bi_encoder", bert, tmp_path)), "--eval_rows", "0", "--dropout", "0"]
    args, accelerator = script.parse_args(flags), Accelerator(cpu=True)
    model = script.load_model(args)
    args = script.resolve_args(args, model, accelerator)
    data = script.open_data(args)
    seen = {}
    batches = script.local_batches(script.row_batches(data.sources, data.weights, args), 0, data, args, accelerator)
    while len(seen) < 3:
        rows, index, more = next(batches)
        seen.setdefault(more["source"], (rows, index, more))
    reference = SentenceTransformer(str(bert), device="cpu").train()
    reference.max_seq_length = 32
    script.set_dropout(reference, 0.0)

    def embed(texts):
        return reference(reference.preprocess(texts))["sentence_embedding"]

    for number, (rows, index, _) in sorted(seen.items()):
        source = data.sources[number]
        batch = script.batch_to_torch(script.make_batch(rows, index, model, args, accelerator))
        model.zero_grad()
        loss = script.forward_backward(model, batch, source.args, accelerator, script.make_loss(source.args, model))
        reference.zero_grad()
        prompts = script.prompts_of(source.args)
        queries = embed([prompts["query"] + row.query for row in rows])
        documents = [embed([prompts["document"] + text for text in row.documents]) for row in rows]
        if number == 0:
            columns = [queries, torch.stack([part[0] for part in documents]), torch.stack([d[1] for d in documents])]
            assert len({text for row in rows for text in row.documents}) == 2 * len(rows)  # nothing is masked
            expected = library.MultipleNegativesRankingLoss(reference, scale=20.0)
            expected = expected.compute_loss_from_embeddings(columns, None)
        elif number == 1:
            columns = [queries, torch.cat(documents)]
            labels = torch.tensor([row.labels[0] for row in rows])
            expected = library.CoSENTLoss(reference).compute_loss_from_embeddings(columns, labels)
        else:
            terms = []
            for query, part in zip(queries, documents):
                scores = F.cosine_similarity(query[None], part) / 0.05
                terms.append(-scores.log_softmax(0)[0])
            assert {len(part) for part in documents} > {3}  # null and empty negatives are left out
            expected = torch.stack(terms).mean()
        expected.backward()
        gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, reference)]
        found, wanted = (torch.cat([part.flatten() for part in parts]) for parts in gradients)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("entry, problem", [
    ({"columns": ["a", "b"]}, "takes a path, and of its own a weight, columns"),
    ({"path": "x.jsonl", "learning_rate": 1}, "takes a path, and of its own a weight, columns"),
    ({"path": "x.jsonl", "loss": "kl"}, "x.jsonl: --loss kl requires teacher scores"),
    ({"path": "x.jsonl", "num_negatives": -1}, "x.jsonl: --num_negatives -1: must be finite, 0 or more"),
    ({"path": "x.jsonl", "query_prompt": ["a", "b"]}, "source x.jsonl: error: unrecognized arguments: b"),
    ({"path": "https://user:secret@host/x.jsonl"}, "a URL with a credential"),
])  # fmt: skip
def test_an_entry_is_checked_like_flags(entry, problem, capsys):
    with pytest.raises((script.UserError, SystemExit)) as error:  # of argparse
        script.parse_args(["--model_name_or_path", "x", "--train_data", json.dumps(entry)])
    assert problem in f"{error.value} {capsys.readouterr().err}"


def test_what_an_entry_takes_from_the_run():
    """null and [] are not given; a loss of its own takes the defaults of its options and labels."""
    run = ["--model_name_or_path", "x", "--train_data", "x", "--loss", "kl", "--label_column", "y", "--columns", *"ab",
           "--query_prompt", "q: ", "--loss_kwargs", '{"teacher_temperature": 1}', "--num_negatives", "3"]  # fmt: skip
    args = script.parse_args(run)
    same = script.args_of_source({"path": "p", "columns": [], "query_prompt": None}, args)
    assert (same.train_data, same.query_prompt, same.loss, same.label_column) == (["p"], "q: ", "kl", ["y"])
    own = script.args_of_source({"path": "p", "loss": "infonce", "query_prompt": "", "weight": 0.5}, args)
    assert (own.loss, own.loss_kwargs, own.label_column, own.num_negatives) == ("infonce", {}, [], 3)
    assert own.query_prompt == "" and own.mixing_weights == [0.5]


def open_data(folder, *sources, more=()):
    flags = ["--model_name_or_path", "x", "--train_data", *sources, "--query_prompt", "", "--document_prompt", "",
             *([] if "--columns" in more else ["--columns", "q", "d"]), *more]  # fmt: skip
    return script.open_data(script.parse_args(flags))


def test_what_is_refused_of_several_sources(sources):
    retrieval, similarity, topics = entries(sources, "train_bi_encoder")
    with pytest.raises(script.UserError, match="different losses require --mix_by batch"):
        open_data(sources, retrieval, similarity)
    unweighted = json.dumps({name: value for name, value in json.loads(topics).items() if name != "weight"})
    with pytest.raises(script.UserError, match="give a weight to each source or to none"):
        open_data(sources, retrieval, unweighted, more=["--mix_by", "batch"])
    plain = [f"{sources}/retrieval.jsonl", f"{sources}/retrieval.jsonl"]
    message = r"retrieval.jsonl: has no column \['other'\], but \['question', 'answer', 'wrong'\]"
    with pytest.raises(script.UserError, match=message):
        open_data(sources, *plain, more=["--columns", "question", "answer", "other"])


def count_rows(batches, count):
    """Return (the rows of each source in the next batches, the state after them)."""
    found = Counter()
    for _ in range(count):
        table, state = next(batches)
        found.update(table[script.SOURCE].to_pylist())
    return dict(found), json.loads(json.dumps(state))


@pytest.mark.parametrize("way", ["row", "batch"])
def test_a_resume_mixes_by_its_own_weights(tmp_path, way):
    """From then on; sources keep their positions by name, and the first rows are not made up for."""
    names = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    for name in names:
        write_jsonl(Path(name), [{"q": f"{name} {i}", "d": f"d {i}"} for i in range(500)])
    flags = f"--model_name_or_path x --train_data x --columns q d --batch_size 10 --mix_by {way}"
    args = script.parse_args(flags.split())

    def batches(names, weights, state):
        more = ["--eval_rows", "0", "--mixing_weights", *map(str, weights)]
        data = open_data(tmp_path, *names, more=more)
        return script.row_batches(data.sources, data.weights, args, state), data.sources

    rows, state = count_rows(batches(names, [8, 1, 1], None)[0], 20)
    assert rows == {0: 160, 1: 20, 2: 20}
    resumed, _ = batches(names, [8, 1, 1], state)  # as it was
    assert count_rows(resumed, 10)[0] == {0: 80, 1: 10, 2: 10}
    resumed, sources = batches(names[1:], [1, 1], state)  # without the first
    rows, later = count_rows(resumed, 6)
    assert rows == {0: 30, 1: 30} and [source.position.taken for source in sources] == [50, 50]
    resumed, _ = batches(names[1:], [1, 1], later)  # the weights of that resume go on
    assert count_rows(resumed, 4)[0] == {0: 20, 1: 20}
    resumed, _ = batches(names, [1, 1, 3], state)
    assert count_rows(resumed, 10)[0] == {0: 20, 1: 20, 2: 60}


@pytest.mark.parametrize("way", quick_first([[], ["--streaming", "--max_steps", "1"], ["--length_window", "3"]]))
def test_a_source_that_stays_continues_where_it_was(tmp_path, way):
    """Whatever leaves, enters or moves in the list: its rows, and what is drawn from their lists."""
    names = {name: str(tmp_path / f"{name}.jsonl") for name in "abc"}
    for name, path in names.items():
        rows = [{"q": f"{name} {i}", "d": [f"{name} {i} {n}" for n in range(5)], "n": []} for i in range(90)]
        write_jsonl(Path(path), rows)
    flags = ["--columns", *"qdn", "--eval_rows", "0", "--shuffle_buffer", "40", "--batch_size", "10", *way]

    def batches_of_b(letters, count, state=None):
        """Return (the rows of b in each of so many batches, the state after the last one)."""
        data = open_data(tmp_path, *map(names.get, letters), more=flags)
        batches = script.row_batches(data.sources, [1] * len(letters), data.sources[0].args, state)
        tables, states = zip(*islice(batches, count))
        found = []
        for table in tables:
            rows, _ = script.read_rows(table, data.sources, data.lookups, 0)
            found.append([(row.query, *row.documents) for row in rows if row.query.startswith("b")])
        return found, json.loads(json.dumps(states[-1]))

    _, state = batches_of_b("ab", 6)
    expected = sum(batches_of_b("ab", 30)[0][6:], [])  # to the second epoch
    for letters in ("ab", "b", "ba", "cb", "acb"):
        found, later = batches_of_b(letters, 30, state)
        found = sum(found, [])
        if "--length_window" in way:  # which is sorted: of 10, 15 or 30 rows of b
            assert sorted(found[:90]) == sorted(expected[:90])
        else:
            assert found[:100] == expected[:100] and len(expected) > 100
        numbers = {key: position.get("number") for key, position in later["sources"].items()}
        assert len({*numbers.values()}) == len(numbers) and numbers[f"{names['b']} 0"] == 1


@pytest.mark.parametrize("way", [[], ["--streaming", "--max_steps", "1"]])
def test_entries_of_one_path_are_known_by_their_own_flags(tmp_path, way):
    """In a resume, whichever leaves; one with other flags begins anew. Mixtures of the eighth edition are refused."""
    path = str(tmp_path / "s.jsonl")
    write_jsonl(Path(path), [{"q": f"q{i}", "p": f"p{i}", "x": f"x{i}", "y": f"y{i}"} for i in range(40)])
    p, x, y = ({"path": path, "columns": ["q", name], "query_prompt": None} for name in "pxy")
    more = ["--eval_rows", "0", "--shuffle_buffer", "0", "--batch_size", "4", "--columns", "q", "p", *way]

    def resume(entries, weights, state=None, count=1):
        """Return ({what the documents begin with: first row in the last batch}, state after it)."""
        words = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        data = open_data(tmp_path, *words, more=more)
        *_, (table, state) = islice(script.row_batches(data.sources, weights, data.sources[0].args, state), count)
        documents = [row.documents[0] for row in script.read_rows(table, data.sources, data.lookups, 0)[0]]
        return {text[0]: int(text[1:]) for text in documents[::-1]}, json.loads(json.dumps(state))

    _, state = resume([p, x], [3, 1], count=3)  # 9 and 3 rows
    assert resume([p, x], [3, 1], state)[0] == {"p": 9, "x": 3}
    assert resume([p | {"weight": 3}, y | {"weight": 1}], [3, 1], state)[0] == {"p": 9, "y": 0}
    assert resume([x], [1], state)[0] == {"x": 3} and resume([x, p], [1, 3], state)[0] == {"x": 3, "p": 9}
    assert resume([dict(reversed(x.items())), y], [1, 1], state)[0] == {"x": 3, "y": 0}
    _, alone = resume([x], [1], state)
    assert resume([x, p], [1, 1], alone)[0] == {"x": 7, "p": 9}
    _, twice = resume([path, path], [3, 1], count=3)
    assert resume([path, path], [1, 1], twice)[0] == {"p": 9}
    saved = {"unchanging": {"--train_data": [p]}, "progress": {"step": 3}}
    for entries in ([p], [path, path]):
        args = script.parse_args(["--model_name_or_path", "x", "--columns", "q", "p", "--train_data", path])
        with pytest.raises(script.UserError, match="mixtures of editions before the ninth are resumed by these alone"):
            script.check_changes(saved, {}, replace(args, train_data=entries), None)


def test_held_out_are_as_many_of_each_and_at_most_a_tenth(tmp_path):
    for name, count in (("big", 1000), ("small", 60)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"q": f"{name} {i}", "d": f"d {i}"} for i in range(count)])
    both = [str(tmp_path / "big.jsonl"), str(tmp_path / "small.jsonl")]
    data = open_data(tmp_path, *both)
    assert [len(rows) for _, rows in data.held_out] == [100, 6] and [len(part) for part in data.sources] == [900, 54]
    data = open_data(tmp_path, *both, more=["--eval_rows", "20"])
    assert [len(rows) for _, rows in data.held_out] == [10, 10]


def test_each_source_has_a_name_of_its_own_in_metrics(tmp_path):
    names = ["x.jsonl", "d/x.jsonl", "x-1.jsonl"]
    for name in names:
        write_jsonl(tmp_path / name, [{"q": f"{name} {i}", "d": f"d {i}"} for i in range(20)])
    data = open_data(tmp_path, *(str(tmp_path / name) for name in names))
    assert [source.label for source in data.sources] == ["x-0", "x-1", "x-1-2"]


def test_the_command_of_the_page(sources, bert, tmp_path, monkeypatch):
    """docs/mixtures.md: its file and its command, on small files of the same columns."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/mixtures.md").read_text()
    text, command = re.findall(r"```(?:yaml|sh)\n(.*?)```", page, re.S)
    for name in ("retrieval", "topics"):
        rows = [json.loads(line) for line in (sources / f"{name}.jsonl").read_text().splitlines()]
        if name == "topics":
            rows = [{"text": row["text"], "topic": row["topic"], "others": [row["n1"]]} for row in rows]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    pairs = [json.loads(line) for line in (sources / "similarity.jsonl").read_text().splitlines()]
    lines = [f'"{row["a"]}","{row["b"]}",{row["score"]}' for row in pairs if '"' not in row["a"] + row["b"]]
    (tmp_path / "similarity.csv").write_text("sentence1,sentence2,score\n" + "\n".join(lines) + "\n")
    flags = yaml.safe_load(text)
    flags |= {"model_name_or_path": str(bert), "batch_size": 8, "max_steps": 3, "max_length": 32}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(flags))
    python, trainer, file = command.split()
    done = launch(ROOT / trainer, file, cwd=tmp_path)
    assert "retrieval.jsonl: " in done.stdout and "query: sentence1; documents: sentence2" in done.stdout
    assert metrics(tmp_path / "runs/mixture")[-1]["step"] == 3


@pytest.mark.slow
def test_a_bad_row_is_named_whatever_the_loss_of_its_source(sources, bert, tmp_path):
    """The process that has it must compute no loss: that of the first source refuses the rows of another one."""
    similarity = entries(sources, "train_bi_encoder")[1]
    rows = [{"question": f"question {number}", "answer": f"answer {number}"} for number in range(64)]
    write_jsonl(tmp_path / "bad.jsonl", [*rows, {"question": "the last one", "answer": ""}])
    bad = {"path": str(tmp_path / "bad.jsonl"), "columns": ["question", "answer"], "weight": 0.7}
    flags = ["--train_data", similarity, json.dumps(bad), "--mix_by", "batch", "--batch_size", 5, "--max_steps", 60]
    flags += ["--model_name_or_path", bert, "--max_length", 16, "--eval_rows", 0, "--output_dir", tmp_path / "out"]
    found = launch(ROOT / "train_bi_encoder.py", *flags, processes=2, check=False)
    assert found.returncode == 1
    assert "'answer' has no text in the row {'question': 'the last one'" in found.stderr
    assert "equally many" not in found.stderr and "Traceback" not in found.stderr


@pytest.mark.slow
def test_gathering_of_a_loss_of_the_library_is_left_out(sources, bert, tmp_path):
    """Embeddings are those of all processes already."""
    flags = ["--train_data", f"{sources}/retrieval.jsonl", "--columns", "question", "answer", "--dropout", 0,
             "--model_name_or_path", bert, "--max_length", 16, "--batch_size", 8, "--max_steps", 2, "--eval_rows", 0,
             "--loss", "MultipleNegativesRankingLoss", "--logging_steps", 1]  # fmt: skip
    losses = []
    for name, kwargs in ("gathered", {"gather_across_devices": True}), ("plain", {}):
        flags += ["--loss_kwargs", json.dumps(kwargs), "--output_dir", tmp_path / name]
        launch(ROOT / "train_bi_encoder.py", *flags, processes=2)
        losses.append([line["loss"] for line in metrics(tmp_path / name)])
    assert losses[0] == losses[1] and len(losses[0]) == 2
