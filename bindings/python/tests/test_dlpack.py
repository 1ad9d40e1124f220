"""Tensors of other libraries, by DLPack: a library of our own that counts what it exports and what is given back, JAX
where it is installed, and capsules that nobody should have made."""

import ctypes
import unittest

import numpy as np
from reference import attention, visible

import flashtune
from flashtune import _dlpack

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None

_CODES = {
    "float32": (2, 32), "float16": (2, 16), "int32": (0, 32), "int64": (0, 64), "bool": (6, 8), "float64": (2, 64),
}


class Array:
    """An array of a library that exports and takes DLPack; ``change`` edits what it exports."""

    exported, deleted, alive = 0, 0, {}

    def __init__(self, data, versioned=True, change=None, device=1):
        self.data, self.versioned, self.change, self.device_type = data, versioned, change, device
        self.shape, self.dtype, self.capsule = data.shape, data.dtype, None

    def __array_namespace__(self):
        return Array

    @classmethod
    def from_dlpack(cls, other):
        return cls(np.from_dlpack(other))

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **asked):
        if not self.versioned and asked:
            raise TypeError("no such argument")
        a, kind = self.data, _dlpack._Versioned if self.versioned else _dlpack._Managed
        shape = (ctypes.c_int64 * a.ndim)(*a.shape)
        strides = (ctypes.c_int64 * a.ndim)(*(n // a.itemsize for n in a.strides))
        managed = kind()
        if self.versioned:
            managed.major, managed.flags = 1, not a.flags.writeable
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        t = managed.dl_tensor
        t.data, t.device_type, t.ndim = a.ctypes.data, self.device_type, a.ndim
        (t.code, t.bits), t.lanes = _CODES[a.dtype.name], 1
        t.shape, t.strides = shape, strides
        if self.change:
            self.change(managed, t)
        at = ctypes.addressof(managed)
        Array.alive[at] = managed, shape, strides, a
        Array.exported += 1
        self.capsule = _dlpack._capsule(at, _dlpack._KINDS[0 if self.versioned else 1][0], None)
        return self.capsule


def _delete(at):
    # A KeyError here would be a second call.
    Array.deleted += 1
    del Array.alive[at]


_deleter = _dlpack._delete(_delete)


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Counted(unittest.TestCase):
    def setUp(self):
        Array.exported = Array.deleted = 0

    def tearDown(self):
        self.assertEqual((Array.exported, len(Array.alive)), (Array.deleted, 0), "exported, alive; deleted, 0")


class Functions(Counted):
    """Results are those of NumPy's arrays, bit for bit, and of the caller's type."""

    def same(self, function, *args, **options):
        want = function(*args, **options)
        for versioned in (True, False):
            turn = lambda t: Array(t, versioned) if isinstance(t, np.ndarray) else t  # noqa: E731
            turned = {
                name: {n: turn(x) for n, x in t.items()} if isinstance(t, dict) else turn(t)
                for name, t in options.items()
            }
            before = Array.exported
            found = function(*map(turn, args), **turned)
            self.assertGreater(Array.exported, before)
            many = isinstance(want, tuple)
            self.assertEqual(isinstance(found, tuple), many)
            for a, b in zip(found if many else (found,), want if many else (want,), strict=True):
                self.assertIs(type(a), Array)
                np.testing.assert_array_equal(a.data, b)
            self.assertEqual(Array.exported, Array.deleted)

    def test_dense(self):
        for dtype in ("float32", "float16"):
            q, k, v = (random((2, 5, 2, 16), dtype, i) for i in range(3))
            self.same(flashtune.flash_attn_func, q, k, v, causal=True)
            self.same(flashtune.flash_attn_func, q, k, v, return_lse=True, softcap=5.0)
            self.same(flashtune.flash_attn_func, q, k[:, ::2], v[:, ::2], alibi_slopes=np.float32([0.5, 0.25]))
        self.same(flashtune.scaled_dot_product_attention, q, k, v, attn_mask=np.tri(2, dtype=bool))
        table = random((2, 5), seed=4)
        by_heads = (x.swapaxes(1, 2) for x in (q, k, v))
        self.same(
            flashtune.attention, *by_heads, score="score + t[h, q]", tensors={"t": table, "x": 3}, mask="kv < x",
            return_weights=True,
        )  # fmt: skip

    def test_dropout_and_its_state(self):
        q, k, v = (random((1, 5, 2, 16), seed=i) for i in range(3))
        options = {"dropout_p": 0.5, "rng_state": (3, 8), "causal": True}
        self.same(flashtune.flash_attn_func, q, k, v, **options)
        out, state = flashtune.flash_attn_func(Array(q), Array(k), Array(v), return_rng_state=True, **options)
        np.testing.assert_array_equal(out.data, flashtune.flash_attn_func(q, k, v, **options))
        self.assertEqual(state, (3, 8))

    def test_right_by_fp64(self):
        q, k, v = (random((1, 5, 2, 16), seed=i) for i in range(3))
        out, lse = flashtune.flash_attn_func(Array(q), Array(k), Array(v), causal=True, return_lse=True)
        want, want_lse = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), visible(5, 5, True))
        np.testing.assert_allclose(out.data.swapaxes(1, 2), want, atol=1e-5)
        np.testing.assert_allclose(lse.data, want_lse, atol=1e-5)

    def test_packed_and_cached(self):
        q, k, v = (random((7, 2, 16), seed=i) for i in range(3))
        begin = np.int32([0, 3, 7])
        self.same(
            flashtune.flash_attn_varlen_func, q, k, v, cu_seqlens_q=begin, cu_seqlens_k=begin, causal=True,
            return_softmax_lse=True, deterministic=True,
        )  # fmt: skip
        q, cache = random((2, 1, 2, 16)), random((4, 8, 2, 16), seed=1)
        table, lengths = np.int32([[0, 1], [2, 3]]), np.int32([9, 3])
        self.same(flashtune.flash_attn_with_kvcache, q, cache, cache, cache_seqlens=lengths, block_table=table)
        self.same(flashtune.flash_attn_with_kvcache, q, cache, cache, cache_seqlens=5)

    def test_new_rows_are_written_in_place(self):
        q, new = random((2, 1, 2, 16)), random((2, 1, 2, 16), seed=3)
        caches = [np.zeros((2, 8, 2, 16), np.float32) for _ in range(4)]
        lengths = np.int32([4, 7])
        want = flashtune.flash_attn_with_kvcache(q, *caches[:2], new, new, cache_seqlens=lengths)
        found = flashtune.flash_attn_with_kvcache(
            Array(q), *map(Array, caches[2:]), Array(new), Array(new), cache_seqlens=Array(lengths)
        )
        np.testing.assert_array_equal(found.data, want)
        np.testing.assert_array_equal(caches[2], caches[0])
        self.assertTrue((caches[2][1, 7] == new[1, 0]).all())
        rows, slots = random((3, 2, 16)), np.int64([0, -1, 9])
        self.assertIsNone(
            flashtune.reshape_and_cache_flash(Array(rows), Array(rows), *map(Array, caches[2:]), Array(slots))
        )
        np.testing.assert_array_equal(caches[3][1, 1], rows[2])

    def test_out_is_given_back(self):
        x = random((1, 4, 2, 8))
        out = Array(np.full_like(x, np.nan))
        with flashtune.Engine("cpu") as engine:
            self.assertIs(engine.forward(Array(x), Array(x), Array(x), out=out), out)
            np.testing.assert_array_equal(out.data, engine.forward(x, x, x))
            # Arrays of NumPy beside those of another library.
            self.assertIs(type(engine.forward(Array(x), x, x)), Array)
            with self.assertRaisesRegex(flashtune.InvalidTensor, "shares memory with q"):
                engine.forward(Array(x), Array(x), Array(x), out=Array(x))

    def test_a_result_outlives_the_call_and_is_aligned(self):
        x = random((1, 4, 2, 8))
        found = [flashtune.flash_attn_func(Array(x), Array(x), Array(x)) for _ in range(50)]
        want = flashtune.flash_attn_func(x, x, x)
        for one in found:
            np.testing.assert_array_equal(one.data, want)
            self.assertEqual(one.data.ctypes.data % 64, 0)

    def test_nothing_to_compute(self):
        empty = random((0, 4, 2, 8))
        self.same(flashtune.flash_attn_func, empty, empty, empty)


