"""FlexAttention's public examples written anew, on flashtune and on PyTorch's own function in float64; and what is
refused."""

import math
import os
import unittest
import unittest.mock

import numpy as np
from torch_device import DEVICE, MISSING, check, gradients, randn, torch

import flashtune
from flashtune import flex

if torch is not None:
    from torch.nn.attention import flex_attention as theirs

B, H, S, D = 2, 4, 96, 32
FORTY_TWO = 42


def rows(n=S, heads=H, dim=D, **more):
    return [randn(B, heads, n, dim, seed=i, **more) for i in range(3)]


def reference(q, k, v, score_mod=None, mask_mod=None, **more):
    """PyTorch's own, which computes every score: in float64, or in what q is."""
    block_mask = None
    if mask_mod is not None:
        block_mask = theirs.create_block_mask(mask_mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device)
    with unittest.mock.patch.object(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        return theirs.flex_attention(q, k, v, score_mod, block_mask, **more)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@unittest.skipIf(torch is None, MISSING)
class Examples(unittest.TestCase):
    def same(self, score_mod=None, mask_mod=None, inputs=None, prepared=True, **more):
        """Outputs and log-sum-exps are PyTorch's, whichever way the mask comes."""
        q, k, v = rows() if inputs is None else inputs
        want, sums = reference(*(x.double() for x in (q, k, v)), score_mod, mask_mod, return_lse=True, **more)
        masks = [None]
        if mask_mod is not None:
            sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            masks = [theirs.create_block_mask(mask_mod, *sizes, device=DEVICE)]
            masks += [flashtune.create_block_mask(mask_mod, *sizes, device=DEVICE)] if prepared else []
        for block_mask in masks:
            out, lse = flashtune.flex_attention(q, k, v, score_mod, block_mask, return_lse=True, **more)
            self.assertEqual((out.shape, out.dtype, lse.dtype), (want.shape, q.dtype, torch.float32))
            torch.testing.assert_close(out.double(), want, rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(lse.double(), sums.double(), rtol=2e-5, atol=2e-4)
        return out

    def test_causal(self):
        self.same(mask_mod=causal)
        self.same(lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf")))

    def test_sliding_windows(self):
        window = 17

        def windowed(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

        self.same(mask_mod=windowed)
        by_mask = flex.and_masks(causal, lambda b, h, q, kv: abs(q - kv) <= window)
        self.same(mask_mod=by_mask)

    def test_prefixes(self):
        length = torch.tensor([3, 40], dtype=torch.int32, device=DEVICE)
        prefix = lambda b, h, q_idx, kv_idx: kv_idx < length[b]
        for join in (flex.or_masks, theirs.or_masks):
            self.same(mask_mod=join(causal, prefix))

    def test_documents(self):
        document = (torch.arange(S, device=DEVICE) // 20 * 7 % 5).to(torch.int32)

        def documents(b, h, q_idx, kv_idx):
            return document[q_idx] == document[kv_idx]

        for join in (flex.and_masks, theirs.and_masks):
            self.same(mask_mod=join(causal, documents))

    def test_documents_by_offsets(self):
        """Packed sequences, with a mask of positions within them."""
        offsets = torch.tensor([0, 10, 47, S], dtype=torch.int64, device=DEVICE)
        of = torch.repeat_interleave(torch.arange(3, device=DEVICE), offsets.diff())

        def packed(inner):
            def mask(b, h, q_idx, kv_idx):
                q, kv = q_idx - offsets[of[q_idx]], kv_idx - offsets[of[kv_idx]]
                return torch.where(of[q_idx] == of[kv_idx], inner(b, h, q, kv), False)

            return mask

        self.same(mask_mod=packed(lambda b, h, q, kv: (q >= kv) & (q - kv < 9)))

    def test_alibi(self):
        slopes = torch.exp2(-torch.arange(1, H + 1, device=DEVICE) * 8.0 / H)
        self.same(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), causal)
        self.same(lambda score, b, h, q, kv: score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv - q), causal)

    def test_soft_caps(self):
        cap = 7.5
        self.same(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), causal)
        self.same(lambda score, *_: (score / cap).tanh() * cap)

    def test_relative_positions(self):
        bias = randn(H, 2 * S, seed=4)
        self.same(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + S])
        self.same(lambda score, b, h, q_idx, kv_idx: score + bias[h][q_idx - kv_idx + S])
        self.same(lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx))
        # From the end, as tensors are indexed.
        self.same(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx])

    def test_buckets_of_t5(self):
        table = randn(H, 32, seed=5)

        def bucket(distance, count=32, most=128):
            exact = count // 2
            far = exact + (
                torch.log(distance.float() / exact) / math.log(most / exact) * (count - exact) + 1e-4
            ).to(torch.int64)
            return torch.where(distance < exact, distance, torch.minimum(far, torch.tensor(count - 1)))

        def biased(score, b, h, q_idx, kv_idx):
            return score + table[h, bucket(torch.clamp(q_idx - kv_idx, min=0))]

        self.same(biased, causal)

    def test_neighbourhoods_in_two_dimensions(self):
        width, kernel = 12, 5

        def natten(b, h, q_idx, kv_idx):
            q_x, q_y = q_idx // width, q_idx % width
            kv_x, kv_y = kv_idx // width, kv_idx % width
            x = q_x.clamp(kernel // 2, (S // width - 1) - kernel // 2)
            y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
            return ((x - kv_x).abs() <= kernel // 2) & ((y - kv_y).abs() <= kernel // 2)

        self.same(mask_mod=natten)

    def test_dilated_strided_and_global_keys(self):
        self.same(mask_mod=lambda b, h, q, kv: ((q - kv) % 4 == 0) & (q >= kv) | (kv < 3) | (q // 16 == kv // 16))
        self.same(mask_mod=lambda b, h, q, kv: (q & 7) >= (kv & 7))
        self.same(mask_mod=lambda b, h, q, kv: (q >> 3) == (kv >> 3))

    def test_pages(self):
        """Keys in pages, whose logical places a table has; unused pages have -1."""
        page = 8
        used = S // page - 3
        order = torch.randperm(S // page, generator=torch.Generator().manual_seed(2))
        logical = torch.full((B, S // page), -1, dtype=torch.int64)
        logical[:, order[:used]] = torch.arange(used)
        logical = logical.to(DEVICE)

        def paged(inner):
            def mask(b, h, q_idx, kv_idx):
                block = logical[b, kv_idx // page]
                kv = block * page + kv_idx % page
                return torch.where(block >= 0, inner(b, h, q_idx, kv), False)

            return mask

        self.same(mask_mod=paged(causal))

    def test_biases_of_all_kinds(self):
        dense, of_keys, of_heads = randn(H, S, S, seed=6), randn(B, S, seed=7), randn(H, seed=8)
        self.same(lambda score, b, h, q, kv: score + dense[h, q, kv])
        self.same(lambda score, b, h, q, kv: score * of_heads[h] + of_keys[b, kv], causal)
        half = dense.to(torch.bfloat16)
        self.same(lambda score, b, h, q, kv: score + half[h, q, kv].to(score.dtype))
        # Longer than the call goes.
        long = randn(H, S + 40, S + 24, seed=9)
        self.same(lambda score, b, h, q, kv: score + long[h, q, kv])

    def test_offsets_on_the_device_and_on_the_host(self):
        for device in {DEVICE, "cpu"}:
            offset = torch.tensor(60, dtype=torch.int32, device=device)
            q, k, v = randn(B, H, 5, D), randn(B, H, S, D, seed=1), randn(B, H, S, D, seed=2)
            mask = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
            traced = flex.trace_mask(mask, None, None, 5, S, DEVICE)
            # One that is on the host beside a GPU is read when it is traced.
            for step in (60, 61, 70) if device == DEVICE else (60,):
                offset.fill_(step)
                want = reference(q, k, v, None, lambda b, h, q_idx, kv_idx, step=step: q_idx + step >= kv_idx)
                got = flashtune.flex_attention(q, k, v, block_mask=traced)
                torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)

    def test_groups_of_heads(self):
        inputs = [randn(B, H, 40, D), randn(B, 2, S, D, seed=1), randn(B, 2, S, 64, seed=2)]
        slopes = torch.linspace(0.1, 0.4, H, device=DEVICE)
        score_mod = lambda score, b, h, q, kv: score - slopes[h] * abs(q - kv)
        self.same(score_mod, causal, inputs, enable_gqa=True, scale=0.3)

    def test_a_row_that_sees_nothing_gives_zero(self):
        q, k, v = rows()
        block_mask = flex.create_block_mask(lambda b, h, q, kv: (q > 5) & (kv < q), None, None, S, S, device=DEVICE)
        out, lse = flashtune.flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        self.assertFalse(out[:, :, :6].any())
        self.assertTrue((lse[:, :, :6] == -math.inf).all())

    def test_masks_without_words_are_none(self):
        for noop in (flex.noop_mask, theirs.noop_mask, lambda *_: True):
            block_mask = flex.create_block_mask(noop, None, None, S, S, device=DEVICE)
            torch.testing.assert_close(
                flashtune.flex_attention(*rows(), block_mask=block_mask), reference(*rows()), rtol=2e-4, atol=2e-5
            )

    def test_blocks_without_a_function(self):
        counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32, device=DEVICE)
        columns = torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]], dtype=torch.int32, device=DEVICE)
        block_mask = theirs.BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=32)
        live = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool, device=DEVICE)
        want = reference(*rows(), None, lambda b, h, q, kv: live[q // 32, kv // 32])
        for _ in range(2):
            got = flashtune.flex_attention(*rows(), block_mask=block_mask)
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)

    def test_functions_of_every_form(self):
        import functools

        def shifted(by, score, b, h, q, kv):
            return score + by * (q == kv)

        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("of", torch.linspace(0.5, 1.5, H, device=DEVICE))

            def forward(self, score, b, h, q, kv):
                return score * self.of[h]

        self.same(functools.partial(shifted, 3.0))
        self.same(Scaled())
        by = 1.0

        def later(score, b, h, q, kv):
            return score * by

        first = self.same(later)
        by = 2.0
        self.assertGreater((self.same(later) - first).abs().max().item(), 0.01)

    def test_results_beside_the_output(self):
        q, k, v = rows()
        out, aux = flashtune.flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True))
        self.assertEqual(type(aux), theirs.AuxOutput)
        _, lse = flashtune.flex_attention(q, k, v, return_lse=True, kernel_options={"BLOCK_M": 64})
        torch.testing.assert_close(aux.lse, lse, rtol=0, atol=0)
        with self.assertRaisesRegex(flashtune.Unsupported, "max_scores"):
            flashtune.flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))
        with self.assertRaisesRegex(flashtune.InvalidArgument, "both given"):
            flashtune.flex_attention(q, k, v, return_lse=True, return_aux=theirs.AuxRequest(lse=True))

    def test_gradients(self):
        slopes = torch.linspace(0.1, 0.4, H, device=DEVICE)

        def score_mod(score, b, h, q, kv):
            return 3.0 * torch.sigmoid(score) + torch.log(1.0 + torch.exp(score)) - slopes[h] * torch.sqrt(abs(q - kv))

        def ours(q, k, v):
            block_mask = flex.create_block_mask(causal, None, None, S, S, device=DEVICE)
            return flashtune.flex_attention(q, k, v, score_mod, block_mask, return_lse=True)

        def unfused(q, k, v):
            at = torch.arange(S, device=DEVICE)
            score = q @ k.transpose(-1, -2) * D**-0.5
            far = slopes.to(q.dtype)[:, None, None] * (at[:, None] - at).abs().to(q.dtype).sqrt()
            score = 3.0 * score.sigmoid() + torch.log(1.0 + torch.exp(score)) - far
            score = score.masked_fill(at[:, None] < at, -math.inf)
            return score.softmax(-1) @ v, score.logsumexp(-1)

        inputs = rows()
        check(self, gradients(ours, *inputs), lambda *x: gradients(unfused, *x), *inputs)

    def test_gradients_of_captured_tensors(self):
        """Of a bias, a relative table by a computed index, slopes, and a scalar."""

        def mods(bias, table, slope, cap):
            return [
                lambda score, b, h, q, kv: score + bias[h, q, kv],
                lambda score, b, h, q, kv: score + table[kv - q + S - 1, h],
                lambda score, b, h, q, kv: score + slope[h] * (kv - q),
                lambda score, b, h, q, kv: cap * torch.tanh(score / cap) + 0.5 * bias[h, q, kv],
            ]

        shapes = [(H, S, S), (2 * S - 1, H), (H,), ()]
        captured = [0.3 * randn(*shape or [1], seed=10 + i).reshape(shape) for i, shape in enumerate(shapes)]
        captured[3] = captured[3].abs() + 1
        at = torch.arange(S, device=DEVICE)
        places = [torch.arange(n, device=DEVICE).view(-1, *[1] * left) for n, left in ((B, 3), (H, 2), (S, 1))] + [at]
        for nth, reads in enumerate([[0], [1], [2], [0, 3]]):

            def ours(q, k, v, *captured, nth=nth):
                return (flashtune.flex_attention(q, k, v, mods(*captured)[nth]),)

            def unfused(q, k, v, *captured, nth=nth):
                score = mods(*captured)[nth](q @ k.transpose(-1, -2) * D**-0.5, *places)
                return (score.softmax(-1) @ v,)

            found = []
            for attend, dtype in ((ours, torch.float32), (unfused, torch.float64)):
                inputs = [t.detach().to(dtype).requires_grad_() for t in (*rows(), *captured)]
                (out,) = attend(*inputs)
                out.backward(torch.ones_like(out) * torch.linspace(-1, 1, D, device=DEVICE, dtype=dtype))
                found.append([t.grad for t in inputs])
            for i, (got, want) in enumerate(zip(*found)):
                self.assertEqual(got is None, want is None, (nth, i))
                self.assertEqual(got is not None, i < 3 or i - 3 in reads, (nth, i))
                if got is not None:
                    most = want.abs().max().item()
                    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4 * most, msg=f"{nth}, {i}")

    def test_compiled_code(self):
        slopes = torch.linspace(0.1, 0.4, H, device=DEVICE)
        score_mod = lambda score, b, h, q, kv: score - slopes[h] * abs(q - kv)
        q, k, v = rows()
        block_mask = flex.create_block_mask(causal, None, None, S, S, device=DEVICE)
        want = flashtune.flex_attention(q, k, v, score_mod, block_mask)

        @torch.compile(backend="aot_eager")
        def between_graphs(q, k, v):
            return flashtune.flex_attention(q * 1.0, k, v, score_mod, block_mask) * 1.0

        torch.testing.assert_close(between_graphs(q, k, v), want, rtol=0, atol=0)
        traced = flex.trace_score(score_mod, q, k)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def one_graph(q, k, v):
            return flashtune.attention(q, k, v, score=traced.text, tensors=traced.tensors, block_mask=block_mask)

        torch.testing.assert_close(one_graph(q, k, v), want, rtol=0, atol=0)


