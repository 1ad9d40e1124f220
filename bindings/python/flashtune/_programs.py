"""The score program of a call, packed as the library takes it."""

import ctypes
import numbers
import struct

from . import _library as abi
from .errors import InvalidArgument, InvalidTensor, Unsupported

_LARGEST_INT = 1 << 63
_FLOAT = struct.Struct("=d")


class Program:
    """Texts of a mask, a score and a sink, and the values of the names that they read: numbers and tensors."""

    def __init__(self, mask=None, score=None, sink=None, tensors=None):
        self.written = mask, score, sink
        self.texts = [_text(name, text) for name, text in (("mask", mask), ("score", score), ("sink", sink))]
        if tensors is not None and not hasattr(tensors, "items"):
            raise InvalidArgument(
                f"tensors is a {type(tensors).__name__}; pass a dict from names to tensors and numbers"
            )
        self.values = dict(tensors or {})

    def form(self):
        """All of it but the memory of tensors, as a key, and the tensors; None where a value is neither one nor a plain
        number. Floats count by their bits, since 0.0 and -0.0 are equal and not the same."""
        key, tensors = [self.written], []
        for name, value in self.values.items():
            if type(value) is int:
                key += name, value
            elif type(value) is float:
                key += name, _FLOAT.pack(value)
            elif isinstance(value, numbers.Number):
                return None
            else:
                key.append(name)
                tensors.append(value)
        return tuple(key), tensors

    def pack(self, adapter, device):
        """The end of the argument struct, and what must live until the call returns."""
        packed = PackedProgram(self, adapter, device)
        end, inputs = packed.pack()
        return end, (packed, inputs)

    def inputs(self, adapter, device):
        """Where the inputs are, their number, and the size of one; and what must live until the call returns."""
        packed = PackedProgram(self, adapter, device)
        where, inputs = packed.inputs()
        return where, (packed, inputs)


class PackedProgram:
    """A program as the library takes it, of which calls that differ in memory alone fill in the addresses of tensors.
    Its texts are at the addresses that are packed as long as it lives."""

    __slots__ = ("texts", "at", "values", "places")

    def __init__(self, program, adapter, device):
        names = []
        for name in program.values:
            if not isinstance(name, str):
                raise InvalidArgument(f"the name {name!r} in tensors is no text")
            names.append(_text("a name in tensors", name))
        self.texts = [*program.texts, *names]
        self.at = [0 if text is None else address(text) for text in program.texts]
        values = program.values.items()
        self.values = [(address(at), *_value(name, value, adapter, device)) for at, (name, value) in zip(names, values)]
        self.places = [i for i, (_, value) in enumerate(values) if not isinstance(value, numbers.Number)]

    def inputs(self, addresses=()):
        """Where the inputs are, their number, and the size of one, and what must live until the call returns.
        ``addresses``: those of all tensors, in their order; as they were when not given."""
        values = self.values.copy()
        for i, at in zip(self.places, addresses):
            values[i] = (values[i][0], at, *values[i][2:])
        inputs = b"".join([abi.INPUT.pack(*value) for value in values])
        return (address(inputs) if values else 0, len(values), abi.INPUT.size), inputs

    def pack(self, addresses=()):
        """The end of the argument struct, and what must live until the call returns."""
        where, inputs = self.inputs(addresses)
        return abi.PROGRAM_ARGS.pack(*self.at, *where), inputs


def pack_gradients(written, adapter, device):
    """Memory for gradients by name as the library takes it, and what must live until the call returns."""
    packed, kept = [], []
    for name, t in written.items():
        text = _text("a name in needs", name)
        where, shape, strides, dtype = adapter.side(f"d{name}", t, device)
        storage, rest = abi.STORAGES.get(dtype), (0,) * (4 - len(shape))
        if storage is None or len(shape) > 4:
            raise InvalidTensor(
                f"the gradient of {name} is {dtype} of the shape {tuple(shape)}; it is one of floats, as {name} is"
            )
        kept.append(text)
        packed.append(abi.INPUT.pack(address(text), where, *shape, *rest, *strides, *rest, storage, len(shape), 0, 0.0))
    inputs = b"".join(packed)
    return abi.GRADIENTS.pack(address(inputs) if packed else 0, len(packed)), [*kept, inputs]


def _text(name, text):
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} is a {type(text).__name__}; pass the text of a score program")
    if "\0" in text:
        raise InvalidArgument(f"{name} holds a zero byte")
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"{name} is no text: {e}") from None


def address(data):
    """Of the content of a bytes object, which ends with a zero byte."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


def _value(name, value, adapter, device):
    """The fields of an input behind its name."""
    none = (0,) * 4
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if not -_LARGEST_INT <= value < _LARGEST_INT:
            raise InvalidArgument(f"{name} is {value}, which does not fit 64 bits")
        return 0, *none, *none, abi.STORAGES["int64"], 0, int(value), 0.0
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return 0, *none, *none, abi.STORAGES["float32"], 0, 0, float(value)
    address, shape, strides, dtype = adapter.side(name, value, device)
    storage = abi.STORAGES.get(dtype)
    if storage is None:
        raise Unsupported(f"the tensor {name} is {dtype}; score programs read {', '.join(abi.STORAGES)}")
    if not 1 <= len(shape) <= 4:
        raise InvalidTensor(
            f"the tensor {name} has the shape {tuple(shape)}; it has 1 to 4 axes (a single value is a number)"
        )
    rest = (0,) * (4 - len(shape))
    return address, *shape, *rest, *strides, *rest, storage, len(shape), 0, 0.0
