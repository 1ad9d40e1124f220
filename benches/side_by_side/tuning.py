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


def tune(binary, device, case, budget_s):
    """Finds the best schedule for a case and keeps it where the Python package looks. A failure is told, not fatal: the
    default schedule is measured then, and the report says that it is one."""
    options = {
        "--device": device,
        "--dtype": case.dtype,
        "--head-dim": case.head_dim,
        "--mask": case.mask,
        "--batch": case.batch,
        "--heads": case.heads,
        "--kv-heads": case.kv_heads,
        "--q-len": case.q_len,
        "--kv-len": case.kv_len,
        "--budget-s": budget_s,
    }
    line = [binary, "tune", *(str(word) for option in options.items() for word in option)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        print(f"not tuned: {case}: {done.stderr.strip()[-300:]}", flush=True)
