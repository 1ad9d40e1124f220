"""Fused attention for tensors of PyTorch and arrays of NumPy: kernels are generated for the problem at hand, compiled
and tuned on the device that is there, and kept.

    import flashtune
    out = flashtune.flash_attn_func(q, k, v, causal=True)   # [batch, rows, heads, head_dim]
    print(flashtune.explain())                              # which kernel ran, and why

Pure Python over ``libflashtune`` (``FLASHTUNE_LIBRARY``, or beside the package, or the repository's build). The
variables that the library honours (``FLASHTUNE_CACHE``, ``FLASHTUNE_BUNDLES``, ``FLASHTUNE_TEMPLATES``,
``FLASHTUNE_NVRTC``, ``FLASHTUNE_CPU_ISA``, ``FLASHTUNE_LOG``, ``CC``) hold here too; :class:`Engine` takes the first
three as arguments. Bundles must be signed by a key of ``FLASHTUNE_TRUSTED_KEYS`` unless
``FLASHTUNE_ALLOW_UNSIGNED`` is 1.
"""

from . import _library
from ._quantise import Quantised, quantise
from ._version import __version__
from .block_mask import BlockMask
from .engine import Engine, default_engine, explain, set_default_engine
from .errors import EngineClosed, Error, InvalidArgument, InvalidTensor, Missing, Sealed, Unsupported
from .flex import flex_attention
from .functional import attention, create_block_mask, flash_attn_func, scaled_dot_product_attention
from .gradients import attention_backward, flash_attn_backward, flash_attn_varlen_backward
from .serving import (
    Step,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    prepare_step,
    reshape_and_cache,
    reshape_and_cache_flash,
)

__all__ = [
    "BlockMask",
    "Engine",
    "EngineClosed",
    "Error",
    "InvalidArgument",
    "InvalidTensor",
    "Missing",
    "Quantised",
    "Sealed",
    "Step",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "create_block_mask",
    "default_engine",
    "explain",
    "flash_attn_backward",
    "flash_attn_varlen_backward",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "prepare_step",
    "quantise",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "scaled_dot_product_attention",
    "set_default_engine",
    "version",
]


def version():
    """Version of the library, e.g. ``"0.1.0"``."""
    return _library.library().flashtune_version().decode()
