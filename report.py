"""Compare results of eval_incremental.py: a table with intervals and tests, and a page to look into failures.

    python report.py runs/eval/scifact_bge_a1b2c3
    python report.py runs/monday runs/today --rankings bge BM25 --output_dir runs/compared

A FOLDER is the --output_dir of a call. Rankings of several calls are compared if these had the same queries and
judgments. Output: table.md, table.tex, report.html, one file that needs no server and no network, and of several sizes
of an index index.png, quality against bytes.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib>=3.9,<4", "numpy>=2.2,<3", "pandas>=3.1,<4", "scipy>=1.14,<2"]
# ///

import argparse
import csv
import json
import math
import re
import shutil
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import norm, permutation_test

NORMAL_ABOVE = 20_000  # queries, instead of drawing samples
QUERIES = 500  # on the page
DEPTH = 10  # documents of a ranking; and at most of the relevant ones of a query that no ranking has among them


def parse_args(argv):
    """Return the values of the flags; exit on a wrong one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="results of eval_incremental.py")
    parser.add_argument("--rankings", nargs="+", default=[], help="names to compare, the baseline first; none: all")
    parser.add_argument("--output_dir", help="folder to write to; none: the first FOLDER")
    return parser.parse_args(argv)


def main(args):
    calls = read_calls(args.folders)
    rankings = read_rankings(calls, args.rankings)
    names = [collection["name"] for collection in calls[0]["collections"]]
    columns = [*names, "mean"] if len(names) > 1 else names
    summaries = {name: compare_rankings(rankings, number) for number, name in enumerate(columns)}
    table = table_of(summaries, [ranking.name for ranking in rankings])
    sizes = [ranking.size() for ranking in rankings]
    has_sizes = len(set(filter(None, sizes))) > 1
    if has_sizes:
        table.insert(0, "bytes", [size or "" for size in sizes])
    output = Path(args.output_dir or args.folders[0])
    output.mkdir(parents=True, exist_ok=True)
    texts = table_texts(table.T if len(names) > 1 and len(rankings) < 3 else table)
    lines = [[texts.columns.name, *texts.columns], *map(list, texts.itertuples(name=None))]
    write_tables(lines, output)
    width = shutil.get_terminal_size((120, 24)).columns
    print("\n" + texts.to_string(line_width=width))
    data = page_data(calls, rankings[:2])
    write_page(output / "report.html", data, lines, calls)
    print(f"{len(data['queries']):,} queries are in {output}/report.html; tables: table.md, table.tex")
    if has_sizes and data["queries"]:
        plot_sizes(rankings, summaries[columns[-1]], output / "index.png")
        print(f"quality against the bytes of a document: {output}/index.png")


# ---- results of the evaluator


@dataclass
class Results:
    name: str
    folders: list[Path]  # of each collection, with run.trec and per_query.csv
    tables: list[pd.DataFrame]  # per_query.csv, by query id
    metrics: list[dict]  # {measure: statistics} of each collection and, of several, of their mean
    sizes: list[int | None]  # bytes of a document of each collection; None: no vectors

    def size(self):
        """Return the mean of the sizes, or None."""
        return math.ceil(np.mean(self.sizes)) if all(self.sizes) else None


def read_calls(folders):
    """Return metrics.json of each folder, collections in one order; raise UserError if they do not compare."""
    calls = []
    for folder in dict.fromkeys(map(Path, folders)):
        try:
            call = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
            hashes = {part["name"]: (part["judgments"], part["corpus"]) for part in call["collections"]}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: not the --output_dir of an evaluation by this edition: {error}") from None
        calls.append(call | {"folder": folder, "hashes": hashes})
        first = calls[0]["hashes"]
        if different := {name for name, _ in hashes.items() ^ first.items()}:
            names = ", ".join(sorted(different))
            raise UserError(f"{folder}: not the corpus, queries and judgments of {names} in {calls[0]['folder']}")
        order = list(first)
        call["collections"].sort(key=lambda part: order.index(part["name"]))
        call["results"].sort(key=lambda result: order.index(result["collection"]))
    return calls


