"""Calls like one before over tensors that the library reads by itself, through the DLPack exchange API of the tensors'
package (`__dlpack_c_exchange_api__`, PyTorch 2.10 and newer): it knows what they are like, and fills in addresses."""

import ctypes
import itertools
import sys

from . import _dlpack
from . import _library as abi

# Of a call, the result among them.
MOST_TENSORS = 12
# Numbers of an engine. More are those of a program whose calls all differ.
MOST_NUMBERS = 256
NOT_KNOWN = -1
_CAPSULE = b"dlpack_exchange_api"
_counted = itertools.count()


class _Api(ctypes.Structure):
    """DLPackExchangeAPI of version 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("take", ctypes.c_void_p),
        ("give", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


# flashtune_python, in its order.
_FUNCTIONS = (
    "PyLong_AsUnsignedLongLong",
    "PyLong_FromLong",
    "PyErr_Clear",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
_FASTCALL = 0x80


def _read_of(kind):
    """The address of the function that reads a tensor of a type, or None."""
    # What is looked up here is CPython's.
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None) if sys.implementation.name == "cpython" else None
    if capsule is None:
        return None
    try:
        at = _dlpack.pointer(capsule, _CAPSULE)
    except (ValueError, TypeError, ctypes.ArgumentError):
        return None
    while at:
        api = _Api.from_address(at)
        if api.major == 1:
            return api.read
        at = api.older
    return None


def of_type(kind):
    """What makes calls over tensors of exactly this type; None where their package has no such interface, or the
    interpreter hides what is called of it."""
    try:
        read = _read_of(kind)
        return KnownCalls(read) if read else None
    except AttributeError:
        return None


class KnownCalls:
    """Calls by the number that an engine has for all that is no tensor.

    call: a function of an engine's handle, a number, a stream, :attr:`read`, and tensors, the result the last of them.
    Makes a call that is known, and gives NOT_KNOWN or a status. It is called in place: a method around it takes as long
    again as what is around it now (0.25 us).
    read: the address of what reads tensors.
    """

    def __init__(self, read):
        self.read = read
        # By this handle calls keep the interpreter's lock.
        library, u64, pointer = ctypes.PyDLL(abi.library()._name), ctypes.c_uint64, ctypes.c_void_p
        functions = [ctypes.cast(getattr(ctypes.pythonapi, name), pointer) for name in _FUNCTIONS]
        library.flashtune_python_functions.restype = ctypes.c_int32
        abi.require(library.flashtune_python_functions((pointer * len(functions))(*functions)))
        self._remember = library.flashtune_remember_call
        self._remember.restype = ctypes.c_int32
        self._remember.argtypes = [
            u64, u64, pointer, ctypes.c_int32, ctypes.c_char_p, u64, ctypes.POINTER(u64), ctypes.POINTER(pointer), u64,
        ]  # fmt: skip
        # As an extension module would have it, which costs a tenth of a call by ctypes.
        function = ctypes.cast(library.flashtune_repeat_call, pointer).value
        method = _Method(b"repeat_call", function, _FASTCALL, None)
        new = _dlpack.python(ctypes.py_object, "PyCFunction_NewEx", pointer, ctypes.py_object, pointer)
        # It looks at its definition when it goes, and holds it as what it is a method of.
        self.call = new(ctypes.addressof(method), method, None)

    def remember(self, engine, options, ragged, args, places, tensors):
        """Of a call that succeeded, and that the library did not know: its arguments, and where in them the address of
        each tensor stands."""
        n = len(tensors)
        if n > MOST_TENSORS:
            return
        number = engine._numbers.get(options)
        if number is None:
            if len(engine._numbers) >= MOST_NUMBERS:
                engine._numbers.clear()
            # Of all engines: what one that was cleared has had is not met again.
            number = engine._numbers.setdefault(options, next(_counted))
        # An engine that another thread has closed knows nothing; the call has its result all the same.
        self._remember(
            engine._handle, number, self.read, ragged, args, len(args), (ctypes.c_uint64 * n)(*places),
            (ctypes.c_void_p * n)(*map(id, tensors)), n,
        )  # fmt: skip
