"""Search the demo corpus with a trained bi-encoder: the functions of the Python that built it.

python search_demo.py runs/demo/model "read a gzip file" "remove duplicates but keep the order"
"""

import sys
from pathlib import Path

import pyarrow.dataset as pads
from sentence_transformers import SentenceTransformer, util


def main(model_path, *queries):
    files = sorted(map(str, Path("data/python_code").glob("*/*.parquet")))
    if not files:
        sys.exit("error: no demo corpus in data/python_code; make it with: python prepare_corpus.py")
    code = pads.dataset(files).to_table(columns=["code"])["code"].to_pylist()
    model = SentenceTransformer(model_path, device="cpu")
    print(f"searching {len(code):,} functions")
    vectors = model.encode_document(code, batch_size=1024, convert_to_tensor=True, show_progress_bar=True)
    found = util.semantic_search(model.encode_query(list(queries), convert_to_tensor=True), vectors, top_k=3)
    for query, hits in zip(queries, found):
        print(f"\n{query}")
        for hit in hits:
            lines = code[hit["corpus_id"]].splitlines()
            print(f"  {hit['score']:.3f}  {' '.join(line.strip() for line in lines[:3])[:110]}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
