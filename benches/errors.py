"""Rounding errors of flashtune and its peers against fp64, on the same inputs: normal ones, and ones with outlier \
channels.

    python3 benches/errors.py [--peers flashtune,fa3,cudnn] [--head-dims 64,128,256] [--length 2048] [--json FILE]

Attention of trained models has a few channels of Q and K that are many times larger than the others, and keys that
nearly all queries attend to. `outliers` draws such tensors: two channels of Q and K times 8, one channel of V times 30,
and a first key that attracts. For every contender: root mean square and maximum of the error of O, and both as a share
of those of unfused attention in the same dtype, the yardstick of the numeric contract.
"""

import argparse
import json
import math
from pathlib import Path

from side_by_side import cases


def inputs(torch, contenders, case, kind, seed):
    """Q, K and V in the dtype of the case, [batch, rows, heads, head dim]."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    draw = lambda heads, rows: torch.randn(
        case.batch, rows, heads, case.head_dim, device="cuda", dtype=torch.float64, generator=generator
    )
    q, k, v = draw(case.heads, case.q_len), draw(case.kv_heads, case.kv_len), draw(case.kv_heads, case.kv_len)
    if kind == "outliers":
        for channel in (3, case.head_dim // 2 + 1):
            q[..., channel] *= 8
            k[..., channel] *= 8
        v[..., 5] *= 30
        k[:, 0] = q.mean(dim=1)[:, : case.kv_heads] * math.sqrt(case.head_dim)
    return [t.to(contenders.DTYPES[case.dtype]) for t in (q, k, v)]


def errors(o, exact):
    """(root mean square, maximum) of the differences."""
    difference = (o.double() - exact).abs()
    return difference.square().mean().sqrt().item(), difference.max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--peers", default="flashtune,fa3,cudnn")
    add("--head-dims", default="64,128,256")
    add("--dtypes", default="bf16,f16")
    add("--length", type=int, default=2048)
    add("--heads", type=int, default=4)
    add("--seeds", type=int, default=3)
    add("--json", type=Path, help="file for all figures")
    a = parser.parse_args()

    import torch
    from side_by_side import contenders

    known, there = contenders.known(), []
    for name in a.peers.split(","):
        try:
            known[name].load("cuda")
            there.append(known[name])
        except Exception as e:  # a peer that is not installed
            print(f"{name} is absent: {str(e)[:120]}")
    found = []
    print(f"{'':32}{'unfused rms, max':>22}" + "".join(f"{c.name + ' rms, max (of unfused)':>40}" for c in there))
    for dtype in a.dtypes.split(","):
        for head_dim in map(int, a.head_dims.split(",")):
            for causal in (False, True):
                for kind in ("normal", "outliers"):
                    case = cases.Case(dtype, head_dim, causal, 1, a.heads, a.heads, a.length, a.length)
                    row = measure(torch, contenders, there, case, kind, a.seeds)
                    found.append({"case": case.facts(), "kind": kind, "errors": row})
                    show(case, kind, row, there)
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))


def measure(torch, contenders, there, case, kind, seeds):
    """Mean of the root mean squares and largest of the maxima over the seeds, of unfused attention and every
    contender."""
    seen = {}
    for seed in range(seeds):
        q, k, v = inputs(torch, contenders, case, kind, seed)
        exact = contenders.unfused(case, q.double(), k.double(), v.double())
        answers = {"unfused": lambda: contenders.unfused(case, q, k, v)}
        for contender in there:
            answers[contender.name] = lambda contender=contender: contender.prepare(case, q, k, v)()
        for name, answer in answers.items():
            try:
                seen.setdefault(name, []).append(errors(answer(), exact))
            except contenders.Unsupported:
                continue
    return {name: {"rms": sum(r for r, _ in x) / len(x), "max": max(m for _, m in x)} for name, x in seen.items()}


def show(case, kind, row, there):
    base = row["unfused"]
    text = f"{case.dtype} d{case.head_dim} {case.mask} {kind}"
    text = f"{text:32}{base['rms']:>11.2e}{base['max']:>11.2e}"
    for contender in there:
        x = row.get(contender.name)
        if x is None:
            text += f"{'-':>40}"
            continue
        share = f"({x['rms'] / base['rms']:.2f}, {x['max'] / base['max']:.2f})"
        text += f"{x['rms']:>14.2e}{x['max']:>11.2e}{share:>15}"
    print(text, flush=True)


if __name__ == "__main__":
    main()
