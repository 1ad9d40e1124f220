"""Operands of float8_e4m3fn that ask for gradients, which no kernel computes."""

import torch

from ..errors import Unsupported


class _Ungraded(torch.autograd.Function):
    """A result whose gradients are refused when they are wanted, and not before."""

    @staticmethod
    def forward(ctx, result, *_):
        return result.view_as(result)

    @staticmethod
    def backward(ctx, _):
        raise Unsupported(
            "gradients of float8_e4m3fn operands are not computed; call with the float16 or bfloat16 tensors that they "
            "were made from"
        )


def through(function, arguments):
    """Calls a function of q, k and v with these detached. ``arguments`` are its locals."""
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    call = {name: arguments[name] for name in named} | arguments["others"]
    operands = call["q"], call["k"], call["v"]
    call.update(zip("qkv", (t.detach() for t in operands)))
    found = function(**call)
    if not isinstance(found, tuple):
        return _Ungraded.apply(found, *operands)
    floats = (t is not None and t.is_floating_point() for t in found)
    return tuple(_Ungraded.apply(t, *operands) if is_float else t for t, is_float in zip(found, floats))
