"""flashtune in a PyTorch program: gradients, torch.compile, and PyTorch's own function.

    PYTHONPATH=bindings/python python3 examples/pytorch.py        # on the GPU if there is one, else on the CPU
"""

import torch
import torch.nn.functional as F

import flashtune
import flashtune.torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def largest(a, b):
    return f"{(a.double() - b.double()).abs().max().item():.1e}"


print(f"flashtune {flashtune.version()}, PyTorch {torch.__version__}, {device}")

# Gradients, as of any function of PyTorch. [batch, rows, heads, head dim]; 4 query heads share 2 KV heads.
q = torch.randn(2, 128, 4, 64, device=device, requires_grad=True)
k, v = (torch.randn(2, 128, 2, 64, device=device, requires_grad=True) for _ in range(2))
loss = flashtune.flash_attn_func(q, k, v, causal=True).square().sum()
ours = torch.autograd.grad(loss, (q, k, v))
wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
loss = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).square().sum()
theirs = [g.transpose(1, 2) for g in torch.autograd.grad(loss, wide)]
print("gradients, off fp64 by:", *map(largest, ours, theirs))


# A graph without breaks, forward and backward.
@torch.compile(fullgraph=True, backend="aot_eager")
def step(q, k, v):
    return flashtune.flash_attn_func(q, k, v, causal=True, softcap=30.0).square().sum()


print("compiled:", [tuple(g.shape) for g in torch.autograd.grad(step(q, k, v), (q, k, v))])

# What a score program reads is learned as well: here a table of relative positions, by clipped distance.
table = torch.zeros(4, 17, device=device, requires_grad=True)
rows = [x.transpose(1, 2) for x in (q, k, v)]
score = "score + table[h, clamp(kv - q, -8, 8) + 8]"
out = flashtune.attention(*rows, score=score, tensors={"table": table}, enable_gqa=True)
(ours,) = torch.autograd.grad(out.square().sum(), table)
wide, (deep_q, deep_k, deep_v) = table.detach().double().requires_grad_(), (x.detach().double() for x in rows)
at = torch.arange(128, device=device)
bias = wide[:, (at[None, :] - at[:, None]).clamp(-8, 8) + 8]
loss = F.scaled_dot_product_attention(deep_q, deep_k, deep_v, attn_mask=bias[None], enable_gqa=True).square().sum()
(theirs,) = torch.autograd.grad(loss, wide)
print("a learned table, off fp64 by:", largest(ours, theirs))

# A plain program on flashtune, by one line.
layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True, dropout=0.0, device=device)
x = torch.randn(2, 100, 256, device=device)
before = layer(x)
flashtune.torch.activate()
after = layer(x)
mask = torch.rand(2, 1, 64, 64, device=device) > 0.3
a, b, c = torch.randn(3, 2, 4, 64, 64, device=device)
F.scaled_dot_product_attention(a, b, c, attn_mask=mask)
print("activated:", flashtune.torch.counters(), "off by", largest(before, after))
try:
    F.scaled_dot_product_attention(a.double(), b.double(), c.double())
except flashtune.Unsupported as e:
    print("refused:", e)
flashtune.torch.activate(on_unsupported="torch")
F.scaled_dot_product_attention(a.double(), b.double(), c.double())
for line in flashtune.default_engine(device).prometheus().splitlines():
    if line.startswith(("flashtune_sdpa", "flashtune_fallback")):
        print(line)
flashtune.torch.restore()
