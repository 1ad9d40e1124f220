"""Arrays of CuPy, JAX and others on a GPU, by DLPack: where results are made and what is waited for, with libraries of
our own, and the kernels where there is a GPU."""

import ctypes
import types
import unittest
from unittest import mock

import numpy as np
from test_dlpack import Array, Counted, random

import flashtune
from flashtune import _dlpack, _other_libraries, _tensors

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None
try:
    import cupy
except ImportError:
    cupy = None


class Homes(Counted):
    """Where results are made, and what exporters are told, with a function in the place of a kernel: arrays say that
    they are on a GPU, and lie on the host."""

    class Writable(Array):
        """As CuPy: a current stream, and arrays that may be written."""

        current, entered, told = 0, [], []
        cuda = types.SimpleNamespace()

        def __init__(self, data, device=2):
            super().__init__(data, device=device)

        def __array_namespace__(self):
            return Homes.Writable

        def __dlpack__(self, **asked):
            Homes.Writable.told.append(asked["stream"])
            return super().__dlpack__(**asked)

        @classmethod
        def empty(cls, shape, dtype):
            return cls(np.empty(shape, dtype))

        @classmethod
        def full(cls, shape, value, dtype):
            return cls(np.full(shape, value, dtype))

    class Other(Array):
        """As JAX: neither."""

        def __init__(self, data, device=2):
            super().__init__(data, device=device)

        def __array_namespace__(self):
            return Homes.Other

        @classmethod
        def from_dlpack(cls, other):
            cls.device = other.__dlpack_device__()
            # The memory lies on the host in truth.
            other.device = "cpu"
            _dlpack._Managed.from_address(other.managed).dl_tensor.device_type = 1
            return cls(np.from_dlpack(other))

        @classmethod
        def full(cls, shape, value, dtype, device):
            return cls(np.full(shape, value, dtype))

    def setUp(self):
        super().setUp()

        class Device:
            def __init__(self, number):
                Homes.Writable.entered.append(number)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        stream = lambda: types.SimpleNamespace(ptr=Homes.Writable.current)  # noqa: E731
        Homes.Writable.cuda = types.SimpleNamespace(Device=Device, get_current_stream=stream)
        Homes.Writable.current, Homes.Writable.entered, Homes.Writable.told = 0, [], []

    def doubled(self, q, k=None, out=None, fails=False):
        """What a call does with its tensors: two results, the first of which is written."""
        tensors = _tensors.adapter(q)
        device = tensors.device(q, k, k)
        self.seen = device, tensors.stream(device)
        o = tensors.empty_like(q) if out is None else out
        ones = tensors.full(3, 7, "int32", q)
        read = np.ctypeslib.as_array((ctypes.c_int32 * 3).from_address(ones.address))
        self.assertEqual(read.tolist(), [7, 7, 7])
        lse = tensors.empty_lse((2,), q)
        if fails:
            raise ValueError("no")
        n = int(np.prod(q.shape))
        for t, values in ((o, 2 * np.ctypeslib.as_array((ctypes.c_float * n).from_address(q.address))), (lse, [3, 4])):
            (ctypes.c_float * len(values)).from_address(t.address)[:] = list(values)
        return o, lse

    def test_a_library_with_streams_has_its_own_arrays_as_results(self):
        q, k = Homes.Writable(random((2, 3))), Homes.Writable(random((2, 3)))
        for current, told in ((0, 1), (2, 2), (0x7F00, 0x7F00)):
            Homes.Writable.current = current
            out, lse = _other_libraries.through(self.doubled, {"q": q, "k": k})
            self.assertEqual(self.seen, ("cuda:0", current))
            self.assertEqual({type(out), type(lse)}, {Homes.Writable})
            np.testing.assert_array_equal(out.data, 2 * q.data)
            np.testing.assert_array_equal(lse.data, [3, 4])
            self.assertEqual((set(Homes.Writable.told), set(Homes.Writable.entered)), ({told}, {0}))
            self.assertEqual(Array.exported, Array.deleted)
            Homes.Writable.told = []
        self.assertEqual(_dlpack._call.stream, 0)
        mine = Homes.Writable(np.empty((2, 3), np.float32))
        self.assertIs(_other_libraries.through(self.doubled, {"q": q, "k": k, "out": mine})[0], mine)
        np.testing.assert_array_equal(mine.data, 2 * q.data)
        with self.assertRaisesRegex(ValueError, "no"):
            _other_libraries.through(self.doubled, {"q": q, "k": k, "fails": True})
        self.assertEqual(_dlpack._call.stream, 0)

    def test_a_library_without_streams_takes_results_over_behind_the_kernel(self):
        with flashtune.Engine("cpu") as engine:
            made = _other_libraries.abi.library().flashtune_empty_dl

            def on_gpu(*arguments):
                status = made(*arguments)
                _dlpack._Managed.from_address(arguments[-1].value).dl_tensor.device_type = 2
                return status

            waited = mock.Mock(return_value=0)
            engine_of = lambda _: engine  # noqa: E731
            library = types.SimpleNamespace(flashtune_empty_dl=on_gpu, flashtune_synchronize=waited)
            q, k = Homes.Other(random((2, 3))), Homes.Other(random((2, 3)))
            with (
                mock.patch("flashtune.engine.default_engine", engine_of),
                mock.patch.object(_other_libraries, "_open_engine", engine_of),
                mock.patch.object(_other_libraries.abi, "library", lambda: library),
            ):
                out, lse = _other_libraries.through(self.doubled, {"q": q, "k": k})
                waited.assert_called_once()
                self.assertEqual((Homes.Other.device, self.seen), ((2, 0), ("cuda:0", 0)))
                np.testing.assert_array_equal(out.data, 2 * q.data)
                np.testing.assert_array_equal(lse.data, [3, 4])
                with self.assertRaisesRegex(ValueError, "no"):
                    _other_libraries.through(self.doubled, {"q": q, "k": k, "fails": True})
                self.assertEqual(waited.call_count, 2)
                with (
                    mock.patch.object(Homes.Other, "full", None),
                    self.assertRaisesRegex(flashtune.Unsupported, "pass an array in its place"),
                ):
                    _other_libraries.through(self.doubled, {"q": q, "k": k})
                # Operands of a library whose memory goes by another stream are waited for as well.
                waited.reset_mock()
                _other_libraries.through(self.doubled, {"q": Homes.Writable(q.data), "k": k})
                waited.assert_called_once_with(engine._handle, None)
                _other_libraries.through(self.doubled, {"q": Homes.Writable(q.data), "k": Homes.Writable(k.data)})
                waited.assert_called_once()
            # They outlive the engine.
        np.testing.assert_array_equal(out.data, 2 * q.data)

    def test_two_devices(self):
        q, host = Homes.Writable(random((2, 3))), Array(random((2, 3)))
        for first, second in ((q, host), (host, q), (q, np.zeros((2, 3), np.float32))):
            with self.assertRaisesRegex(flashtune.InvalidTensor, "move them to one device"):
                _other_libraries.through(self.doubled, {"q": first, "k": second})


