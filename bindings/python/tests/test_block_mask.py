"""Masks that are prepared once for many calls: arrays of NumPy on the CPU, and tensors of PyTorch where there is a
GPU."""

import gc
import threading
import unittest

import numpy as np
from reference import check

import flashtune

try:
    import torch
except ImportError:
    torch = None

B, H, Q_LEN, KV_LEN = 2, 4, 40, 56
SAME = "of_q[b, q] == of_kv[b, kv]"


def random(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


class OnTheCpu(unittest.TestCase):
    def setUp(self):
        lengths = enumerate((Q_LEN, KV_LEN, KV_LEN))
        self.q, self.k, self.v = (random((B, H, n, 32), seed) for seed, n in lengths)
        self.of_q = (np.arange(B * Q_LEN, dtype=np.int32).reshape(B, Q_LEN) * 7 % 5).astype(np.int32)
        self.of_kv = (np.arange(B * KV_LEN, dtype=np.int32).reshape(B, KV_LEN) * 3 % 5).astype(np.int32)
        self.seen = self.of_q[:, None, :, None] == self.of_kv[:, None, None, :]

    def documents(self, *sizes, **more):
        tensors, sizes = {"of_q": self.of_q, "of_kv": self.of_kv}, sizes or (B, None, Q_LEN, KV_LEN)
        return flashtune.create_block_mask(SAME, *sizes, tensors=tensors, **more)

    def test_calls_of_all_kinds_go_by_it(self):
        block_mask = self.documents()
        out, lse = flashtune.attention(self.q, self.k, self.v, block_mask=block_mask, return_lse=True)
        seen = np.broadcast_to(self.seen, (B, H, Q_LEN, KV_LEN))
        check(self, out, lse, self.q, self.k, self.v, seen)
        self.assertEqual((block_mask.nbytes, block_mask.device), (0, "cpu"))
        # The same as without it, and with a score and its own tensors, which may change from call to call.
        for scale in (0.5, -0.25):
            slope = np.linspace(0, scale, H, dtype=np.float32)
            score = {"score": "score + slope[h] * (kv - q)", "sink": "slope[h]"}
            own = {"tensors": {"slope": slope}, **score}
            with_it = flashtune.attention(self.q, self.k, self.v, block_mask=block_mask, **own)
            own["tensors"] |= {"of_q": self.of_q, "of_kv": self.of_kv}
            without = flashtune.attention(self.q, self.k, self.v, SAME, **own)
            np.testing.assert_array_equal(with_it, without)
        # A score may read what the mask reads, the call may say the mask again, and an engine takes it in its layout.
        more = {"score": "score + of_q[b, q] * kv * 0.01", "mask": SAME}
        again = flashtune.attention(self.q, self.k, self.v, block_mask=block_mask, **more)
        tensors = {"of_q": self.of_q, "of_kv": self.of_kv}
        np.testing.assert_array_equal(again, flashtune.attention(self.q, self.k, self.v, tensors=tensors, **more))
        q, k, v = (x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
        by_engine = flashtune.default_engine("cpu").forward(q, k, v, causal=True, block_mask=block_mask)
        plain = flashtune.default_engine("cpu").forward(q, k, v, causal=True, mask=SAME, tensors=tensors)
        np.testing.assert_array_equal(by_engine, plain)

    def test_any_number_of_heads_and_sequences_where_the_mask_is_the_same_for_all(self):
        sizes = None, None, Q_LEN, KV_LEN
        block_mask = flashtune.create_block_mask("(q - kv) % n == 0", *sizes, device="cpu", tensors={"n": np.int64(3)})
        for b, h in [(1, 1), (2, 3)]:
            parts = [t[:b, :h] for t in (self.q, self.k, self.v)]
            out = flashtune.attention(*parts, block_mask=block_mask)
            np.testing.assert_array_equal(out, flashtune.attention(*parts, "(q - kv) % n == 0", tensors={"n": 3}))

    def test_what_it_was_not_made_for_is_refused(self):
        block_mask, causal = self.documents(), flashtune.create_block_mask("causal", B, H, Q_LEN, KV_LEN, "cpu")
        q, k, v = self.q, self.k, self.v
        sizes = B, H, Q_LEN, KV_LEN
        made = flashtune.create_block_mask
        call = lambda *t, by=block_mask, **more: lambda: flashtune.attention(*(t or (q, k, v)), block_mask=by, **more)
        other = {"score": "score * of_q[b, q]", "tensors": {"of_q": self.of_q.copy()}}
        for words, refused in [
            ("q_len is 30, but it was made for 40", call(q[:, :, :30], k, v)),
            ("kv_len is 41, but", call(q, k[:, :, :41], v[:, :, :41])),
            ("batch is 1, but", call(q[:1], k[:1], v[:1])),
            ("heads is 2, but", call(q[:, :2], k[:, :2], v[:, :2], by=causal)),
            ("the call's mask is another", call(mask="kv < 3")),
            ("the address of the tensor `of_q`", call(**other)),
            ("mask reads `b`.*number", lambda: self.documents(None, None, Q_LEN, KV_LEN)),
            ("reads `h`", lambda: made("kv % (h + 1) == 0", B, None, Q_LEN, KV_LEN)),
            ("reads `h_kv`", lambda: made("kv % (h_kv + 1) == 0", *sizes)),
            ("axis 1 of the tensor `of_q`", lambda: self.documents(B, None, Q_LEN + 1, KV_LEN)),
            ("`of_kv`", lambda: made(SAME, *sizes, tensors={"of_q": self.of_q})),
            ("Q_LEN is 'a'", lambda: self.documents(B, None, "a", KV_LEN)),
            ("H is 0", lambda: self.documents(B, 0, Q_LEN, KV_LEN)),
            ("mask is None", lambda: made(None, *sizes)),
            ("pass the text", lambda: made(3, *sizes)),
            ("a list", lambda: made("kv <= q", *sizes, tensors=[1])),
            ("block_mask is a str", call(by="causal")),
        ]:
            with self.subTest(words), self.assertRaisesRegex(flashtune.InvalidArgument, words):
                refused()

    def test_closing_threads_and_the_tensors_that_it_keeps(self):
        block_mask = self.documents()
        want = flashtune.attention(self.q, self.k, self.v, block_mask=block_mask)
        # The arrays live on in it alone.
        self.of_q = self.of_kv = None
        gc.collect()
        failures = []

        def work():
            for _ in range(20):
                if not np.array_equal(flashtune.attention(self.q, self.k, self.v, block_mask=block_mask), want):
                    failures.append("another answer")

        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads], [t.join() for t in threads]
        self.assertEqual(failures, [])
        block_mask.close()
        block_mask.close()
        with self.assertRaisesRegex(flashtune.InvalidArgument, "closed"):
            flashtune.attention(self.q, self.k, self.v, block_mask=block_mask)
        self.assertIn("closed", repr(block_mask))


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device, or no PyTorch to reach it")
class OnAGpu(unittest.TestCase):
    """Lists, bits and runs that later calls go by, on other streams and in graphs."""

    LENGTH = 1000

    @classmethod
    def setUpClass(cls):
        n, device = cls.LENGTH, "cuda"
        torch.manual_seed(0)
        cls.q, cls.k, cls.v = (torch.randn(2, 4, n, 64, device=device).bfloat16() for _ in range(3))
        plain = torch.randint(0, 3, (2, n), device=device, dtype=torch.int32)
        sorted_ = plain.sort(-1).values
        rows, keys = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
        same = lambda t: (t[:, None, :, None] == t[:, None, None, :])
        live = torch.rand(8, 8, device=device) < 0.3
        cls.cases = {
            "runs": ("document", {"doc_q": sorted_, "doc_kv": sorted_}, same(sorted_)),
            "bits": ("of[b, q] == of[b, kv]", {"of": plain}, same(plain)),
            "lists": ("live[q // 128, kv // 128]", {"live": live}, live[rows // 128, keys // 128][None, None]),
            "arithmetic": ("kv <= q", {}, (keys <= rows)[None, None]),
        }

    def made(self, case, batch=2):
        text, tensors, _ = self.cases[case]
        return flashtune.create_block_mask(text, batch, None, self.LENGTH, self.LENGTH, "cuda", tensors=tensors)

    def run_with(self, block_mask, **more):
        with torch.no_grad():
            return flashtune.attention(self.q, self.k, self.v, block_mask=block_mask, **more)

    def holds(self, case, out):
        seen = self.cases[case][2]
        scores = (self.q.double() @ self.k.double().transpose(-1, -2) / 8).masked_fill(~seen, float("-inf"))
        want = torch.softmax(scores, -1).nan_to_num(0) @ self.v.double()
        self.assertLess((out.double() - want).abs().max().item(), 0.02, case)

    def test_first_and_later_calls_on_any_stream(self):
        for case in self.cases:
            self.run_with(self.made(case))  # compiles
            block_mask, streams = self.made(case), [torch.cuda.Stream() for _ in range(3)]
            # What is found comes late, so that others have to wait for it.
            torch.cuda._sleep(50_000_000)
            outs = [self.run_with(block_mask)]
            for stream in streams:
                with torch.cuda.stream(stream):
                    outs.append(self.run_with(block_mask))
            self.assertEqual(block_mask.nbytes > 0, case != "arithmetic", case)
            held = block_mask.nbytes
            block_mask.close()  # while launches are under way
            torch.cuda.synchronize()
            for out in outs:
                self.holds(case, out)
                self.assertTrue(torch.equal(out, outs[0]), f"{case}, {held} bytes")

    def test_graphs_use_what_is_there_and_find_what_is_not(self):
        for case in ("runs", "bits"):
            for before in (True, False):
                block_mask, graph = self.made(case), torch.cuda.CUDAGraph()
                text, tensors, _ = self.cases[case]
                flashtune.attention(self.q, self.k, self.v, text, tensors=tensors)
                if before:
                    self.run_with(block_mask)
                with torch.cuda.graph(graph):
                    out = self.run_with(block_mask)
                self.assertEqual(block_mask.nbytes > 0, before)
                for _ in range(3):
                    out.zero_()
                    graph.replay()
                    torch.cuda.synchronize()
                    self.holds(case, out)
                del graph


    def captured(self, block_mask):
        """A graph of one call, and its output."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        out = self.run_with(block_mask)
        graph.capture_end()
        return graph, out

    def test_a_graph_waits_for_what_another_stream_is_still_finding(self):
        for case in ("runs", "bits"):
            finding, replaying = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(replaying):
                # A capture waits for the kernel's own compilation: the next one is there at once.
                self.captured(self.made(case))
            torch.cuda.synchronize()
            block_mask = self.made(case)
            with torch.cuda.stream(finding):
                torch.cuda._sleep(500_000_000)
                self.run_with(block_mask)
            with torch.cuda.stream(replaying):
                graph, out = self.captured(block_mask)
                self.assertFalse(finding.query(), "the capture came too late to show anything")
                graph.replay()
                replaying.synchronize()
            self.assertTrue(finding.query(), "it was waited for")
            self.holds(case, out)
            del graph


if __name__ == "__main__":
    unittest.main()
