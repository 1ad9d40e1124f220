"""A few cases of each grid of ``serving_grids.py`` with NumPy on the CPU. ``FLASHTUNE_GRID`` is how many of each
(2; most of a case's time is that of compiling its kernel), ``FLASHTUNE_GRID_SEED`` draws others."""

import os
import unittest

from serving_grids import GRIDS, NumPy, run, sample

COUNT, SEED = (int(os.environ.get(f"FLASHTUNE_GRID{name}", n)) for name, n in (("", 2), ("_SEED", 1)))


class Grids(unittest.TestCase):
    def holds(self, name):
        for case in sample(name, COUNT, SEED):
            with self.subTest(**case):
                self.assertIsNone(run(case, NumPy()))


for _name in GRIDS:
    setattr(Grids, f"test_{_name}", lambda self, name=_name: self.holds(name))

if __name__ == "__main__":
    unittest.main()
