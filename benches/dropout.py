"""Dropout beside FlashAttention-2 and cuDNN, as PyTorch has them, forward and backward, in turn: TFLOP/s of a table.

    python3 benches/dropout.py [--p 0.1] [--head-dims 64,128] [--seq-lens 4096] [--peers fa2,cudnn] [--rounds 7]
                               [--json FILE] [--dry-run]

Every contender is a CUDA graph of its own call over a flushed L2, all in turn within each round; medians. `whole` is
flashtune's call without dropout in the same round: what dropping costs. TFLOP/s count 4 operations for each live pair
and head-dim element forward, 10 backward. The state of every forward pass lies on the device. Kernels are compiled
first, all at once. A case passes where flashtune is at 1.3 times the better peer. Needs PyTorch and `libflashtune`.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradients import captured
from side_by_side.cases import Case

TOKENS, WIDTH = 16384, 2048
PEERS = ("fa2", "cudnn")
GOAL = 1.3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    numbers, words = (lambda t: [int(x) for x in t.split(",")]), (lambda t: t.split(","))
    add("--p", type=float, default=0.1, help="the probability that a weight is dropped")
    add("--head-dims", type=numbers, default=[64, 128])
    add("--seq-lens", type=numbers, default=[4096])
    add("--peers", type=words, default=list(PEERS))
    add("--rounds", type=int, default=7)
    add("--json", type=Path, help="file for all figures")
    add("--dry-run", action="store_true", help="print the cases; needs no PyTorch")
    a = parser.parse_args()
    if not 0 < a.p < 1:
        parser.error("--p must be above 0 and below 1")
    if unknown := set(a.peers) - set(PEERS):
        parser.error(f"--peers: `{unknown.pop()}` is none of {','.join(PEERS)}")
    if min(a.rounds, *a.seq_lens, *a.head_dims) < 1:
        parser.error("--rounds, --seq-lens and --head-dims must be at least 1")
    return a


def cases(dims, lengths):
    for dim in dims:
        for causal in (False, True):
            for n in lengths:
                heads = max(WIDTH // dim, 1)
                yield Case("bf16", dim, causal, max(TOKENS // n, 1), heads, heads, n, n, None)


class Ours:
    """flashtune, with dropout or without."""

    def __init__(self, name, p):
        self.name, self.p = name, p

    def prepare(self, case, dout, q, k, v):
        """Calls of the forward and of the backward pass, and what they write."""
        import flashtune
        import torch

        state = torch.tensor([1, 2], device=q.device)
        options = {"causal": case.causal, "dropout_p": self.p, "rng_state": state}
        out, lse = flashtune.flash_attn_func(q, k, v, return_lse=True, **options)
        into = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
        written = torch.empty_like(out)
        engine = flashtune.default_engine(str(q.device))
        forward = lambda: engine.forward(q, k, v, out=written, return_lse=True, **options)
        return forward, lambda: flashtune.flash_attn_backward(dout, q, k, v, out, lse, into=into, **options), into


class Peer:
    """A backend of PyTorch, by its operators: autograd would run a backward pass on a stream that no capture sees."""

    def __init__(self, name, p):
        self.name, self.p = name, p

    def prepare(self, case, dout, q, k, v):
        import torch

        operators, more = torch.ops.aten, {"scale": case.head_dim**-0.5}
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
        if self.name == "fa2":
            forward = lambda: operators._scaled_dot_product_flash_attention(q, k, v, self.p, case.causal, False, **more)
            out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
            last = (cum_q, cum_k, max_q, max_k, self.p, case.causal, seed, offset)
            backward = operators._scaled_dot_product_flash_attention_backward
        else:
            forward = lambda: operators._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, self.p, case.causal, False, **more
            )
            out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
            last = (seed, offset, None, cum_q, cum_k, max_q, max_k, self.p, case.causal)
            backward = operators._scaled_dot_product_cudnn_attention_backward
        return forward, lambda: backward(dout, q, k, v, out, lse, *last, **more), None


def tensors(case):
    import torch

    random = lambda heads, n: torch.randn(case.batch, n, heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    of_queries, of_keys = (case.heads, case.q_len), (case.kv_heads, case.kv_len)
    return [random(*of_queries), random(*of_queries), random(*of_keys), random(*of_keys)]


def compiled(case, p):
    """Has the kernels of a case compiled, which takes longer than all that is measured."""
    try:
        for run in Ours("", p).prepare(case, *tensors(case))[:2]:
            run()
    except Exception as e:
        print(f"{case}: {e}"[:300], flush=True)


def measure(case, all_of, clock, rounds):
    """Microseconds by name of both passes, why others are missing, and whether ours gave the same bytes twice."""
    import torch
    from side_by_side.clock import race

    dout, q, k, v = tensors(case)
    runs, absent, repeats = ({}, {}), {}, True
    for contender in all_of:
        try:
            *calls, written = contender.prepare(case, dout, q, k, v)
            found = [captured(call) for call in calls]
        except Exception as e:
            absent[contender.name] = str(e).split("\n")[0][:120]
            continue
        for of, run in zip(runs, found):
            of[contender.name] = run
        if written is not None:
            both = []
            for _ in range(2):
                found[1]()
                torch.cuda.synchronize()
                both.append([x.clone() for x in written])
            repeats &= all(torch.equal(*pair) for pair in zip(*both)) and all(bool(x.isfinite().all()) for x in both[0])
    us = []
    for of in runs:
        found = race(clock, of, rounds, 1, None) if of else {}
        us.append({name: latency["median"] for name, latency in found.items()})
    return us, absent, repeats


def told(case, op, us, repeats):
    flops = case.flops() * (1 if op == "forward" else 2.5)
    rate = {name: flops / t / 1e6 for name, t in us.items()}
    ours, whole = rate.pop("flashtune", None), rate.pop("whole", None)
    best = max(rate.values(), default=None)
    of = lambda x: f"{ours / x:5.2f}" if ours and x else "    -"
    rates = "  ".join(f"{name} {x:4.0f}" for name, x in rate.items())
    mark = "" if repeats else "  NOT REPEATED"
    return f"{str(case):34} {op:8} {ours or 0:4.0f}  of best {of(best)}  of whole {of(whole)}   {rates}{mark}"


def main():
    a = arguments()
    chosen = list(cases(a.head_dims, a.seq_lens))
    if a.dry_run:
        print(json.dumps([case.facts() | {"p": a.p, "flops": case.flops()} for case in chosen], indent=1))
        return
    # No schedule stands in for another.
    os.environ.setdefault("FLASHTUNE_QUICK_FIRST", "0")
    import torch
    from side_by_side.clock import CudaClock

    torch.manual_seed(0)
    begun = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: compiled(*job), [(case, p) for case in chosen for p in (a.p, 0.0)]))
    print(f"{torch.cuda.get_device_name()}, dropout of {a.p}; compiled in {time.monotonic() - begun:.0f} s", flush=True)
    all_of = [Ours("flashtune", a.p), Ours("whole", 0.0), *(Peer(name, a.p) for name in a.peers)]
    clock, rows = CudaClock(), []
    for case in chosen:
        both, absent, repeats = measure(case, all_of, clock, a.rounds)
        for op, us in zip(("forward", "backward"), both):
            print(told(case, op, us, repeats), *(f"{n}: {why}" for n, why in absent.items()), flush=True)
            rows.append(case.facts() | {"op": op, "p": a.p, "us": us, "absent": absent, "repeats": repeats})
            if a.json:
                a.json.write_text(json.dumps(rows, indent=1))
    for op in ("forward", "backward"):
        of = [row["us"] for row in rows if row["op"] == op and "flashtune" in row["us"]]
        ratios = [min(us[n] for n in a.peers if n in us) / us["flashtune"] for us in of if set(us) & set(a.peers)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{op}: of the better peer {mean:.2f}, {sum(r >= GOAL for r in ratios)} of {len(ratios)} pass")


if __name__ == "__main__":
    main()
