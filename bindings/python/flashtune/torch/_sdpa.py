"""flashtune behind ``torch.nn.functional.scaled_dot_product_attention``.

The operator that this function calls, ``aten::scaled_dot_product_attention``, is overridden as a whole, on CUDA and on
the CPU, with and without autograd: below it PyTorch chooses between its flash, memory-efficient, cuDNN, CPU and unfused
operators by rules of its own, has made floats of bool masks, and keeps grouped heads with a mask, or float32 with
grouped heads, from all but the unfused one. Taken here, each of these calls arrives, as its caller has written it.
"""

import logging
import sys
import threading

import torch

from ..errors import InvalidArgument, Unsupported
from ..functional import sdpa_call, sdpa_like_before
from . import _counts, _operators
from ._counts import counters  # noqa: F401 - part of this module's face

_NAME = "scaled_dot_product_attention"
_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
# In PyTorch's registry of flash implementations, which 2.11 is the first to have.
_IMPLEMENTATION = "FLASHTUNE"
# In the keys of what compilers keep on disk: what was compiled with flashtune in place is not found without it.
_TAG = "+flashtune"

_log = logging.getLogger("flashtune.torch")
_lock = threading.Lock()
_active = None
_on_unsupported = "raise"


class _Handle:
    """An override that is in place."""

    def __init__(self):
        self.library = torch.library.Library("aten", "IMPL")
        for key in _KEYS:
            self.library.impl(_NAME, _attention, key)
        _tag(True)
        _compile_anew()
        global _active
        _active = self

    def remove(self):
        """Puts PyTorch's own back."""
        global _active
        library, self.library = self.library, None
        if library is not None:
            library._destroy()
            _tag(False)
            _compile_anew()
        if _active is self:
            _active = None


def _compile_anew():
    """What ``torch.compile`` has in memory was traced with the other kernels, and tracing keeps which kernel an
    operator has for a key."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _registry():
    """PyTorch's registry of flash implementations, where this PyTorch has one that gives back."""
    try:
        from torch.nn.attention import _registry as found
    except ImportError:
        return None
    return found if hasattr(found, "restore_flash_attention_impl") else None


def activate(on_unsupported="raise"):
    """From now on ``torch.nn.functional.scaled_dot_product_attention`` runs on flashtune, for tensors on CUDA devices
    and on the CPU, with gradients, within ``torch.compile``, and in every module that calls it. Returns at once;
    calling it again only changes ``on_unsupported``.

    on_unsupported: what becomes of calls that flashtune cannot compute (float64, gradients of a mask, ...).
        ``"raise"``: :class:`flashtune.Unsupported`. ``"torch"``: PyTorch's own kernels compute them, counted by reason
        (:func:`counters`, and ``flashtune_fallback_total`` of :meth:`Engine.prometheus`), logged once for each reason.

    A ``torch.nn.attention.sdpa_kernel`` block that allows the unfused kernel alone is obeyed, and counted. Functions
    that ``torch.compile`` has compiled before are compiled anew. Nested tensors, other devices, and calls within
    ``torch.vmap`` stay with PyTorch. From PyTorch 2.11 on, the registry of ``torch.nn.attention`` names the
    implementation ``"FLASHTUNE"``: ``torch.nn.attention.activate_flash_attention_impl("FLASHTUNE")`` is the same call
    once this module is imported.
    """
    global _on_unsupported
    if on_unsupported not in ("raise", "torch"):
        raise InvalidArgument(f"on_unsupported is {on_unsupported!r}; it is 'raise' or 'torch'")
    with _lock:
        _on_unsupported = on_unsupported
        if _active is not None:
            return
        registry = _registry()
        if registry is None:
            _Handle()
        else:
            registry.activate_flash_attention_impl(_IMPLEMENTATION)


def restore():
    """Gives ``scaled_dot_product_attention`` back to PyTorch. Without :func:`activate` before, nothing happens."""
    with _lock:
        if _active is None:
            return
        registry = _registry()
        if registry is not None and registry.current_flash_attention_impl() == _IMPLEMENTATION:
            registry.restore_flash_attention_impl(_raise_warn=False)
        else:
            _active.remove()


def active():
    """Whether ``scaled_dot_product_attention`` runs on flashtune."""
    return _active is not None


def _tag(on):
    config = getattr(torch.compiler, "config", None)
    tag = getattr(config, "cache_key_tag", None)
    if tag is not None:
        config.cache_key_tag = tag.removesuffix(_TAG) + (_TAG if on else "")