@unittest.skipIf(torch is None, MISSING)
class Words(unittest.TestCase):
    """Every operation that is written down gives what PyTorch gives: added to a score, of ints and of floats."""

    def same(self, *changes, positive=False, reference_on=DEVICE):
        """All in one kernel."""
        q, k, v = rows(40)
        if positive:
            q, k = q.abs(), k.abs()

        def score_mod(score, b, h, q, kv):
            return score + sum(0.25 * change(score, q, kv) for change in changes)

        want = reference(*(x.double().to(reference_on) for x in (q, k, v)), score_mod)
        got = flashtune.flex_attention(q, k, v, score_mod)
        torch.testing.assert_close(got.double(), want.to(DEVICE), rtol=5e-4, atol=5e-5)

    def test_of_floats(self):
        f = torch.nn.functional
        self.same(
            lambda s, q, kv: torch.exp(s) + s.exp2() - torch.expm1(0.5 * s),
            lambda s, q, kv: torch.sigmoid(s) * f.softplus(s) + f.silu(s) - f.logsigmoid(s),
            lambda s, q, kv: f.relu(s) + f.leaky_relu(s, 0.2) + torch.relu(-s),
            lambda s, q, kv: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0.1) + torch.clamp_max(s, 0.2),
            lambda s, q, kv: torch.maximum(s, 2 * s) - torch.minimum(s, torch.zeros_like(s)),
            # PyTorch maps no logsigmoid over batches on a GPU.
            reference_on="cpu",
        )
        self.same(
            lambda s, q, kv: s**2 - s**3 + (s + 20.0) ** 0.5 + (s + 20.0) ** -1 + torch.square(s) + 1.5**s + 2**s,
            lambda s, q, kv: torch.sign(s) + torch.abs(s) - abs(-s) + torch.where(torch.isnan(s), 0.0, s),
            lambda s, q, kv: torch.masked_fill(s, s > 0.5, -3.0) + s.masked_fill(kv > 3, 1.0),
            lambda s, q, kv: s.new_full((), 2.0) * torch.full_like(s, 0.5) + torch.isinf(s) * 1.0 + torch.isfinite(s),
        )
        self.same(
            lambda s, q, kv: torch.log(s) + s.log2() - torch.log10(s) + torch.log1p(s),
            lambda s, q, kv: torch.sqrt(s) + s.rsqrt() - torch.reciprocal(1 + s) + s.pow(1.25) + (s + 1) ** -0.5,
            positive=True,
        )

    def test_of_ints(self):
        self.same(
            lambda s, q, kv: (q * 3 + kv) // 7 - (q - kv) % 5 + (kv - q) // 4,
            lambda s, q, kv: torch.div(q - kv, 3, rounding_mode="trunc") + torch.div(q - kv, 3, rounding_mode="floor"),
            lambda s, q, kv: torch.fmod(q - kv, 3) + torch.remainder(q - kv, 3) + (q - kv) / 8 + 10 / (1 + kv),
            lambda s, q, kv: (q << 2) - (kv >> 1) + (q & 15) - (~kv) + 2**3 - 5 % (kv + 1),
            lambda s, q, kv: torch.bitwise_and(q, 3) + torch.bitwise_left_shift(kv, 1) - kv**2 // 9,
        )
        self.same(
            lambda s, q, kv: (q > kv) * 2 + (q == kv).to(torch.int32) - (q != kv).float() + (q < 3).int(),
            lambda s, q, kv: torch.minimum(q, kv) - torch.clamp(kv, max=5) + torch.maximum(q, torch.tensor(4)),
            lambda s, q, kv: torch.where((q > 3) & ~(kv < 2) | (q == 0) ^ (kv == 1), 1, -1),
            lambda s, q, kv: torch.where(torch.logical_and(q > 3, kv) | torch.logical_xor(q, kv), 1.5, 0),
            lambda s, q, kv: torch.isin(kv, torch.tensor([1, 5, 9], device=DEVICE)) * 2.0,
        )

    def test_rounding(self):
        self.same(
            # Away from whole numbers, which compilers may reach from either side.
            lambda s, q, kv: torch.floor(0.3 * kv - 4.05) + torch.ceil(0.3 * q - 0.05),
            lambda s, q, kv: torch.trunc(0.7 * kv - 9.05) + torch.round(0.5 * q),
            lambda s, q, kv: (0.3 * kv - 4.05).to(torch.int32) + (0.3 * kv - 4.05).floor().long(),
            lambda s, q, kv: (q * 0.5).round().int() + torch.floor(s * 0).to(torch.int64),
            lambda s, q, kv: (q / 3) // 2 + torch.floor_divide(kv - 20.5, 4),
        )


