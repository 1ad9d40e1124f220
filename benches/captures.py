"""Ten thousand captured launches of one kernel: each must take its tiles from a counter of its own, and a graph that is
gone gives its counters back. Needs PyTorch and a GPU whose kernels are persistent (Hopper).

    python3 benches/captures.py [--launches 10000] [--rounds 3]

Every round captures all launches into one graph, replays it, and drops it; more launches than a kernel has counters
(16,256) in all, so that without giving back the later rounds would take tiles by stride. Prints the time of a launch
per round, beside that of a graph of 100 launches, and compares the bytes of all outputs with those of an eager launch.
Two graphs that were captured on one stream are replayed on two streams at once, and give the same bytes. Exit code 1
where bytes differ or a launch takes over 3 % longer.
"""

import argparse
import statistics
import sys

import torch

import flashtune


def capture(q, k, v, launches, stream=None):
    outputs = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            o = flashtune.flash_attn_func(q, k, v, causal=True)
            if i % max(1, launches // 8) == 0 or i == launches - 1:
                outputs.append(o)
            del o
    return graph, outputs


def microseconds(graph, launches, times=9):
    took = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(took)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    # Rows of different lengths: tiles by stride are some percent slower.
    q, k, v = (torch.randn(2, 2048, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = flashtune.flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    failed = False
    few, _ = capture(q, k, v, 100)
    for _ in range(3):
        few.replay()
    base = microseconds(few, 100)
    print(f"100 launches: {base:.2f} us each")
    for i in range(args.rounds):
        graph, outputs = capture(q, k, v, args.launches)
        for o in outputs:
            o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        equal = all(torch.equal(o, expected) for o in outputs)
        took = microseconds(graph, args.launches, 3)
        again = microseconds(few, 100)
        slow = took > 1.03 * again
        print(
            f"round {i}: {args.launches} launches, {took:.2f} us each (100: {again:.2f}), "
            f"bytes {'equal' if equal else 'DIFFER'}"
        )
        failed |= slow or not equal
        del graph, outputs
        torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    graphs = [capture(q, k, v, 50, stream) for _ in range(2)]
    same = True
    for _ in range(20):
        for _, outputs in graphs:
            for o in outputs:
                o.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, _ in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        equal = all(torch.equal(o, expected) for _, outputs in graphs for o in outputs)
        failed |= not equal
        same &= equal
    print(f"two graphs of one stream at once, 20 times: bytes {'equal' if same else 'DIFFER'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
