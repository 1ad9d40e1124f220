"""FlexAttention's functions on flashtune: the same masks and score changes, without torch.compile.

    PYTHONPATH=bindings/python python3 examples/flex_attention.py        # on the GPU if there is one, else on the CPU
"""

import time

import torch
from torch.nn.attention import flex_attention as pytorch

import flashtune
from flashtune.flex import and_masks, create_block_mask, flex_attention, trace_mask, trace_score

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# PyTorch's own function, as it is without torch.compile: every score in memory.
pytorch._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

B, H, S, D = 2, 8, 512, 64
query, key, value = (torch.randn(B, H, S, D, device=device) for _ in range(3))
document = torch.arange(S, device=device, dtype=torch.int32) // 150
slopes = torch.exp2(-torch.arange(1, H + 1, device=device) * 8.0 / H)
table = torch.randn(H, 32, device=device)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 128


def documents(b, h, q_idx, kv_idx):
    return document[q_idx] == document[kv_idx]


def neighbours(b, h, q_idx, kv_idx):
    near = lambda a, b: (a - b).abs() <= 3
    return near(q_idx // 32, kv_idx // 32) & near(q_idx % 32, kv_idx % 32)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def soft_cap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def buckets(score, b, h, q_idx, kv_idx):
    """T5's relative positions: near ones one by one, far ones by their logarithm."""
    distance = torch.clamp(q_idx - kv_idx, min=0)
    far = 16 + (torch.log(torch.clamp(distance, min=1) / 16) * 7.6943 + 1e-4).to(torch.int64)
    return score + table[h, torch.where(distance < 16, distance, torch.clamp(far, max=31))]


print(f"flashtune {flashtune.version()}, PyTorch {torch.__version__}, {device}")
for name, score_mod, mask_mod in [
    ("causal", None, causal),
    ("causal window", None, and_masks(causal, window)),
    ("causal documents", None, and_masks(causal, documents)),
    ("neighbours in 2-D", None, neighbours),
    ("ALiBi", alibi, causal),
    ("soft cap", soft_cap, causal),
    ("buckets of T5", buckets, causal),
]:
    block_mask = create_block_mask(mask_mod, B=None, H=None, Q_LEN=S, KV_LEN=S, device=device)
    out = flex_attention(query, key, value, score_mod, block_mask)
    wide = [x.double() for x in (query, key, value)]
    theirs = pytorch.create_block_mask(mask_mod, 1, 1, S, S, device=device)
    want = pytorch.flex_attention(*wide, score_mod, theirs)
    print(f"{name:18} off fp64 by {(out - want).abs().max().item():.1e}: {block_mask.mask}")

# Gradients come by autograd.
inputs = [x.clone().requires_grad_() for x in (query, key, value)]
flex_attention(*inputs, soft_cap, block_mask).square().sum().backward()
print("gradients:", *(f"{x.grad.abs().max().item():.3f}" for x in inputs))

# What a function becomes can be looked at, and kept for calls within torch.compile(fullgraph=True).
traced = trace_score(buckets, query, key)
print("traced:", traced.text)

# A tensor is read at run time, so another offset needs no other kernel. (What a block mask reads has to stay as it is.)
offset = torch.tensor(0, device=device)
mask = trace_mask(lambda b, h, q, kv: q + offset >= kv, None, None, 1, S, device)
classes = []
for step in (100, 101, 102):
    offset.fill_(step)
    flex_attention(query[:, :, :1], key, value, block_mask=mask)
    classes.append(flashtune.default_engine(device).counters()["classes"])
print("kernels for three steps of decoding:", classes[-1] - classes[0] + 1)


def rotates(score, b, h, q_idx, kv_idx):
    return score * torch.cos(0.1 * (q_idx - kv_idx))


try:
    flex_attention(query, key, value, rotates)
except flashtune.Unsupported as e:
    print("refused:", str(e).replace(__file__, "flex_attention.py"))

begin = time.perf_counter()
for _ in range(1000):
    trace_score(alibi, query, key)
print(f"a trace takes {(time.perf_counter() - begin) * 1000:.0f} us")
