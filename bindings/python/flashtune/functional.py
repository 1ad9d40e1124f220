"""Attention under the names and with the arguments that flash-attention and PyTorch have given it. The forward pass;
:mod:`flashtune.gradients` has the other.

What is not supported raises :class:`Unsupported`; nothing falls back to anything in silence.
"""

import numbers
import sys

from . import _dense_call, _memo, _other_libraries
from . import _library as abi
from . import engine as _engine
from ._dense_call import attend_plain_again, mask_of, top_left_sliced
from ._dropout import of_call, with_state
from ._other_builds import refuse_others, short
from ._programs import Program
from ._tensors import _of_type, adapter, foreign
from .block_mask import first_tensor
from .engine import default_engine
from .errors import InvalidArgument, InvalidTensor, Unsupported


_ALL = (-1, -1)


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=_ALL,
    softcap=0.0,
    alibi_slopes=None,
    return_lse=False,
    deterministic=True,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    precise=False,
    return_residual=False,
    dropout_p=0.0,
    rng_state=None,
    return_rng_state=False,
    descale_rows=1,
    out_scale=None,
    attention_chunk=0,
    num_splits=0,
    **others,
):
    """Attention in flash-attention's layout. Tensors of PyTorch that ask for gradients get them.

    q: ``[batch, q_len, heads, head_dim]``; k: ``[batch, kv_len, kv_heads, head_dim]``; v: ``[batch, kv_len, kv_heads,
    head_dim_v]``; heads is a multiple of kv_heads. float16, bfloat16 or float32, any strides with a contiguous last
    dimension; head dims from 1 to 256 (a GPU pads rows that are no whole 16 bytes). float8_e4m3fn, too, beside which k
    and v may be float8_e5m2, with scales of heads and without gradients and dropout.
    softmax_scale: ``1 / sqrt(head_dim)`` when not given.
    causal: query ``i`` sees keys up to ``i + kv_len - q_len``.
    window_size: keys to the left and to the right of that position that a query sees; -1 is all.
    attention_chunk: a query sees keys of its own chunk alone, of so many keys each from the first one on; 0 for none.
    softcap: scores are bent to stay within +-softcap; 0.0 for none.
    alibi_slopes: float32 ``[heads]`` or ``[batch, heads]``; the slope times the distance is taken from the scores.
    deterministic: every kernel there is, of gradients too, gives the same bytes in every run, whatever this says.
    q_descale, k_descale, v_descale: of float8_e4m3fn tensors, which :func:`quantise` makes, and which a GPU of sm_90a
    takes without gradients at head dims that are multiples of 16 (one of sm_89 and newer with ``Engine(allow_paths=)``
    and without softcap and slopes, the CPU at any head dim, for tests): what their elements are multiplied by, float32;
    1 when not given.
        How many axes there are says what shares a scale. Two, a head: ``[batch, kv_heads]``, of q by the head of k.
        Three, of q and k a row, ``[batch, heads, rows]`` with their own heads, and of v a channel,
        ``[batch, kv_heads, head_dim_v]``; scales of rows of v are not taken, and a third axis of v is always
        channels.
    descale_rows: rows of q and k that share a scale of three axes, a power of two: ``[batch, heads, rows / n]``,
        rounded up.
    out_scale: float32 of one element on the device of q: of float8_e4m3fn tensors, the output is float8_e4m3fn, too,
        and multiplied by this before it is rounded; beyond 448 it becomes 448.
    precise: gradients of rows that attend mostly to one key get the digits of others: the forward pass also keeps
        what its output loses by rounding, in bfloat16. For float16 and bfloat16; it costs memory of the size of the
        output, and time to write and read it.
    return_residual: what the output loses by rounding as the last result, bfloat16 of its shape, for
        :func:`flash_attn_backward`.
    dropout_p: the probability that a weight is dropped behind the softmax, from 0.0 to below 1.0; others are multiplied
        by ``1 / (1 - dropout_p)``, and the log-sum-exp is that of all. Which are is decided by the places of query,
        key, head and sequence, the seed and the offset alone (``docs/reference.md``).
    rng_state: int64 ``[seed, offset]`` on the device of q, or a pair of numbers; drawn by the default generator of that
        device when not given, so that ``torch.manual_seed`` and captured graphs mean what they mean to PyTorch.
    return_rng_state: the state as the last result, for :func:`flash_attn_backward`; None where nothing is dropped.
    num_splits, pack_gqa and others of flash-attention that change no result are taken; what no kernel computes is
    :class:`Unsupported` (``docs/serving-python.md``).
    Gives ``[batch, q_len, heads, head_dim_v]`` of q's dtype, bfloat16 for float8_e4m3fn without ``out_scale``, and with
    ``return_lse`` the log-sum-exp of the scaled scores, float32 ``[batch, heads, q_len]``. A query that sees no key
    gives 0 and -inf.
    """
    if type(q) not in _of_type and foreign(q):
        return _other_libraries.through(flash_attn_func, locals())
    # A call like one before, of nothing but q, k and v: all that was looked at then is in its key.
    if (
        window_size is _ALL and alibi_slopes is None and (causal is True or causal is False) and deterministic is True
        and type(softcap) is float and softcap == 0.0
        and q_descale is None and k_descale is None and v_descale is None and out_scale is None
        and not precise and not return_residual and not dropout_p and not return_rng_state
        and no_chunk(attention_chunk) and not others
    ):  # fmt: skip
        found = _like_before(q, k, v, True, abi.CAUSAL if causal else abi.FULL, softmax_scale, return_lse)
        if found is not None:
            return found
    tensors = adapter(q)
    if tensors.narrow_and_graded(q, k, v):
        return tensors.ungraded(flash_attn_func, locals())
    check_deterministic(deterministic)
    refuse_others(num_splits, others)
    program = _changed(softcap, alibi_slopes, None, attention_chunk)
    mask, left, right = mask_of(causal, window_size)
    descales = (q_descale, k_descale, v_descale)
    dropout = of_call(tensors, q, dropout_p, rng_state)
    if tensors.by_operator(q, k, v, program):
        if _is_beside_e5m2(q, k):
            raise Unsupported(
                f"k is {k.dtype}, which is for calls without gradients and tracing; make one so, or convert k and v"
            )
        if any(scales is not None for scales in (*descales, out_scale)):
            raise Unsupported(
                "q_descale, k_descale, v_descale and out_scale are for calls without gradients and tracing; make one so"
            )
        found = tensors.operators.attend(
            q, k, v, True, mask, left, right, softmax_scale, return_lse, program, precise=precise,
            return_residual=return_residual, dropout=dropout,
        )  # fmt: skip
    elif _is_beside_e5m2(q, k):
        if precise or return_residual or dropout is not None or isinstance(descale_rows, bool) or descale_rows != 1:
            raise Unsupported(
                f"k is {k.dtype} beside float8_e4m3fn, which kernels of ragged batches compute: without precise, "
                "return_residual, dropout_p and descale_rows; leave those out, or convert k and v to float8_e4m3fn"
            )
        from .serving import attend_beside_e5m2

        found = attend_beside_e5m2(
            q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, descales, out_scale,
            return_lse,
        )  # fmt: skip
    else:
        found = _dense_call.attend(
            _default(tensors, q), tensors, q, k, v, True, mask, left, right, softmax_scale, return_lse,
            program=program, descales=descales, descale_rows=descale_rows, residual=return_residual, dropout=dropout,
            out_scale=out_scale,
        )  # fmt: skip
    return with_state(found, dropout) if return_rng_state else found


