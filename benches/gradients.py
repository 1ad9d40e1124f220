"""Gradients beside FlashAttention-3, FlashAttention-4 and cuDNN, in turn: TFLOP/s of a table, and who is ahead.

    python3 benches/gradients.py [--cases d64,d128,d256,others] [--seq-lens 512,1024,4096,16384] [--peers fa3,fa4,cudnn]
                                 [--rounds 7] [--json FILE] [--dry-run]

Every contender is a CUDA graph of its own call over a flushed L2, all in turn within each round; medians. TFLOP/s count
10 operations for each live pair and head-dim element. `det` is a peer's repeatable mode; flashtune's gradients are the
same bytes in every run, with at most 1 GiB of scratch memory. A case passes where flashtune is at 0.99 of the fastest
peer at least. Needs PyTorch and `libflashtune`; FA3_DIR holds xformers' build of FlashAttention-3.
"""

import argparse
import json
import math
from pathlib import Path

from side_by_side.cases import Case

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 4096, 16384)
# Head dim, masks, lengths, heads, KV heads, window; heads of None are WIDTH by the head dim.
GROUPS = {
    "d64": [(64, (False, True), LENGTHS, None, None, None)],
    "d128": [(128, (False, True), LENGTHS, None, None, None)],
    "d256": [(256, (False, True), LENGTHS, None, None, None)],
    "others": [
        (96, (False, True), (4096,), 16, None, None),
        (192, (False, True), (4096,), 16, None, None),
        (128, (True,), (4096, 16384), 32, 8, None),
        (128, (True,), (16384,), 32, 8, 1024),
    ],
}
PEERS = ("fa3", "fa4", "cudnn")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    numbers, words = (lambda t: [int(x) for x in t.split(",")]), (lambda t: t.split(","))
    add("--cases", type=words, default=list(GROUPS), help=f"of {','.join(GROUPS)}")
    add("--seq-lens", type=numbers, default=list(LENGTHS))
    add("--peers", type=words, default=list(PEERS))
    add("--rounds", type=int, default=7)
    add("--json", type=Path, help="file for all figures")
    add("--dry-run", action="store_true", help="print the cases; needs no PyTorch")
    a = parser.parse_args()
    for name, values, known in [("--cases", a.cases, GROUPS), ("--peers", a.peers, PEERS)]:
        for value in values:
            if value not in known:
                parser.error(f"{name}: `{value}` is none of {','.join(known)}")
    if a.rounds < 1:
        parser.error("--rounds must be at least 1")
    return a


def cases(groups, lengths):
    for group in groups:
        for dim, masks, at, heads, kv_heads, window in GROUPS[group]:
            for causal in masks:
                for n in at:
                    if n in lengths:
                        h = heads or WIDTH // dim
                        yield Case("bf16", dim, causal, TOKENS // n, h, kv_heads or h, n, n, window)


def flops(case):
    return case.flops() * 5 / 2


class Ours:
    name = "flashtune"

    def prepare(self, case, dout, q, k, v):
        import flashtune
        import torch

        options = {"causal": case.causal and not case.window}
        if case.window:
            options["window_size"] = case.window_size
        out, lse = flashtune.flash_attn_func(q, k, v, return_lse=True, **options)
        into = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
        return lambda: flashtune.flash_attn_backward(dout, q, k, v, out, lse, into=into, **options), into


class Fa3:
    def __init__(self, deterministic):
        from side_by_side.contenders import load_fa3

        self.name, self.deterministic = "fa3" + " det" * deterministic, deterministic
        load_fa3("cuda", "xformers/flash_attn_3/_C.so")

    def prepare(self, case, dout, q, k, v):
        import torch

        options = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
        if case.window:
            options |= {"window_size_left": case.window_size[0], "window_size_right": case.window_size[1]}
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]
        backward = torch.ops.flash_attn_3.bwd
        return lambda: backward(dout, q, k, v, out, lse, deterministic=self.deterministic, **options), None


class Fa4:
    def __init__(self, deterministic):
        from flash_attn.cute import interface

        self.name, self.deterministic = "fa4" + " det" * deterministic, deterministic
        self.forward, self.backward = interface._flash_attn_fwd, interface._flash_attn_bwd

    def prepare(self, case, dout, q, k, v):
        options = {"softmax_scale": case.head_dim**-0.5, "causal": case.causal}
        if case.window:
            options |= {"window_size_left": case.window_size[0], "window_size_right": case.window_size[1]}
        out, lse = self.forward(q, k, v, return_lse=True, **options)[:2]
        return lambda: self.backward(q, k, v, out, dout, lse, deterministic=self.deterministic, **options), None


