"""Stored kernels, damaged at random, loaded on the device that is there: each load is refused, or its answer is right.

    PYTHONPATH=bindings/python python3 benches/fuzz_load.py [--device cuda:0] [--loads 4000]
        [--seconds N] [--processes 4]

A few small problems are tuned; what was kept of them is a bundle, a snapshot and files of single kernels. Each time one
of these is damaged (bits flipped, bytes overwritten, parts swapped, cut, extended, or another of them put in its
place), an engine that may not compile opens it, and a call computes into memory full of NaN. Either the call is
refused, and nothing was written; or it is answered, since what it needs is whole, with the same bits as before the
damage. What ends a process is told with the damage that did it.

Needs the command (`--flashtune`, else that of this repository or package), and PyTorch, or NumPy for the cpu.
"""

import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Head dim and mask. Small, so that a load is most of the work.
PROBLEMS = [(64, "causal"), (128, "full"), (64, "full")]
HEADS, ROWS = 2, 128
# What the engine must not find, so that nothing is compiled in place of what is damaged.
NOWHERE = "/nonexistent/flashtune"


def command(a):
    places = [ROOT / "bin/flashtune", ROOT / "target/release/flashtune"]
    return str(a.flashtune or next((p for p in places if p.is_file()), "flashtune"))


def store(a, folder):
    """Tunes the problems, and gives what is stored of them: a bundle, and the folder of a cache."""
    cache, bundle = folder / "cache", folder / "whole.ftb"
    cache.mkdir(mode=0o700)
    base = [command(a), "--device", a.device, "--cache", str(cache)]
    dtype = "f32" if a.device == "cpu" else "bf16"
    for head_dim, mask in PROBLEMS:
        case = f"--dtype {dtype} --head-dim {head_dim} --mask {mask} --heads {HEADS} --q-len {ROWS}".split()
        tune = [*base, "tune", *case, "--trials", "1", "--budget-s", "20"]
        # On a busy machine noise may hide the winner, and nothing is stored.
        for _ in range(4):
            done = subprocess.run(tune, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            sys.exit(f"{' '.join(tune)}: {done.stderr}")
    subprocess.run([*base, "export", str(bundle)], check=True, capture_output=True)
    return bundle, cache


class Calls:
    """Calls of the problems, and their answers by an undamaged store."""

    def __init__(self, device):
        self.device = device
        if device == "cpu":
            import numpy

            chance = numpy.random.default_rng(1)
            self.full = lambda shape: numpy.full(shape, numpy.nan, numpy.float32)
            self.random = lambda shape: chance.standard_normal(shape, numpy.float32)
            self.bits = lambda t: t.tobytes()
            self.untouched = lambda t: bool(numpy.isnan(t).all())
        else:
            import torch

            torch.manual_seed(1)
            self.full = lambda shape: torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
            self.random = lambda shape: torch.randn(shape, dtype=torch.bfloat16, device=device)
            self.bits = lambda t: t.cpu().view(torch.int16).numpy().tobytes()
            self.untouched = lambda t: bool(t.isnan().all())
        self.inputs = [[self.random((1, ROWS, HEADS, head_dim)) for _ in range(3)] for head_dim, _ in PROBLEMS]

    def answer(self, engine, problem):
        """The bits of an answer; None when the call is refused and its output untouched; a text for what is neither."""
        import flashtune

        q, k, v = self.inputs[problem]
        out = self.full(q.shape)
        try:
            engine.forward(q, k, v, causal=PROBLEMS[problem][1] == "causal", out=out)
        except flashtune.Error:
            return None if self.untouched(out) else "refused, but something was written"
        return self.bits(out)


def damage(chance, whole, others):
    """Bytes with something wrong in them, and in words what."""
    data, size = bytearray(whole), len(whole)
    kind = chance.choice(["flip", "flips", "random", "zeros", "swap", "cut", "extend", "another", "twice"])
    at = chance.randrange(size)
    length = min(chance.choice([1, 4, 16, 64, 512, 4096, 65536]), size - at)
    match kind:
        case "flip":
            data[at] ^= 1 << chance.randrange(8)
        case "flips":
            for _ in range(chance.randint(2, 64)):
                data[chance.randrange(size)] ^= 1 << chance.randrange(8)
        case "random":
            data[at : at + length] = chance.randbytes(length)
        case "zeros":
            data[at : at + length] = bytes(length)
        case "swap":
            to = chance.randrange(size - length + 1)
            one, other = data[at : at + length], data[to : to + length]
            data[at : at + length], data[to : to + length] = other, one
        case "cut":
            del data[at:]
        case "extend":
            data += chance.randbytes(length)
        case "another":
            data = bytearray(chance.choice(others))
        case "twice":
            data[at:at] = data[at : at + length]
    return bytes(data), f"{kind} at {at} of {size}, {length}"


def some(a):
    """Loads damaged files until the count or the time is up; prints what came of it. Runs in a process of its own."""
    import flashtune

    folder, chance, start = Path(a.store), random.Random(a.seed), time.monotonic()
    bundle, cache = (folder / "whole.ftb").read_bytes(), folder / "cache"
    calls = Calls(a.device)
    own = Path(tempfile.mkdtemp(prefix="load-", dir=folder))
    snapshot = next(cache.glob("v*/snapshot.ftb")).relative_to(cache)
    kernels = sorted(p.relative_to(cache) for p in cache.glob("v*/artifacts/*/*.art"))
    files = [(cache / k).read_bytes() for k in kernels]
    # One whose kernels are all damaged: then the files are asked.
    hollow = bundle.replace(b"\x7fELF", b"\x7fELf")
    assert hollow != bundle

    def engine(cache_dir, bundles=()):
        return flashtune.Engine(a.device, policy="sealed", cache_dir=cache_dir, bundles=bundles)

    empty = own / "empty"
    # The context of the device stays while one engine does.
    with engine(empty, [folder / "whole.ftb"]) as whole:
        expected = [calls.answer(whole, p) for p in range(len(PROBLEMS))]
        assert all(isinstance(bits, bytes) for bits in expected), expected
        told = collections.Counter()
        for n in range(a.loads):
            if time.monotonic() - start > a.seconds:
                break
            target = chance.choice(["bundle", "snapshot", "kernels"])
            problem = chance.randrange(len(PROBLEMS))
            here = own / "here"
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(mode=0o700)
            if target == "kernels":
                spared = chance.choice([None, *kernels])
                made = {snapshot: (hollow, "no kernels in the snapshot")}
                for kernel, data in zip(kernels, files):
                    others = [f for f in files if f != data]
                    made[kernel] = (data, "one spared") if kernel == spared else damage(chance, data, others)
            else:
                path = snapshot if target == "snapshot" else Path("damaged.ftb")
                made = {path: damage(chance, bundle, [files[0], b"", bundle[: len(bundle) // 2] * 2])}
            for path, (data, _) in made.items():
                for parent in reversed((here / path).parents):
                    parent.mkdir(mode=0o700, exist_ok=True)
                (here / path).write_bytes(data)
            what = "; ".join(words for _, words in made.values())
            bundles = [here / "damaged.ftb"] if target == "bundle" else []
            # Should the process end in the next lines, this says by what.
            (own / "last").write_text(f"seed {a.seed}, load {n}, {target}: {what}")
            try:
                with engine(empty if target == "bundle" else here, bundles) as damaged:
                    found = calls.answer(damaged, problem)
            except flashtune.Error:
                found = None
            right = found is None or found == expected[problem]
            if not right:
                words = found if isinstance(found, str) else "another answer"
                sys.exit(f"WRONG: seed {a.seed}, load {n}, {target}: {what}: {words}")
            told[f"{target}: {'refused' if found is None else 'answered right'}"] += 1
        # The device is as it was.
        assert [calls.answer(whole, p) for p in range(len(PROBLEMS))] == expected
    (own / "last").write_text("the end")
    print(json.dumps(told))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda:0")
    add("--flashtune", help="the command")
    add("--loads", type=int, default=4000, help="damaged files in all")
    add("--seconds", type=float, default=60, help="when to stop, whatever the number")
    add("--seed", type=int, default=1)
    add("--processes", type=int, default=4)
    add("--store", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.store:
        return some(a)
    import flashtune

    # Whatever is missing is missed now.
    flashtune.version()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="flashtune-load-"))
    try:
        store(a, folder)
        told_after = time.monotonic() - start
        print(f"{len(PROBLEMS)} problems tuned and exported in {told_after:.1f} s", flush=True)
        env = {**os.environ, "FLASHTUNE_ALLOW_UNSIGNED": "1", "FLASHTUNE_LOG": "off"}
        env |= {"FLASHTUNE_NVRTC": NOWHERE, "CC": NOWHERE}
        mine = [sys.executable, __file__, "--device", a.device, "--store", str(folder), "--seconds", str(a.seconds)]
        each = -(-a.loads // a.processes)
        pipe = subprocess.PIPE
        args = [[*mine, "--loads", str(each), "--seed", str(a.seed * 1000 + i)] for i in range(a.processes)]
        running = [subprocess.Popen(args_, env=env, stdout=pipe, stderr=pipe, text=True) for args_ in args]
        told, failed = collections.Counter(), 0
        for process in running:
            out, err = process.communicate()
            if process.returncode:
                failed += 1
                print(f"a process ended with {process.returncode}: {err.strip()[-500:]}")
            else:
                told.update(json.loads(out))
        for last in folder.glob("load-*/last"):
            if failed and last.read_text() != "the end":
                print(f"  its last load: {last.read_text()}")
        for what, count in sorted(told.items()):
            print(f"  {count:6} {what}")
        print(f"{told.total()} loads of damaged files in {time.monotonic() - start:.0f} s, {failed} processes failed")
        return int(failed > 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