def _is_beside_e5m2(q, k):
    """Whether keys are of e5m2, as a quantised cache may have them, beside queries of e4m3."""
    names = (str(getattr(t, "dtype", None)).removeprefix("torch.") for t in (q, k))
    return tuple(names) == ("float8_e4m3fn", "float8_e5m2")


def _like_before(q, k, v, bshd, mask, scale, return_lse, top_left=False, grouped=True):
    """A call like one before of the default engine, of nothing but q, k and v; else None."""
    tensors = _of_type.get(type(q))
    device = None if tensors is None else tensors.unseen(q, k, v)
    if device is None or not (scale is None or type(scale) is float):
        return None
    engine = _engine._engines.get(tensors.name(device))
    if engine is None or engine._closed:
        return None
    return attend_plain_again(engine, tensors, device, q, k, v, bshd, mask, scale, return_lse, top_left, grouped)


def sdpa_like_before(query, key, value, is_causal, scale, grouped):
    """The same of PyTorch's function, without a mask tensor."""
    return _like_before(query, key, value, False, abi.FULL, scale, False, is_causal, grouped)


def check_deterministic(deterministic):
    """Refuses what is no truth value."""
    if not isinstance(deterministic, bool):
        raise InvalidArgument(f"deterministic is {deterministic!r}; it is True or False")


