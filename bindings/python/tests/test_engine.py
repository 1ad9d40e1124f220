"""Engines, the library behind them, and processes."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

import flashtune
from flashtune import _library

PACKAGE = Path(flashtune.__file__).resolve().parent
ONES = np.ones((1, 4, 1, 32), np.float32)


def python(code, **env):
    """Runs a program in a process of its own; gives its outcome."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path]), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


class Engines(unittest.TestCase):
    def test_explains_what_ran(self):
        with flashtune.Engine("cpu") as engine:
            with self.assertRaisesRegex(flashtune.InvalidArgument, "forward first"):
                engine.explain()
            engine.forward(ONES, ONES, ONES, causal=True)
            self.assertIn("forward-f32-d32-causal", engine.explain())
            told = engine.explain(as_dict=True)
            self.assertEqual((told["family"], told["shape"]), ("forward/cpu", "b1 h1/1 4x4 causal"))
            self.assertIn("cpu", repr(engine))

    def test_a_sealed_engine_counts_and_compiles_nothing(self):
        long = np.ones((1, 700, 1, 32), np.float32)
        with flashtune.Engine("cpu") as engine, tempfile.TemporaryDirectory() as folder:
            engine.forward(ONES, ONES, ONES, causal=True)
            with self.assertRaisesRegex(flashtune.InvalidArgument, "nearest, refuse"):
                engine.seal("default")
            digest = engine.seal()
            self.assertRegex(digest, "^[0-9a-f]{64}$")
            self.assertEqual(engine.seal(), digest)
            compiled = engine.counters()["compiled"]
            engine.forward(long, long, long, causal=True)
            with self.assertRaisesRegex(flashtune.Sealed, "sealed in"):
                engine.forward(ONES, ONES, ONES)
            counters = engine.counters()
            self.assertEqual((counters["calls"]["default"], counters["refused"], counters["sealed"]), (2, 1, True))
            self.assertEqual(counters["compiled"], compiled)
            self.assertIn("flashtune_refused_total{", engine.prometheus())
            file = Path(folder) / "rank0.prom"
            for _ in range(2):
                engine.write_metrics(file)
            lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
            self.assertTrue(all('process="rank0"' in line and 'device="' in line for line in lines), lines)
            self.assertTrue(any(line.startswith("flashtune_seal_info{") and digest in line for line in lines), lines)
            self.assertEqual([f.name for f in Path(folder).glob("rank0*")], ["rank0.prom"])
            with self.assertRaisesRegex(flashtune.Error, "rank0.prom.*writable folder"):
                engine.write_metrics(Path(folder) / "none" / "rank0.prom")
            # What one process met, another one loads before its first call.
            manifest = Path(folder) / "untuned.jsonl"
            self.assertEqual(engine.write_untuned(manifest), 2)
            with flashtune.Engine("cpu", quick_first=False) as other:
                other.preload(manifest)
                self.assertEqual(other.counters()["classes"], 2)
                with self.assertRaisesRegex(flashtune.Error, "none.jsonl"):
                    other.preload(Path(folder) / "none.jsonl")
            # Nothing is stored there, and nothing may be compiled: each entry is named.
            with flashtune.Engine("cpu", policy="sealed", cache_dir=Path(folder) / "empty") as strict:
                with self.assertRaises(flashtune.Error) as raised:
                    strict.preload(manifest)
                first, *lines = str(raised.exception).splitlines()
                self.assertIn("2 of 2 entries cannot be had", first)
                self.assertEqual(len({line.split(": ")[0] for line in lines}), 2, lines)
                self.assertTrue(all(" at b1 h" in line for line in lines), lines)

    def test_threads_are_those_of_the_library_or_of_openmp(self):
        with self.assertRaisesRegex(flashtune.InvalidArgument, "'own', 'openmp' or None"):
            flashtune.Engine("cpu", threads=4)
        # NumPy may bring an OpenMP runtime with it, PyTorch does: a process with neither.
        without = "import flashtune\nflashtune.Engine('cpu', threads='openmp')"
        if python(f"import sys\nsys.modules['numpy'] = None\n{without}").returncode == 0:
            self.fail("an OpenMP runtime where none is loaded")
        with_torch = """
import sys
try:
    import torch
except ImportError:
    sys.exit()
import flashtune
q, k, v = (torch.randn(1, 700, 2, 64) for _ in range(3))
results = []
for threads in ("own", "openmp", None):
    with flashtune.Engine("cpu", threads=threads) as engine:
        results.append(engine.forward(q, k, v, causal=True))
assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
torch.set_num_threads(1)
with flashtune.Engine("cpu") as engine:
    assert torch.equal(results[0], engine.forward(q, k, v, causal=True))
"""
        outcome = python(with_torch)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)

    def test_a_closed_engine_is_an_error(self):
        engine = flashtune.Engine("cpu")
        engine.forward(ONES, ONES, ONES)
        engine.close()
        engine.close()
        self.assertTrue(engine.closed)
        calls = [lambda: engine.forward(ONES, ONES, ONES), engine.explain, lambda: flashtune.set_default_engine(engine)]
        for call in calls:
            with self.assertRaisesRegex(flashtune.EngineClosed, "closed"):
                call()

    def test_the_default_engine_is_opened_again_and_can_be_replaced(self):
        first = flashtune.default_engine("cpu")
        first.close()
        flashtune.flash_attn_func(ONES, ONES, ONES)
        second = flashtune.default_engine("cpu")
        self.assertIsNot(first, second)
        own = flashtune.Engine("cpu", policy="sealed", cache_dir=tempfile.mkdtemp())
        self.assertIs(flashtune.set_default_engine(own), second)
        try:
            with self.assertRaisesRegex(flashtune.Sealed, "sealed policy"):
                flashtune.flash_attn_func(ONES, ONES, ONES)
        finally:
            flashtune.set_default_engine(second)
            own.close()
        flashtune.flash_attn_func(ONES, ONES, ONES)

    def test_bad_settings(self):
        for error, word, settings in [
            (flashtune.InvalidArgument, "device", {"device": "gpu"}),
            (flashtune.InvalidArgument, "device", {"device": "cuda:x"}),
            (flashtune.InvalidArgument, "policy", {"policy": "fast"}),
            (flashtune.InvalidArgument, "policy", {"policy": []}),
            (flashtune.InvalidArgument, "cache_dir is a int", {"cache_dir": 3}),
            # Not the folder `a`.
            (flashtune.InvalidArgument, "zero byte", {"cache_dir": "a\0b"}),
            (flashtune.InvalidArgument, "quick_first", {"quick_first": 2}),
            (flashtune.InvalidArgument, "scratch_limit", {"scratch_limit": 0}),
            (flashtune.InvalidArgument, "scratch_limit", {"scratch_limit": True}),
            (flashtune.InvalidArgument, "list of paths", {"bundles": "a.ftb"}),
            (flashtune.InvalidArgument, "list of names", {"allow_paths": "forward/sm80:bf16"}),
            (flashtune.InvalidArgument, "forward/sm81", {"allow_paths": ["forward/sm80:bf16", "forward/sm81:f16"]}),
            (flashtune.InvalidArgument, "cache_dir", {"cache_dir": ""}),
            (flashtune.Error, "/nonexistent", {"templates_dir": "/nonexistent"}),
            (flashtune.Error, "/nonexistent/b", {"bundles": ["/nonexistent/b"]}),
            (flashtune.Error, "", {"device": "cuda:9999"}),
        ]:
            with self.subTest(settings), self.assertRaisesRegex(error, word):
                flashtune.Engine(**{"device": "cpu", **settings})

    def test_the_variables_of_the_library_hold(self):
        with tempfile.TemporaryDirectory() as cache:
            code = (
                "import numpy, flashtune\n"
                "x = numpy.ones((1, 4, 1, 32), 'float32')\n"
                "flashtune.flash_attn_func(x, x, x)\n"
            )
            done = python(code, FLASHTUNE_CACHE=cache, FLASHTUNE_LOG="info")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(any(Path(cache).rglob("*.art")), list(Path(cache).rglob("*")))
            self.assertIn("compiled", done.stderr)


