"""Traces of FlexAttention's functions that are kept: what was kept is what a trace of now would give."""

import types
import unittest

from torch_device import DEVICE, MISSING, torch

import flashtune  # noqa: F401  (finds the library once for all)

if torch is not None:
    from flashtune.flex import _kept, and_masks
    from flashtune.flex._trace import tracer

SIZES = {"b": 2, "h": 4, "q": 16, "kv": 24}
WINDOW = 3


@unittest.skipIf(torch is None, MISSING)
class Kept(unittest.TestCase):
    def setUp(self):
        _kept._texts.clear()

    def traced(self, function, kept, what="score_mod", sizes=SIZES):
        """The trace, which is one of now, and whether it was kept before."""
        before, traces = len(_kept._texts), []
        real = _kept.tracer
        try:
            _kept.tracer = lambda *args: traces.append(1) or real(*args)
            got = _kept.trace(function, what, "p_", DEVICE, sizes)
        finally:
            _kept.tracer = real
        want = tracer(function, what, "p_", DEVICE, sizes).traced
        self.assertEqual((got.text, got.coordinates), (want.text, want.coordinates))
        self.assertEqual(got.tensors.keys(), want.tensors.keys())
        for name, tensor in want.tensors.items():
            if isinstance(tensor, torch.Tensor):
                ours = got.tensors[name]
                same = [(kept and t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, ours)]
                self.assertEqual(*same)
                self.assertTrue(torch.equal(tensor, ours))
            else:
                self.assertEqual((type(tensor), tensor), (type(got.tensors[name]), got.tensors[name]))
        self.assertEqual(not traces, kept, got.text)
        return len(_kept._texts) > before

    def test_numbers_are_part_of_the_text(self):
        def of(n):
            return lambda score, b, h, q, kv: score * n

        for n, kept in ((2, False), (2, True), (2.0, False), (2.0, True), (True, False), (0.0, False), (-0.0, False)):
            self.traced(of(n), kept)

    def test_tensors_are_those_of_the_call(self):
        def of(slope, s=0):
            return lambda score, b, h, q, kv: score + slope[h] * (kv - q) + s

        make = lambda n, **more: torch.rand(n, device=DEVICE, **more)
        self.assertTrue(self.traced(of(make(4)), False))
        self.traced(of(make(4)), True)
        # Another length, dtype or stride.
        self.traced(of(make(8)), False)
        self.traced(of(make(8)), True)
        self.traced(of(make(4).half()), False)
        self.traced(of(make(8)[::2]), False)
        self.traced(of(torch.nn.Parameter(make(4))), True)

    def test_one_memory_by_two_names(self):
        def of(first, second):
            return lambda score, b, h, q, kv: score + first[h] * second[h]

        x, y = torch.rand(4, device=DEVICE), torch.rand(4, device=DEVICE)
        self.traced(of(x, y), False)
        self.traced(of(y, x), True)
        self.traced(of(x, x), False)
        self.traced(of(y, y.view(4)), True)
        self.traced(of(x, y), True)

    def test_tensors_without_axes_are_read_at_run_time(self):
        def of(cap):
            return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

        for device in {"cpu", DEVICE}:
            self.traced(of(torch.tensor(20.0, device=device)), False)
            self.traced(of(torch.tensor(30.0, device=device)), True)
            self.traced(of(torch.tensor(30, device=device)), False)

    def test_what_the_function_computes_of_tensors_is_not_kept(self):
        lengths = torch.tensor([3, 5], device=DEVICE)
        table = torch.rand(4, 2, device=DEVICE)

        def of_a_number(score, b, h, q, kv):
            return score * int(lengths.max())

        def of_a_tensor(score, b, h, q, kv):
            return score + (table * 2)[h, 0]

        def by_a_branch(score, b, h, q, kv):
            return score * 2 if lengths[0] > 3 else score

        for function in (of_a_number, of_a_tensor, by_a_branch):
            self.traced(function, False)
            lengths += 1
            table += 1
            self.traced(function, False)

    def test_shapes_are_known(self):
        def of(table):
            return lambda score, b, h, q, kv: score + table[h, q % table.shape[1]] * table.size(0)

        self.traced(of(torch.rand(4, 5, device=DEVICE)), False)
        self.traced(of(torch.rand(4, 5, device=DEVICE)), True)
        self.traced(of(torch.rand(4, 6, device=DEVICE)), False)

    def test_globals_lists_and_defaults(self):
        global WINDOW
        numbers = [1, 2]

        def mask(b, h, q, kv, reach=(1, 2)):
            return (q - kv <= WINDOW) & (kv - q < numbers[1] * reach[0])

        self.traced(mask, False, "mask_mod")
        self.traced(mask, True, "mask_mod")
        numbers[1] = 5
        self.traced(mask, False, "mask_mod")
        try:
            WINDOW = 4
            self.traced(mask, False, "mask_mod")
        finally:
            WINDOW = 3
        mask.__defaults__ = ((3, 2),)
        self.traced(mask, False, "mask_mod")

    def test_functions_within_functions(self):
        def window(n):
            return lambda b, h, q, kv: q - kv < n

        def causal(b, h, q, kv):
            return q >= kv

        self.traced(and_masks(causal, window(8)), False, "mask_mod")
        self.traced(and_masks(causal, window(8)), True, "mask_mod")
        self.traced(and_masks(causal, window(9)), False, "mask_mod")
        self.traced(and_masks(window(9), causal), False, "mask_mod")

    def test_objects_and_modules_may_change(self):
        class Window:
            reach = 3

            def mask(self, b, h, q, kv):
                return q - kv < self.reach

            def __call__(self, b, h, q, kv):
                return q - kv < self.reach + 1

        window, settings = Window(), types.SimpleNamespace(reach=3)
        by_object = lambda b, h, q, kv: q - kv < window.reach
        by_class = lambda b, h, q, kv: q - kv < Window.reach
        by_name = lambda b, h, q, kv: q - kv < settings.reach
        for function in (window.mask, window, by_object, by_class, by_name):
            self.traced(function, False, "mask_mod")
            self.traced(function, False, "mask_mod")
            Window.reach, settings.reach = Window.reach + 1, settings.reach + 1
            self.traced(function, False, "mask_mod")

    def test_sizes_of_the_call(self):
        documents = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        mask = lambda b, h, q, kv: documents[q] == documents[kv]
        self.traced(mask, False, "mask_mod")
        self.traced(mask, True, "mask_mod")
        self.traced(mask, False, "mask_mod", {**SIZES, "q": 20})
        self.traced(mask, True, "mask_mod")

    def test_no_more_is_kept_than_so_much(self):
        def of(n):
            return lambda score, b, h, q, kv: score * n

        for n in range(2 * _kept._MOST):
            _kept.trace(of(n), "score_mod", "p_", DEVICE, SIZES)
        self.assertLessEqual(len(_kept._texts), _kept._MOST)


if __name__ == "__main__":
    unittest.main()