class Hostile(Counted):
    def refused(self, error, text, change=None, data=None, device=1, versioned=True, **options):
        good = random((1, 4, 2, 8))
        bad = Array(good if data is None else data, versioned, change, device)
        for where in range(3):
            given = [Array(good) for _ in range(3)]
            given[where] = bad
            with self.subTest(where=where), self.assertRaisesRegex(error, text):
                flashtune.flash_attn_func(*given, **options)
        self.assertEqual(Array.exported, Array.deleted)

    def test_descriptions_that_are_none(self):
        def put(**fields):
            def change(managed, t):
                for name, value in fields.items():
                    setattr(managed if hasattr(type(managed), name) else t, name, value)

            return change

        invalid, unsupported = flashtune.InvalidTensor, flashtune.Unsupported
        for error, text, change in [
            (invalid, "null shape", put(shape=None)),
            (invalid, "-1 axes", put(ndim=-1)),
            (invalid, "1000000 axes", put(ndim=1000000)),
            (invalid, "0x0 .*no memory", put(data=None)),
            (invalid, "no memory", put(byte_offset=(1 << 64) - 8)),
            (unsupported, "2 lanes", put(lanes=2)),
            (unsupported, "code 5", put(code=5)),
            (unsupported, "7 bits", put(bits=7)),
            (unsupported, "device of DLPack's type 10", put(device_type=10)),
            (invalid, "on cuda:0 by its capsule", put(device_type=2)),
            (unsupported, "DLPack 2.0", put(major=2)),
            (unsupported, "DLPack 0.0", put(major=0)),
        ]:
            with self.subTest(text):
                self.refused(error, text, change)
        self.refused(invalid, "sizes are not negative", lambda _, t: t.shape.__setitem__(1, -4))
        self.refused(invalid, "none is negative", data=random((1, 4, 2, 8))[:, ::-1])
        self.refused(unsupported, "64 bits", data=random((1, 4, 2, 8), "float64"))
        self.refused(invalid, r"\(\)", data=np.array(1, np.float32))
        self.refused(invalid, "null shape", put(shape=None), versioned=False)

    def test_strides_of_null_are_compact(self):
        x = random((2, 4, 2, 8))
        bare = Array(x, change=lambda _, t: setattr(t, "strides", None))
        np.testing.assert_array_equal(
            flashtune.flash_attn_func(bare, bare, bare).data, flashtune.flash_attn_func(x, x, x)
        )

    def test_a_deleter_of_null_is_none(self):
        x = random((1, 4, 2, 8))
        bare = Array(x, change=lambda managed, _: setattr(managed, "deleter", None))
        flashtune.flash_attn_func(bare, bare, bare)
        self.assertEqual((Array.exported, Array.deleted), (1, 0))
        Array.alive.clear()
        Array.exported = 0

    def test_devices_and_libraries(self):
        self.refused(flashtune.Unsupported, "type 7", device=7)
        self.refused(flashtune.Unsupported, "type 10", device=10)
        x = random((1, 4, 2, 8))

        class Lonely(Array):
            __array_namespace__ = property()

        Lonely.__module__ = "nowhere"
        with self.assertRaisesRegex(flashtune.Unsupported, "no from_dlpack.*pass out="):
            flashtune.flash_attn_func(Lonely(x), Lonely(x), Lonely(x))
        with self.assertRaisesRegex(flashtune.InvalidTensor, "kinds|is a list"):
            flashtune.flash_attn_func([x], x, x)
        with self.assertRaises(flashtune.InvalidTensor):
            flashtune.flash_attn_func(np.ma.masked_array(x), x, x)

    def test_capsules_that_are_taken_or_none(self):
        x = random((1, 4, 2, 8))

        class Used(Array):
            def __dlpack__(self, **asked):
                capsule = super().__dlpack__(**asked)
                _dlpack.View(capsule, _dlpack.pointer(capsule, b"dltensor_versioned"), _dlpack._Versioned).release()
                _dlpack._rename(capsule, b"used_dltensor_versioned")
                return capsule

        class No(Array):
            def __dlpack__(self, **asked):
                return 42

        class Raises(Array):
            def __dlpack__(self, **asked):
                raise BufferError("not today")

        for kind, text in ((Used, "nobody has taken"), (No, "gave 42"), (Raises, "not today")):
            with self.assertRaisesRegex(flashtune.InvalidTensor, text):
                flashtune.flash_attn_func(kind(x), Array(x), Array(x))

    def test_read_only_is_not_written(self):
        x = random((1, 4, 2, 8))
        fixed = x.copy()
        fixed.flags.writeable = False
        with flashtune.Engine("cpu") as engine:
            engine.forward(Array(fixed), Array(fixed), Array(fixed))
            with self.assertRaisesRegex(flashtune.InvalidTensor, "out is read-only"):
                engine.forward(Array(x), Array(x), Array(x), out=Array(fixed))
            copied = Array(x.copy(), change=lambda managed, _: setattr(managed, "flags", 2))
            with self.assertRaisesRegex(flashtune.InvalidTensor, "or a copy"):
                engine.forward(Array(x), Array(x), Array(x), out=copied)
        new = random((1, 1, 2, 8))
        with self.assertRaisesRegex(flashtune.InvalidTensor, "k_cache cannot be written"):
            flashtune.flash_attn_with_kvcache(
                Array(new), Array(fixed), Array(x), Array(new), Array(new), cache_seqlens=Array(np.int32([1]))
            )

    def test_a_library_that_takes_no_result(self):
        class Refuses(Array):
            @classmethod
            def from_dlpack(cls, other):
                cls.last = other.__dlpack__()
                raise ValueError("no")

            def __array_namespace__(self):
                return Refuses

        x = Refuses(random((1, 4, 2, 8)))
        with self.assertRaisesRegex(ValueError, "no"):
            flashtune.flash_attn_func(x, x, x)
        # What was freed cannot be taken later.
        self.assertFalse(_dlpack._is_valid(Refuses.last, b"dltensor"))