class Library(unittest.TestCase):
    def test_package_and_library_are_of_one_version(self):
        self.assertEqual(flashtune.version(), flashtune.__version__)

    def test_the_packed_struct_is_that_of_the_header(self):
        header = PACKAGE.parents[1] / "c" / "include" / "flashtune.h"
        if not header.is_file():
            self.skipTest("no header beside the package")
        text = header.read_text()
        self.assertIn(f"#define FLASHTUNE_ABI_VERSION {_library.ABI_VERSION}\n", text)
        self.assertEqual(_library.FORWARD_ARGS.size, 368)
        body = re.search(r"typedef struct flashtune_forward_args \{(.*?)\n\}", text, re.S).group(1)
        fields = re.findall(r"^  (?!//).*?(\w+)(?:\[\d\])?;", body, re.M)
        plain = "struct_size flags q k v o lse stream window_left window_right mask softmax_scale"
        program = "mask_program score_program sink_program inputs inputs_len input_size block_mask weights"
        descales = "q_descale k_descale v_descale q_descale_stride k_descale_stride v_descale_stride"
        finer = "residual dropout q_descale_by k_descale_by v_descale_by o_scale"
        self.assertEqual(fields, plain.split() + program.split() + descales.split() + finer.split())
        self.assertEqual((_library.DESCALES.size, _library.DESCALES_BY.size), (3 * 8 + 3 * 2 * 8, 3 * 16))
        self.assertEqual((_library.TENSOR.size, _library.DROPOUT.size), (80, 40))
        body = re.search(r"typedef struct flashtune_input \{(.*?)\n\}", text, re.S).group(1)
        fields = re.findall(r"^  (?!//).*?(\w+)(?:\[\d\])?;", body, re.M)
        self.assertEqual(fields, "name data shape strides storage rank int_value float_value".split())
        body = re.search(r"typedef struct flashtune_block_mask_args \{(.*?)\n\}", text, re.S).group(1)
        fields = re.findall(r"^  (?!//).*?(\w+);", body, re.M)
        sizes = "batch heads kv_heads q_len kv_len"
        self.assertEqual(fields, f"struct_size reserved mask_program inputs inputs_len input_size {sizes}".split())
        names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "bool": "BOOL"}
        for name, number in _library.STORAGES.items():
            self.assertIn(f"FLASHTUNE_STORAGE_{names[name]} = {number},", text)
        for name in ("F16", "BF16", "F32", "E4M3"):
            self.assertIn(f"FLASHTUNE_DTYPE_{name} = {getattr(_library, name)},", text)
        for name, number in _library.POLICIES.items():
            self.assertIn(f"FLASHTUNE_POLICY_{name.upper()} = {number},", text)

    def test_a_missing_library_tells_where_it_was_looked_for(self):
        code = "import flashtune; flashtune.Engine('cpu')"
        for path, word in [("/nonexistent/libflashtune.so", "cargo build"), (__file__, "cannot be loaded")]:
            done = python(code, FLASHTUNE_LIBRARY=path)
            self.assertEqual(done.returncode, 1)
            self.assertIn("flashtune.errors.Missing", done.stderr)
            self.assertIn(word, done.stderr)
            self.assertIn(path, done.stderr)

    def test_neither_numpy_nor_torch_is_needed_to_import(self):
        done = python("import sys, flashtune; print('numpy' in sys.modules, 'torch' in sys.modules)")
        self.assertEqual((done.returncode, done.stdout), (0, "False False\n"), done.stderr)

    @unittest.skipUnless(hasattr(os, "fork"), "there is no fork here")
    def test_a_forked_process_is_told(self):
        code = (
            "import os, numpy, flashtune\n"
            "x = numpy.ones((1, 4, 1, 32), 'float32')\n"
            "flashtune.flash_attn_func(x, x, x)\n"
            "if os.fork() == 0:\n"
            "    try: flashtune.flash_attn_func(x, x, x)\n"
            "    except flashtune.Error as e: os._exit(7 if e.status == 'FLASHTUNE_STATUS_FORKED' else 8)\n"
            "    os._exit(9)\n"
            "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        self.assertEqual(python(code).stdout, "7\n")


if __name__ == "__main__":
    unittest.main()
