"""f32 in its three precisions beside PyTorch's memory-efficient kernel, in turn, with errors against fp64.

    python3 benches/f32.py [--head-dims 32,64,128] [--seq-lens 512,4096] [--masks full,causal] [--json FILE] [--dry-run]

Prints microseconds and TFLOP/s on live pairs of `exact`, `tf32x3` and `tf32`, how many times as fast they are as the
memory-efficient kernel of the same rounds, which kernel each was, and the errors of O against fp64 (root mean square
and maximum) as shares of those of unfused attention in f32. The inputs are normal, V around --mean, so that what sums
lose adds up. The device's clock falls while it works, so contenders alternate within each round. Needs PyTorch and
`libflashtune` (`cargo build --release -p flashtune-c`).
"""

import argparse
import json
from pathlib import Path

from side_by_side.cases import Case

PRECISIONS = ("exact", "tf32x3", "tf32")
PEER = "efficient"
MASKS = ("full", "causal")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    numbers, words = (lambda t: [int(x) for x in t.split(",")]), (lambda t: t.split(","))
    add("--head-dims", type=numbers, default=[32, 64, 128])
    add("--seq-lens", type=numbers, default=[512, 4096])
    add("--masks", type=words, default=list(MASKS))
    add("--precisions", type=words, default=list(PRECISIONS))
    add("--tokens", type=int, default=8192, help="rows of a call: the batch is this by the length, at least one")
    add("--width", type=int, default=2048, help="heads are this by the head dim")
    add("--mean", type=float, default=0.5, help="mean of V")
    add("--rounds", type=int, default=15)
    add("--repeats", type=int, default=3)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--json", type=Path, help="file for all figures")
    add("--dry-run", action="store_true", help="print what would be measured, as JSON; needs no PyTorch")
    a = parser.parse_args()
    for name, values, known in [("--masks", a.masks, MASKS), ("--precisions", a.precisions, PRECISIONS)]:
        if wrong := [v for v in values if v not in known]:
            parser.error(f"{name}: {wrong[0]} is none of {','.join(known)}")
    if a.device == "cpu" and a.precisions != ["exact"]:
        parser.error("--device cpu: the CPU has exact products alone; name --precisions exact")
    if min(a.rounds, a.repeats, a.tokens, a.width, *a.seq_lens, *a.head_dims) < 1:
        parser.error("sizes, rounds and repeats are at least 1")
    return a


def points(a):
    """The cases, the shortest first."""
    for length in a.seq_lens:
        for head_dim in a.head_dims:
            heads = max(1, a.width // head_dim)
            for mask in a.masks:
                batch = max(1, a.tokens // length)
                yield Case("f32", head_dim, mask == "causal", batch, heads, heads, length, length)


def contenders(a, engine, case, q, k, v):
    """What computes a case, by name."""

    def ours(precision):
        return lambda: engine.forward(q, k, v, causal=case.causal, precision=precision)

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    views = [t.transpose(1, 2) for t in (q, k, v)]
    backend = SDPBackend.EFFICIENT_ATTENTION if a.device == "cuda" else SDPBackend.MATH

    def theirs():
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(*views, is_causal=case.causal).transpose(1, 2)

    return {p: ours(p) for p in a.precisions} | {PEER: theirs}


def errors(torch, case, answers, q, k, v, rows=256):
    """(root mean square, maximum) of each answer's error, as shares of unfused attention's in f32: of the first batch,
    up to two heads, and the last rows, which see the most keys."""
    q, k, v = (t[:1, :, :2] for t in (q, k, v))
    at = slice(max(0, case.q_len - rows), case.q_len)

    def reference(dtype):
        qs, ks, vs = (t.transpose(1, 2).to(dtype) for t in (q[:, at], k, v))
        scores = (qs * case.head_dim**-0.5) @ ks.transpose(-1, -2)
        if case.causal:
            keys = torch.arange(case.kv_len, device=q.device)
            queries = torch.arange(case.q_len, device=q.device)[at, None]
            scores.masked_fill_(keys > queries, float("-inf"))
        return (scores.softmax(-1) @ vs).transpose(1, 2)

    def off(o):
        difference = (o.double() - exact).abs()
        return difference.square().mean().sqrt().item(), difference.max().item()

    exact = reference(torch.float64)
    allowed = off(reference(torch.float32))
    return {name: [e / max(y, 1e-30) for e, y in zip(off(o[:1, at, :2]), allowed)] for name, o in answers.items()}


def measure(torch, a, engine, ticks, conditions, case):
    from side_by_side import clock

    draw = lambda mean: torch.randn(case.batch, case.q_len, case.heads, case.head_dim, device=a.device) + mean
    q, k, v = draw(0), draw(0), draw(a.mean)
    found, answers, kernels = {}, {}, {}
    runs = contenders(a, engine, case, q, k, v)
    for name, run in list(runs.items()):
        try:
            answers[name] = run()
            if name != PEER:
                told = engine.explain(as_dict=True)
                kernels[name] = f"{told['family']} {told['schedule']}"
        except Exception as e:  # a contender that cannot is named, and the others are measured
            found[name] = {"absent": str(e).splitlines()[0]}
            del runs[name]
    shares = errors(torch, case, answers, q, k, v)
    timed = clock.race(ticks, runs, a.rounds, a.repeats, conditions.read)
    beside = timed.get(PEER, {}).get("median")
    for name, latency in timed.items():
        us = latency["median"]
        more = {"tflops": case.flops() / us / 1e6, "of_peer": beside and beside / us, "errors": shares[name]}
        found[name] = {"us": latency} | more | ({"kernel": kernels[name]} if name in kernels else {})
    return found


def told(name, result):
    if "absent" in result:
        return f"  {name:10} {result['absent']}"
    of = f"{result['of_peer']:.2f}" if result["of_peer"] else "-"
    rms, most = result["errors"]
    us = result["us"]["median"]
    return (
        f"  {name:10} {us:10.1f} us {result['tflops']:7.1f} TFLOP/s {of:>6} of {PEER}, errors {rms:.2f} and {most:.2f}"
        f" of unfused  {result.get('kernel', '')}"
    )


def main():
    a = arguments()
    cases = list(points(a))
    if a.dry_run:
        print(json.dumps([case.facts() | {"contenders": [*a.precisions, PEER]} for case in cases], indent=1))
        return
    import torch

    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU; use --device cpu --precisions exact, or a PyTorch with CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False  # the yardstick, unfused f32, is exact
    from programs import load
    from side_by_side import clock
    from side_by_side.conditions import Conditions

    # What is measured is the kernel itself, not what answers while it is compiled.
    engine = load().Engine(a.device, quick_first=False)
    ticks = clock.CudaClock() if a.device == "cuda" else clock.CpuClock()
    conditions = Conditions(str(torch.cuda.get_device_properties(0).uuid) if a.device == "cuda" else None)
    torch.manual_seed(0)
    results = []
    for case in cases:
        point = measure(torch, a, engine, ticks, conditions, case)
        now = conditions.take()
        results.append(case.facts() | {"results": point, "conditions": now})
        print(case, now or "", *(told(name, result) for name, result in point.items()), sep="\n", flush=True)
        if a.json:
            a.json.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
