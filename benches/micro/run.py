"""Microbenchmarks for attention backward on Hopper: sinks of dQ, order, shared memory beside wgmma, clusters, spills.

    python3 benches/micro/run.py [--groups sinks,loops] [--json FILE]
    python3 benches/micro/run.py --compile-only DIR       # without a GPU: cubins and what ptxas says of them

Needs NVRTC (FLASHTUNE_NVRTC names it) and the driver. Variants are compiled in as many processes as there are cores;
each group runs in a process of its own, so that a fault in one leaves the others their figures.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cases
import cuda


def path_of(folder, variant):
    return Path(folder) / (hashlib.sha256(variant.source(read).encode()).hexdigest()[:24] + ".cubin")


def read(name):
    return (cuda.HERE / name).read_text()


def compile_variant(folder, variant):
    """(variant's name, registers, spilled bytes, warnings, error); the cubin is left in `folder`."""
    try:
        cubin, log = cuda.compile_cubin(variant.source(read), variant.name)
    except cuda.Failed as error:
        return variant.name, 0, 0, "", str(error)
    path_of(folder, variant).write_bytes(cubin)
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
    warnings = "; ".join(l for l in log.splitlines() if "Performance" in l or "setmaxnreg" in l)
    return variant.name, registers, spilled, warnings, ""


def compile_all(groups, folder):
    """Errors by variant's name."""
    unique = {v.name: v for g in groups for v in cases.GROUPS[g][1]()}
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(compile_variant, [folder] * len(unique), unique.values()):
            results.append(result)
            name, registers, spilled, warnings, error = result
            if spilled or warnings or error:
                print(f"# {name}: {registers} registers, {spilled} bytes spilled {warnings} {error[:600]}", flush=True)
    return results


def run_group(group, folder):
    """In a process of its own: a line of JSON per row."""
    bench = cases.Bench(cuda.Device(), lambda variant: path_of(folder, variant).read_bytes())
    for row in cases.GROUPS[group][0](bench):
        print(json.dumps({"group": group, **row}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default=",".join(cases.GROUPS))
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=30, help="a group may take this long")
    parser.add_argument("--compile-only", metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("GROUP", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return run_group(*arguments.child)
    groups = arguments.groups.split(",")
    if unknown := set(groups) - set(cases.GROUPS):
        sys.exit(f"no groups {sorted(unknown)}; there are {', '.join(cases.GROUPS)}")
    if arguments.compile_only:
        Path(arguments.compile_only).mkdir(parents=True, exist_ok=True)
        results = compile_all(groups, arguments.compile_only)
        for name, registers, *_ in sorted(results):
            print(f"{registers:4} {name}")
        return sys.exit(any(error for *_, error in results))
    rows, faults, started = [], {}, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        compile_all(groups, folder)
        print(f"# compiled after {time.monotonic() - started:.0f} s", flush=True)
        for group in groups:
            rows += run_child(group, folder, arguments.seconds, faults)
            print(f"# {group} after {time.monotonic() - started:.0f} s {faults.get(group, '')}", flush=True)
            if arguments.json:  # what there is outlives a later fault
                Path(arguments.json).write_text(json.dumps({"rows": rows, "faults": faults}, indent=1))
    show(rows)


def run_child(group, folder, seconds, faults):
    command = [sys.executable, str(cuda.HERE / "run.py"), "--child", group, folder]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(command, stdout=out, stderr=err, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"ended after {seconds} s"
        out.seek(0), err.seek(0)
        lines, words = out.read().splitlines(), err.read().strip().splitlines()
    if code:
        faults[group] = f"{code}: {' | '.join(words[-3:])}"
    return [json.loads(line) for line in lines if line.endswith("}")]


def show(rows):
    """A line per row: the case, then its figures by name; what decides most comes last, where a terminal ends."""
    for row in sorted(rows, key=lambda row: -list(cases.GROUPS).index(row["group"])):
        figures = "  ".join(
            f"{k} {v}" for k, v in row.items() if k not in ("group", "case") and not (k == "right" and v)
        )
        print(f"{row['group'][:5]:5} {row['case']:44} {figures}")


if __name__ == "__main__":
    main()
