"""Print the mean nDCG@10 of the held-out rows by a saved model; launched by test_architectures.py in a fresh process.

saved_model_worker.py MODEL ROWS
"""

import json
import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).parent))
from test_architectures import ndcg

folder, rows = sys.argv[1:]
model = SentenceTransformer(folder, device="cpu", trust_remote_code=True)
print(ndcg(model, [json.loads(line) for line in Path(rows).read_text().splitlines()]))
