"""flashtune's forward/cpu beside PyTorch's CPU scaled_dot_product_attention, on the same cores, in one run.

For every point `flashtune tune` finds a schedule, then both are measured in turn several times: PyTorch in this process,
flashtune in its own (`flashtune bench`, caches flushed before every call); medians over all turns. Causal counts half.

    python3 benches/cpu.py OUT_DIR [--flashtune target/release/flashtune] [--turns 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F


def flashtune(binary, command, point, *more):
    dtype, d, s, causal = point
    case = ["--dtype", dtype, "--head-dim", d, "--mask", "causal" if causal else "full", "--batch", 1, "--heads", 8]
    line = [binary, command, "--device", "cpu", "--json", *map(str, case), "--q-len", str(s), *map(str, more)]
    return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)


def torch_ms(q, k, v, causal, calls):
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--flashtune", default="target/release/flashtune")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--budget-s", type=int, default=12, help="seconds of tuning per point")
    a = parser.parse_args()
    os.makedirs(a.out, exist_ok=True)
    torch.set_num_threads(os.cpu_count())
    rows = []
    for dtype in ("f32", "bf16"):
        for d in (64, 128):
            for s in (1024, 4096):
                for causal in (False, True):
                    point = (dtype, d, s, causal)
                    flashtune(a.flashtune, "tune", point, "--budget-s", a.budget_s)
                    kind = torch.float32 if dtype == "f32" else torch.bfloat16
                    q, k, v = (torch.randn(1, 8, s, d).to(kind) for _ in range(3))
                    torch_ms(q, k, v, causal, 3)
                    theirs, ours = [], []
                    for _ in range(a.turns):
                        theirs += torch_ms(q, k, v, causal, 9)
                        row = flashtune(a.flashtune, "bench", point, "--rounds", 9)[0]
                        ours.append(row["median_us"] / 1e3)
                    flops = 4 * 8 * s * s * d * (0.5 if causal else 1)
                    t, o = statistics.median(theirs), statistics.median(ours)
                    rows.append(dict(dtype=dtype, d=d, s=s, causal=causal, schedule=row["schedule"], torch=flops / t / 1e6,
                                     flashtune=flops / o / 1e6, ratio=t / o))  # fmt: skip
                    print(f"{dtype:4} d{d:3} {s:5} {'causal' if causal else 'full':6} torch {flops / t / 1e6:6.0f} "
                          f"flashtune {flops / o / 1e6:6.0f} {t / o:5.2f}x  {row['schedule']}", flush=True)  # fmt: skip
    with open(f"{a.out}/cpu.json", "w") as f:
        json.dump(dict(torch=torch.__version__, threads=os.cpu_count(), rows=rows), f, indent=1)
    with open(f"{a.out}/cpu.md", "w") as f:
        f.write("| dtype | D | length | mask | PyTorch | flashtune | ratio | schedule |\n|---|---|---|---|---|---|---|---|\n")
        for r in rows:
            f.write(f"| {r['dtype']} | {r['d']} | {r['s']} | {'causal' if r['causal'] else 'full'} | {r['torch']:.0f} "
                    f"| {r['flashtune']:.0f} | {r['ratio']:.2f} | `{r['schedule']}` |\n")  # fmt: skip


if __name__ == "__main__":
    main()
