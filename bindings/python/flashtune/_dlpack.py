"""Tensors of any library that exports DLPack, such as arrays of JAX and CuPy, for the length of one call.

A capsule is taken when the call begins and its deleter called when it ends, once. Where results come from says
:mod:`flashtune._other_libraries`; those on the host are new memory whose deleter is C's ``free``, so that whichever
thread lets go of one, at whatever time, runs no Python.
"""

import contextlib
import ctypes
import math
import threading

from ._library import BF16, F16, F32
from .errors import InvalidTensor, Unsupported

_FLOATS = {"float16": F16, "bfloat16": BF16, "float32": F32}
# (DLDataTypeCode, bits): the name of the dtype.
_DTYPES = {
    (0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (1, 32): "uint32",
    (2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16", (6, 8): "bool",
    (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}
# DLDeviceType: with memory that is pinned, and memory that is managed.
HOST, CUDA = (1, 3), (2, 13)
_READ_ONLY, _COPIED = 1, 2
_MOST_AXES = 8
# Where elements of a result begin: what JAX asks for, to take memory over as it is.
_ALIGNMENT = 64


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("dl_tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _Tensor),
    ]


# Names of capsules, which keep the pointer to them: before and after somebody took what is inside.
_KINDS = ((b"dltensor_versioned", b"used_dltensor_versioned", _Versioned), (b"dltensor", b"used_dltensor", _Managed))
_FRESH, _USED, _ = _KINDS[1]


def python(result, name, *arguments):
    # A prototype of our own: those of ctypes.pythonapi are shared by everybody in the process.
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = python(ctypes.c_int, "PyCapsule_IsValid", ctypes.py_object, ctypes.c_char_p)
pointer = python(ctypes.c_void_p, "PyCapsule_GetPointer", ctypes.py_object, ctypes.c_char_p)
_rename = python(ctypes.c_int, "PyCapsule_SetName", ctypes.py_object, ctypes.c_char_p)
_capsule = python(ctypes.py_object, "PyCapsule_New", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_allocate = _libc.aligned_alloc
_allocate.restype, _allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
_free = ctypes.cast(_libc.free, ctypes.c_void_p).value


class View:
    """A tensor that was taken: its address, shape, strides in elements, and the name of its dtype."""

    # The caller's tensor that this is a view of, and the home that results beside it are made by.
    of, home = None, None

    def __init__(self, capsule, managed, kind):
        self.capsule, self.managed, self.kind = capsule, managed, kind
        self.read_only = False

    def read(self, name):
        """Reads the description, and refuses what is none."""
        if self.kind is _Versioned:
            head = _Versioned.from_address(self.managed)
            if head.major != 1:
                raise Unsupported(
                    f"{name} is of DLPack {head.major}.{head.minor}, this package reads 1; export version 1 or older"
                )
            flags = head.flags
            self.read_only = bool(flags & (_READ_ONLY | _COPIED))
        t = self.kind.from_address(self.managed).dl_tensor
        if not 0 <= t.ndim <= _MOST_AXES:
            raise InvalidTensor(f"{name} has {t.ndim} axes by its DLPack; it has 0 to {_MOST_AXES}")
        if t.ndim and not t.shape:
            raise InvalidTensor(f"{name} has {t.ndim} axes by its DLPack, and a null shape; export its sizes")
        self.shape = tuple(t.shape[: t.ndim])
        if any(n < 0 for n in self.shape):
            raise InvalidTensor(f"{name} has the shape {self.shape} by its DLPack; sizes are not negative")
        self.strides = tuple(t.strides[: t.ndim]) if t.strides else compact(self.shape)
        if any(n > 1 and s < 0 for n, s in zip(self.shape, self.strides)):
            raise InvalidTensor(f"{name} has the strides {self.strides}; copy it, so that none is negative")
        self.dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
        if self.dtype is None:
            raise Unsupported(
                f"{name} has elements of DLPack's code {t.code}, {t.bits} bits and {t.lanes} lanes; convert it to one "
                f"of {', '.join(_CODES)}"
            )
        if t.device_type in HOST:
            self.device = "cpu"
        elif t.device_type in CUDA:
            self.device = f"cuda:{t.device_id}"
        else:
            raise Unsupported(
                f"{name} is on a device of DLPack's type {t.device_type}; copy it to the cpu or a cuda device"
            )
        self.address = (t.data or 0) + t.byte_offset
        if 0 not in self.shape and (not t.data or self.address >= 1 << 64):
            raise InvalidTensor(
                f"{name} lies at {self.address:#x} by its DLPack, which is no memory; check its exporter"
            )
        return self

    def release(self):
        """Gives back what was taken; again, it does nothing."""
        managed, self.managed = self.managed, None
        if managed is not None:
            deleter = self.kind.from_address(managed).deleter
            if deleter:
                _delete(deleter)(managed)

    # Memory for the length of a call, such as rotated queries.
    __del__ = release

    def __dlpack_device__(self):
        return (1, 0) if self.device == "cpu" else (2, int(self.device[5:]))

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.capsule


def compact(shape):
    """Strides of a compact row-major tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def take(name, t, stream=None):
    """A :class:`View` of what a tensor exports, to be released."""
    told = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = t.__dlpack__(**told, max_version=(1, 0), copy=False)
        except TypeError:
            # Of the protocol before versions.
            capsule = t.__dlpack__(**told)
    except Exception as e:
        raise InvalidTensor(f"{name} is a {type(t).__name__} that exports no DLPack: {e}") from e
    for fresh, used, kind in _KINDS:
        if type(capsule).__name__ == "PyCapsule" and _is_valid(capsule, fresh):
            view = View(capsule, pointer(capsule, fresh), kind)
            _rename(capsule, used)
            try:
                return view.read(name)
            except BaseException:
                view.release()
                raise
    raise InvalidTensor(
        f"{name} is a {type(t).__name__} whose __dlpack__ gave {capsule!r}; it gives a new capsule that nobody has "
        "taken"
    )


def adopted(managed, what):
    """A tensor of which this process has the description, as a :class:`View` whose capsule a library may take."""
    return View(_capsule(managed, _FRESH, None), managed, _Managed).read(what)


def is_taken(view):
    """Whether somebody has taken what is in the capsule of :func:`adopted`, and owns it; if not, nobody can from now
    on."""
    if _is_valid(view.capsule, _FRESH):
        _rename(view.capsule, _USED)
        return False
    return True


def code_of(dtype):
    """DLPack's code and bits of a dtype."""
    return _CODES[dtype]


class _Call(threading.local):
    """The stream of the call that a thread is in."""

    stream = 0


_call = _Call()


@contextlib.contextmanager
def on_stream(stream):
    """Calls of this thread on tensors that were taken go to a stream."""
    before, _call.stream = _call.stream, stream
    try:
        yield
    finally:
        _call.stream = before


def result(shape, dtype):
    """New memory on the host, as a :class:`View` whose capsule a library may take: one block with the description
    before the elements, which C's ``free`` gives back."""
    code, bits = _CODES[dtype]
    head = ctypes.sizeof(_Managed) + 2 * 8 * len(shape)
    head += -head % _ALIGNMENT
    size = head + max(1, math.prod(shape)) * bits // 8
    managed = _allocate(_ALIGNMENT, size + -size % _ALIGNMENT)
    if not managed:
        raise MemoryError(f"no memory for a result of {size} bytes")
    ctypes.memset(managed, 0, head)
    block, axes = _Managed.from_address(managed), ctypes.c_int64 * len(shape)
    sizes = managed + ctypes.sizeof(_Managed)
    axes.from_address(sizes)[:] = shape
    axes.from_address(sizes + 8 * len(shape))[:] = compact(shape)
    block.deleter = _free
    t = block.dl_tensor
    t.data, t.device_type, t.ndim, t.code, t.bits, t.lanes = managed + head, 1, len(shape), code, bits, 1
    t.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    t.strides = ctypes.cast(sizes + 8 * len(shape), ctypes.POINTER(ctypes.c_int64))
    return adopted(managed, "a result")


class Views:
    """The adapter of tensors that were taken. As :class:`flashtune._tensors.NumPy`."""

    known_calls = None

    def by_operator(self, _q, _k, _v, _program=None):
        return False

    def narrow_and_graded(self, _q, _k, _v):
        return False

    def rows(self, _table, _index):
        raise Unsupported(
            "cache_batch_idx beside a block_table has its rows gathered by PyTorch or NumPy; gather those of other "
            "libraries before the call"
        )

    def unseen(self, _q, _k, _v):
        return None

    def forms_of(self, _ts):
        return None

    def device(self, q, k, v):
        for name, t in (("k", k), ("v", v)):
            if type(t) is not View:
                raise InvalidTensor(f"{name} is a {type(t).__name__}; pass a tensor that exports DLPack, as q does")
            if t.device != q.device:
                raise InvalidTensor(f"q is on {q.device}, {name} on {t.device}; move them to one device")
        return q.device

    def name(self, device):
        return device

    def is_tensor(self, t):
        return type(t) is View

    def check_out(self, out, device):
        if type(out) is not View or out.device != device:
            raise InvalidTensor(
                f"out is a {type(out).__name__} or on another device than q ({device}); allocate it there"
            )
        if out.read_only:
            raise InvalidTensor("out is read-only, or a copy of what was passed; pass memory that can be written")

    def describe(self, name, t, bshd):
        from ._tensors import four_dims

        if len(t.shape) != 4:
            raise four_dims(name, t.shape, bshd)
        if t.dtype not in _FLOATS:
            raise Unsupported(f"{name} is {t.dtype}; dtypes are float16, bfloat16 and float32; convert the tensor")
        order = (0, 2, 1, 3) if bshd else (0, 1, 2, 3)
        sizes, strides = (t.shape[i] for i in order), (t.strides[i] for i in order)
        return t.address, *sizes, *strides, _FLOATS[t.dtype], 0

    def forms(self, q, k, v):
        return "DLPack", q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype

    def addresses(self, q, k, v):
        return q.address, k.address, v.address

    def side(self, name, t, device):
        if type(t) is not View:
            raise InvalidTensor(
                f"the value of {name} is a {type(t).__name__}; pass a tensor that exports DLPack, or a number"
            )
        if t.device != device:
            raise InvalidTensor(f"the tensor {name} is on {t.device}, q on {device}; move it there")
        return t.address, t.shape, t.strides, t.dtype

    def empty(self, shape, like):
        return like.home.empty(tuple(shape), like.dtype)

    def empty_wide(self, shape, like):
        return like.home.empty(tuple(shape), "bfloat16")

    def empty_like(self, like):
        return like.home.empty(like.shape, like.dtype)

    def empty_lse(self, shape, like):
        return like.home.empty(tuple(shape), "float32")

    def full(self, n, value, dtype, like):
        return like.home.full(n, value, dtype)

    def is_writeable(self, t):
        return not t.read_only

    def address(self, t):
        return t.address

    def stream(self, _device):
        return _call.stream
