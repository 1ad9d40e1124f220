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
            raise InvalidArgument(f"tensors is a {type(tensors).__name__}; pass a dict from names to tensors and numbers")
        self.values = dict(tensors or {})

    def form(self):
        """All of it but the memory of tensors, as a key, and the tensors; None where a value is neither one nor a plain
        number. Numbers count by their bits: 0.0 and -0.0 are equal."""
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
        inputs, kept = self.inputs(adapter, device)
        addresses = [0 if t is None else address(t) for t in self.texts]
        return abi.PROGRAM_ARGS.pack(*addresses, *inputs), [*kept, *self.texts]

    def inputs(self, adapter, device):
        """Where the inputs are, their number, and the size of one; and what must live until the call returns."""
        packed, kept = [], []
        for name, value in self.values.items():
            if not isinstance(name, str):
                raise InvalidArgument(f"the name {name!r} in tensors is no text")
            text = _text("a name in tensors", name)
            kept.append(text)
            packed.append(abi.INPUT.pack(address(text), *_value(name, value, adapter, device)))
        inputs = b"".join(packed)
        where = address(inputs) if packed else 0
        return (where, len(packed), abi.INPUT.size), [*kept, inputs]


class Again:
    """A program of which all but the addresses of tensors is as in a call before. Made after that call, by the same
    adapter and device."""

    __slots__ = ("texts", "names", "values", "places")

    def __init__(self, program, adapter, device):
        self.texts, self.names = program.texts, [_text("a name in tensors", name) for name in program.values]
        self.values = [
            [address(name), *_value(name, value, adapter, device)]
            for name, value in zip(self.names, program.values.values())
        ]
        self.places = [i for i, value in enumerate(program.values.values()) if not isinstance(value, numbers.Number)]

    def pack(self, addresses):
        """As :meth:`Program.pack`, of tensors by their addresses."""
        values = self.values
        if addresses:
            values = [v.copy() for v in values]
            for place, at in zip(self.places, addresses):
                values[place][1] = at
        inputs = b"".join([abi.INPUT.pack(*v) for v in values])
        texts = [0 if t is None else address(t) for t in self.texts]
        return abi.PROGRAM_ARGS.pack(*texts, address(inputs) if values else 0, len(values), abi.INPUT.size), inputs


def pack_gradients(written, adapter, device):
    """Memory for gradients by name as the library takes it, and what must live until the call returns."""
    packed, kept = [], []
    for name, t in written.items():
        text = _text("a name in needs", name)
        where, shape, strides, dtype = adapter.side(f"d{name}", t, device)
        storage, rest = abi.STORAGES.get(dtype), (0,) * (4 - len(shape))
        if storage is None or len(shape) > 4:
            raise InvalidTensor(f"the gradient of {name} is {dtype} of the shape {tuple(shape)}; it is one of floats, as {name} is")
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
        raise InvalidTensor(f"the tensor {name} has the shape {tuple(shape)}; it has 1 to 4 axes (a single value is a number)")
    rest = (0,) * (4 - len(shape))
    return address, *shape, *rest, *strides, *rest, storage, len(shape), 0, 0.0