# The largest float32: a greater cap would be infinity to a kernel.
_LARGEST_CAP = 3.4028234663852886e38


def _cap(softcap):
    """The cap as a number; 0.0 for none."""
    try:
        cap = 0.0 if softcap is None else float(softcap)
    except (TypeError, ValueError, RuntimeError) as e:
        raise InvalidArgument(f"softcap is {softcap!r}, but it is a number: {e}") from None
    if not 0 <= cap <= _LARGEST_CAP:
        raise InvalidArgument(f"softcap is {softcap}; it is above zero and finite in float32, or 0.0 for none")
    return cap


def _shape(name, tensor):
    """The shape of what has to be a tensor."""
    try:
        return tuple(tensor.shape)
    except AttributeError:
        raise InvalidTensor(f"{name} is a {type(tensor).__name__}; pass a tensor or an array as q is") from None


# Keys of the query's own chunk, its position being aligned to the end of the keys.
_CHUNKS = "kv // chunk == (q + kv_len - q_len) // chunk"
# The most that a chunk can be: that of the built-in `chunked`.
_LARGEST_CHUNK = (1 << 30) - 1


def chunk_of(attention_chunk):
    """The keys of a chunk; 0 for none."""
    if not isinstance(attention_chunk, numbers.Integral) or not 0 <= attention_chunk <= _LARGEST_CHUNK:
        raise InvalidArgument(
            f"attention_chunk is {short(attention_chunk)}; pass a whole number of keys up to 2^30 - 1, or 0 for none"
        )
    return int(attention_chunk)


def no_chunk(attention_chunk):
    """Whether it is a plain 0."""
    return type(attention_chunk) is int and attention_chunk == 0


def _changed(softcap, alibi_slopes, sinks=None, chunk=0):
    """The score program of flash-attention's arguments, if there is one: the cap comes first, as there. ``sinks`` is
    a tensor of the logits of heads, ``chunk`` the keys that see each other."""
    if alibi_slopes is None and sinks is None and type(softcap) is float and softcap == 0.0 and no_chunk(chunk):
        return None
    declared, score, values = "", "score", {}
    cap = _cap(softcap)
    if cap:
        # As the built-in `soft_cap`, which `tune --model` tunes: one kernel for all caps up to 50, with a bound that it
        # knows.
        declared, score, values = "cap: float usually in 0..50; ", "cap * tanh(score * (1.0 / cap))", {"cap": cap}
    if alibi_slopes is not None:
        shape = _shape("alibi_slopes", alibi_slopes)
        if len(shape) not in (1, 2):
            raise InvalidTensor(f"alibi_slopes has the shape {shape}; it is [heads] or [batch, heads]")
        at = "b, h" if len(shape) == 2 else "h"
        score = f"{score} - slope[{at}] * abs(q + kv_len - q_len - kv)"
        values["slope"] = alibi_slopes
    sink = None
    if sinks is not None:
        if len(shape := _shape("s_aux", sinks)) != 1:
            raise InvalidTensor(f"s_aux (learnable_sink) has the shape {shape}; it is [heads]")
        sink, values["sinks"] = "sinks[h]", sinks
    mask = None
    if keys := chunk_of(chunk):
        mask, values["chunk"] = f"chunk: int in 1..{_LARGEST_CHUNK + 1}; {_CHUNKS}", keys
    if score == "score" and sink is None and mask is None:
        return None
    return Program(mask, None if score == "score" else declared + score, sink, values)