class Cudnn:
    name = "cudnn"

    def __init__(self, _):
        pass

    def prepare(self, case, dout, q, k, v):
        import torch

        if case.window or case.heads != case.kv_heads:
            raise ValueError("no windows and no groups of heads")
        # By its operators: autograd would run the backward pass on a stream of its own, which no capture sees.
        operators, scale = torch.ops.aten, case.head_dim**-0.5
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
        forward = operators._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, case.causal, scale=scale)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward
        backward = operators._scaled_dot_product_cudnn_attention_backward
        last = (seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, case.causal)
        return lambda: backward(dout, q, k, v, out, lse, *last, scale=scale), None


def contenders(peers):
    kinds = {"fa3": (Fa3, (False, True)), "fa4": (Fa4, (False, True)), "cudnn": (Cudnn, (False,))}
    found = [Ours()]
    for peer in peers:
        make, modes = kinds[peer]
        for mode in modes:
            try:
                found.append(make(mode))
            except Exception as e:
                print(f"{peer}: not there ({e})"[:200])
                break
    return found


def captured(run):
    """Replays a call. Holds it, and so the tensors that the graph reads and writes."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda graph=graph, _kept=run: graph.replay()


def measure(case, all_of, clock, rounds):
    """Microseconds by name, why others are missing, and whether ours gave the same bytes in two replays."""
    import torch
    from side_by_side.clock import race

    random = lambda heads, n: torch.randn(case.batch, n, heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    q, dout = random(case.heads, case.q_len), random(case.heads, case.q_len)
    k, v = random(case.kv_heads, case.kv_len), random(case.kv_heads, case.kv_len)
    runs, absent, repeats = {}, {}, None
    for contender in all_of:
        try:
            run, gradients = contender.prepare(case, dout, q, k, v)
            runs[contender.name] = captured(run)
        except Exception as e:
            absent[contender.name] = str(e).split("\n")[0][:120]
            continue
        if gradients is not None:
            found = []
            for _ in range(2):
                runs[contender.name]()
                torch.cuda.synchronize()
                found.append([x.clone() for x in gradients])
            repeats = all(torch.equal(*pair) for pair in zip(*found)) and all(x.isfinite().all() for x in found[0])
    found = race(clock, runs, rounds, 1, None)
    return {name: latency["median"] for name, latency in found.items()}, absent, repeats


def told(case, us, repeats):
    rate = {name: flops(case) / t / 1e6 for name, t in us.items()}
    ours = rate.pop("flashtune", None)
    best = max(rate.values(), default=None)
    det = max((x for name, x in rate.items() if name.endswith("det")), default=None)
    of = lambda x: f"{ours / x:5.2f}" if ours and x else "    -"
    rates = "  ".join(f"{name} {x:4.0f}" for name, x in rate.items())
    mark = "" if repeats else "  NOT REPEATED" if repeats is False else ""
    return f"{str(case):38} {ours or 0:4.0f}  of best {of(best)}  of det {of(det)}   {rates}{mark}"


def main():
    a = arguments()
    chosen = list(cases(a.cases, a.seq_lens))
    if a.dry_run:
        print(json.dumps([case.facts() | {"flops": flops(case)} for case in chosen], indent=1))
        return
    import torch
    from side_by_side.clock import CudaClock

    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    all_of, clock, rows = contenders(a.peers), CudaClock(), []
    for case in chosen:
        us, absent, repeats = measure(case, all_of, clock, a.rounds)
        print(told(case, us, repeats), *(f"{n}: {why}" for n, why in absent.items() if "cudnn" not in n), flush=True)
        rows.append(case.facts() | {"us": us, "absent": absent, "repeats": repeats, "flops": flops(case)})
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))
    ratios = [
        min(t for name, t in row["us"].items() if name != "flashtune") / row["us"]["flashtune"]
        for row in rows
        if "flashtune" in row["us"] and len(row["us"]) > 1
    ]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"of the best peer: geometric mean {mean:.3f}, {sum(r >= 0.99 for r in ratios)} of {len(ratios)} pass")


if __name__ == "__main__":
    main()
