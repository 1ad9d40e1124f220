"""Calls over ragged batches like one before: of the same shapes, strides, dtypes, device and options, they fill in
addresses and the stream alone. What an address says, such as its alignment, the library looks at each time."""

import ctypes
import struct

from . import _library as abi
from . import engine as _engine
from ._dense_call import MOST_CALLS
from ._known_calls import NOT_KNOWN
from ._tensors import adapter
from .functional import _default

# The addresses of flashtune_ragged that tensors of a call stand at, in the order of the struct.
_FIELDS = (
    "q", "q_begin", "q_lengths", "k", "v", "k_scale", "v_scale", "slots", "kv_begin", "k_table", "kv_lengths",
    "kv_sums", "left_pad", "o", "lse", "q_scale",
)  # fmt: skip
_OFFSETS = [getattr(abi.Ragged, name).offset for name in _FIELDS]
_ENDS = [*_OFFSETS, ctypes.sizeof(abi.Ragged)]
# What lies before each of them, and behind the last.
_BETWEEN = [(begin, end) for begin, end in zip([0] + [at + 8 for at in _OFFSETS], _ENDS)]
assert all(begin <= end for begin, end in _BETWEEN)
_AGAIN = struct.Struct("=" + "Q".join(f"{end - begin}s" for begin, end in _BETWEEN))
assert _AGAIN.size == ctypes.sizeof(abi.Ragged)
# Among the bytes and addresses that are packed, the place of each address.
_PLACES = {name: 2 * i + 1 for i, name in enumerate(_FIELDS)}


class Repeated:
    """One call, by what it looks like."""

    __slots__ = ("tensors", "engine", "options", "given", "key")

    def __init__(self, tensors, engine, options, given):
        self.tensors, self.engine, self.options, self.given, self.key = tensors, engine, options, given, None

    def run(self):
        """What the call gives, where one like it has been made; else None."""
        engine, tensors, given = self.engine, self.tensors, self.given
        known_calls, like_q = tensors.known_calls, None
        number = None if known_calls is None else engine._numbers.get(self.options)
        if number is not None and tensors.are_plain(given):
            try:
                like_q = tensors.empty_like(given[0])
            except RuntimeError:
                # As in `attend_plain_again`.
                return None
            stream = 0 if engine._index is None else tensors.raw_stream(engine._index)
            status = known_calls.call(engine._handle, number, stream, known_calls.read, *given, like_q)
            if status == 0:
                _engine._last = engine
                return like_q
            if status != NOT_KNOWN:
                raise abi.failure(status)
        forms = tensors.forms_of(given)
        if forms is None:
            return None
        self.key = (forms, *self.options)
        known = engine._again_ragged.get(self.key)
        if known is None:
            return None
        parts, places, new, shape, lse_shape = known
        parts = parts.copy()
        try:
            for place, address in zip(places, tensors.addresses_of(given)):
                parts[place] = address
        except RuntimeError:
            # The long way says why one has no memory to read.
            return None
        q = given[0]
        if shape is None:
            out = tensors.empty_like(q) if like_q is None else like_q
        else:
            out = getattr(tensors, new)(shape, q)
        parts[_PLACES["o"]] = tensors.address(out)
        lse = None
        if lse_shape is not None:
            lse = tensors.empty_lse(lse_shape, q)
            parts[_PLACES["lse"]] = tensors.address(lse)
        stream = 0 if engine.device == "cpu" else tensors.stream(q.device)
        args = _AGAIN.pack(*parts)
        status = engine._forward_ragged(engine._handle, args, stream)
        if status:
            raise abi.failure(status)
        _engine._last = engine
        if known_calls is not None and shape is None and lse is None:
            at = [_OFFSETS[_FIELDS.index(name)] for name in (*self.options[0], "o")]
            known_calls.remember(engine, self.options, 1, args, at, (*given, out))
        return out if lse is None else (out, lse)

    def remember(self, args, out, lse):
        """A call that succeeded and took nothing but the tensors of its key."""
        if self.key is None:
            return
        names, tensors = self.options[0], self.tensors
        wanted = dict.fromkeys(_FIELDS, 0)
        wanted.update(zip(names, tensors.addresses_of(self.given)))
        wanted["o"], wanted["lse"] = tensors.address(out), 0 if lse is None else tensors.address(lse)
        # Whatever the long way has made of them.
        if any(getattr(args, name) != address for name, address in wanted.items()):
            return
        image, parts = bytes(args), []
        for begin, end in _BETWEEN:
            parts += [image[begin:end], 0]
        # O is contiguous.
        like_q = tuple(out.shape) == tuple(self.given[0].shape)
        # Beside e4m3 it is of another dtype.
        new, like_q = ("empty", like_q) if args.q_dtype != abi.E4M3 else ("empty_wide", False)
        shapes = None if like_q else tuple(out.shape), None if lse is None else tuple(lse.shape)
        known = self.engine._again_ragged
        if len(known) >= MOST_CALLS:
            known.clear()
        known[self.key] = parts[:-1], [_PLACES[name] for name in names], new, *shapes


def is_plain(scale, causal, window, numbers):
    """Whether a call has plain numbers beside its tensors."""
    if type(causal) is not bool or not (scale is None or type(scale) is float):
        return False
    # 1.0 and True are equal to 1, and not what the long way takes.
    if window is not None:
        if type(window) is not tuple or len(window) != 2 or type(window[0]) is not int or type(window[1]) is not int:
            return False
    for n in numbers:
        if n is not None and type(n) is not int:
            return False
    return True


def of_call(q, given, scale, causal, window, numbers):
    """A call of these tensors by the fields that they are for, the first of them q, or None where it has more to it
    than their forms and plain numbers."""
    tensors = adapter(q)
    names, given = zip(*[pair for pair in given if pair[1] is not None])
    if not is_plain(scale, causal, window, numbers):
        return None
    return Repeated(tensors, _default(tensors, q), (names, scale, causal, window, numbers), given)
