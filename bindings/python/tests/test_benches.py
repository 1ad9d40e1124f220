"""The shows of `benches/` that need this package, on the CPU and as short as can be."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCHES = Path(__file__).resolve().parents[3] / "benches"
COMMAND = Path(os.environ.get("FLASHTUNE_LIBRARY", "/nonexistent")).with_name("flashtune")

sys.path.insert(0, str(BENCHES))
import regret  # noqa: E402


@unittest.skipUnless(COMMAND.is_file(), "the command is built with `cargo build`")
class Shows(unittest.TestCase):
    def shows(self, script, *args):
        command = [sys.executable, "-B", str(BENCHES / script), "--device", "cpu", "--flashtune", str(COMMAND), *args]
        return subprocess.run(command, capture_output=True, text=True)

    def test_damaged_kernels_are_refused_or_right(self):
        done = self.shows("fuzz_load.py", "--loads", "80", "--processes", "2", "--seconds", "60")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("80 loads", done.stdout)
        # Whatever the seed, some of so many hit what a call needs, and some do not.
        self.assertIn("bundle: refused", done.stdout)
        self.assertIn("kernels: refused", done.stdout)

    def test_winners_are_raced_against_defaults(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            args = ("--shapes", "4", "--seconds", "30", "--trials", "2", "--rounds", "7", "--json", str(out))
            done = self.shows("regret.py", *args)
            # Who is faster on a busy machine is another matter.
            self.assertIn(done.returncode, (0, 1), done.stdout + done.stderr)
            rows = json.loads(out.read_text())["rows"]
        self.assertEqual(len(rows), 4)
        for row in rows:
            self.assertEqual("ratio" in row, row["winner"] != row["default"], row)


class Bounds(unittest.TestCase):
    def test_bounds_of_a_median_hold_as_often_as_they_say(self):
        import random

        chance, outside = random.Random(1), 0
        for _ in range(2000):
            median, least, most = regret.bounds([chance.gauss(1, 0.1) for _ in range(21)])
            self.assertTrue(least <= median <= most)
            outside += least > 1
        # One side, 95 %: at most one in twenty, and not much less.
        self.assertTrue(40 <= outside <= 115, outside)
        self.assertEqual(regret.bounds([3.0]), (3.0, 3.0, 3.0))


if __name__ == "__main__":
    unittest.main()
