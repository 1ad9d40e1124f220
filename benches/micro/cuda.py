"""The CUDA driver and NVRTC by ctypes: what the microbenchmarks need of both, and nothing of PyTorch."""

import ctypes
import glob
import os
import statistics
import sys
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Failed(RuntimeError):
    pass


def nvrtc():
    """libnvrtc, from FLASHTUNE_NVRTC, beside the repository, of a Python package, or of a CUDA toolkit."""
    names = [os.environ.get("FLASHTUNE_NVRTC")]
    for folder in [HERE.parents[1] / ".toolchain", *map(Path, sys.path)]:
        names += sorted(glob.glob(str(folder / "nvidia" / "*" / "lib" / "libnvrtc.so.1?")), reverse=True)
    names += ["libnvrtc.so.13", *glob.glob("/usr/local/cuda*/lib64/libnvrtc.so.1?"), "libnvrtc.so"]
    for name in filter(None, names):
        try:
            # NVRTC looks for its builtins by name alone: found where the loader has them, or has loaded them.
            for builtins in glob.glob(str(Path(name).parent / "libnvrtc-builtins.so*")) if "/" in name else []:
                ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Failed("no libnvrtc was found: name it in FLASHTUNE_NVRTC")


def compile_cubin(source, name):
    """(cubin, log) of CUDA C++ for sm_90a."""
    lib = nvrtc()
    program, size = c_void_p(), c_size_t()

    def ask(what, *arguments):
        result = getattr(lib, what)(*arguments)
        if result and what != "nvrtcCompileProgram":
            raise Failed(f"{what} of {name}: {result}")
        return result

    ask("nvrtcCreateProgram", byref(program), source.encode(), name.encode(), 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v", b"--disable-warnings"]
    result = ask("nvrtcCompileProgram", program, len(options), (c_char_p * len(options))(*options))
    ask("nvrtcGetProgramLogSize", program, byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    ask("nvrtcGetProgramLog", program, log)
    log = log.value.decode(errors="replace")
    if result:
        raise Failed(f"{name} does not compile:\n{log}")
    ask("nvrtcGetCUBINSize", program, byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    ask("nvrtcGetCUBIN", program, cubin)
    ask("nvrtcDestroyProgram", byref(program))
    return cubin.raw, log


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        (name, c_uint) for name in ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared"]
    ] + [("stream", c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", c_uint)]


CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6
MAX_DYNAMIC_SHARED = 8


class Device:
    """Device 0 with a stream. Every call that fails raises `Failed` with its name."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, context = c_int(), c_void_p()
        self.ask("cuInit", 0)
        self.ask("cuDeviceGet", byref(device), 0)
        self.ask("cuDevicePrimaryCtxRetain", byref(context), device)
        self.ask("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.ask("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.multiprocessors = self.attribute(16, device)
        self.stream = c_void_p()
        self.ask("cuStreamCreate", byref(self.stream), 0)
        self.events = [c_void_p(), c_void_p()]
        for event in self.events:
            self.ask("cuEventCreate", byref(event), 0)

    def ask(self, what, *arguments):
        result = getattr(self.lib, what)(*arguments)
        if result:
            text = c_char_p()
            self.lib.cuGetErrorName(result, byref(text))
            raise Failed(f"{what}: {(text.value or b'?').decode()} ({result})")

    def attribute(self, which, device):
        value = c_int()
        self.ask("cuDeviceGetAttribute", byref(value), which, device)
        return value.value

    def allocate(self, size):
        address = c_uint64()
        self.ask("cuMemAlloc_v2", byref(address), c_size_t(size))
        self.clear(address.value, size)
        return address.value

    def free(self, address):
        self.ask("cuMemFree_v2", c_uint64(address))

    def clear(self, address, size):
        self.ask("cuMemsetD8_v2", c_uint64(address), 0, c_size_t(size))
        self.ask("cuCtxSynchronize")

    def read(self, address, count, kind=c_uint64):
        self.synchronize()
        host = (kind * count)()
        self.ask("cuMemcpyDtoH_v2", host, c_uint64(address), c_size_t(ctypes.sizeof(host)))
        return host

    def synchronize(self):
        self.ask("cuStreamSynchronize", self.stream)

    def kernel(self, cubin, name, shared):
        module, function = c_void_p(), c_void_p()
        self.ask("cuModuleLoadData", byref(module), cubin)
        self.ask("cuModuleGetFunction", byref(function), module, name.encode())
        self.ask("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, c_int(shared))
        return function

    def launch(self, function, grid, threads, shared, arguments, cluster=1, programmatic=False):
        """Integers are 64 bits where `arguments` has them as c_uint64, 32 bits otherwise."""
        values = [a if isinstance(a, ctypes._SimpleCData) else c_uint(a) for a in arguments]
        pointers = (c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        attributes = (LaunchAttribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = CLUSTER_DIMENSION
            attributes[count].value[0], attributes[count].value[1], attributes[count].value[2] = cluster, 1, 1
            count += 1
        if programmatic:
            attributes[count].id, attributes[count].value[0] = PROGRAMMATIC_SERIALIZATION, 1
            count += 1
        config = LaunchConfig(grid, 1, 1, threads, 1, 1, shared, self.stream, attributes, count)
        self.ask("cuLaunchKernelEx", byref(config), function, pointers, None)

    def milliseconds(self, work, repeats=5):
        """Median time of `work`, which enqueues on the stream, after a run that is not timed."""
        work()
        self.synchronize()
        times = []
        for _ in range(repeats):
            self.ask("cuEventRecord", self.events[0], self.stream)
            work()
            self.ask("cuEventRecord", self.events[1], self.stream)
            self.ask("cuEventSynchronize", self.events[1])
            elapsed = c_float()
            self.ask("cuEventElapsedTime", byref(elapsed), *self.events)
            times.append(elapsed.value)
        return statistics.median(times)

    def graph(self, work):
        """A function that replays what `work` enqueues."""
        graph, executable = c_void_p(), c_void_p()
        self.ask("cuStreamBeginCapture_v2", self.stream, 0)
        work()
        self.ask("cuStreamEndCapture", self.stream, byref(graph))
        self.ask("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        return lambda: self.ask("cuGraphLaunch", executable, self.stream)
