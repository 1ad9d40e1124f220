"""Masks in memory: what finding their live blocks takes, and whole calls beside PyTorch's kernels with the same mask.

    python3 benches/masks.py [--cases bool] [--heads 16] [--head-dim 128] [--rounds 20] [--json FILE]

Each call is captured in a CUDA graph and replayed after a flush of L2, which is not part of its time. `found` is
flashtune's call, `kept` the same with a block mask made before, `first` the kernels before the attention kernel (their
own times, by PyTorch's profiler), whose aim is 20 us for the 33 MB of 8 x 2048 x 2048. Needs PyTorch with CUDA and
`libflashtune`.
"""

import argparse
import json
import statistics
from pathlib import Path

from programs import load

# Name, batch, rows, and what is visible: True, or numbers to add where `kind` is a dtype.
CASES = [
    ("bool 8x2048 half", 8, 2048, "half", "bool"),
    ("bool 8x2048 causal, left padding", 8, 2048, "causal", "bool"),
    ("bool 8x2047 causal, left padding", 8, 2047, "causal", "bool"),
    ("bool 8x2048 documents", 8, 2048, "documents", "bool"),
    ("bool 1x4096 half", 1, 4096, "half", "bool"),
    ("bool 1x4096 causal, left padding", 1, 4096, "causal", "bool"),
    ("bfloat16 8x2048 causal, left padding", 8, 2048, "causal", "bfloat16"),
    ("bfloat16 1x4096 causal, left padding", 1, 4096, "causal", "bfloat16"),
    ("float32 8x2048 causal, left padding", 8, 2048, "causal", "float32"),
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", type=lambda t: t.split(","), default=[""], help="parts of the names of those that are measured")
    add("--heads", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=20)
    add("--json", type=Path, help="file for the results")
    a = parser.parse_args()
    if a.rounds < 1:
        parser.error("--rounds must be at least 1")
    cases = [c for c in CASES if any(part in c[0] for part in a.cases)]
    if not cases:
        parser.error(f"--cases: of {', '.join(c[0] for c in CASES)} none is meant")
    return a, cases


def mask_of(torch, batch, rows, pattern, kind):
    """The mask as Transformers makes it: [batch, 1, rows, rows]."""
    q = torch.arange(rows, device="cuda")
    if pattern == "half":
        seen = torch.rand(batch, 1, rows, rows, device="cuda") < 0.5
    elif pattern == "causal":
        pads = torch.linspace(0, rows / 3, batch, device="cuda").long()
        seen = (q[None, :] <= q[:, None])[None, None] & (q >= pads[:, None])[:, None, None]
        seen = seen | torch.eye(rows, dtype=torch.bool, device="cuda")
    else:
        document = torch.arange(batch, device="cuda")[:, None] * 37 + q // (rows // 7)
        seen = (document[:, None, :, None] == document[:, None, None, :]) & (q[None, :] <= q[:, None])
    seen = seen.contiguous()
    if kind == "bool":
        return seen
    dtype = getattr(torch, kind)
    return torch.zeros(seen.shape, dtype=dtype, device="cuda").masked_fill_(~seen, torch.finfo(dtype).min)


class Clock:
    """Microseconds of captured work between flushes of L2."""

    def __init__(self, torch, rounds):
        self.torch, self.rounds = torch, rounds
        self.flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def capture(self, work):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def replay(self, graph):
        torch = self.torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def medians(self, graphs):
        """Of all in turn: a GPU's clock falls while it works."""
        times = {name: [] for name in graphs}
        for _ in range(self.rounds + 2):
            for name, graph in graphs.items():
                times[name].append(self.replay(graph))
        return {name: statistics.median(all_[2:]) for name, all_ in times.items()}

    def kernels(self, work):
        """Microseconds of each kernel of a call, by the ends of their names."""
        torch = self.torch
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(self.rounds):
                self.flush.zero_()
                work()
            torch.cuda.synchronize()
        found = {}
        for event in profile.events():
            if "memset" not in event.name.lower() and (us := getattr(event, "device_time", 0)):
                found.setdefault(event.name, []).append(us)
        return {name: statistics.median(us) for name, us in found.items()}


def main():
    a, cases = arguments()
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU")
    flashtune = load()
    # What is measured is the kernel itself, not what answers while it is compiled.
    flashtune.set_default_engine(flashtune.Engine("cuda", quick_first=False))
    torch.manual_seed(0)
    clock = Clock(torch, a.rounds)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, flashtune {flashtune.version()}; "
          f"bf16, {a.heads} heads of {a.head_dim}, us")
    columns = ("found", "kept", "first", "efficient", "cudnn")
    print(f"{'':38}", *(f"{c:>10}" for c in columns), "  error", flush=True)
    results = []
    for name, batch, rows, pattern, kind in cases:
        mask = mask_of(torch, batch, rows, pattern, kind)
        q, k, v = (torch.randn(batch, a.heads, rows, a.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        works = {"found": lambda: flashtune.scaled_dot_product_attention(q, k, v, attn_mask=mask)}
        if kind == "bool":
            at = "attn_mask[b, 0, q, kv]"
            block = flashtune.create_block_mask(at, batch, None, rows, rows, tensors={"attn_mask": mask})
            works["kept"] = lambda: flashtune.attention(q, k, v, block_mask=block)
        added = mask if kind == "bool" else mask.to(torch.bfloat16)
        for peer, backend in (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            def work(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
            try:
                work()
                works[peer] = work
            except RuntimeError as e:
                print(f"{name}: {peer}: {str(e).splitlines()[0]}")
        point = {"case": name, **clock.medians({n: clock.capture(w) for n, w in works.items()})}
        kernels = clock.kernels(works["found"])
        first = {n: us for n, us in kernels.items() if n.endswith(("_classify", "_gather", "_runs"))}
        point["first"], point["kernels"] = sum(first.values()), kernels
        rows_checked = slice(0, rows, 257)
        scores = (q[:1, :1, rows_checked].double() @ k[:1, :1].double().mT) * a.head_dim**-0.5
        part = mask[:1, :, rows_checked]
        scores = scores.masked_fill(~part, float("-inf")) if kind == "bool" else scores + part.double()
        wanted = torch.nan_to_num(scores.softmax(-1)) @ v[:1, :1].double()
        point["error"] = float((works["found"]()[:1, :1, rows_checked].double() - wanted).abs().max())
        results.append(point)
        print(f"{name:38}", *(f"{point[c]:10.1f}" if c in point else f"{'-':>10}" for c in columns),
              f"{point['error']:8.4f}  " + ", ".join(f"{n.rsplit('_', 1)[-1]} {us:.1f}" for n, us in first.items()),
              flush=True)
    if a.json:
        a.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
