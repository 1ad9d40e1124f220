"""Traces that are kept: a trace takes 20 to 60 us, a look for one 3 to 6.

A function of FlexAttention closes over numbers, tensors and other functions. Where it depends on nothing else, two
calls of the same code give the same text as long as the numbers are the same and the tensors alike, and what the text
reads are those tensors. Everything else is traced in every call: bound methods and callable objects, modules other than
torch and math, arrays of NumPy, tensors that the function computes of others.
"""

import math
import sys
import types

from ._trace import Traced, _memory, tracer

# Texts by what they depend on; more than a program has layers with masks of their own.
_MOST = 512
_texts = {}
_NUMBERS = (bool, int, float, str, type(None))
# What gives one thing now and another thing later.
_MOVING = frozenset(
    "__import__ cuda distributed eval exec get_default_dtype getattr globals initial_seed is_grad_enabled locals "
    "vars".split()
)
# By code object, the names of globals that it may read: those of functions inside of it, too.
_globals = {}


class _Unknown(Exception):
    """The function depends on something that cannot be compared."""


def trace(function, what, prefix, device, sizes):
    """:func:`._trace.trace`, or what it gave before for the same."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(function, types.FunctionType):
        return tracer(function, what, prefix, device, sizes).traced
    tensors = []
    try:
        key = what, device, *sizes.values(), *_signature(function, tensors, torch, 0)
        # Which of the tensors are the same memory, and so one in the text.
        places = {}
        key = key, tuple(places.setdefault(_memory(t), n) for n, t in enumerate(tensors))
        kept = _texts.get(key)
    except (_Unknown, TypeError):
        return tracer(function, what, prefix, device, sizes).traced
    if kept is not None:
        text, coordinates, read = kept
        return Traced(text, {name: fill(tensors) for name, fill in read}, coordinates)
    done = tracer(function, what, prefix, device, sizes)
    read = _fills(done, tensors)
    if read is not None:
        if len(_texts) >= _MOST:
            _texts.clear()
        _texts[key] = done.traced.text, done.traced.coordinates, read
    return done.traced


def _fills(done, tensors):
    """How the tensors and numbers of a trace come from those that the function has captured, or None where that is
    not known."""
    if done.looked_inside:
        return None
    at = {id(t): n for n, t in enumerate(tensors)}
    read = []
    for name, source, number in done.numbers.values():
        if source is None:
            # The length of an axis, which is in the key.
            read.append((name, lambda _, number=number: number))
        elif (n := at.get(id(source))) is None:
            return None
        else:
            read.append((name, lambda found, n=n: _number(found[n])))
    for entry in done.read.values():
        n = at.get(id(entry.source))
        if n is None:
            return None
        given = done.traced.tensors[entry.name]
        if given is entry.source:
            read.append((entry.name, lambda found, n=n: found[n]))
        else:
            # A tensor without axes as one of one element, and axes as long as their coordinates go.
            shape = tuple(given.shape)
            read.append((entry.name, lambda found, n=n, shape=shape: _cut(found[n], shape)))
    return read


def _number(tensor):
    x = tensor.item()
    return int(x) if isinstance(x, bool) else x


def _cut(tensor, shape):
    tensor = tensor.reshape(1) if tensor.shape == () else tensor
    return tensor[tuple(slice(0, n) for n in shape)]


def _signature(function, tensors, torch, depth):
    """Everything that a function's trace depends on. The tensors that it may read are added to `tensors`."""
    code = function.__code__
    if depth > 8 or function.__kwdefaults__ or function.__dict__:
        raise _Unknown
    found = [code]
    for cell in function.__closure__ or ():
        try:
            x = cell.cell_contents
        except ValueError:
            raise _Unknown from None
        found.append(_item(x, tensors, torch, depth))
    for x in function.__defaults__ or ():
        found.append(_item(x, tensors, torch, depth))
    names = _globals.get(code)
    if names is None:
        if len(_globals) >= 4 * _MOST:
            _globals.clear()
        names = _globals[code] = _names(code)
    known = function.__globals__
    for name in names:
        if name in known:
            found.append(_item(known[name], tensors, torch, depth))
    return tuple(found)


def _names(code):
    """Names that a code object, or one inside of it, takes from anywhere but its own variables."""
    names = dict.fromkeys(code.co_names)
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            names.update(dict.fromkeys(_names(x)))
    if not _MOVING.isdisjoint(names):
        raise _Unknown
    return tuple(names)


def _item(x, tensors, torch, depth):
    """Something that a function has captured, as a part of the key."""
    kind = type(x)
    if kind in _NUMBERS:
        # Of equal numbers those of other types are others, and so is the zero below zero.
        return (kind, repr(x)) if kind is float else (kind, x)
    if isinstance(x, torch.Tensor):
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            raise _Unknown
        tensors.append(x)
        return x.shape, x.stride(), x.dtype, x.device
    if kind is types.FunctionType:
        if (x.__module__ or "").split(".")[0] in ("torch", "numpy") and not x.__closure__:
            return x
        # Functions of this package, such as those that join masks, are looked into as well.
        return _signature(x, tensors, torch, depth + 1)
    if x is torch or x is math or kind in (types.BuiltinFunctionType, torch.dtype, torch.device):
        return x
    if kind is type and x.__module__ == "builtins" or x is torch.Tensor:
        return x
    if kind is tuple or kind is list or kind is torch.Size:
        return (kind, *[_item(y, tensors, torch, depth) for y in x])
    raise _Unknown