@unittest.skipIf(torch is None, MISSING)
class Refusals(unittest.TestCase):
    def refused(self, words, score_mod=None, mask_mod=None, error=flashtune.Unsupported):
        """The error has the words, this file, and the line of the operation."""
        with self.assertRaises(error) as caught:
            if score_mod is not None:
                flashtune.flex_attention(*rows(40), score_mod)
            else:
                flex.create_block_mask(mask_mod, B, H, 40, 40, device=DEVICE)
        message = str(caught.exception)
        for part in (words, os.path.basename(__file__), "line "):
            self.assertIn(part, message)
        return message

    def test_operations_without_words(self):
        table = torch.arange(40, device=DEVICE)
        for words, score_mod in (
            ("calls sin", lambda score, *_: torch.sin(score)),
            ("uses .cos of", lambda score, *_: score.cos()),
            ("calls erf", lambda score, *_: torch.erf(score)),
            ("takes the remainder of floats", lambda score, *_: score % 2.0),
            ("joins ints bit by bit (^)", lambda score, b, h, q, kv: score + (q ^ kv)),
            ("joins ints bit by bit (&)", lambda score, b, h, q, kv: score + (q & kv)),
            ("shifts by a traced value", lambda score, b, h, q, kv: score + (q << kv)),
            ("to a traced power", lambda score, b, h, q, kv: score**score),
            ("converts to int8", lambda score, *_: score.to(torch.int8)),
            ("slices a tensor", lambda score, b, h, q, kv: score + table[q:]),
            ("index_select", lambda score, b, h, q, kv: score + torch.index_select(table, 0, q)),
            ("rounds to 2 decimals", lambda score, *_: torch.round(score, decimals=2)),
            ("numpy.add.reduce", lambda score, *_: np.add.reduce(score)),
        ):
            message = self.refused(words, score_mod)
            self.assertIn("score_mod", message)
        self.assertIn("torch.sin(score)", self.refused("calls sin", lambda score, *_: torch.sin(score)))

    def test_control_flow_and_numbers(self):
        def branches(score, b, h, q, kv):
            if q > kv:
                return score
            return -score

        self.assertIn("`if q > kv:`", self.refused("branches on a traced value", branches))
        self.refused("branches", mask_mod=lambda b, h, q, kv: q >= kv and kv > 3)
        self.refused("branches", lambda score, b, h, q, kv: score + max(q, kv))
        self.refused("float()", lambda score, *_: score + math.exp(score))
        self.refused("int()", lambda score, b, h, q, kv: score + int(q))
        self.refused(".item()", lambda score, b, h, q, kv: score + q.item())
        self.refused("range()", lambda score, b, h, q, kv: score + [1, 2, 3][q])
        self.refused("iterates", lambda score, b, h, q, kv: score + sum(q))

    def test_tensors_that_do_not_fit(self):
        table, deep = torch.zeros(40, 40, device=DEVICE), torch.zeros(1, 1, 1, 1, 1, device=DEVICE)
        wrong = flashtune.InvalidTensor
        self.refused("are not indexed", lambda s, b, h, q, kv: s + table[q], error=wrong)
        self.refused("by 3 indices", lambda s, b, h, q, kv: s + table[b, q, kv], error=wrong)
        self.refused("shape (40, 40)", lambda s, *_: s + table, error=wrong)
        self.refused("by a float", lambda s, b, h, q, kv: s + table[s, q], error=wrong)
        self.refused("5 axes", lambda s, b, h, q, kv: s + deep[b, h, q, kv, 0])
        self.refused("float64", lambda s, b, h, q, kv: s + table.double()[q, kv])
        with self.assertRaisesRegex(wrong, "axis 0 of table, which has length 40, by q, which goes to 96"):
            flashtune.flex_attention(*rows(), lambda s, b, h, q, kv: s + table[q, kv])

    def test_what_is_no_mask_or_function(self):
        with self.assertRaisesRegex(flashtune.Unsupported, "gives a float; a mask is a bool"):
            flex.create_block_mask(lambda b, h, q, kv: q * 0.5, None, None, S, S, device=DEVICE)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "score_mod is a str"):
            flashtune.flex_attention(*rows(), "score * 2.0")
        with self.assertRaisesRegex(flashtune.InvalidArgument, "block_mask is a function"):
            flashtune.flex_attention(*rows(), block_mask=causal)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "H is None, and mask_mod reads h"):
            flex.create_block_mask(lambda b, h, q, kv: h < 2, None, None, S, S, device=DEVICE)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "made for 96 queries and 96 keys, the call has 40"):
            flashtune.flex_attention(*rows(40), block_mask=theirs.create_block_mask(causal, 1, 1, S, S, device=DEVICE))
        with self.assertRaisesRegex(flashtune.InvalidArgument, "pass functions"):
            flex.and_masks("causal")
        sliced = theirs.create_block_mask(causal, 1, 1, S, S, device=DEVICE)[:, :, :1]
        with self.assertRaisesRegex(RuntimeError, "sliced"):
            flashtune.flex_attention(*rows(), block_mask=sliced)


