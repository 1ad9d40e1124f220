"""Bad input to engines on a GPU: an error that names what is wrong, nothing launched, and the engine works on.

Through the C ABI with packed arguments, because most of this is caught by the package's own checks of PyTorch's tensors
before the library sees it. What could end the process runs in one of its own.
"""

import ctypes
import threading
import time
import unittest

import numpy as np
from test_engine import python

import flashtune
from flashtune import _library as abi

try:
    import torch
except ImportError:
    torch = None

SHAPE = (1, 2, 8, 64)
N = 2 * 8 * 64


def tensor(address, shape=SHAPE, strides=None, dtype=abi.BF16, reserved=0):
    b, h, s, d = shape
    return (address, *shape, *(strides or (h * s * d, s * d, d, 1)), dtype, reserved)


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device, or no PyTorch to reach it")
class Refused(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = flashtune.Engine("cuda:0")
        cls.lib = abi.library()
        # For memory that PyTorch does not manage.
        cls.driver = ctypes.CDLL("libcuda.so.1")
        cls.q, cls.k, cls.v, cls.o = (
            torch.full(SHAPE, float(i), dtype=torch.bfloat16, device="cuda:0") for i in range(4)
        )

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()

    def packed(
        self, size=None, flags=0, q=None, k=None, v=None, o=None, lse=0, stream=0, left=0, right=0, mask=0, scale=0.0
    ):
        given = [t or tensor(own.data_ptr()) for t, own in zip((q, k, v, o), (self.q, self.k, self.v, self.o))]
        size = abi.FORWARD_ARGS.size if size is None else size
        return abi.FORWARD_ARGS.pack(size, flags, *sum(given, ()), lse, stream, left, right, mask, scale)

    def status(self, handle=None, **change):
        handle = self.engine._handle if handle is None else handle
        number = self.lib.flashtune_forward(handle, self.packed(**change))
        return abi.failure(number) if number else None

    def refused(self, status, word, **change):
        error = self.status(**change)
        self.assertIsNotNone(error, change)
        self.assertEqual(error.status, f"FLASHTUNE_STATUS_{status}", error)
        self.assertIn(word, str(error))

    def computes(self):
        self.o.fill_(-1)
        self.assertIsNone(self.status(stream=torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        self.assertTrue((self.o == 2).all(), "every value is 2, so every output is")

    def tearDown(self):
        self.computes()

    def test_addresses(self):
        host = np.zeros(N, np.uint16)
        pinned = torch.zeros(N, dtype=torch.bfloat16).pin_memory()
        freed = ctypes.c_uint64()
        self.assertEqual(self.driver.cuMemAlloc_v2(ctypes.byref(freed), ctypes.c_size_t(64 << 20)), 0)
        self.assertEqual(self.driver.cuMemFree_v2(freed), 0)
        addresses = {
            "null": (0, "null"),
            "host": (host.ctypes.data, "host memory or freed"),
            "pinned": (pinned.data_ptr(), "host memory or freed"),
            "freed": (freed.value, "host memory or freed"),
            "nowhere": (0xDEAD0000, "host memory or freed"),
            "last": (2**64 - 16, "address"),
        }
        for name in "qkvo":
            for what, (address, word) in addresses.items():
                with self.subTest(name, what=what):
                    self.refused("INVALID_TENSOR", f"tensor {name}: ", **{name: tensor(address)})
                    if what != "last":
                        self.refused("INVALID_TENSOR", word, **{name: tensor(address)})
        for what in ("host", "pinned", "freed", "nowhere"):
            with self.subTest("lse", what=what):
                self.refused("INVALID_TENSOR", "tensor lse: ", lse=addresses[what][0])

    def test_shapes_and_strides_beyond_the_allocation(self):
        # Q and O, or K and V, agree with each other, and are longer than all memory of the device.
        long = (1, 2, 1 << 30, 64)
        q, o, k, v = (tensor(t.data_ptr(), long) for t in (self.q, self.o, self.k, self.v))
        self.refused("INVALID_TENSOR", "tensor q: extent", q=q, o=o)
        self.refused("INVALID_TENSOR", "tensor k: extent", k=k, v=v)
        self.refused("INVALID_TENSOR", "tensor v: extent", v=tensor(self.v.data_ptr(), strides=(0, 1 << 40, 64, 1)))
        self.refused("INVALID_TENSOR", "tensor k: extent", k=tensor(self.k.data_ptr(), strides=(0, 1 << 62, 64, 1)))

    def test_what_does_not_fit(self):
        q, k, v, o = (t.data_ptr() for t in (self.q, self.k, self.v, self.o))
        self.refused("INVALID_TENSOR", "tensor k: dtype is f16", k=tensor(k, dtype=abi.F16))
        self.refused("INVALID_TENSOR", "tensor q: dtype is 0", q=tensor(q, dtype=0))
        self.refused("INVALID_TENSOR", "tensor o: dtype", o=tensor(o, dtype=99))
        self.refused("INVALID_TENSOR", "tensor k: shape", k=tensor(k, (1, 2, 8, 32)))
        self.refused("INVALID_TENSOR", "tensor v: shape", v=tensor(v, (1, 2, 4, 64)))
        self.refused("INVALID_TENSOR", "tensor o: shape", o=tensor(o, (1, 2, 7, 64)))
        self.refused("INVALID_TENSOR", "tensor q: shape", q=tensor(q, (1, 2, -8, 64)))
        self.refused("INVALID_TENSOR", "stride of the last dim", q=tensor(q, strides=(N, 512, 64, 2)))
        self.refused("INVALID_TENSOR", "row stride", k=tensor(k, strides=(N, 512, -64, 1)))
        self.refused("INVALID_TENSOR", "tensor o: ", o=tensor(o, strides=(0, 0, 0, 1)))
        self.refused("INVALID_TENSOR", "tensor q: address", q=tensor(q + 1))
        self.refused("INVALID_TENSOR", "reserved", v=tensor(v, reserved=1))
        self.refused("UNSUPPORTED", "multiple", k=tensor(k, (1, 3, 5, 64)), v=tensor(v, (1, 3, 5, 64)))
        self.refused("INVALID_ARGUMENT", "struct_size", size=8)
        self.refused("INVALID_ARGUMENT", "flags", flags=16)
        self.refused("INVALID_ARGUMENT", "mask", mask=7)
        self.assertNotEqual(self.lib.flashtune_forward(self.engine._handle, None), 0)

    def test_numbers_that_are_no_stream(self):
        for stream in (3, 16, 4095):
            self.refused("INVALID_ARGUMENT", "CUstream", stream=stream)
        # The default streams, legacy and of the thread, are streams.
        for stream in (0, 1, 2):
            self.assertIsNone(self.status(stream=stream))

    def test_closed_and_strange_engines(self):
        with flashtune.Engine("cuda:0") as engine:
            handle = engine._handle
            self.assertIsNone(self.status(handle=handle))
        for stranger in (handle, 0, 2**64 - 1):
            self.refused("INVALID_HANDLE", "engine", handle=stranger)
        with self.assertRaises(flashtune.EngineClosed):
            engine.forward(self.q, self.k, self.v)

    def test_tensors_of_the_cpu_through_the_package(self):
        good = [self.q, self.k, self.v]
        for i in range(3):
            for other in (good[i].cpu(), good[i].cpu().pin_memory()):
                with self.assertRaisesRegex(flashtune.InvalidTensor, "cpu"):
                    self.engine.forward(*good[:i], other, *good[i + 1 :], layout="bhsd")
        with self.assertRaisesRegex(flashtune.InvalidTensor, "cuda:0"):
            flashtune.default_engine("cpu").forward(*good)
        with self.assertRaisesRegex(flashtune.InvalidTensor, "numpy|ndarray|float32"):
            self.engine.forward(self.q, np.zeros(SHAPE, np.float32), self.v)
        with self.assertRaisesRegex(flashtune.InvalidTensor, "dtype is f32"):
            self.engine.forward(self.q, self.k.float(), self.v, layout="bhsd")

    def test_an_engine_that_is_closed_while_other_threads_call_it(self):
        engine = flashtune.Engine("cuda:0")
        self.assertIsNone(self.status(handle=engine._handle))
        found, closing = [], threading.Event()

        def work():
            stream = torch.cuda.Stream()
            out = torch.empty_like(self.o)
            for _ in range(300):
                error = self.status(handle=engine._handle, o=tensor(out.data_ptr()), stream=stream.cuda_stream)
                stream.synchronize()
                found.append("ok" if error is None else error.status)
                if len(found) > 200:
                    closing.set()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        closing.wait(60)
        engine.close()
        for t in threads:
            t.join()
        self.assertEqual(len(found), 1200)
        self.assertLessEqual(set(found), {"ok", "FLASHTUNE_STATUS_INVALID_HANDLE"})
        self.assertEqual(found[0], "ok")

    def test_what_a_call_costs_the_host_through_the_c_abi(self):
        args = self.packed(stream=torch.cuda.current_stream().cuda_stream)
        forward, handle, best = self.lib.flashtune_forward, self.engine._handle, float("inf")
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.thread_time()
            for _ in range(100):
                forward(handle, args)
            best = min(best, (time.thread_time() - start) * 1e4)
        torch.cuda.synchronize()
        print(f"C ABI through ctypes: {best:.1f} us a call")
        self.assertLess(best, 15)


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device, or no PyTorch to reach it")
class Streams(unittest.TestCase):
    """Streams that are not the engine's, each in a process of its own. A stream that was destroyed is not among them:
    the driver reads what its handle points to, and has no way to ask first."""

    SETUP = """
import ctypes, torch, flashtune
from flashtune import _library as abi
cu = ctypes.CDLL('libcuda.so.1')
t = torch.full((1, 2, 8, 64), 2.0, dtype=torch.bfloat16, device='cuda:0')
d = (t.data_ptr(), 1, 2, 8, 64, 1024, 512, 64, 1, abi.BF16, 0)
engine = flashtune.Engine('cuda:0')
lib, out = abi.library(), torch.empty_like(t)
o = (out.data_ptr(), *d[1:])
def call(stream):
    return lib.flashtune_forward(engine._handle, abi.FORWARD_ARGS.pack(\
abi.FORWARD_ARGS.size, 0, *d, *d, *d, *o, 0, stream, 0, 0, 0, 0.0))
def made():
    stream = ctypes.c_uint64()
    assert cu.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream
assert call(0) == 0
torch.cuda.synchronize()
"""
    REST = """
status = call(stream)
print(lib.flashtune_status_name(status).decode(), lib.flashtune_last_error().decode() if status else '')
assert call(0) == 0
torch.cuda.synchronize()
assert (out == 2).all()
"""

    def outcome(self, make):
        done = python(self.SETUP + make + self.REST)
        self.assertEqual(done.returncode, 0, f"{make}\n{done.stdout}\n{done.stderr[-2000:]}")
        return done.stdout.split(maxsplit=1)

    def test_a_stream_of_another_context(self):
        make = (
            "own, other, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(0)\n"
            "cu.cuCtxGetCurrent(ctypes.byref(own))\n"
            "assert cu.cuCtxCreate_v2(ctypes.byref(other), 0, device) == 0\n"
            "stream = made().value\n"
            "cu.cuCtxSetCurrent(own)\n"
        )
        self.assertEqual(self.outcome(make)[0], "FLASHTUNE_STATUS_DEVICE")

    @unittest.skipIf(torch is None or torch.cuda.device_count() < 2, "one CUDA device")
    def test_a_stream_of_another_device(self):
        make = "stream = torch.cuda.Stream('cuda:1').cuda_stream\n"
        self.assertEqual(self.outcome(make)[0], "FLASHTUNE_STATUS_DEVICE")


if __name__ == "__main__":
    unittest.main()