def _register():
    registry = _registry()
    if registry is not None:
        registry.register_flash_attention_impl(_IMPLEMENTATION, register_fn=_Handle)


_register()


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The kernel in place of PyTorch's."""
    if attn_mask is None and dropout_p == 0.0 and not _unfused_alone():
        # What makes a call unsupported is part of what is known of a call.
        found = sdpa_like_before(query, key, value, is_causal, scale, enable_gqa)
        if found is not None:
            _operators.count(_operators.device_name(query))
            return found
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if _unfused_alone():
        return _pytorch(given, scale, enable_gqa, "sdpa_kernel", "an sdpa_kernel block allows the unfused kernel alone")
    found = _unsupported(query, key, value, attn_mask, dropout_p)
    if found is None:
        try:
            return _flashtune(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)
        except Unsupported as e:
            found = "kernel", e
    reason, error = found
    if _on_unsupported == "raise":
        raise error
    return _pytorch(given, scale, enable_gqa, reason, error)


def _unfused_alone():
    cuda = torch.backends.cuda
    return not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


def _pytorch(given, scale, enable_gqa, reason, why):
    """PyTorch's own kernels, chosen as if flashtune were not there."""
    if _counts.fallback(_operators.device_name(given[0]), reason):
        _log.warning("%s goes to PyTorch's own kernels (%s): %s", _NAME, reason, why)
    op = torch.ops.aten.scaled_dot_product_attention.default
    return op.decompose(*given, scale=scale, enable_gqa=enable_gqa)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _unsupported(q, k, v, mask, dropout):
    """A reason, as a label, and an error that tells it; ``None`` for what flashtune computes."""

    def no(reason, text):
        return reason, Unsupported(
            f"{_NAME}: {text}; change the call, or flashtune.torch.activate(on_unsupported='torch') has PyTorch "
            "compute it"
        )

    if (error := _operators.of_transform()) is not None:
        return "transform", error
    if not 0.0 <= dropout < 1.0:
        return no("dropout", f"dropout_p is {dropout}; from 0.0 to below 1.0 it is computed")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        return no("dtype", f"dtypes are {q.dtype}, {k.dtype}, {v.dtype}; one of float16, bfloat16, float32 is computed")
    if any(t.layout is not torch.strided or t.is_nested for t in (q, k, v)):
        return no("layout", "a tensor is sparse or nested")
    if not 2 <= q.dim() == k.dim() == v.dim():
        return no("shape", f"the shapes are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    for d in (q.shape[-1], v.shape[-1]):
        if not 1 <= d <= 256:
            return no("head_dim", f"head dims are {q.shape[-1]} and {v.shape[-1]}; those from 1 to 256 are computed")
    if mask is not None:
        if mask.dtype is not torch.bool and mask.dtype not in _DTYPES:
            return no("mask_dtype", f"attn_mask is {mask.dtype}; bool and float16, bfloat16, float32 are computed")
        if mask.layout is not torch.strided or not 1 <= mask.dim() <= max(q.dim(), 4):
            return no("mask_shape", f"attn_mask has the shape {tuple(mask.shape)}")
        if q.dim() > 4 and mask.dim() > 2:
            return no("mask_shape", f"attn_mask has the shape {tuple(mask.shape)} for a query of {q.dim()} dimensions")
    return None


def _flashtune(q, k, v, mask, is_causal, scale, enable_gqa, dropout_p):
    """The call in four dimensions, with rows that lie in one piece."""
    dims = q.dim()
    if dims < 4:
        lead = (1,) * (4 - dims)
        q, k, v = (t.view(*lead, *t.shape) if dims == 2 else t.unsqueeze(1) for t in (q, k, v))
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
    elif dims > 4:
        many = q.shape[:-3]
        q, k, v = (t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    batch = max(t.shape[0] for t in (q, k, v))
    q, k, v = (t.expand(batch, *t.shape[1:]) if t.shape[0] == 1 else t for t in (q, k, v))
    out = sdpa_call(
        q, k, v, mask, bool(is_causal), scale, bool(enable_gqa), caller=_NAME, dropout_p=dropout_p
    )
    if dims == 3:
        return out.squeeze(1)
    if dims == 2:
        return out[0, 0]
    return out.unflatten(0, many) if dims > 4 else out
