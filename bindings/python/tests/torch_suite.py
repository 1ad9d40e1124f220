"""The tests with PyTorch and Transformers, each in a process of its own, several at a time, as a short table:

    FLASHTUNE_LIBRARY=target/release/libflashtune.so python3 bindings/python/tests/torch_suite.py [JOBS]

Most of their time on a GPU is compiling, which is why they share the work and a cache. Runs on ``cuda`` if there is a
device, or where ``FLASHTUNE_TEST_DEVICE`` says. The exit code is 1 if a test failed, whose output is then printed.
"""

import concurrent.futures
import os
import subprocess
import sys
import time
import unittest
from pathlib import Path

MODULES = ("test_flex", "test_torch_operators", "test_torch_sdpa", "test_transformers", "test_gradients")
LIMIT = 140


def tests(suite):
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests(one)
        else:
            yield one.id()


def run(name, env):
    start = time.monotonic()
    command = [sys.executable, "-B", "-m", "unittest", "-v", name]
    try:
        done = subprocess.run(
            command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as e:
        text = (e.stderr or b"").decode(errors="replace")
        return name, f"over {LIMIT} s", time.monotonic() - start, text
    text = done.stdout + done.stderr
    state = "ok" if done.returncode == 0 else "FAILED"
    return name, "skipped" if "skipped=1" in text else state, time.monotonic() - start, text


def main():
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    here = Path(__file__).resolve().parent
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here.parent), env.get("PYTHONPATH")]))
    if "FLASHTUNE_LIBRARY" in env:
        env["FLASHTUNE_LIBRARY"] = str(Path(env["FLASHTUNE_LIBRARY"]).resolve())
    sys.path[:0] = [str(here.parent), str(here)]
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    try:
        import transformers

        more = f", Transformers {transformers.__version__}"
    except ImportError:
        more = ", no Transformers"
    print(f"PyTorch {torch.__version__}{more}, on {env.get('FLASHTUNE_TEST_DEVICE', device)}", flush=True)
    names = list(tests(unittest.defaultTestLoader.loadTestsFromNames(MODULES)))
    start, failed, counts = time.monotonic(), [], {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name, state, seconds, text in pool.map(lambda n: run(n, env), names):
            print(f"{state:>10} {seconds:6.1f} s  {name}", flush=True)
            counts[state] = counts.get(state, 0) + 1
            if state not in ("ok", "skipped"):
                failed.append((name, text))
    for name, text in failed:
        print(f"\n==== {name}\n{text[-3000:]}")
    told = ", ".join(f"{n} {state}" for state, n in counts.items())
    print(f"\n{len(names)} tests in {time.monotonic() - start:.0f} s: {told}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
