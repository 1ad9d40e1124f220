"""Masks that are prepared once for many calls."""

import ctypes
import numbers
import operator
import struct

from . import _library as abi
from ._programs import Program, address
from ._tensors import adapter
from .errors import InvalidArgument


class BlockMask:
    """What kernels have found of a mask, for the calls that bring it along: made by :func:`create_block_mask`.

    May be used by several threads and on several streams. It keeps the mask's tensors alive.
    """

    def __init__(self, engine, mask, B, H, Q_LEN, KV_LEN, tensors=None, H_KV=None):
        if mask is None:
            raise InvalidArgument("mask is None; pass the text of a mask, such as 'kv <= q'")
        program = Program(mask, tensors=tensors)
        first = first_tensor(program.values)
        adapted = None if first is None else adapter(first)
        inputs, _kept = program.inputs(adapted, getattr(first, "device", "cpu"))
        sizes = [_size(name, n, True) for name, n in (("B", B), ("H", H), ("H_KV", H_KV))]
        sizes += [_size(name, n, False) for name, n in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
        try:
            args = abi.BLOCK_MASK_ARGS.pack(abi.BLOCK_MASK_ARGS.size, 0, address(program.texts[0]), *inputs, *sizes)
        except struct.error as e:
            raise InvalidArgument(f"the sizes are {sizes}, which do not fit 64 bits: {e}") from None
        handle = ctypes.c_uint64()
        lib = abi.library()
        self._destroy, self.handle, self.device = lib.flashtune_block_mask_destroy, 0, engine.device
        self.mask, self.shape, self.values = mask, (B, H, Q_LEN, KV_LEN), program.values
        abi.require(lib.flashtune_block_mask_create(engine._handle, args, handle))
        self.handle = handle.value

    @property
    def nbytes(self):
        """Bytes of device memory that it holds now: 0 before its first call, and for masks that kernels know by
        arithmetic."""
        held = ctypes.c_uint64()
        abi.require(abi.library().flashtune_block_mask_bytes(self.handle, held))
        return held.value

    @property
    def closed(self):
        """Whether :meth:`close` was called."""
        return self.handle == 0

    def close(self):
        """Gives its memory back, behind all calls that were made with it; captured graphs must not be replayed again.
        Without this it happens when nobody refers to it any more. Closing twice is no error."""
        handle, self.handle = self.handle, 0
        if handle:
            self.values = None
            abi.require(self._destroy(handle))

    def __del__(self):
        handle = getattr(self, "handle", 0)
        if handle:
            self._destroy(handle)

    def __repr__(self):
        return f"<flashtune.BlockMask {self.mask!r} {self.shape} on {self.device}{', closed' * self.closed}>"


def first_tensor(values):
    """The first tensor among what a program reads, if there is one."""
    every = values.values() if hasattr(values, "values") else ()
    return next((t for t in every if not isinstance(t, numbers.Number)), None)


def _size(name, n, open_):
    """A size as the library takes it, with 0 for any."""
    if n is None and open_:
        return 0
    try:
        size = operator.index(n)
    except TypeError:
        raise InvalidArgument(f"{name} is {n!r}; it is a whole number{', or None for any' * open_}") from None
    if size < open_:
        raise InvalidArgument(f"{name} is {size}; it is at least {int(open_)}{', or None for any number' * open_}")
    return size


def handle_of(block_mask, device):
    """The library's number of a block mask that serves tensors on a device."""
    if not isinstance(block_mask, BlockMask):
        raise InvalidArgument(
            f"block_mask is a {type(block_mask).__name__}; pass what flashtune.create_block_mask gives"
        )
    if block_mask.closed:
        raise InvalidArgument("the block mask is closed; make another with flashtune.create_block_mask")
    if block_mask.device != device:
        raise InvalidArgument(
            f"the block mask is on {block_mask.device}, q on {device}; make one there with flashtune.create_block_mask"
        )
    return block_mask.handle
