"""The `flashtune` command: finding it, and tuning the cases before they are measured."""

import os
import shutil
import subprocess
from pathlib import Path


def find(named=None):
    """Path of the command: the one that is named, that of this package or repository, or one on PATH; None without."""
    if named:
        found = shutil.which(named)
        if not found:
            raise SystemExit(f"error: {named} is no program; build it with `cargo build --release`")
        return found
    root = Path(__file__).resolve().parents[2]
    for place in (root / "bin/flashtune", root / "target/release/flashtune"):
        if os.access(place, os.X_OK):
            return str(place)
    return shutil.which("flashtune")


def problem(device, case):
    """The options that a case of any kind has."""
    return {
        "--device": device,
        "--dtype": case.dtype,
        "--head-dim": case.head_dim,
        "--mask": case.mask,
        "--batch": case.batch,
        "--heads": case.heads,
        "--kv-heads": case.kv_heads,
    }


def tune(binary, device, case, budget_s):
    """Finds the best schedule for a case and keeps it where the Python package looks. A failure is told, not fatal: the
    default schedule is measured then, and the report says that it is one."""
    options = {
        **problem(device, case),
        "--q-len": case.q_len,
        "--kv-len": case.kv_len,
        "--budget-s": budget_s,
    }
    line = [binary, "tune", *(str(word) for option in options.items() for word in option)]
    return run(line, case)


def tune_serving(binary, device, case, budget_s):
    """The same for a case of serving, whose class is that of its usual sequence."""
    if case.sinks:
        print(f"not tuned: {case}: sinks are no option of the command", flush=True)
        return False
    mean = lambda numbers: max(1, round(sum(numbers) / len(numbers)))
    scores = {"--score": "soft_cap"} if case.soft_cap else {}
    options = {
        **problem(device, case),
        "--q-len": mean(case.rows),
        "--kv-len": mean(case.lengths),
        "--pages": case.store if case.is_paged else "packed",
        "--kv-dtype": case.element,
        **scores,
        "--budget-s": budget_s,
    }
    graphs = ["--graph"] if device == "cuda" else []
    line = [binary, "tune", *graphs, *(str(word) for option in options.items() for word in option)]
    return run(line, case)


def run(line, case):
    """Whether a case was tuned."""
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        print(f"not tuned: {case}: {done.stderr.strip()[-300:]}", flush=True)
    return done.returncode == 0
