"""Hugging Face Transformers: ``attn_implementation="ftune"``.

    import flashtune.transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ftune")

Masks are taken as the functions that Transformers makes them of, and written as score programs: no mask tensor is
made for causal masks, windows, chunks, packed sequences, padding and static caches. (Names with "flash" in them are
refused by Transformers, which takes them for packages of its own.)
"""

import logging

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .errors import Unsupported
from .functional import attention, bools_at, scaled_dot_product_attention

NAME = "ftune"

_log = logging.getLogger("flashtune.transformers")


class Mask(BlockMask):
    """What a model hands from its mask function to its layers: the text of a mask, and what it reads. Not a tensor; of
    FlexAttention's type, since ``generate`` makes masks ahead and models pass on what is of four axes and a tensor or
    of that type."""

    # Set below: FlexAttention's is a property.
    shape = None

    def __init__(self, text, tensors, shape):
        self.text, self.tensors, self.shape = text, tensors, shape

    def __repr__(self):
        return f"<flashtune.transformers.Mask {self.text!r}>"


class _Untraceable(Exception):
    """A mask function does what has no word in score programs."""


class _Expression:
    """A value of a mask function's, as text. Answers to what such functions do with tensors of indices."""

    device = torch.device("cpu")

    def __init__(self, text, tensors):
        self.text, self.tensors = text, tensors

    def _with(self, form, *others):
        return _Expression(form.format(self.text, *(_text(x) for x in others)), self.tensors)

    def new_ones(self, *_size, dtype=None, **_more):
        return _Expression("true", self.tensors)

    def new_zeros(self, *_size, dtype=None, **_more):
        return _Expression("false", self.tensors)

    def to(self, *_args, **_more):
        return self

    def __abs__(self):
        return self._with("abs({0})")

    def __neg__(self):
        return self._with("(-{0})")

    def __invert__(self):
        return self._with("(not {0})")

    def __and__(self, other):
        if self.text == "true":
            return other
        return self._with("({0} and {1})", other)

    def __or__(self, other):
        if self.text == "false":
            return other
        return self._with("({0} or {1})", other)

    def __bool__(self):
        raise _Untraceable("it branches on an index")

    def __hash__(self):
        return id(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise _Untraceable(f"it calls {getattr(func, '__name__', func)}")


def _operator(name, form):
    setattr(_Expression, name, lambda self, other: self._with(form, other))


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//"), ("mod", "%")):
    _operator(f"__{_name}__", f"({{0}} {_sign} {{1}})")
    _operator(f"__r{_name}__", f"({{1}} {_sign} {{0}})")
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    _operator(f"__{_name}__", f"({{0}} {_sign} {{1}})")


def _text(x):
    if isinstance(x, _Expression):
        return x.text
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        return f"({x})" if x < 0 else str(x)
    raise _Untraceable(f"it combines an index with a {type(x).__name__}")


class _Reads(TorchFunctionMode):
    """Tensors that are indexed by expressions become side tensors of the program."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            found = next((i for i in index if isinstance(i, _Expression)), None)
            if found is not None:
                if len(index) != tensor.dim() or tensor.dim() > 4:
                    raise _Untraceable(f"it reads a tensor of {tensor.dim()} axes by {len(index)} indices")
                tensors = found.tensors
                name = next((n for n, t in tensors.items() if t is tensor), None)
                if name is None:
                    name = f"t{len(tensors)}"
                    tensors[name] = tensor
                return _Expression(f"{name}[{', '.join(map(_text, index))}]", tensors)
        return func(*args, **(kwargs or {}))


def _position(name, offset, tensors):
    """An index with what it is counted from: a number that changes from step to step is read, and not written."""
    if isinstance(offset, torch.Tensor):
        tensors[f"{name}_from"] = offset.reshape(1)
        return f"({name} + {name}_from[0])"
    if offset == 0:
        return name
    tensors[f"{name}_from"] = int(offset)
    return f"({name} + {name}_from)"


def ftune_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    **kwargs,
):
    """A model's mask as :class:`Mask`, with the arguments that Transformers gives. A function that has no words in
    score programs is computed as a tensor, which is said once."""
    tensors, shape = {}, (batch_size, 1, q_length, kv_length)
    key = _position("kv", kv_offset, tensors)
    if not isinstance(q_offset, torch.Tensor) and q_offset - kv_offset == kv_length - q_length:
        # The last query is at the last key, in words that the compiler knows the causal and the window masks by.
        query = "(q + kv_len - q_len)" if kv_offset == 0 else "(q + kv_len - q_len + kv_from)"
        query = "q" if q_length == kv_length and kv_offset == 0 else query
    else:
        query = _position("q", q_offset, tensors)
    expressions = [_Expression(text, tensors) for text in ("b", "h", query, key)]
    try:
        with _Reads():
            found = mask_function(*expressions)
        text = _text(found)
    except (_Untraceable, TypeError, AttributeError) as e:
        _say_once(mask_function, e)
        made = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return Mask("m[b, h, q, kv]", {"m": made}, shape)
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        if missing > 0:
            attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
        if not _all_true(attention_mask):
            tensors["pad"] = attention_mask
            text = f"{text} and pad[b, {key}]"
    return Mask(text, tensors, shape)


_said = set()


def _say_once(function, why):
    name = getattr(function, "__qualname__", str(function))
    if name not in _said:
        _said.add(name)
        _log.warning("the mask function %s is computed as a tensor, since %s", name, why)


def _all_true(mask):
    """Whether nothing is padding. Looks at the tensor, once for all layers; not where that cannot be done."""
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(mask.all())


def ftune_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    is_causal=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    cache=None,
    **kwargs,
):
    """A layer's attention: query ``[batch, heads, q_len, head_dim]``, key and value with their own number of heads.
    Gives ``[batch, q_len, heads, head_dim_v]`` and no weights. What is not computed raises :class:`Unsupported`."""
    if cache is not None:
        raise Unsupported("continuous batching passes a paged cache, which 'ftune' does not read; use generate()")
    if kwargs.get("output_attentions"):
        raise Unsupported(
            "output_attentions asks for weights, which are never in memory; use attn_implementation='eager'"
        )
    # As Transformers' own `sdpa` takes a layer without a mask.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    first = attention_mask is None and is_causal and query.shape[2] > 1
    if first and softcap is None and s_aux is None and position_bias is None:
        out = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    mask, score, sink, tensors = "kv <= q" if first else None, "score", None, {}
    if isinstance(attention_mask, Mask):
        mask, tensors = attention_mask.text, dict(attention_mask.tensors)
    elif attention_mask is not None:
        tensors["m"] = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype is torch.bool:
            mask = f"m[{bools_at(tensors['m'], query.shape)}]"
        else:
            score = "score + m[b, h, q, kv]"
    if softcap is not None:
        score, tensors["cap"] = score.replace("score", "cap * tanh(score * (1.0 / cap))"), float(softcap)
        # As the built-in cap is declared, so that one kernel serves all caps up to 50, with a bound that it knows.
        score = f"cap: float usually in 0..50; {score}"
    if position_bias is not None:
        score, tensors["position_bias"] = f"{score} + position_bias[b, h, q, kv]", position_bias
    if s_aux is not None:
        sink, tensors["sinks"] = "sinks[h]", s_aux.reshape(-1)
    score = None if score == "score" else score
    out = attention(
        query, key, value, mask=mask, score=score, sink=sink, tensors=tensors, scale=scaling, enable_gqa=True,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, ftune_attention)
AttentionMaskInterface.register(NAME, ftune_mask)