def _has_gpu():
    try:
        return cupy is not None and cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


@unittest.skipUnless(_has_gpu(), "no CuPy with a GPU")
class OnGpu(unittest.TestCase):
    """Arrays of CuPy and JAX on a GPU against the same arrays of NumPy on the host."""

    def close(self, found, want, by=2e-3):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), atol=by, rtol=by)

    def test_other_dtypes_are_refused_by_name(self):
        x = cupy.zeros((1, 4, 2, 16), cupy.uint8)
        with self.assertRaisesRegex(flashtune.Unsupported, "uint8"):
            flashtune.flash_attn_func(x, x, x)

    def test_cupy(self):
        q, k, v = (random((2, 257, 4, 64), "float16", i) for i in range(3))
        want, want_lse = flashtune.flash_attn_func(q, k, v, causal=True, return_lse=True)
        device = [cupy.asarray(x) for x in (q, k, v)]
        out, lse = flashtune.flash_attn_func(*device, causal=True, return_lse=True)
        self.assertIs(type(out), cupy.ndarray)
        self.close(cupy.asnumpy(out), want)
        self.close(cupy.asnumpy(lse), want_lse)
        # On a stream of its own: what is launched there before is waited for, and what comes behind waits.
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                late = [cupy.zeros_like(x) for x in device]
                busy = cupy.random.rand(2048, 2048, dtype=cupy.float32)
                for _ in range(4):
                    busy = busy @ busy * 1e-3
                for x, y in zip(late, device):
                    x += y
                again = flashtune.flash_attn_func(*late, causal=True)
                copy = again.copy()
                del late, again
            stream.synchronize()
            self.assertTrue((copy == out).all())
        mine = cupy.full_like(out, cupy.nan)
        with flashtune.Engine("cuda:0") as engine:
            self.assertIs(engine.forward(*device, causal=True, out=mine), mine)
            self.assertTrue((mine == out).all())
            table = random((4, 257), seed=9)
            options = {"score": "score + t[h, q]", "mask": "kv < x", "layout": "bshd", "return_weights": True}
            found = engine.forward(*device, tensors={"t": cupy.asarray(table), "x": 100}, **options)
            with flashtune.Engine("cpu") as host:
                for a, b in zip(found, host.forward(q, k, v, tensors={"t": table, "x": 100}, **options)):
                    self.close(cupy.asnumpy(a), b)

    def test_cupy_serving(self):
        rows = random((7, 4, 64), "float16"), random((7, 2, 64), "float16", 1), random((7, 2, 64), "float16", 2)
        begin = np.int32([0, 3, 7])
        want = flashtune.flash_attn_varlen_func(*rows, cu_seqlens_q=begin, cu_seqlens_k=begin, causal=True)
        on = cupy.asarray
        found = flashtune.flash_attn_varlen_func(
            *map(on, rows), cu_seqlens_q=on(begin), cu_seqlens_k=on(begin), max_seqlen_q=4, max_seqlen_k=4, causal=True
        )
        self.close(cupy.asnumpy(found), want)
        q, new = random((2, 1, 4, 64), "float16"), random((2, 1, 2, 64), "float16", 3)
        caches = [random((4, 16, 2, 64), "float16", i) for i in (4, 5)]
        table, lengths = np.int32([[0, 1], [2, 3]]), np.int32([9, 3])
        device = [on(c) for c in caches]
        want = flashtune.flash_attn_with_kvcache(
            q, *caches, new, new, cache_seqlens=lengths, block_table=table
        )
        found = flashtune.flash_attn_with_kvcache(
            on(q), *device, on(new), on(new), cache_seqlens=on(lengths), block_table=on(table)
        )
        self.close(cupy.asnumpy(found), want)
        np.testing.assert_array_equal(cupy.asnumpy(device[0]), caches[0])

    def test_jax(self):
        if jax is None or not any(d.platform == "gpu" for d in jax.devices()):
            self.skipTest("no JAX with a GPU")
        q, k, v = (random((2, 257, 4, 64), "float16", i) for i in range(3))
        want, want_lse = flashtune.flash_attn_func(q, k, v, causal=True, return_lse=True)
        for _ in range(20):
            # Still being computed, and given away by the caller.
            out, lse = flashtune.flash_attn_func(
                *(jnp.asarray(x) + 0 * jnp.ones((1500, 1500)).dot(jnp.ones((1500, 1500)))[0, 0].astype(x.dtype)
                  for x in (q, k, v)), causal=True, return_lse=True,
            )  # fmt: skip
            self.close(out * 1, want)
        self.close(lse, want_lse)
        self.assertEqual(next(iter(out.devices())).platform, "gpu")
        half = [jnp.asarray(x).astype(jnp.bfloat16) for x in (q, k, v)]
        found = flashtune.flash_attn_func(*half, causal=True)
        self.assertEqual(found.dtype, jnp.bfloat16)
        self.close(found.astype(jnp.float32), want, 2e-2)


if __name__ == "__main__":
    unittest.main()
