"""The runner of all other modules: a failure is told and named, however a module ends."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

RUNNER = Path(__file__).with_name("run_modules.py")
TEST = "import os, unittest\n\n\nclass Of(unittest.TestCase):\n    def test(self):\n        "


def run(modules, *names):
    with tempfile.TemporaryDirectory() as folder:
        # Imports of what takes long are seen elsewhere.
        for name, text in {"numpy": "", "torch": "", **{n: TEST + body for n, body in modules.items()}}.items():
            Path(folder, f"{name}.py").write_text(text)
        command = [sys.executable, "-B", RUNNER, "--processes", "2", "--caches", "some-", *names]
        environment = os.environ | {"PYTHONPATH": folder}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


class Runner(unittest.TestCase):
    def test_modules_have_their_own_process_variables_and_cache(self):
        body = "print(os.environ['FLASHTUNE_CACHE'], os.environ.get('WORD')); os.environ['WORD'] = 'left behind'"
        done = run({"one": body, "two": body, "three": body}, "one:WORD=some", "two", "three")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("OK"), 3, done.stdout)
        words = [line.split() for line in done.stdout.splitlines() if line.startswith("some-")]
        self.assertEqual(sorted(word for _, word in words), ["None", "None", "some"])
        self.assertLessEqual({cache for cache, _ in words}, {"some-0", "some-1"})

    def test_every_module_that_fails_is_named(self):
        modules = {"passes": "pass", "fails": "self.fail('the reason')", "dies": "os.kill(os.getpid(), 9)"}
        done = run(modules, "fails", "dies", "passes", "nowhere")
        self.assertNotEqual(done.returncode, 0)
        for told in ("fails ended with 1", "dies ended with -9", "nowhere ended with 1"):
            self.assertIn(told, done.stderr)
        self.assertNotIn("passes", done.stderr)
        self.assertIn("the reason", done.stdout)


if __name__ == "__main__":
    unittest.main()
