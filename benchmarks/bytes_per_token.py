"""Bytes that backward keeps of a token, by architecture, and what the defaults do with them on GPUs of several sizes.

    python benchmarks/bytes_per_token.py [--only NAME ...] [--length 256]

Counts on a CPU, in bfloat16 autocast, with sdpa, what autograd saves of one text more, each storage once, of random
weights at two depths; other layers are like these. Attention has no dropout, as kernels of a GPU do not keep its
probabilities; other dropout is the model's. The rest is computed from it by the formulas of docs/gpu.md.
"""

import argparse
import math

import torch
import transformers

BERT = {"attention_probs_dropout_prob": 0}
MINILM = BERT | {"hidden_size": 384, "intermediate_size": 1536}
XLMR = BERT | {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1}
LARGE = BERT | {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
QWEN = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151_669, "tie_word_embeddings": True}  # fmt: skip
GEMMA = {"hidden_size": 768, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256,
         "intermediate_size": 1152, "vocab_size": 262_144, "use_bidirectional_attention": True}  # fmt: skip
MODELS = {  # {name: (class of its configuration, options, layers, layers after which their kinds repeat)}
    "MiniLM-L6": ("BertConfig", MINILM, 6, 1),
    "MiniLM-L12": ("BertConfig", MINILM, 12, 1),
    "DistilBERT": ("DistilBertConfig", {"attention_dropout": 0.0}, 6, 1),
    "BERT-base": ("BertConfig", BERT, 12, 1),
    "mpnet-base": ("MPNetConfig", {"vocab_size": 30_527}, 12, 1),  # has no sdpa: keeps probabilities
    "XLM-R-base": ("XLMRobertaConfig", XLMR, 12, 1),
    "ModernBERT-base": ("ModernBertConfig", {}, 22, 3),
    "EmbeddingGemma-300M": ("Gemma3TextConfig", GEMMA, 24, 6),
    "BERT-large": ("BertConfig", LARGE, 24, 1),
    "Qwen3-0.6B": ("Qwen3Config", QWEN, 28, 1),
}


def make_model(kind, layers, **options):
    depth = "n_layers" if kind == "DistilBertConfig" else "num_hidden_layers"
    config = getattr(transformers, kind)(**options | {depth: layers})
    return transformers.AutoModel.from_config(config, attn_implementation="eager" if "MPNet" in kind else "sdpa")


def count_saved(model, texts, length):
    """Return the bytes that a forward pass keeps for backward, but for the weights."""
    saved = {weight.untyped_storage().data_ptr(): 0 for weight in model.parameters()}

    def pack(tensor):
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor  # it lives as long as the graph, so that no address is used twice

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        _graph = model(input_ids=torch.randint(5, 900, (texts, length))).last_hidden_state.mean(1)
    return sum(saved.values())


def bytes_of_token(kind, options, layers, period, length):
    depths = {}
    for depth in (period, 2 * period):
        model = make_model(kind, depth, **options | {"vocab_size": 60_000}).train()
        one, two = (count_saved(model, texts, length) for texts in (1, 2))
        depths[depth] = (two - one) / length  # without what does not grow, as copies of the weights in bfloat16
    return depths[period] + (depths[2 * period] - depths[period]) * (layers / period - 1)


def defaults_on(memory, kept, weights, matrices, length, most, pairs=256):
    """Return "tokens: graphs of micro-batches, GB" of a batch on a device with so many bytes: docs/gpu.md."""
    fitting = (memory - 16 * weights - 2 * matrices - 1024 * kept) / 4 / kept
    tokens = 2 ** int(math.log2(min(max(fitting, 512), most)))
    micro_batches = math.ceil(2 * pairs * length / tokens)  # of both roles
    graphs = math.ceil((0.6 * memory - 12 * weights - 2 * matrices) / (tokens * kept))
    graphs = max(0, min(graphs, micro_batches))
    peak = 16 * weights + 2 * matrices + max(1, graphs) * min(tokens, 2 * pairs * length) * kept
    return f"{tokens:,}: {graphs} of {micro_batches}, {peak / 1e9:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS))
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    args = parser.parse_args()
    devices = [16, 24, 40, 80, 141]  # GB
    print("| model | weights | of matrices | MB a token | layers x width x |", *(f"{gb} GB |" for gb in devices))
    print("|---" * (5 + len(devices)) + "|")
    for name in args.only:
        kind, options, layers, period = MODELS[name]
        with torch.device("meta"):  # all weights, without memory
            model = make_model(kind, layers, **options)
        weights = sum(weight.numel() for weight in model.parameters())
        matrices = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
        kept = bytes_of_token(kind, options, layers, period, args.length)
        most = 2**15 if "MPNet" in kind else 2**17  # passes with padding, or without
        cells = [defaults_on(gb * 1e9, kept, weights, matrices, args.length, most) for gb in devices]
        cells = [f"{weights / 1e6:,.0f} M", f"{matrices / 1e6:,.0f} M", f"{kept / 1e6:.2f}",
                 f"{kept / layers / model.config.hidden_size:.0f}", *cells]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
