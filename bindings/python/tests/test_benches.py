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
from side_by_side import aims, serving_cases  # noqa: E402

try:
    import torch
except ImportError:
    torch = None


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


class ServingCases(unittest.TestCase):
    def test_names_are_those_of_one_case_and_sizes_are_counted(self):
        todo = serving_cases.points(serving_cases.SUITES, "cuda")
        self.assertEqual(len({(suite, case.name) for suite, case in todo}), len(todo))
        for _, case in todo:
            # Counted one query at a time.
            seen = 0
            for n, rows in list(zip(case.lengths, case.rows))[:4]:
                for at in range(n - rows, n):
                    end = at + 1 if case.causal else n
                    seen += end - (0 if case.window is None else max(0, at + 1 - case.window))
            few = serving_cases.replace(case, lengths=case.lengths[:4], rows=case.rows[:4])
            self.assertEqual(few.live_pairs(), seen, case)
            self.assertLessEqual(case.kv_bytes(), case.store_bytes(), case)
        bytes_of = {case.name: case.kv_bytes() for _, case in todo}
        self.assertEqual(bytes_of["64 x 4k"], 64 * 4096 * 8 * 128 * 2 * 2)
        self.assertEqual(bytes_of["window of 128 over 16 x 32k, e4m3"], 16 * 128 * 8 * 128 * 2)
        # Two queries see one key more than one does.
        two = serving_cases.Case("two", (1000,), (2,), window=128)
        self.assertEqual((two.seen(0), two.live_pairs()), ((871, 1000), 256))
        early = serving_cases.Case("early", (3,), (5,), causal=True)
        self.assertEqual((early.seen(0), early.live_pairs()), ((0, 3), 0 + 0 + 1 + 2 + 3))

    def test_lengths_are_those_that_were_asked_for(self):
        lengths = serving_cases.PROMPTS
        self.assertEqual(len(lengths), 48)
        self.assertLess(abs(sum(lengths) / 48 - 770), 8)
        self.assertNotEqual(lengths, sorted(lengths))
        encoder = serving_cases.ENCODER
        self.assertEqual((len(encoder), min(encoder), max(encoder)), (256, 8, 512))
        self.assertEqual((serving_cases.SHORT[0], serving_cases.SHORT[-1]), (200, 2994))

    def test_small_cases_keep_their_kind(self):
        for (_, case), (_, small) in zip(*(serving_cases.points(serving_cases.SUITES, d) for d in ("cuda", "cpu"))):
            self.assertEqual(case.heads // case.kv_heads, small.heads // small.kv_heads, case)
            self.assertEqual((case.store, case.element, case.name), (small.store, small.element, small.name))
            self.assertTrue(all(0 < r <= n for n, r in zip(small.lengths, small.rows)), small)
            self.assertLessEqual(small.store_bytes(), 16 << 20, small)
            self.assertIsNone(small.aim)


class Aims(unittest.TestCase):
    CASE = serving_cases.Case("a", (4096,), (1,))

    def judged(self, aim, results, device="NVIDIA H200", read=4000.0):
        case = serving_cases.replace(self.CASE, aim=aim)
        dense = serving_cases.replace(self.CASE, name="dense")
        us = lambda name, us: {"contender": name, "latency_us": {"median": us}}
        points = [
            {"results": [us(name, n) if n else {"contender": name, "absent": "x"} for name, n in results.items()]},
            {"results": [us("flashtune", 10.0)]},
        ]
        lines = aims.judge([("decode", case), ("decode", dense)], points, read, device)
        return points[0].get("aim", {}).get("us"), lines[0]

    def test_limits_follow_from_the_run(self):
        ran = {"flashtune": 10.0, "flashtune_128k": 1.0, "fa3": 9.0, "fa2": 20.0}
        ideal = self.CASE.ideal_bytes() / 4000.0 / 1e3
        for aim, limit in [
            (aims.Us(9.91), 9.91),
            (aims.ReadRate(0.5), 2 * ideal),
            (aims.BestOther(1.0), 9.0),
            (aims.BestOther(0.9), 10.0),
            (aims.OfCase("dense", 1.03), 10.3),
            (aims.Tflops(1e-3), self.CASE.flops() / 1e3),
        ]:
            with self.subTest(aim=str(aim)):
                found, line = self.judged(aim, ran)
                self.assertAlmostEqual(found, limit)
                self.assertIn("best other fa3 9.0", line)
                self.assertIn("reached" if limit >= 10 / 1.01 else "missed by", line)

    def test_what_did_not_run_gives_no_limit(self):
        found, line = self.judged(aims.BestOther(1.0), {"flashtune": 10.0, "flashtune_128k": 1.0, "fa3": None})
        self.assertIsNone(found)
        self.assertIn("no other ran", line)
        found, line = self.judged(aims.Us(7), {"flashtune": None, "fa3": 9.0})
        self.assertEqual(found, 7)
        self.assertIn("did not run", line)
        self.assertNotIn("missed", line)
        self.assertIsNone(self.judged(aims.ReadRate(0.9), {"flashtune": 10.0}, read=None)[0])

    def test_absolute_aims_are_of_one_device(self):
        self.assertIsNone(self.judged(aims.Us(7), {"flashtune": 10.0}, device="NVIDIA A100")[0])
        self.assertEqual(self.judged(aims.BestOther(1.0), {"flashtune": 10.0, "fa3": 9.0}, device="A100")[0], 9.0)

    def test_means_are_geometric_and_of_suites(self):
        told = [(1.0, 2.0, "x"), (1.0, 8.0, "x"), (1.0, None, None)]
        todo = [("decode", None), ("decode", None), ("chunk", None)]
        self.assertEqual(aims.means(todo, told), ["decode: 4.000 of the best other in the geometric mean of 2 cases"])


@unittest.skipUnless(torch and COMMAND.is_file(), "PyTorch is installed, and the command built with `cargo build`")
class Serving(unittest.TestCase):
    def test_suites_run_at_small_sizes_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            args = [folder, "--device", "cpu", "--rounds", "1", "--repeats", "1", "--flashtune", str(COMMAND)]
            args += ["--suites", "decode,chunk,varlen,paged,quantised,skewed"]
            args += ["--cases", "sinks,soft cap,4 queries,128 x 8k,2048,197,16 x 8k,63 of"]
            done = subprocess.run(
                [sys.executable, "-B", str(BENCHES / "peers.py"), *args],
                capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            report = json.loads((Path(folder) / "peers.json").read_text())
            self.assertIn("## decode, us", (Path(folder) / "peers.md").read_text())
        self.assertGreater(report["ceilings"]["read"]["gbytes_per_s"], 0)
        self.assertTrue(all(check["passed"] for check in report["checks"]), report["checks"])
        for point in report["points"]:
            own, _, torchs = point["results"]
            self.assertIn("single_us", own, point)
            refused = (
                "e4m3" in point["case"]["store"] or "sinks" in point["case"]["name"] or "cap" in point["case"]["name"]
            )
            self.assertEqual("absent" in torchs, refused, point)


@unittest.skipUnless(torch, "PyTorch is installed")
class ServingAnswers(unittest.TestCase):
    def test_the_reference_is_that_of_pytorch(self):
        from side_by_side.serving_answers import Expected, attention
        from side_by_side.serving_data import Data
        from side_by_side.serving_peers import Torch

        for suite, case in serving_cases.points(
            ("decode", "varlen", "paged"), "cpu", ("window of 128 over", "16 x 8k", "197")
        ):
            data = Data(case, "cpu")
            if case.is_paged and case.window:
                # Its launches read pages of their own, which this contender is not given.
                data.tables = data.tables[:1]
            exact = attention(case, data, 0, torch.float64)
            torch.testing.assert_close(Torch().prepare(case, data)(0).double(), exact, atol=1e-5, rtol=1e-5)
            expected, peer = Expected(case, data), Torch()
            right = {node: out.float() for node, out in expected.exact.items()}
            self.assertTrue(expected.check(peer, right.__getitem__)["passed"])
            wrong = {node: out.clone() for node, out in right.items()}
            wrong[expected.nodes[-1]][-1, -1, -1] += 1e-3
            self.assertFalse(expected.check(peer, wrong.__getitem__)["passed"])
            wrong[0][0, 0, 0] = float("nan")
            found = expected.check(peer, wrong.__getitem__)
            self.assertEqual((found["passed"], found["note"]), (False, "NaN"))

    def test_launches_of_a_window_read_pages_of_their_own(self):
        from side_by_side.serving_data import Data

        class Shared(serving_cases.Case):
            def nodes(self):
                return 8, 2

        case = Shared("windows", (500, 500, 490), (1, 1, 1), heads=2, kv_heads=1, head_dim=16, window=9)
        data, read = Data(case, "cpu"), {0: [], 1: []}
        for node in range(8):
            for b in range(case.batch):
                first, end = case.seen(b)
                pages = data.table(node)[b, first // case.store : -(-end // case.store)]
                read[node % 2] += pages.tolist()
        for pages in read.values():
            self.assertEqual(len(set(pages)), len(pages))


if __name__ == "__main__":
    unittest.main()
