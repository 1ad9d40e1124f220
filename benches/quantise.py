"""What making e4m3 operands costs on a GPU, and what the whole path from bf16 loses: `quantise` with each of its
options, the FP8 attention behind it, and bf16's.

    python3 benches/quantise.py                  # times: microseconds, bytes read once and written once per second
    python3 benches/quantise.py --errors         # against fp64 attention of the bf16 tensors, by input and scale kind
    python3 benches/quantise.py --errors --device cpu --rows 256    # the same without a GPU

With PyTorch. Times are medians of 20 replays of a graph of 10 calls, on one device; a run is to take less than a
minute. Errors are of 8 heads of 2048 rows: the root of the mean square error over that of the output, and the cosine,
of the whole path from bf16; `rounding` is the error against fp64 attention of what the codes mean, over that of an
emulation that rounds P alone, which is to be 1.15 at most.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bindings" / "python"))
import flashtune

FINEST = ("token", "token", "channel")
OPTIONS = {
    "tensor": {"scales": "tensor"},
    "head": {},
    "k token": {"scales": ("head", "token", "head")},
    "v channel": {"scales": ("head", "head", "channel")},
    "block 128, channel": {"scales": ("block", "block", "channel")},
    "block 64, channel": {"scales": ("block", "block", "channel"), "block_rows": 64},
    "token, channel": {"scales": FINEST},
    "mean": {"subtract_mean": True},
    "hadamard": {"hadamard": True},
    "mean, hadamard": {"subtract_mean": True, "hadamard": True},
    "all of it": {"scales": FINEST, "subtract_mean": True, "hadamard": True},
}
# Those that attention is timed with, at head dim 128 alone: each is a kernel that may have to be compiled.
ATTENDED = ("head", "k token", "token, channel")


def median_us(call):
    """Of one call, in a graph of ten."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(10)]
    times = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    del kept
    return sorted(times[3:])[10]


def times():
    print(f"{torch.cuda.get_device_name()}\n{'sizes':34} {'what':24} {'us':>9} {'TB/s':>7}")
    for batch, heads, kv_heads, rows, dim in [
        (1, 16, 16, 16384, 128), (4, 16, 16, 4096, 128), (1, 32, 8, 16384, 128), (1, 8, 8, 16384, 256),
        (4, 32, 32, 1024, 64),
    ]:  # fmt: skip
        q = torch.randn(batch, rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(batch, rows, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        moved = 3 * (q.numel() + k.numel() + v.numel())
        angles = torch.rand(rows, dim // 2, device="cuda")
        named = {**OPTIONS, "rotary": {"rotary_cos": angles, "rotary_sin": angles}}
        sizes = f"{batch} x {heads}/{kv_heads} x {rows} x {dim}"
        for name, options in named.items():
            us = median_us(lambda options=options: flashtune.quantise(q, k, v, **options))
            print(f"{sizes:34} {name:24} {us:9.1f} {moved / us * 1e-6:7.2f}", flush=True)
        if dim != 128:
            continue
        us = median_us(lambda: flashtune.flash_attn_func(q, k, v))
        print(f"{sizes:34} {'bf16 attention':24} {us:9.1f}", flush=True)
        for name in ATTENDED:
            r = flashtune.quantise(q, k, v, **OPTIONS[name])
            us = median_us(lambda r=r: flashtune.flash_attn_func(r.q, r.k, r.v, **r.descales))
            print(f"{sizes:34} {'fp8, ' + name:24} {us:9.1f}", flush=True)


def kinds(device, rows):
    """Inputs of a kind, `[1, rows, 8, 128]` in bf16."""
    torch.manual_seed(0)
    shape = (1, rows, 8, 128)

    def normal():
        return torch.randn(shape).to(device)

    def loud():
        return normal() + 10 * normal() * (torch.rand(shape) < 0.001).to(device)

    yield "normal", normal(), normal(), normal()
    yield "outliers", loud(), loud(), loud()
    q, k, v = normal(), normal(), normal()
    q[..., [5, 77]] *= 6
    k[..., [3, 40, 90, 121]] += 12
    yield "biased channels", q, k, v
    q, k, v = normal(), normal(), normal()
    k[:, 0] = q.mean(1) * 30
    yield "sink, biased V", q, k, v + 0.5
    q, k, v = normal(), normal(), normal()
    v[..., ::9] *= 20
    k[:, ::7] *= 4
    yield "loud rows of K, V", q, k, v


def attention(q, k, v, rounds=False):
    """In fp64; with `rounds` P is rounded to e4m3 times 2^8, relative to the largest of its row, and its sum is not."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = (p * 256).float().to(torch.float8_e4m3fn).double() / 256 if rounds else p
    return (rounded @ v / p.sum(-1, keepdim=True)).transpose(1, 2)


def meant(codes, scale, rows):
    """What codes `[batch, rows, heads, dim]` mean by scales of any kind; `rows` share one of three axes of q and k."""
    x = codes.double()
    _, count, heads, dim = x.shape
    scale = scale.double()
    if scale.ndim == 2:
        return x * scale.repeat_interleave(heads // scale.shape[1], 1)[:, None, :, None]
    if rows is None:
        return x * scale[:, None]
    return x * scale.repeat_interleave(rows, 2)[:, :, :count].transpose(1, 2)[..., None]


def errors(device, rows):
    print(f"{'inputs':18} {'what':20} {'relative':>9} {'cosine':>9} {'rounding':>9}")
    for kind, *tensors in kinds(device, rows):
        q, k, v = (t.bfloat16() for t in tensors)
        want = attention(q, k, v)

        def told(name, out, rounding=""):
            out = out.double()
            relative = ((out - want).square().mean() / want.square().mean()).sqrt()
            cosine = torch.nn.functional.cosine_similarity(out.flatten(), want.flatten(), dim=0)
            print(f"{kind:18} {name:20} {relative:9.5f} {cosine:9.6f} {rounding:>9}", flush=True)

        told("bf16", flashtune.flash_attn_func(q, k, v))
        for name, options in OPTIONS.items():
            r = flashtune.quantise(q, k, v, **options)
            out = flashtune.flash_attn_func(r.q, r.k, r.v, **r.descales)
            given = [
                meant(r.q, r.q_descale, r.descale_rows), meant(r.k, r.k_descale, r.descale_rows),
                meant(r.v, r.v_descale, None),
            ]  # fmt: skip
            exact = attention(*given)
            # O is rounded to bf16, too.
            alone = (attention(*given, rounds=True).bfloat16().double() - exact).square().mean().sqrt()
            rounding = (out.double() - exact).square().mean().sqrt() / alone
            told(name, out, f"{rounding:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--device", default="cuda", help="of --errors")
    parser.add_argument("--rows", type=int, default=2048, help="of --errors")
    args = parser.parse_args()
    errors(args.device, args.rows) if args.errors else times()
