"""Imported once by the server of forked.py: what every run would otherwise import or initialize again.

Tests that launch a script with `use_launcher` or as a subprocess check that it runs without this.
"""

import gc
import runpy
from pathlib import Path

import datasets
import huggingface_hub
import jinja2
import scipy.io  # noqa: F401
import sentence_transformers
import shortcuts  # noqa: F401
import torch
import torch.distributed.fsdp  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers
import transformers.hf_argparser  # noqa: F401
from tqdm.std import TqdmDefaultWriteLock
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import eval_incremental
import train_bi_encoder
import train_cross_encoder

datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 1  # s, of 5, before the end of a run of a template on mixed streams
transformers.utils.logging.disable_progress_bar()  # a bar has a lock, which a killed run could leave locked
random = torch.get_rng_state()
huggingface_hub.utils.get_session()  # forked.py keeps its certificates, and the code of scripts
for script in (train_bi_encoder, train_cross_encoder, eval_incremental):
    runpy.compile(Path(script.__file__).read_bytes(), script.__file__, "exec")
for template in Path(sentence_transformers.__file__).parent.rglob("model_card_template.md"):
    jinja2.Template(template.read_text())  # forked.py keeps it compiled
shape = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 2}
with torch.device("meta"):  # an operation on the CPU would choose its kernels before a run sets ATEN_CPU_CAPABILITY
    transformers.BertModel(transformers.BertConfig(vocab_size=9, **shape))
torch.set_rng_state(random)
get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns, for models of all kinds
transformers.utils.logging.enable_progress_bar()
assert not hasattr(TqdmDefaultWriteLock, "mp_lock"), "forked runs would share this lock"
gc.collect()
gc.freeze()  # exclude all this from garbage collections in the runs
