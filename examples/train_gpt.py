"""A GPT-2-sized model trained on flashtune and on PyTorch's attention: same weights, same batches, loss beside loss.

    PYTHONPATH=bindings/python python3 examples/train_gpt.py            # 12 layers, 12 heads, 768, on a GPU
    PYTHONPATH=bindings/python python3 examples/train_gpt.py --tiny     # anywhere

The text is made here: sentences and sums with a grammar, by a seed. For each kind of attention (heads of their own,
query heads that share KV heads, documents packed into rows) it prints how far the losses of two of PyTorch's kernels
are apart, how far flashtune's are from both, and at some steps the error of the gradients of all weights against
attention in fp64, beside that of unfused attention.
"""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtune

END = 0  # the byte between documents


def text(size, seed=1):
    """Bytes of short documents."""
    draw = random.Random(seed)
    names = ["the cat", "a miller", "her uncle", "the tall ship", "one engineer", "nobody"]
    verbs = ["sees", "builds", "forgets", "carries", "sells", "draws"]
    things = ["a bridge", "the moon", "three apples", "his map", "an engine", "that song"]
    out = bytearray()
    while len(out) < size:
        for _ in range(draw.randint(2, 12)):
            if draw.random() < 0.3:
                a, b = draw.randint(0, 99), draw.randint(0, 99)
                out += f"{a} + {b} = {a + b}. ".encode()
            else:
                out += f"{draw.choice(names)} {draw.choice(verbs)} {draw.choice(things)}. ".encode()
        out.append(END)
    return torch.frombuffer(out, dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, width // heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.d)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend, documents):
        b, n, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, n, -1, self.d).split([self.heads, self.kv_heads, self.kv_heads], 2)
        x = x + self.out(attend(q, k, v, documents).reshape(b, n, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self, layers, heads, kv_heads, width, length):
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, attend, documents):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attend, documents)
        return F.linear(self.last(x), self.words.weight)


# Attention of [batch, rows, heads, head dim], causal and within documents where there are any.
def of_flashtune(q, k, v, documents):
    if documents is None:
        return flashtune.flash_attn_func(q, k, v, causal=True)
    named = {"doc_q": documents, "doc_kv": documents}
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return flashtune.attention(*heads_first, mask="document_causal", tensors=named, enable_gqa=True).transpose(1, 2)


def seen(documents, rows, device):
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return causal if documents is None else causal & (documents[:, None, :, None] == documents[:, None, None, :])


def of_pytorch(backend):
    def attend(q, k, v, documents):
        group = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), *(x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        mask = None if documents is None else seen(documents, q.shape[2], q.device)
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return o.transpose(1, 2)

    return attend


def unfused(dtype):
    """Products in `dtype`, the softmax in at least f32."""

    def attend(q, k, v, documents):
        group = q.shape[2] // k.shape[2]
        of = q.dtype
        q, k, v = (
            x.to(dtype or of).transpose(1, 2)
            for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        )
        with torch.autocast(q.device.type, enabled=False):
            s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            s = s.masked_fill(~seen(documents, s.shape[-1], s.device), float("-inf"))
            p = torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype)
            return (p @ v).transpose(1, 2).to(of)

    return attend


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kinds", default="plain,gqa,documents")
    a = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers, heads, width, rows, length = (2, 4, 64, 2, 64) if a.tiny else (12, 12, 768, 16, 512)
    steps = a.steps or (20 if a.tiny else 300)
    data = text(1 << 16 if a.tiny else 1 << 22).to(device)
    print(f"flashtune {flashtune.version()}, PyTorch {torch.__version__}, {device}: "
          f"{layers} layers, {heads} heads, {width}")

    for kind in a.kinds.split(","):
        kv_heads = heads // 2 if a.tiny and kind == "gqa" else heads // 3 if kind == "gqa" else heads
        torch.manual_seed(0)
        first = Model(layers, heads, kv_heads, width, length).state_dict()
        draw = torch.Generator().manual_seed(1)
        starts = torch.randint(0, len(data) - length - 1, (steps, rows), generator=draw).to(device)

        def batch(step):
            at = starts[step][:, None] + torch.arange(length + 1, device=device)
            tokens = data[at]
            documents = (tokens[:, :-1] == END).cumsum(1).int() if kind == "documents" else None
            return tokens[:, :-1], tokens[:, 1:], documents

        def loss_of(model, attend, step):
            tokens, next_tokens, documents = batch(step)
            with torch.autocast(device, dtype=torch.bfloat16):
                words = model(tokens, attend, documents)
            return F.cross_entropy(words.float().flatten(0, 1), next_tokens.flatten())

        def gradients(model, attend, step):
            found = torch.autograd.grad(loss_of(model, attend, step), list(model.parameters()))
            return torch.cat([g.double().flatten() for g in found])

        def errors(model, step):
            exact = gradients(model, unfused(torch.float64), step)
            return [
                ((gradients(model, f, step) - exact).norm() / exact.norm()).item()
                for f in (of_flashtune, unfused(None))
            ]

        one, other = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) if kind == "documents" else (
            SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        if device == "cpu":
            one, other = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
        contenders = {"flashtune": of_flashtune, one.name: of_pytorch(one), other.name: of_pytorch(other)}
        losses, speed, off = {}, {}, {}
        for name, attend in contenders.items():
            model = Model(layers, heads, kv_heads, width, length).to(device)
            model.load_state_dict(first)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            of_steps, spent, timed = [], 0.0, 0
            for step in range(steps):
                told = name == "flashtune" and step + 1 in (1, steps // 3, steps)
                if told:
                    off[step + 1] = errors(model, step)
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                loss = loss_of(model, attend, step)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                of_steps.append(loss.item())
                if step >= min(10, steps // 2) and not told:
                    spent, timed = spent + time.perf_counter() - began, timed + 1
            losses[name] = torch.tensor(of_steps, dtype=torch.float64)
            speed[name] = timed * rows * length / spent
        ours, theirs, others = losses.values()
        apart = (theirs - others).abs()
        least = torch.minimum((ours - theirs).abs(), (ours - others).abs())
        # What the two are apart varies from step to step as noise does: the most so far counts.
        beyond = (least > 2 * torch.cummax(apart, 0).values).sum().item()
        print(f"{kind}: heads {heads}/{kv_heads}, {rows} x {length} tokens, {steps} steps")
        print("  loss of the first and last step:", ", ".join(f"{n} {l[0]:.4f} {l[-1]:.4f}" for n, l in losses.items()))
        print(f"  most that PyTorch's two are apart {apart.max():.5f}, "
              f"that flashtune is from the nearer {least.max():.5f}; "
              f"steps where it is more than twice the most so far: {beyond} of {steps}")
        for step, (mine, plain) in off.items():
            print(f"  gradients of step {step}, relative error: flashtune {mine:.2e}, unfused {plain:.2e}")
        print("  tokens/s:", ", ".join(f"{n} {x:.0f}" for n, x in speed.items()), flush=True)


main()
