"""What making e4m3 operands costs on a GPU, and what the whole path from bf16 loses: `quantise` with each of its
options, the FP8 attention behind it, and bf16's.

    python3 benches/quantise.py                  # times: microseconds, bytes read once and written once per second
    python3 benches/quantise.py --errors         # against fp64 attention of the bf16 tensors, by kind of input

With PyTorch. Times are medians of 20 replays of a graph of 10 calls, on one device; errors are of 8 heads of 2048 rows.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bindings" / "python"))
import flashtune

OPTIONS = {
    "head": {},
    "tensor": {"scales": "tensor"},
    "mean": {"subtract_mean": True},
    "hadamard": {"hadamard": True},
    "mean, hadamard": {"subtract_mean": True, "hadamard": True},
}


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
    print(f"{torch.cuda.get_device_name()}\n{'sizes':34} {'what':16} {'us':>9} {'TB/s':>7}")
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
            print(f"{sizes:34} {name:16} {us:9.1f} {moved / us * 1e-6:7.2f}", flush=True)
        r = flashtune.quantise(q, k, v)
        for name, call in [
            ("fp8 attention", lambda: flashtune.flash_attn_func(r.q, r.k, r.v, **r.descales)),
            ("bf16 attention", lambda: flashtune.flash_attn_func(q, k, v)),
        ]:
            print(f"{sizes:34} {name:16} {median_us(call):9.1f}", flush=True)


def kinds():
    """Inputs of a kind, `[1, 2048, 8, 128]` in bf16."""
    torch.manual_seed(0)

    def normal():
        return torch.randn(1, 2048, 8, 128, device="cuda")

    def loud():
        return normal() + 10 * normal() * (torch.rand(1, 2048, 8, 128, device="cuda") < 0.001)

    yield "normal", normal(), normal(), normal()
    yield "outliers", loud(), loud(), loud()
    q, k, v = normal(), normal(), normal()
    q[..., [5, 77]] *= 6
    k[..., [3, 40, 90, 121]] += 12
    yield "biased channels", q, k, v
    q, k, v = normal(), normal(), normal()
    k[:, 0] = q.mean(1) * 30
    yield "sink, biased V", q, k, v + 0.5


def attention(q, k, v):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1) @ v).transpose(1, 2)


def errors():
    print(f"{'inputs':18} {'what':16} {'relative':>9} {'cosine':>9}")
    for kind, *tensors in kinds():
        q, k, v = (t.bfloat16() for t in tensors)
        want = attention(q, k, v)

        def told(name, out):
            out = out.double()
            relative = ((out - want).square().mean() / want.square().mean()).sqrt()
            cosine = torch.nn.functional.cosine_similarity(out.flatten(), want.flatten(), dim=0)
            print(f"{kind:18} {name:16} {relative:9.5f} {cosine:9.6f}", flush=True)

        told("bf16", flashtune.flash_attn_func(q, k, v))
        for name, options in OPTIONS.items():
            r = flashtune.quantise(q, k, v, **options)
            told(name, flashtune.flash_attn_func(r.q, r.k, r.v, **r.descales))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true")
    (errors if parser.parse_args().errors else times)()
