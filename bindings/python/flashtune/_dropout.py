"""Dropout of a call: its probability, and the state that says which scores are dropped."""

import numbers
import random

from . import _library as abi
from .errors import InvalidArgument, InvalidTensor


class Dropout:
    """A probability above 0 with a state: an int64 tensor ``[seed, offset]`` on q's device, or these as numbers."""

    def __init__(self, p, state):
        self.p, self.state = p, state

    def pack(self, tensors, device):
        """The end of the arguments that it is."""
        if isinstance(self.state, tuple):
            return abi.DROPOUT.pack(self.p, *self.state, 0, 0)
        address, shape, strides, dtype = tensors.side("rng_state", self.state, device)
        if dtype not in ("int64", "uint64") or tuple(shape) != (2,) or strides[0] != 1:
            raise InvalidTensor(
                f"rng_state is {dtype} of the shape {tuple(shape)} with strides {tuple(strides)}; it is contiguous "
                "int64 of the shape (2,), a seed and an offset, as return_rng_state gives it, or a pair of numbers"
            )
        return abi.DROPOUT.pack(self.p, 0, 0, address, address + 8)


def probability(p, name="dropout_p"):
    """A probability, from 0 to below 1."""
    if isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0.0 <= p < 1.0:
        raise InvalidArgument(f"{name} is {p!r}; it is a number from 0.0, which drops nothing, to below 1.0")
    return float(p)


def of_call(tensors, q, p, state):
    """The dropout of a call, with a state that is drawn where it has none; None where nothing is dropped."""
    p = probability(p)
    if p == 0.0:
        return None
    return Dropout(p, _drawn(tensors, q) if state is None else _given(state))


def of_backward(p, state):
    """That of a backward pass, which takes the state of the forward pass."""
    p = probability(p)
    if p == 0.0:
        return None
    if state is None:
        raise InvalidArgument("dropout_p is given without rng_state; pass that of the forward pass (return_rng_state)")
    return Dropout(p, _given(state))


def with_state(found, dropout):
    """The results of a call with the state of its dropout behind them; None where nothing was dropped."""
    state = None if dropout is None else dropout.state
    return (*found, state) if isinstance(found, tuple) else (found, state)


def _given(state):
    """Numbers as the library takes them; tensors as they are."""
    if not isinstance(state, (tuple, list)):
        return state
    if len(state) != 2 or not all(isinstance(n, numbers.Integral) for n in state):
        raise InvalidArgument(f"rng_state is {state!r}; it is a seed and an offset, or an int64 tensor of both")
    return tuple(int(n) % (1 << 64) for n in state)


def _drawn(tensors, q):
    """A new state by the generator of the tensors' library: in PyTorch by that of q's device, which nothing waits for
    and of which a captured graph draws anew in each replay."""
    torch, numpy = getattr(tensors, "torch", None), getattr(tensors, "numpy", None)
    if torch is not None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (2,), dtype=torch.int64, device=q.device)
    if numpy is not None:
        return numpy.random.randint(-(1 << 63), (1 << 63) - 1, 2, dtype=numpy.int64)
    return random.getrandbits(64), random.getrandbits(64)
