"""Rows that a float mask leaves out whole: PyTorch's answer is the mean of V, since all of their scores are equal."""

import unittest

import flashtune

try:
    import torch
except ImportError:
    torch = None

B, H, S, K, D = 2, 3, 70, 133, 32


def masked(low, dtype):
    """A mask ``[batch, 1, rows, keys]``: whole rows, all keys behind one, and of a row all but the least alike."""
    mask = torch.zeros(B, 1, S, K)
    mask[0, 0, 5:20] = low
    mask[1, 0, :, 40:] = low
    mask[1, 0, 50:] = low
    mask[:, :, 3, ::2] = low
    mask[:, :, 30] = low
    mask[:, :, 30, 7] = low * 0.9
    return mask.to(dtype)


@unittest.skipIf(torch is None, "no PyTorch")
class FarFromZero(unittest.TestCase):
    def plain(self, q, k, v, mask):
        scores = q.float() @ k.float().transpose(-1, -2) / D**0.5 + mask.float()
        return torch.softmax(scores, -1)

    def near(self, got, want, dtype):
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        error = (got.float() - want.float()).abs().max().item()
        self.assertLess(error, bound)

    def test_outputs_weights_and_gradients(self):
        dtypes = [(t, t, torch.finfo(t).min) for t in (torch.float32, torch.bfloat16)]
        # Masks of float32, whose least number float16 does not have; numbers that are no dtype's least.
        dtypes += [(t, torch.float32, low) for t in (torch.float32, torch.float16) for low in (-1e9, -1e30, -3.4e38)]
        for dtype, of_mask, low in dtypes:
            with self.subTest(dtype=dtype, low=low):
                generator = torch.Generator().manual_seed(7)
                make = lambda n: torch.randn(B, H, n, D, generator=generator).to(dtype)
                q, k, v, dout = make(S).requires_grad_(), make(K).requires_grad_(), make(K).requires_grad_(), make(S)
                mask = masked(low, of_mask)
                p = self.plain(q, k, v, mask)
                want = p @ v.float()
                out = flashtune.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                self.near(out, want, dtype)
                # The mean of V, in other words.
                self.near(out[0, :, 10], v[0].float().mean(1), dtype)
                gradients = torch.autograd.grad(out, (q, k, v), dout)
                for got, expected in zip(gradients, torch.autograd.grad(want, (q, k, v), dout.float())):
                    self.near(got, expected, dtype)
                q, k, v = (x.detach() for x in (q, k, v))
                _, weights = flashtune.scaled_dot_product_attention(q, k, v, attn_mask=mask, return_weights=True)
                self.assertLess((weights - p).abs().max().item(), 1e-5)

    def test_log_sum_exp_is_the_number_itself(self):
        low = torch.finfo(torch.float32).min
        q, k = torch.randn(1, 1, 4, D), torch.randn(1, 1, 50, D)
        t = torch.full((4, 50), low)
        score = "t: float[q_len, kv_len]; score + t[q, kv]"
        out, lse = flashtune.attention(q, k, k, score=score, tensors={"t": t}, return_lse=True)
        self.assertEqual(lse.flatten().tolist(), [low] * 4)
        self.near(out, k.mean(2, keepdim=True).expand_as(out), torch.float32)

    def test_gradients_of_the_mask_itself(self):
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(1, 2, n, D, generator=generator) for n in (9, 20, 20))
        mask = torch.zeros(1, 2, 9, 20)
        mask[:, :, 4] = torch.finfo(torch.float32).min
        mask.requires_grad_()
        want = self.plain(q, k, v, mask) @ v
        dout = torch.randn(want.shape, generator=generator)
        (expected,) = torch.autograd.grad(want, mask, dout)
        score = "t: float[1, heads, q_len, kv_len]; score + t[0, h, q, kv]"
        out = flashtune.attention(q, k, v, score=score, tensors={"t": mask})
        (got,) = torch.autograd.grad(out, mask, dout)
        self.near(got, expected, torch.float32)


if __name__ == "__main__":
    unittest.main()