def read_rankings(calls, chosen):
    """Return the Results of all calls, or those of chosen names; a name that repeats becomes FOLDER/NAME."""
    rankings = {}  # {path: Results}
    for call in calls:
        for result in call["results"]:
            path = str(call["folder"] / result["name"])
            ranking = rankings.setdefault(path, Results(result["name"], [], [], [], []))
            ranking.sizes.append(result.get("bytes"))
            ranking.folders.append(call["folder"] / result["folder"])
            table = pd.read_csv(ranking.folders[-1] / "per_query.csv", dtype={"query": str}, na_filter=False)
            ranking.tables.append(table.set_index("query"))
            ranking.metrics.append(result["metrics"])
        for name, metrics in call.get("means", {}).items():
            rankings[str(call["folder"] / name)].metrics.append(metrics)
    counts = Counter(ranking.name for ranking in rankings.values())
    for path, ranking in rankings.items():
        ranking.name = path if counts[ranking.name] > 1 else ranking.name
    named = {ranking.name: ranking for ranking in rankings.values()}
    if unknown := [name for name in chosen if name not in named]:
        raise UserError(f"--rankings {unknown[0]}: no such ranking; there are {', '.join(named)}")
    return [named[name] for name in chosen or named]


def compare_rankings(rankings, number):
    """Return {measure: statistics} of each ranking, of the measures that all have: those of its call and, after the
    first ranking, difference from that and p. number: of the collection, or behind the last one for their mean."""
    first = rankings[0]
    parts = range(len(first.tables)) if number == len(first.tables) else [number]
    measures = [name for name in first.metrics[number] if all(name in ranking.metrics[number] for ranking in rankings)]
    if not measures:
        raise UserError("the rankings have no measure in common: evaluate them with the same --metrics")
    rows = []
    for ranking in rankings:
        row = {}
        for measure in measures:
            cell = ranking.metrics[number][measure]
            row[measure] = {key: cell[key] for key in ("mean", "low", "high", "value") if key in cell}
            if rows and "mean" in cell:
                others = [first.tables[part][measure] for part in parts]
                samples = [ranking.tables[part][measure].loc[other.index] for part, other in zip(parts, others)]
                difference = cell["mean"] - rows[0][measure]["mean"]
                row[measure] |= {"difference": difference, "p": paired_randomization_p(samples, others)}
        rows.append(row)
    return rows


# ---- the page


def page_data(calls, rankings):
    """Return what the script of the page reads: queries that two rankings differ on most, or one is worst at."""
    measure = next((name for name in rankings[0].tables[0] if name in rankings[-1].tables[0]), None)
    collections = calls[0]["collections"]
    queries = []
    for number in range(len(collections) if measure else 0):  # else all measures are numbers of whole rankings
        scores = [ranking.tables[number][measure].to_dict() for ranking in rankings]
        for row in read_jsonl(calls[0], number, "queries.jsonl"):
            values = [score[row["_id"]] for score in scores]
            queries.append(row | {"collection": number, "values": values, "change": values[-1] - values[0]})
    queries = sorted(queries, key=lambda query: (-abs(query["change"]), query["values"][0]))[:QUERIES]
    for number in range(len(collections)):
        own = [query for query in queries if query["collection"] == number]
        ranks = [read_ranks(ranking.folders[number] / "run.trec", own) for ranking in rankings]
        texts = dict(chain.from_iterable(read_passages(call, number).items() for call in calls))
        for query in own:
            query |= find_documents(query.pop("judgments"), [found[query["_id"]] for found in ranks], texts)
    return {
        "collections": [collection["name"] for collection in collections],
        "rankings": [ranking.name for ranking in rankings],
        "measure": measure or "no measure",
        "depth": DEPTH,
        "total": sum(collection["queries"] for collection in collections),
        "queries": queries,
    }


def read_jsonl(call, number, name):
    """Yield the rows of a JSON Lines file of a collection."""
    with open(call["folder"] / call["collections"][number]["folder"] / name, encoding="utf-8") as file:
        yield from map(json.loads, file)