def attention(
    query,
    key,
    value,
    mask=None,
    score=None,
    sink=None,
    tensors=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    block_mask=None,
    return_weights=False,
    precise=False,
    return_residual=False,
    dropout_p=0.0,
    rng_state=None,
    return_rng_state=False,
):
    """Attention with any mask and any change of the scores, compiled into the kernel.

    query: ``[batch, heads, q_len, head_dim]``; key: ``[batch, heads, kv_len, head_dim]``; value: ``[batch, heads,
    kv_len, head_dim_v]``; with ``enable_gqa`` key and value may have fewer heads. Gives ``[batch, heads, q_len,
    head_dim_v]``, and with ``return_lse`` the log-sum-exp, float32 ``[batch, heads, q_len]``.
    mask: which keys a query sees, in the language of score programs (``docs/score-programs.md``), such as ``"kv <= q
    and q - kv < 1024"``; or the name of a built-in program, such as ``"causal"`` or ``"document"``. ``b``, ``h``,
    ``q_idx`` and ``kv_idx`` mean what they mean to FlexAttention; unlike PyTorch's, ``"causal"`` ends at the last key.
    score: what goes into the softmax in place of ``score``, such as ``"score + slope[h] * (kv - q)"``.
    sink: the logit of one more key without a value, such as ``"sinks[h]"``.
    tensors: what these texts read, by name: numbers, and tensors of up to four axes on the device of ``query``. A name
    that a text does not declare is declared by its value: dtype and number of axes.
    block_mask: in place of ``mask``, one that :func:`create_block_mask` has prepared; its tensors need not be passed
    again.
    return_weights: also the attention weights, as the last result: float32 ``[batch, heads, q_len, kv_len]``, 0 where a
        key is masked. Rows sum to 1, to less beside a sink, and to 0 where a query sees no key. They have no gradients,
        and a GPU computes such calls by a plain kernel: for inspection, not for speed.
    precise, return_residual: as :func:`flash_attn_func` takes them; the residual comes before the weights, for
        :func:`attention_backward`.
    dropout_p, rng_state, return_rng_state: as :func:`flash_attn_func` takes them, the state as the last result; not
        with return_weights, and not where gradients of ``tensors`` are wanted.
    """
    if type(query) not in _of_type and foreign(query):
        return _other_libraries.through(attention, locals())
    program = Program(mask, score, sink, tensors)
    adapted = adapter(query)
    if all(text is None for text in program.texts):
        program = None
    grouped = bool(enable_gqa)
    dropout = of_call(adapted, query, dropout_p, rng_state)
    if adapted.by_operator(query, key, value, program):
        refuse_weights(return_weights)
        found = adapted.operators.attend(
            query, key, value, False, abi.FULL, 0, 0, scale, return_lse, program, block_mask, grouped,
            precise=precise, return_residual=return_residual, dropout=dropout,
        )  # fmt: skip
        return with_state(found, dropout) if return_rng_state else found
    engine = _default(adapted, query)
    if block_mask is None and not return_weights:
        program, block_mask = _kept(program, adapted, engine, query, key)
    found = _dense_call.attend(
        engine,
        adapted,
        query,
        key,
        value,
        False,
        abi.FULL,
        0,
        0,
        scale,
        return_lse,
        grouped=grouped,
        program=program,
        block_mask=block_mask,
        return_weights=return_weights,
        residual=return_residual,
        dropout=dropout,
    )
    return with_state(found, dropout) if return_rng_state else found