@unittest.skipIf(jax is None, "JAX is not installed")
class Jax(unittest.TestCase):
    def test_arrays_of_jax(self):
        x = random((2, 5, 2, 16))
        want = flashtune.flash_attn_func(x, x, x, causal=True)
        # What is still being computed is waited for.
        with jax.default_device(jax.devices("cpu")[0]):
            lazy = jnp.asarray(x) + jnp.zeros((1500, 1500)).dot(jnp.ones((1500, 1500)))[0, 0]
        out, lse = flashtune.flash_attn_func(lazy, lazy, lazy, causal=True, return_lse=True)
        self.assertIsInstance(out, jax.Array)
        np.testing.assert_array_equal(np.asarray(out), want)
        self.assertEqual(lse.shape, (2, 2, 5))
        half = lazy.astype(jnp.bfloat16)
        self.assertEqual(flashtune.flash_attn_func(half, half, half).dtype, jnp.bfloat16)

    def test_arrays_of_jax_are_not_written(self):
        x, new = jnp.zeros((1, 4, 2, 8)), jnp.ones((1, 1, 2, 8))
        with self.assertRaisesRegex(flashtune.InvalidTensor, "cannot be written"):
            flashtune.flash_attn_with_kvcache(new, x, x, new, new, cache_seqlens=jnp.zeros(1, jnp.int32))
        self.assertTrue((x == 0).all())


if __name__ == "__main__":
    unittest.main()