def read_passages(call, number):
    """Return {document id: text} of a collection; of several passages of an id the texts one below the other."""
    passages = defaultdict(list)
    for row in read_jsonl(call, number, "documents.jsonl"):
        passages[row["_id"]].append(row["text"])
    return {document: "\n\n".join(texts) for document, texts in passages.items()}


def read_ranks(path, queries):
    """Return {query id: {document id: rank}} of a run file; ties rank by document id, descending, as measured."""
    ranks = {query["_id"]: {} for query in queries}
    with open(path, encoding="utf-8") as file:
        separator = "\t" if "\t" in file.readline() else " "
    names = ["query", "q0", "document", "rank", "score", "tag"]
    options = {"dtype": {"query": str, "document": str}, "na_filter": False, "quoting": csv.QUOTE_NONE}
    chunks = pd.read_csv(path, sep=separator, names=names, chunksize=2**20, **options)
    table = pd.concat([chunk[chunk["query"].isin(ranks)] for chunk in chunks])
    for query, hits in table.sort_values(["score", "document"], ascending=False).groupby("query"):
        ranks[query] = {document: rank for rank, document in enumerate(hits["document"], start=1)}
    return ranks


def find_documents(grades, ranks, texts):
    """Return how many documents are relevant, and those to show: the first of each ranking, then missed ones."""
    shown = dict.fromkeys(document for found in ranks for document in list(found)[:DEPTH])
    relevant = [document for document, grade in grades.items() if grade > 0]
    missed = [document for document in sorted(relevant, key=grades.get, reverse=True) if document not in shown]
    documents = []
    for document in [*shown, *missed[:DEPTH]]:
        hit = {"_id": document, "grade": grades.get(document), "ranks": [found.get(document) for found in ranks]}
        documents.append(hit | {"text": texts.get(document, "(not in the corpus)")})
    return {"relevant": len(relevant), "documents": documents}


def write_page(path, data, lines, calls):
    """Write PAGE with its data, the lines of the table, and time and command of each call."""
    names = data["collections"]
    lines = [[re.sub(r" (?![\[p])", "&nbsp;", escape(cell)) for cell in line] for line in lines]
    origins = [(call["provenance"]["time"], escape(call["provenance"]["command"])) for call in calls]
    page = Template(PAGE).substitute(
        title=escape(", ".join(names) if len(names) < 4 else f"{len(names)} collections"),
        calls="\n".join(f"<details><summary>call of {time}</summary>{command}</details>" for time, command in origins),
        table="\n".join(f"<tr><td>{'<td>'.join(line)}" for line in lines),
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),  # no text can end the script
    )
    path.write_text(page, encoding="utf-8")


PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { max-width: 76rem; margin: auto; padding: 1rem; font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2 { font-size: 1.3rem; margin: 1rem 0 .3rem; }
h3, p { font-size: 1rem; margin: .3rem 0; }
table { border-spacing: 0; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td { padding: .3rem .7rem 0 0; vertical-align: top; }
tr:first-child { font-weight: bold; }
tr + tr:has(td:empty:first-child), .quiet { color: #5c636b; font-size: .85rem; }
main > details > summary { padding: .6rem 0; font-weight: bold; }
.query { border-top: 1px solid #dfe3e8; }
.query > summary { display: grid; grid-template-columns: max-content 1fr; gap: 1rem; padding: .4rem 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1.5rem; }
article { display: grid; grid-template-columns: 2rem 1fr; padding: .4rem; border-top: 1px solid #dfe3e8; }
.relevant { background: #eaf6ee; }
.text { white-space: pre-wrap; list-style: none; }
:not([open]) > .text { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4; overflow: hidden; }
</style>
<h1>$title</h1>
$calls
<div style="overflow-x: auto"><table>
$table
</table></div>
<p class="quiet">Brackets: 95 % bootstrap intervals. Under them: the difference from the first ranking, and the p-value
(0.0002 at least) of a paired randomization test. Above 20,000 queries both are normal approximations.</p>
<p class="quiet">Click a text to read on. <span id="about"></span></p>
<main></main>
<script type="application/json" id="data">$data</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const [first, second] = data.rankings;
const isRelevant = (hit) => hit.grade > 0;
const ranksOf = (hit) => hit.ranks.map((rank) => rank ?? "–").join(" → ");

function add(parent, tag, name, text = "") {  // a text never becomes HTML
  const element = parent.appendChild(document.createElement(tag));
  element.className = name;
  element.textContent = text;
  return element;
}

function addDocument(column, query, hit, side) {
  const box = add(column, "article", hit.grade > 0 ? "relevant" : "");
  add(box, "b", "", hit.ranks[side] ?? "–");
  const body = add(box, "div", "");
  const line = add(body, "div", "quiet", hit._id);
  if (hit.grade !== null) add(line, "b", "", " · grade " + hit.grade);
  if (second) add(line, "span", "", " · rank " + ranksOf(hit));
  const details = add(body, "details", "");
  details.open = hit.grade > 0;
  const text = add(details, "summary", "text");
  const words = query.text.match(/[\p{L}\p{N}]{4,}|\p{L}?[\p{Lu}\p{N}]{2}[\p{L}\p{N}]*/gu) ?? [];  // also HIV and p53
  const marked = new Set(words.map((word) => word.toLowerCase()));
  for (const part of hit.text.split(/([\p{L}\p{N}]+)/u))
    marked.has(part.toLowerCase()) ? add(text, "mark", "", part) : text.append(part);
}

function addDocuments(box, query) {
  const columns = add(box, "div", "columns");
  data.rankings.forEach((name, side) => {
    const column = add(columns, "section", "");
    const rank = (hit) => hit.ranks[side] ?? Infinity;
    const documents = query.documents.toSorted((a, b) => rank(a) - rank(b));
    const best = documents.filter((hit) => rank(hit) <= data.depth);
    const missed = documents.filter((hit) => rank(hit) > data.depth && hit.grade > 0);
    add(column, "h3", "", name);
    add(column, "p", "quiet", data.measure + " " + query.values[side].toFixed(3) + ", " +
      best.filter(isRelevant).length + " of " + query.relevant + " relevant documents among the first " + data.depth);
    if (missed.length) add(column, "p", "", missed.length + " of those missed, then the first " + data.depth);
    [...missed, ...best].forEach((hit) => addDocument(column, query, hit, side));
  });
}

function addGroup(title, queries) {
  const group = add(document.querySelector("main"), "details", "");
  group.open = true;  // for the browser's own search
  add(group, "summary", "", queries.length + " queries: " + title);
  for (const query of queries) {
    const box = add(group, "details", "query");
    const summary = add(box, "summary", "");
    add(summary, "b", "", query.values.map((value) => value.toFixed(3)).join(" → "));
    const text = add(summary, "span", "", query.text + " ");
    const relevant = query.documents.filter(isRelevant);
    add(text, "span", "quiet", (data.collections[1] ? data.collections[query.collection] + " " : "") + query._id +
      " · relevant at rank " + relevant.slice(0, 3).map(ranksOf).join(", ") + (relevant[3] ? ", ..." : ""));
    box.addEventListener("toggle", () => addDocuments(box, query), { once: true });
  }
}

if (second) {
  const equal = data.queries.filter((query) => query.change === 0);
  addGroup(first + " is better", data.queries.filter((query) => query.change < 0));
  addGroup(second + " is better", data.queries.filter((query) => query.change > 0));
  const failed = equal.filter((query) => query.values[0] === 0);
  const best = (query) => Math.min(...query.documents.filter(isRelevant).flatMap((hit) => hit.ranks.filter(Number)));
  addGroup("both fail (0), best rank of a relevant document first", failed.sort((a, b) => best(a) - best(b)));
  addGroup("equal, lowest first", equal.filter((query) => query.values[0] !== 0));
} else addGroup(first + ", lowest " + data.measure + " first", data.queries);
document.getElementById("about").textContent = data.queries.length + " of " + data.total + " queries, by " +
  data.measure + (second ? " of " + first + " → " + second : "") + ". Rank –: not in the ranking.";
</script>
"""

# ---- the table


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


def paired_randomization_p(samples, others):
    """Return the two-sided p-value of the paired randomization test (Smucker et al. 2007), of many queries normal."""
    differences = np.concatenate([(sample - other) / len(sample) for sample, other in zip(samples, others)])
    if len(differences) < 2 or not differences.any():
        return 1.0
    if len(differences) > NORMAL_ABOVE:
        return 2 * norm.sf(abs(differences.sum()) / np.linalg.norm(differences))
    batch = max(1, 2**22 // len(differences))
    random = np.random.default_rng(0)
    options = {"permutation_type": "samples", "n_resamples": 9999, "random_state": random}  # by flipping signs
    return float(permutation_test((differences,), np.sum, batch=batch, **options).pvalue)


def table_of(summaries, names):
    """Return a DataFrame of statistics: a row a ranking, a column a measure or, of several, a collection."""
    rows = next(iter(summaries.values()))
    if len(summaries) == 1:
        return pd.DataFrame(rows, names)
    measure = next(iter(rows[0]))
    return pd.DataFrame(summaries, names).map(lambda cell: cell[measure]).rename_axis(columns=measure)


def table_texts(table):
    """Return a table of statistics as a DataFrame of texts: of each row the values, and below them the differences."""
    lines = []
    for name, row in table.iterrows():
        values, differences = zip(*map(format_cell, row))
        lines.append([name, *values])
        if any(differences):
            lines.append(["", *differences])
    corner = table.columns.name or table.index.name or ""
    return pd.DataFrame(lines, columns=["", *table.columns]).set_index("").rename_axis(index=None, columns=corner)


def format_cell(cell):
    """Return the value and the difference from the first ranking, as texts."""
    if not isinstance(cell, dict):
        return str(cell), ""
    if "value" in cell:
        return f"{cell['value']:.4f} (no interval)", ""
    value = "{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell)
    return value, "{difference:+.4f}, p = {p:.4f}".format(**cell) if "p" in cell else ""


def write_tables(lines, output):
    """Write table.md, and table.tex for the package booktabs; lines: lists of texts, the header first."""
    columns = len(lines[0]) - 1
    rows = [lines[0], ["---", *["---:"] * columns], *lines[1:]]
    rows = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    (output / "table.md").write_text("".join(f"| {row} |\n" for row in rows), encoding="utf-8")
    names = {"\\": "textbackslash", "^": "textasciicircum", "~": "textasciitilde", "|": "textbar"}
    escapes = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {sign: f"\\{name}{{}}" for sign, name in names.items()}
    cells = [[cell.translate(str.maketrans(escapes)) for cell in line] for line in lines]
    # A bracket or star at the begin of a line would belong to the line break before it.
    rows = [re.sub(r"^[\[*]", r"{\g<0>}", " & ".join(line)) + r" \\" for line in cells]
    begin = rf"\begin{{tabular}}{{l{'r' * columns}}}"
    rows = [begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
    (output / "table.tex").write_text("\n".join(rows) + "\n", encoding="utf-8")


def plot_sizes(rankings, rows, path):
    """Plot the first measure of rankings, with its interval, against the bytes of a document in their index: a line
    for each model and precision. rows: {measure: statistics} of each ranking."""
    measure = next(name for name, cell in rows[0].items() if "mean" in cell)
    points = defaultdict(list)  # {label: (bytes, mean, low, high)}
    for ranking, row in zip(rankings, rows):
        if ranking.size():
            label = re.sub(r"@\d+,", " ", ranking.name)
            points[label].append((ranking.size(), *(row[measure][name] for name in ("mean", "low", "high"))))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, line in points.items():
        size, mean, low, high = np.array(sorted(line)).T
        axes.errorbar(size, mean, (mean - low, high - mean), marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="bytes of a document", ylabel=f"{measure}, 95 % interval")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