def refuse_weights(return_weights):
    """Raises where the weights of a call are asked for that autograd or a compiler sees."""
    if return_weights:
        raise Unsupported(
            "return_weights is given, but weights have no gradients and no place in a trace; call under "
            "torch.no_grad() and outside of compiled code"
        )


def create_block_mask(mask, B, H, Q_LEN, KV_LEN, device=None, *, tensors=None, H_KV=None):
    """A mask prepared once for many calls of :func:`attention`, such as those of all layers of a model.

    mask: its text or name, as :func:`attention` takes it; or a function ``mask_mod(b, h, q_idx, kv_idx)`` as
        FlexAttention takes it (:func:`flashtune.flex.create_block_mask`).
    B, H: sequences and query heads of the calls; None for any number, which a mask that reads ``b`` or ``h`` does not
        take.
    Q_LEN, KV_LEN: rows of query and of key.
    device: where the calls compute; that of the tensors when not given, else the current GPU, if there is one.
    tensors: what the mask reads, by name. They must stay as they are for as long as the block mask is used.
    H_KV: KV heads, for masks that read ``h_kv``.

    Nothing is computed here. Where kernels have something found of a mask first (documents, bool tensors, block-sparse
    and dilated masks on a GPU of compute capability 9.0), the first call of each kernel does it, and later calls go by
    that. Make one call before you capture a CUDA graph: what is there then is used, otherwise every replay finds it
    anew.
    """
    if callable(mask):
        from .flex import create_block_mask as of_function

        return of_function(mask, B, H, Q_LEN, KV_LEN, device, tensors=tensors, H_KV=H_KV)
    if device is None:
        first = first_tensor(tensors)
        device = _anywhere() if first is None else getattr(first, "device", "cpu")
    return default_engine(device).create_block_mask(mask, B, H, Q_LEN, KV_LEN, tensors=tensors, H_KV=H_KV)


def _anywhere():
    """The current GPU, if PyTorch is there and sees one."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    return_weights=False,
):
    """Attention as ``torch.nn.functional.scaled_dot_product_attention`` defines it.

    query: ``[batch, heads, q_len, head_dim]``; key: ``[batch, heads, kv_len, head_dim]``; value: ``[batch, heads,
    kv_len, head_dim_v]``; with ``enable_gqa`` key and value may have fewer heads. Gives ``[batch, heads, q_len,
    head_dim_v]``.
    dropout_p: as PyTorch has it, from 0.0 to below 1.0: which weights are dropped, :func:`flash_attn_func` says.
    is_causal: as PyTorch has it, query ``i`` sees keys 0 to ``i``, also where q_len and kv_len differ
    (:func:`flash_attn_func` aligns the last query with the last key instead).
    attn_mask: ``[..., q_len, kv_len]`` with up to four axes, any of length 1: True for the keys that a query sees, or
    numbers to add to the scores.
    return_weights: also the attention weights, as :func:`attention` gives them; PyTorch's function has no such
        argument.
    """
    if type(query) not in _of_type and foreign(query):
        return _other_libraries.through(scaled_dot_product_attention, locals())
    plain = attn_mask is None and not return_weights and not dropout_p
    if plain and type(is_causal) is bool and type(enable_gqa) is bool:
        found = sdpa_like_before(query, key, value, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    return sdpa_call(
        query, key, value, attn_mask, bool(is_causal), scale, bool(enable_gqa), return_weights=return_weights,
        dropout_p=dropout_p,
    )  # fmt: skip


def sdpa_call(query, key, value, attn_mask, top_left, scale, grouped, caller="", return_weights=False, dropout_p=0.0):
    """:func:`scaled_dot_product_attention`; ``caller`` is counted as its caller where it is not empty."""
    program = None if attn_mask is None else _masked(attn_mask, top_left, query)
    tensors = adapter(query)
    if return_weights and top_left and query.shape[2] != key.shape[2]:
        # As a program, so that keys behind the last query have their zeros: the window of this mask leaves them out.
        program, top_left = Program("kv <= q"), False
    dropout = of_call(tensors, query, dropout_p, None)
    if tensors.by_operator(query, key, value, program):
        refuse_weights(return_weights)
        kind, left, right = abi.FULL, 0, 0
        if top_left:
            kind, left, right, key, value = top_left_sliced(query.shape[2], key, value)
        return tensors.operators.attend(
            query, key, value, False, kind, left, right, scale, False, program, None, grouped, caller, dropout=dropout
        )
    engine, block_mask = _default(tensors, query), None
    if not return_weights:
        program, block_mask = _kept(program, tensors, engine, query, key)
    out = _dense_call.attend(
        engine,
        tensors,
        query,
        key,
        value,
        False,
        abi.FULL,
        0,
        0,
        scale,
        False,
        top_left=top_left,
        grouped=grouped,
        program=program,
        block_mask=block_mask,
        return_weights=return_weights,
        dropout=dropout,
    )
    if caller:
        tensors.operators.count(engine.device)
    return out


def _kept(program, tensors, engine, query, key):
    """A call's program without its mask, and what is kept of that; as it is where nothing may be."""
    memo = _memo.active()
    if memo is None or program is None or program.written[0] is None or len(query.shape) != 4 or len(key.shape) != 4:
        return program, None
    block_mask = memo.block_mask(tensors, engine, program, query, key)
    if block_mask is None:
        return program, None
    _, score, sink = program.written
    rest = None if score is None and sink is None else Program(None, score, sink, program.values)
    return rest, block_mask


