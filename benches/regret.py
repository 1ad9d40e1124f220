"""Whether a tuned kernel is ever slower than the default one: many sizes, little time for each, and then a race of the
two by this script, which shares nothing with the tuner's own measurement.

    PYTHONPATH=bindings/python python3 benches/regret.py [--device cuda:0] [--shapes 200] [--seconds 230] [--json FILE]

Of every problem a few sizes are tuned by a search, and the defaults of all are compiled beside each other; the best
schedules of the few are then raced against the default in each other size (`tune --only`), half a second or less. Then
two engines, one on the results and one that has kernels but no results, compute in turns, with caches flushed before,
an odd number of rounds. What counts is the median of the ratios within rounds, with bounds of one-sided 95 % by order
statistics: *faster* is a winner whose ratio to the default is below 1 even at its upper bound. Where it is not, a
second race of four times as many rounds decides, and *slower* is who is above 1 there even at its lower bound.

Needs the command (`--flashtune`, else that of this repository or package), and PyTorch, or NumPy for the cpu.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Schedules of each searched size that are raced in the others.
BEST = 3
# Multiply-adds of one column of Q K^T: what keeps a launch below some milliseconds.
MOST = {"cuda": 1 << 32, "cpu": 1 << 22}


class Sizes:
    """What is tuned: problems, and of each the sizes, no two of one class."""

    def __init__(self, device, shapes):
        self.dtype = "f32" if device == "cpu" else "bf16"
        if device == "cpu":
            dims, lengths, heads, batches = (32,), (64, 128, 256, 512), ((2, 2), (4, 2)), (1, 2)
        else:
            dims = (64, 128)
            lengths, heads, batches = [1 << n for n in range(7, 15)], ((8, 8), (16, 4), (32, 8), (64, 8)), (1, 2, 4, 16)
        self.problems = [(dim, mask) for dim in dims for mask in ("causal", "full")]
        every = {}
        for batch in batches:
            for h, kv in heads:
                for q_len in (1, *lengths):
                    for kv_len in lengths:
                        # A prompt, one in pieces, a decoded token.
                        if kv_len < q_len or (q_len > 1 and kv_len not in (q_len, 4 * q_len)):
                            continue
                        work, rows = batch * h * q_len * kv_len, batch * (h * q_len + 2 * kv * kv_len)
                        # Tensors that take long to make would leave no time for tuning.
                        if 1 << 14 <= work <= MOST[device.split(":")[0]] and rows <= 1 << 18:
                            every.setdefault((batch * h, h // kv, q_len, kv_len), (batch, h, kv, q_len, kv_len))
        # The same whatever was tuned before.
        chance = random.Random(1)
        self.of = {}
        for n, problem in enumerate(self.problems):
            count = shapes // len(self.problems) + (n < shapes % len(self.problems))
            self.of[problem] = chance.sample(sorted(every.values()), min(count, len(every)))

    def entry(self, problem, shape):
        """A line of what `tune --from` takes."""
        (dim, mask), (batch, heads, kv_heads, q_len, kv_len) = problem, shape
        kind = {"left": False, "right": mask == "causal"}
        what = {"op": "Forward", "dtype": self.dtype.capitalize(), "head_dim_qk": dim, "head_dim_v": dim, "mask": kind}
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        return {"problem": what | {"program": None}, "shape": sizes | {"mask": mask.capitalize()}, "calls": 0}


class Tuner:
    """The command, on one cache."""

    def __init__(self, a, folder):
        places = [ROOT / "bin/flashtune", ROOT / "target/release/flashtune"]
        command = str(a.flashtune or next((p for p in places if p.is_file()), "flashtune"))
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir(mode=0o700)
        self.base = [command, "--device", a.device, "--cache", str(self.cache), "--json"]
        self.arch = json.loads(self.run("emit", *"--head-dim 64 --q-len 128 --mask full".split()))["arch"]

    def run(self, *args):
        done = subprocess.run([*self.base, *args], capture_output=True, text=True)
        if not done.stdout:
            sys.exit(f"{' '.join([*self.base, *args])}: {done.stderr[-1000:]}")
        return done.stdout

    def default(self, dtype, problem, shape):
        """The name of the schedule that a call runs on without a record."""
        (dim, mask), (batch, heads, kv_heads, q_len, kv_len) = problem, shape
        sizes = {
            "head-dim": dim, "batch": batch, "heads": heads, "kv-heads": kv_heads, "q-len": q_len, "kv-len": kv_len,
        }
        case = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
        kernel = json.loads(self.run("emit", "--arch", self.arch, "--dtype", dtype, "--mask", mask, *case))["kernel"]
        return kernel.split(".")[2]

    def space(self, dtype, problem):
        """Names of the schedules of the usual family that a search may propose."""
        (dim, mask), names = problem, set()
        plain = [word for word in self.base if word != "--json"]
        for q_len in ("1", "4096"):
            case = ["--dtype", dtype, "--head-dim", str(dim), "--mask", mask, "--q-len", q_len]
            done = subprocess.run(
                [*plain, "emit", "--space", "--arch", self.arch, *case], capture_output=True, text=True
            )
            # The first is the default of these sizes, in the space or not.
            names |= set(done.stdout.split()[1:])
        return names

    def tune(self, entries, seconds, *more):
        """The report; cases that noise hides are missing in it."""
        path = self.folder / "sizes.json"
        path.write_text("\n".join(map(json.dumps, entries)))
        return json.loads(self.run("tune", "--from", str(path), "--budget-s", f"{max(seconds, 1):.1f}", *more))["tuned"]


def tune(a, sizes, tuner):
    """Tunes all sizes; gives how many are left without a result, since noise hid it."""
    missing, timed_all = 0, 0
    share = a.seconds / len(sizes.problems)
    for problem, shapes in sizes.of.items():
        # The least and the most work, and a size between.
        ordered = sorted(shapes, key=lambda s: (s[3] > 1, s[0] * s[1] * s[3] * s[4]))
        few = list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
        entries = [sizes.entry(problem, s) for s in few]
        tuned = tuner.tune(entries, share * 0.3, "--trials", str(a.trials))
        missing += len(few) - len(tuned)
        best = {}
        for case in tuned:
            timed = sorted((t["median_us"], t["schedule"]) for t in case["trials"] if t["result"] == "timed")
            best |= dict.fromkeys(name for _, name in timed[:BEST])
        # A default that is not of the searched space is its own sizes' alone.
        space = tuner.space(sizes.dtype, problem)
        alone = {tuner.default(sizes.dtype, problem, s) for s in few} - space
        best = [name for name in best if name not in alone]
        others = [s for s in shapes if s not in few]
        if not (others and best):
            continue
        with ThreadPoolExecutor(8) as pool:
            defaults = pool.map(lambda s: tuner.default(sizes.dtype, problem, s), others)
        # All at once, on all cores; who is asked for one default after the other waits for each.
        together = [name for name in dict.fromkeys([*best, *defaults]) if name in space]
        tuner.tune(entries[:1], share * 0.2, "--only", ",".join(together))
        found = tuner.tune([sizes.entry(problem, s) for s in others], share * 0.6, "--only", ",".join(best))
        missing += len(others) - len(found)
        timed_all += sum(sum(t["result"] == "timed" for t in case["trials"]) > 1 for case in found)
    print(f"in {timed_all} sizes others than the default were timed too")
    return missing


def bounds(ratios):
    """The median, and what it is above and below with 95 % each, by order statistics."""
    ordered, n = sorted(ratios), len(ratios)
    rank, below = -1, 0.0
    # The chance that no more than `rank` of n ratios are below the true median.
    while (below := below + math.comb(n, rank + 1) / 2**n) <= 0.05:
        rank += 1
    return statistics.median(ordered), ordered[max(rank, 0)], ordered[n - 1 - max(rank, 0)]


class Device:
    """Tensors, and a clock for calls that follow each other."""

    def __init__(self, device):
        if device == "cpu":
            import numpy

            flush = numpy.zeros(64 << 20, numpy.uint8)
            self.tensor = lambda shape: numpy.random.default_rng(1).standard_normal(shape, numpy.float32)

            def times(runs):
                took = []
                for run in runs:
                    flush.fill(0)
                    start = time.perf_counter()
                    run()
                    took.append(time.perf_counter() - start)
                return took

            self.times = times
            return
        import torch
        from side_by_side.clock import CudaClock

        torch.cuda.set_device(device)
        self.tensor = lambda shape: torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.times = CudaClock().round


def race(a, device, tuned, plain, problem, shape):
    """What both engines run a call on, and the ratio of their times; None where it is one kernel."""
    (dim, mask), (batch, heads, kv_heads, q_len, kv_len) = problem, shape
    # As it was tuned.
    q = device.tensor((batch, heads, q_len, dim))
    k, v = (device.tensor((batch, kv_heads, kv_len, dim)) for _ in range(2))
    out = device.tensor(q.shape)
    runs = [lambda e=e: e.forward(q, k, v, causal=mask == "causal", layout="bhsd", out=out) for e in (tuned, plain)]
    told = []
    for engine, run in zip((tuned, plain), runs):
        run()
        told.append(engine.explain(as_dict=True))
    row = {"problem": told[0]["problem"], "shape": told[0]["shape"], "status": told[0]["status"]["kind"]}
    row |= {"winner": told[0]["schedule"], "default": told[1]["schedule"]}
    if row["winner"] == row["default"]:
        return row

    def ratios(rounds):
        found = []
        for n in range(rounds):
            # Who goes first takes turns.
            order = (0, 1) if n % 2 else (1, 0)
            times = device.times([runs[i] for i in order])
            found.append(times[order.index(0)] / times[order.index(1)])
        return found

    ratios(2)
    row["ratio"], row["least"], row["most"] = bounds(ratios(a.rounds))
    if row["most"] >= 1:
        row["first"] = [row[name] for name in ("ratio", "least", "most")]
        row["ratio"], row["least"], row["most"] = bounds(ratios(4 * a.rounds + 1))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda:0")
    add("--flashtune", help="the command")
    add("--shapes", type=int, default=200)
    add("--seconds", type=float, default=230, help="for all; what is left after tuning is for the race")
    add("--trials", type=int, default=12, help="schedules of each search")
    add("--rounds", type=int, default=21)
    add("--json", type=Path, help="also write what was found")
    a = parser.parse_args()
    import flashtune

    # Whatever is missing is missed now.
    flashtune.version()
    start = time.monotonic()
    sizes = Sizes(a.device, a.shapes)
    folder = Path(tempfile.mkdtemp(prefix="flashtune-regret-"))
    try:
        tuner = Tuner(a, folder)
        missing = tune(a, sizes, tuner)
        seconds = time.monotonic() - start
        count = sum(map(len, sizes.of.values()))
        print(f"{count} sizes of {len(sizes.problems)} problems tuned in {seconds:.0f} s, {missing} without a result",
              flush=True)
        # Kernels and no results.
        plain = folder / "plain"
        for kernels in tuner.cache.glob("v*/artifacts"):
            shutil.copytree(kernels, plain / kernels.relative_to(tuner.cache), copy_function=os.link)
        for path in [plain, *plain.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)
        device, rows = Device(a.device), []
        options = {"policy": "default", "quick_first": False}
        with flashtune.Engine(a.device, cache_dir=tuner.cache, **options) as tuned:
            with flashtune.Engine(a.device, cache_dir=plain, **options) as untuned:
                every = [(problem, shape) for problem, shapes in sizes.of.items() for shape in shapes]
                random.Random(2).shuffle(every)
                for problem, shape in every:
                    if time.monotonic() - start > a.seconds:
                        break
                    rows.append(race(a, device, tuned, untuned, problem, shape))
        return report(a, rows, count, time.monotonic() - start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(a, rows, count, seconds):
    raced = sorted((r for r in rows if "ratio" in r), key=lambda r: r["ratio"])
    faster = sum(r["most"] < 1 for r in raced)
    again = [r for r in raced if "first" in r]
    slower = [r for r in raced if r["least"] > 1]
    print(f"{len(rows)} of {count} sizes looked at, {seconds:.0f} s: the default won in {len(rows) - len(raced)}; of "
          f"{len(raced)} others the winner is faster in {faster}, not told apart in "
          f"{len(raced) - faster - len(slower)}, slower in {len(slower)}; {len(again)} were raced twice")
    if raced:
        at = lambda share: raced[min(len(raced) - 1, int(share * len(raced)))]["ratio"]  # noqa: E731
        print(f"time of the winner over the default's: best {at(0):.3f}, median {at(0.5):.3f}, p95 {at(0.95):.3f}, "
              f"worst {at(1):.3f}")
    for r in again:
        words = [
            f"{ratio:.3f} ({least:.3f} to {most:.3f})"
            for ratio, least, most in [r["first"], (r["ratio"], r["least"], r["most"])]
        ]
        print(f"  twice: {r['problem']} {r['shape']} ({r['status']}): {words[0]}, then {words[1]}: "
              f"{r['winner']} for {r['default']}")
    if a.json:
        a.json.write_text(json.dumps({"rows": rows, "sizes": count, "seconds": seconds}, indent=1))
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
