"""A model of Transformers on flashtune, beside Transformers' own attention: same tokens, and with --large tokens per
second.

    PYTHONPATH=bindings/python python3 examples/transformers_generate.py          # tiny, anywhere
    PYTHONPATH=bindings/python python3 examples/transformers_generate.py --large  # a 1.2B Llama in bf16, on a GPU

Weights are random: nothing is downloaded.
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flashtune.transformers  # noqa: F401 - registers "ftune"

large = "--large" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {
    "hidden_size": 2048 if large else 64,
    "intermediate_size": 8192 if large else 96,
    "num_hidden_layers": 16 if large else 2,
    "num_attention_heads": 32 if large else 4,
    "num_key_value_heads": 8 if large else 2,
    "vocab_size": 32000 if large else 99,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02 if large else 0.3,
}
torch.manual_seed(0)
config = LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
dtype = torch.bfloat16 if large else torch.float32
model = LlamaForCausalLM(config).to(dtype).eval().to(device)
batch, prompt, new = (4, 4096, 64) if large else (2, 12, 8)
ids = torch.randint(3, config.vocab_size, (batch, prompt), device=device)
padding = torch.ones_like(ids)
padding[0, : prompt // 4] = 0  # padded on the left


def timed(call, repeats=3):
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return result, best


@torch.no_grad()
def main():
    print(f"PyTorch {torch.__version__}, {device}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    tokens = {}
    for name in ("eager", "sdpa", "ftune"):
        model.set_attn_implementation(name)
        _, prefill = timed(lambda: model(ids, logits_to_keep=1))
        _, padded = timed(lambda: model(ids, attention_mask=padding, logits_to_keep=1))
        call = lambda: model.generate(ids, attention_mask=padding, max_new_tokens=new, do_sample=False)
        tokens[name], whole = timed(call, 1)
        rates = f"prefill {batch * prompt / prefill:9.0f} tokens/s, padded {batch * prompt / padded:9.0f}"
        if large:
            print(f"{name:>6}: {rates}, generate {batch * new / (whole - padded):7.0f} new tokens/s")
    same = (tokens["ftune"] == tokens["eager"]).float().mean().item()
    print(f"tokens of ftune that are eager's: {100 * same:.1f} %")


main()
