#!/usr/bin/env python3
"""The grids of serving calls of other libraries (bindings/python/tests/serving_grids.py), as many cases as wanted.

    PYTHONPATH=bindings/python python3 benches/whole_grids.py [--torch cpu|cuda:0] [--cases 100] [--seed 1]
        [--grid NAME]

Without --torch with arrays of NumPy on the CPU; CI runs a few of those. With it needs PyTorch, which CI has not: run
it by hand after a change of the Python names or of a kernel of ragged batches. Prints every case that is wrong, and
how many of each grid were tried; exits with 1 if any was wrong.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "bindings/python/tests"))

import numpy as np
from serving_grids import GRIDS, NumPy, run, sample


class Torch:
    """Tensors of PyTorch on a device."""

    def __init__(self, device):
        import torch

        self.torch, self.device = torch, device
        self.views = {"bfloat16": (torch.bfloat16, "int16"), "float8_e4m3fn": (torch.float8_e4m3fn, "uint8")}

    def to(self, x):
        kind, bits = self.views.get(x.dtype.name, (None, None))
        t = self.torch.from_numpy(np.array(x) if kind is None else np.array(x).view(bits)).to(self.device)
        return t if kind is None else t.view(kind)

    def back(self, t):
        import ml_dtypes

        t = t.cpu()
        if t.dtype == self.torch.bfloat16:
            return t.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        if t.dtype == self.torch.float8_e4m3fn:
            return t.view(self.torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return t.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="DEVICE")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grid", choices=sorted(GRIDS))
    a = parser.parse_args()
    tensors, wrong = Torch(a.torch) if a.torch else NumPy(), 0
    for name in [a.grid] if a.grid else GRIDS:
        start = time.time()
        for case in sample(name, a.cases, a.seed):
            found = run(case, tensors)
            if found is not None:
                wrong += 1
                print(f"{name}: {found}\n    {case}", flush=True)
        print(f"{name}: {a.cases} cases in {time.time() - start:.0f} s", flush=True)
    print("all right" if wrong == 0 else f"{wrong} wrong")
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
