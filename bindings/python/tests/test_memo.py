"""The mask of the layer before: what makes it the same one, and what does not."""

import threading
import unittest
from unittest import mock

import numpy as np

import flashtune
from flashtune.functional import bools_at

try:
    import torch

    import flashtune.torch
except ImportError:
    torch = None

SIZES = (2, 3, 40, 16)


@unittest.skipIf(torch is None, "PyTorch is not installed")
class Memo(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.randn(SIZES) for _ in range(3))
        self.mask = self.some()

    def some(self):
        return torch.rand(SIZES[0], 1, SIZES[2], SIZES[2]) < 0.5

    def call(self, mask, k=None):
        """The call, beside PyTorch's own kernel."""
        k = self.k if k is None else k
        got = flashtune.scaled_dot_product_attention(self.q, k, self.v, attn_mask=mask)
        seen = mask.any(-1, keepdim=True)
        scores = (self.q @ k.mT * SIZES[3] ** -0.5).masked_fill(~mask, float("-inf"))
        want = torch.where(seen, torch.softmax(scores, -1).nan_to_num() @ self.v, torch.zeros(()))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        return got

    def test_layers_with_one_mask_look_once(self):
        with flashtune.torch.mask_memo() as memo:
            for _ in range(3):
                self.call(self.mask)
            # Views of it that are the whole of it, as Transformers' layers make them.
            self.call(self.mask[:, :, :, : SIZES[2]])
            self.assertEqual((memo.hits, memo.misses), (3, 1))
        self.call(self.mask)
        self.assertEqual((memo.hits, memo.misses), (3, 1))

    def test_nothing_is_kept_outside_of_a_block(self):
        with mock.patch("flashtune._memo.BlockMask", side_effect=AssertionError("a block mask was made")):
            for _ in range(2):
                self.call(self.mask)
        with flashtune.torch.mask_memo() as memo:
            self.call(self.mask)
            held = memo._block_mask
        self.assertTrue(held.closed)
        self.assertIsNone(memo._owners)

    def test_a_mask_changed_in_place_is_another(self):
        with flashtune.torch.mask_memo() as memo:
            self.call(self.mask)
            self.mask[:, :, :, 7] = ~self.mask[:, :, :, 7]
            self.call(self.mask)
            # By way of a view of it.
            self.mask.view(-1)[:5].fill_(True)
            self.call(self.mask)
            self.mask.copy_(self.some())
            self.call(self.mask)
            self.assertEqual((memo.hits, memo.misses), (0, 4))

    def test_what_pytorch_does_not_see_is_told_by_drop(self):
        """A foreign kernel leaves the version as it is: only in a block, and there `drop` is the caller's part."""
        with flashtune.torch.mask_memo() as memo:
            self.call(self.mask)
            version = self.mask._version
            np.asarray(self.mask)[:] = ~np.asarray(self.mask)
            self.assertEqual(self.mask._version, version)
            memo.drop()
            self.call(self.mask)
            self.assertEqual((memo.hits, memo.misses), (0, 2))
        with flashtune.torch.mask_memo() as memo:
            np.asarray(self.mask)[:] = ~np.asarray(self.mask)
            self.call(self.mask)
            self.assertEqual((memo.hits, memo.misses), (0, 1))

    def test_an_alias_with_a_version_of_its_own_is_another(self):
        with flashtune.torch.mask_memo() as memo:
            self.call(self.mask)
            alias = torch.from_numpy(self.mask.numpy())
            self.assertEqual(alias.data_ptr(), self.mask.data_ptr())
            self.call(alias)
            self.assertEqual((memo.hits, memo.misses), (0, 2))

    def test_memory_of_a_mask_is_not_given_to_another(self):
        with flashtune.torch.mask_memo() as memo:
            for _ in range(20):
                mask = self.some()
                address = mask.data_ptr()
                self.call(mask)
                del mask
                # The one before is still there.
                self.assertNotEqual(self.some().data_ptr(), address)
            self.assertEqual((memo.hits, memo.misses), (0, 20))

    def test_other_shapes_strides_and_sizes_are_others(self):
        wide = torch.rand(SIZES[0], 1, SIZES[2], 2 * SIZES[2]) < 0.5
        with flashtune.torch.mask_memo() as memo:
            half = wide[..., ::2]
            for mask in (wide[..., : SIZES[2]], wide[..., SIZES[2] :], half, half[:1], half[1:]):
                self.call(mask)
            self.assertEqual((memo.hits, memo.misses), (0, 5))
            # Other keys of the same sizes are no matter.
            self.call(self.mask, self.k.clone())
            self.call(self.mask, self.k.flip(2))
            self.assertEqual((memo.hits, memo.misses), (1, 6))

    def test_other_threads_and_inner_blocks_have_their_own(self):
        with flashtune.torch.mask_memo() as memo:
            self.call(self.mask)
            thread = threading.Thread(target=self.call, args=(self.mask,))
            thread.start()
            thread.join()
            with flashtune.torch.mask_memo() as inner:
                self.call(self.mask)
            self.call(self.mask)
            self.assertEqual((memo.hits, memo.misses), (1, 1))
            self.assertEqual((inner.hits, inner.misses), (0, 1))

    def test_captures_and_inference_mode_pass_it_by(self):
        with flashtune.torch.mask_memo() as memo:
            with mock.patch.object(torch.Tensor, "is_cuda", True):
                with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
                    from flashtune import _tensors

                    self.assertIsNone(_tensors.adapter(self.q).tell_apart(self.mask))
            with torch.inference_mode():
                self.call(self.some())
            self.assertEqual((memo.hits, memo.misses), (0, 0))

    def test_scores_are_the_calls_own(self):
        with flashtune.torch.mask_memo() as memo:
            for factor in (1.0, 2.0):
                slope = torch.rand(SIZES[1]) * factor
                texts = {"mask": "m[b, 0, q, kv]", "score": "score + slope[h] * (kv - q)"}
                tensors = {"m": self.mask, "slope": slope}
                got = flashtune.attention(self.q, self.k, self.v, tensors=tensors, **texts)
                memo_of, flashtune._memo._of_thread.memo = flashtune._memo.active(), None
                want = flashtune.attention(self.q, self.k, self.v, tensors=tensors, **texts)
                flashtune._memo._of_thread.memo = memo_of
                torch.testing.assert_close(got, want)
            self.assertEqual((memo.hits, memo.misses), (1, 1))

    def test_gradients_do_not_go_by_it(self):
        with flashtune.torch.mask_memo() as memo:
            q = self.q.clone().requires_grad_()
            flashtune.scaled_dot_product_attention(q, self.k, self.v, attn_mask=self.mask).sum().backward()
            self.assertEqual((memo.hits, memo.misses), (0, 0))

    @unittest.skipUnless(torch is not None and torch.cuda.is_available(), "no GPU")
    def test_on_a_gpu(self):
        q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        mask = (torch.rand(2, 1, 512, 512, device="cuda") < 0.3).repeat_interleave(1, 0)
        mask[:, :, 128:256, :256] = False

        def call():
            return flashtune.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        def plain():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        with torch.no_grad(), flashtune.torch.mask_memo() as memo:
            first = call()
            self.assertTrue(torch.equal(first, call()))
            self.assertEqual((memo.hits, memo.misses), (1, 1))
            self.assertGreater(memo._block_mask.nbytes, 0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call()
            self.assertEqual((memo.hits, memo.misses), (1, 1))
            for _ in range(2):
                mask.copy_(torch.rand(2, 1, 512, 512, device="cuda") < 0.3)
                mask[:, :, :, 0] = True
                graph.replay()
                torch.cuda.synchronize()
                torch.testing.assert_close(captured, plain(), atol=2e-2, rtol=2e-2)
                torch.testing.assert_close(call(), plain(), atol=2e-2, rtol=2e-2)
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            misses = memo.misses
            with torch.cuda.stream(other):
                found = call()
            torch.cuda.synchronize()
            self.assertEqual(memo.misses, misses + 1)
            torch.testing.assert_close(found, plain(), atol=2e-2, rtol=2e-2)


class Places(unittest.TestCase):
    def test_masks_that_are_shared_do_not_read_what_they_are_shared_by(self):
        query = (2, 3, 5, 8)
        for shape, want in [
            ((5, 7), "q, kv"),
            ((3, 5, 7), "h, q, kv"),
            ((1, 5, 7), "0, q, kv"),
            ((2, 1, 5, 7), "b, 0, q, kv"),
            ((1, 3, 5, 7), "0, h, q, kv"),
            ((2, 1, 1, 7), "b, 0, q, kv"),
        ]:
            self.assertEqual(bools_at(np.ones(shape, bool), query), want, shape)
        # What is one by itself is one of all there are.
        self.assertEqual(bools_at(np.ones((1, 1, 5, 7), bool), (1, 1, 5, 8)), "b, h, q, kv")
        repeated = np.broadcast_to(np.ones((2, 1, 5, 7), bool), (2, 3, 5, 7))
        self.assertEqual(bools_at(repeated, query), "b, 0, q, kv")


if __name__ == "__main__":
    unittest.main()