class WithNumPy(unittest.TestCase):
    def test_arrays_that_a_function_has_captured(self):
        random = np.random.default_rng(0).standard_normal
        q, k, v = (random((B, H, 40, D)).astype("float32") for _ in range(3))
        slopes, document = np.linspace(0.1, 0.4, H, dtype="float32"), np.arange(40, dtype="int32") // 7

        def helper(q, kv):
            return document[q] == document[kv]

        block_mask = flex.create_block_mask(
            lambda b, h, q, kv: helper(q, kv) & (q >= kv), None, None, 40, 40, device="cpu"
        )
        score_mod = lambda s, b, h, q, kv: s - slopes[h] * np.sqrt(np.abs(q - kv))
        out = flashtune.flex_attention(q, k, v, score_mod, block_mask)
        at = np.arange(40)
        score = np.einsum("bhqd,bhkd->bhqk", q, k, dtype="float64") * D**-0.5
        score -= slopes[:, None, None] * np.sqrt(np.abs(at[:, None] - at))
        seen = (document[:, None] == document) & (at[:, None] >= at)
        p = np.exp(score - score.max(-1, keepdims=True)) * seen
        want = (p / p.sum(-1, keepdims=True)) @ v
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)

    def test_globals_are_looked_at_in_every_call(self):
        global FORTY_TWO
        traced = lambda: flex.trace_mask(lambda b, h, q, kv: q + FORTY_TWO >= kv, 1, 1, 8, 8, "cpu").text
        FORTY_TWO = 42
        self.assertEqual(traced(), "((q + 42) >= kv)")
        FORTY_TWO = 43
        self.assertEqual(traced(), "((q + 43) >= kv)")


if __name__ == "__main__":
    unittest.main()
