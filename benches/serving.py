"""A sealed engine under mixed requests: what it compiles (nothing), what a call costs, and its digest.

    PYTHONPATH=bindings/python python3 benches/serving.py [--device cuda:0] [--calls 10000] [--cache DIR]

A few problems are computed once, so that there are kernels; then the engine is sealed and answers calls of random
sizes, most of which it never met. Printed are the host's times of a call and the counters. Processes that print equal
digests run equal kernels: on several devices of a host, start one for each (`--device cuda:1`) on one cache.

Needs PyTorch, or NumPy for the cpu.
"""

import argparse
import random
import tempfile
import time

import flashtune

# Causal or not, head dim, heads and KV heads.
PROBLEMS = [(True, 128, 16, 4), (False, 64, 8, 8)]


def tensors(device):
    """A function that makes a tensor of ones, and one that waits for the device."""
    if device == "cpu":
        import numpy

        return (lambda *shape: numpy.full(shape, 0.5, numpy.float32)), (lambda: None)
    import torch

    def ones(*shape):
        return torch.full(shape, 0.5, dtype=torch.bfloat16, device=device)

    return ones, torch.cuda.synchronize


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--longest", type=int, default=512, help="the longest length of a call")
    parser.add_argument("--cache", help="a folder; an empty one when not given")
    a = parser.parse_args()
    ones, wait = tensors(a.device)
    with tempfile.TemporaryDirectory() as empty, flashtune.Engine(a.device, cache_dir=a.cache or empty) as engine:
        longest, chance = a.longest, random.Random(1)
        whole = [(c, ones(2, longest, h, d), ones(2, longest, g, d)) for c, d, h, g in PROBLEMS]

        def call(problem, batch, q_len, kv_len):
            causal, q, kv = whole[problem]
            q, kv = q[:batch, :q_len], kv[:batch, :kv_len]
            start = time.perf_counter()
            out = engine.forward(q, kv, kv, causal=causal)
            return time.perf_counter() - start, out

        for problem in range(len(PROBLEMS)):
            call(problem, 1, 128, 128)
        wait()
        digest, before = engine.seal("nearest"), engine.counters()
        took, wrong = [], 0
        for n in range(a.calls):
            q_len = chance.choice([1, chance.randint(1, longest)])
            problem, batch = chance.randrange(len(PROBLEMS)), chance.randint(1, 2)
            kv_len = chance.randint(q_len, longest)
            seconds, out = call(problem, batch, q_len, kv_len)
            took.append(seconds)
            if n % 64 == 0:
                # The mean of halves is a half.
                wrong += abs(float(out[0, -1, 0, 0]) - 0.5) > 1e-3
                wait()
        after = engine.counters()
        took.sort()
        at = lambda share: 1e6 * took[min(len(took) - 1, int(share * len(took)))]  # noqa: E731
        compiled = after["compiled"] - before["compiled"]
        print(f"digest {digest}")
        print(f"{a.calls} calls, {compiled} compiled since the seal, {wrong} wrong; host us: median {at(0.5):.1f}, "
              f"p99 {at(0.99):.1f}, p99.9 {at(0.999):.1f}, longest {at(1):.1f}")
        assert compiled == 0 and wrong == 0


if __name__ == "__main__":
    main()
