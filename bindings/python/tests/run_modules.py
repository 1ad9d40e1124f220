"""Runs modules of tests, each in a process of its own, which is forked from one that has imported PyTorch and NumPy.

    python -B run_modules.py --processes 2 --caches PREFIX MODULE[:NAME=VALUE] ...

As many at once as are asked for, in the order given; a process has the environment's variables and those behind its
module, and a cache of its own: what one test finds does not hang on what others do at the same time. PyTorch's import
takes 3 s of a processor, and most modules want it.
"""

import argparse
import os
import sys
import tempfile
import time
import unittest


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--caches", required=True, metavar="PREFIX", help="what the names of cache folders begin with")
    parser.add_argument("modules", nargs="+", metavar="MODULE[:NAME=VALUE]")
    return parser.parse_args()


def begin(module, variables, output):
    """The number of a new process; in it, the tests."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.environ.update(variables)
    unittest.main(module=None, argv=["unittest", module])


def main():
    a = arguments()
    for wanted_by_many in ("numpy", "torch"):
        try:
            __import__(wanted_by_many)
        except ImportError:
            pass
    waiting, free, running, failed = list(a.modules), list(range(a.processes)), {}, []
    while waiting or running:
        while waiting and free:
            module, *variables = waiting.pop(0).split(":", 1)
            place, output = free.pop(0), tempfile.TemporaryFile()
            more = dict(v.split("=", 1) for v in variables) | {"FLASHTUNE_CACHE": f"{a.caches}{place}"}
            running[begin(module, more, output)] = module, place, output, time.monotonic()
        number, status = os.wait()
        module, place, output, begun = running.pop(number)
        free.append(place)
        output.seek(0)
        print(f"{module}, {time.monotonic() - begun:.0f} s\n{output.read().decode(errors='replace')}", flush=True)
        if code := os.waitstatus_to_exitcode(status):
            failed.append(f"{module} ended with {code}")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
