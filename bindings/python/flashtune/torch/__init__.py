"""PyTorch: operators that autograd, ``torch.compile``, ``torch.export`` and ``torch.vmap`` know, and
:func:`activate`, which puts flashtune behind ``torch.nn.functional.scaled_dot_product_attention``.

The functions of :mod:`flashtune` come here by themselves where a gradient is asked for or PyTorch traces; other calls
go to the library directly, without PyTorch's dispatcher. Import this module before loading an exported program that
has the operators in it.
"""

import torch

from .. import _tensors
from .._memo import mask_memo
from . import _operators, _varlen
from ._sdpa import activate, active, counters, restore

# Made here, so that no trace is the first to make it.
for _kind in (torch.Tensor, torch.nn.Parameter):
    _tensors.of_kind(_kind)

attend = _operators.attend_op
attend_precise = _operators.attend_precise_op
attend_backward = _operators.attend_backward_op
attend_varlen = _varlen.attend_varlen_op
attend_varlen_backward = _varlen.attend_varlen_backward_op

__all__ = [
    "activate",
    "active",
    "attend",
    "attend_backward",
    "attend_precise",
    "attend_varlen",
    "attend_varlen_backward",
    "counters",
    "mask_memo",
    "restore",
]