_PLACES = ("b", "h", "q", "kv")


def bools_at(mask, query):
    """How a mask of bools is read by queries of a shape. One that is the same for all sequences or heads, of length 1
    or repeated in place, does not read ``b`` or ``h``: then what kernels find of it first is found once for all of
    them."""
    shape = mask.shape
    try:
        strides = mask.stride() if hasattr(mask, "stride") else getattr(mask, "strides", None)
    except RuntimeError:
        # Of no strided layout, which is told where it is read.
        strides = None
    places = list(_PLACES[4 - len(shape) :])
    for i, many in enumerate(query[4 - len(shape) : 2]):
        repeated = strides is not None and shape[i] > 1 and strides[i] == 0
        if many != 1 and (shape[i] == 1 or repeated):
            places[i] = "0"
    return ", ".join(places)


def _masked(attn_mask, is_causal, query):
    """The score program of a mask tensor: True or a number to add for what is visible."""
    if is_causal:
        raise InvalidArgument("attn_mask and is_causal are both given; put one into the other")
    shape = _shape("attn_mask", attn_mask)
    if not 2 <= len(shape) <= 4:
        raise InvalidTensor(f"attn_mask has the shape {shape}; it is [q_len, kv_len], with heads and batch before it")
    values = {"attn_mask": attn_mask}
    if "bool" in str(attn_mask.dtype):
        return Program(mask=f"attn_mask[{bools_at(attn_mask, _shape('query', query))}]", tensors=values)
    at = f"attn_mask[{', '.join(_PLACES[4 - len(shape) :])}]"
    if "float" not in str(attn_mask.dtype):
        # Zeros and ones are mostly meant to be a mask, which adding them is not.
        raise Unsupported(
            f"attn_mask is {attn_mask.dtype}; it is bool (True for what is seen) or of floats, which are added"
        )
    return Program(score=f"score + {at}", tensors=values)


def _default(tensors, q):
    """The default engine of a tensor's device."""
    name = tensors.name(getattr(q, "device", "cpu"))
    engine = _engine._engines.get(name)
    return default_engine(name) if engine is None or engine.closed else engine
