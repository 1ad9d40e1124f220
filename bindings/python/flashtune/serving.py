"""Attention over sequences of different lengths and over KV caches, and new rows into caches, under the names and
with the arguments of flash-attention 2 and 3 and of vLLM. Forward only.

``docs/serving-python.md`` of the repository lists every argument. What is not supported raises :class:`Unsupported`.
Lengths, tables and slots are read where the kernel runs: no call waits for a GPU.
"""

import numbers

from . import _other_libraries, _repeated
from . import _library as abi
from ._dense_call import mask_of
from ._dropout import of_call, with_state
from ._serving_call import Call, Step, bound, check, one_of, require_writeable, window_of
from ._tensors import _of_type, adapter, foreign
from .errors import InvalidArgument, InvalidTensor, Unsupported
from .functional import _default, chunk_of, no_chunk


def prepare_step(bounds, cache_seqlens=None):
    """What the calls of one step (all layers of a model) have in common, to be passed as ``scheduler_metadata``.

    bounds: ``(max_seqlen_q, max_seqlen_k)``, the most rows and keys of a sequence; None for what shapes say. They
        stand in for arguments that a call leaves out.
    cache_seqlens: keys of each sequence as the host knows them: a list, an array or a tensor on the CPU. A hint by
        which a kernel is chosen; it may be wrong and is not read later. Lengths on a GPU are not read, since that
        would wait for it.

    Kernels need no data prepared: nothing is computed, and the result, a :class:`Step`, holds the bounds and the hint
    alone.
    Raises :class:`InvalidArgument` for what is no number of at least 0.
    """
    try:
        most_q, most_k = bounds
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"bounds is {bounds!r}; it is (max_seqlen_q, max_seqlen_k), None for what is unknown"
        ) from None
    most_q, most_k = bound("max_seqlen_q", most_q), bound("max_seqlen_k", most_k)
    lengths = ()
    if cache_seqlens is not None and str(getattr(cache_seqlens, "device", "cpu")) == "cpu":
        try:
            lengths = cache_seqlens.tolist() if hasattr(cache_seqlens, "tolist") else list(cache_seqlens)
            lengths = [bound("cache_seqlens", n) for n in lengths]
        except TypeError:
            raise InvalidArgument(
                f"cache_seqlens is {cache_seqlens!r}; pass the keys of each sequence, or None"
            ) from None
    return Step(most_q, most_k, sum(lengths), max(lengths, default=0))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    alibi_slopes=None,
    block_table=None,
    page_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    num_splits=0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    k_scale=None,
    v_scale=None,
    out_scale=None,
    s_aux=None,
    learnable_sink=None,
    precise=False,
    dropout_p=0.0,
    rng_state=None,
    return_rng_state=False,
    **others,
):
    """Attention of packed sequences over packed keys or over pages.

    q: ``[total_q, heads, head_dim]``; float16, bfloat16 or float32; or float8_e4m3fn beside k and v of 8 bits.
    k, v: ``[total_k, kv_heads, head_dim]`` and ``[total_k, kv_heads, head_dim_v]`` with ``cu_seqlens_k``; or, with
        ``block_table`` (``page_table``), pages ``[pages, page_tokens, kv_heads, head_dim]``, of q's dtype or of
        float8_e4m3fn, float8_e5m2 or int8. Any strides with a contiguous last dimension.
    cu_seqlens_q, cu_seqlens_k: first row of each sequence, and the end of the last one's, ``[batch + 1]``. With a
        table those of keys say lengths alone. All lengths are int32, or all int64.
    max_seqlen_q, max_seqlen_k: the most rows and keys of a sequence; longer ones are cut. From shapes when not given.
    seqused_q, seqused_k: rows and keys that are used of each sequence, ``[batch]``; rows behind them are not written.
    block_table: pages of each sequence, int32 or int64 ``[batch, width]``. Entries behind a sequence's length are
        never read, keys of pages that there are not are masked.
    softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes: as in :func:`flash_attn_func`, by the
        lengths of each sequence.
    s_aux or learnable_sink: the logit of one more key without a value for each head, ``[heads]``.
    k_descale or k_scale, and of v: what elements of quantised pages are multiplied by, float32: a number, ``[1]``,
        ``[kv_heads]``, ``[batch, kv_heads]`` (any of both 1), or ``[pages, page_tokens, kv_heads]``.
    q_descale: what elements of a float8_e4m3fn q are multiplied by, as those of k but for the last form.
    out_scale: float32 of one element: of a float8_e4m3fn q, the output is float8_e4m3fn, too, rounded after it was
        multiplied by this. Without it, it is bfloat16, or what ``out`` is.
    out: where the result goes; else new memory, in which rows of no sequence hold anything.
    Gives ``[total_q, heads, head_dim_v]``, and with ``return_softmax_lse`` the log-sum-exp, float32 ``[heads,
    total_q]``. A row that sees no key gives 0 and -inf.
    precise: refused: calls of dense tensors have it.
    dropout_p, rng_state, return_rng_state: as in :func:`flash_attn_func`, over packed keys alone. Queries and keys are
        counted inside of their sequence, sequences by their place in ``cu_seqlens_q``.
    With packed keys and without ``out`` it has gradients of q, k and v in PyTorch's autograd.
    """
    if type(q) not in _of_type and foreign(q):
        return _other_libraries.through(flash_attn_varlen_func, locals())
    if precise:
        raise Unsupported(
            "precise is True, but forward passes over packed sequences do not write what their output loses; leave it "
            "out, or call flash_attn_func for each sequence"
        )
    tensors = adapter(q)
    if tensors.narrow_and_graded(q, k, v):
        return tensors.ungraded(flash_attn_varlen_func, locals())
    table = one_of("block_table", block_table, "page_table", page_table)
    dropout = of_call(tensors, q, dropout_p, rng_state)
    sinks = one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    scales = q_descale, k_descale, v_descale, k_scale, v_scale, out_scale
    if table is None and out is None and all(scale is None for scale in scales) and tensors.by_operator(q, k, v):
        check(scheduler_metadata, num_splits, others)
        attention_chunk = chunk_of(attention_chunk)
        step = scheduler_metadata or Step(None, None, 0, 0)
        found = tensors.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k,
            step.max_seqlen_q if max_seqlen_q is None else max_seqlen_q,
            step.max_seqlen_k if max_seqlen_k is None else max_seqlen_k,
            seqused_q, seqused_k, softmax_scale, causal, window_of(window_size), softcap, alibi_slopes, sinks,
            return_softmax_lse, dropout, attention_chunk,
        )  # fmt: skip
        return with_state(found, dropout) if return_rng_state else found
    found = varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
        causal, window_size, softcap, alibi_slopes, sinks, return_softmax_lse, table, out, scales, scheduler_metadata,
        num_splits, others, dropout, attention_chunk,
    )  # fmt: skip
    return with_state(found, dropout) if return_rng_state else found


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal,
    window_size, softcap, alibi_slopes, sinks, return_softmax_lse, table=None, out=None, scales=(None,) * 6, step=None,
    num_splits=0, others=(), dropout=None, chunk=0,
):  # fmt: skip
    """The call, the short way where one like it has been made."""
    repeated = None
    q_descale, k_descale, v_descale, k_scale, v_scale, out_scale = scales
    plain = alibi_slopes is None and sinks is None and out is None and not others and num_splits in (None, 0, 1)
    plain = plain and dropout is None and out_scale is None and no_chunk(chunk)
    if plain and k_scale is None and v_scale is None and _is_step(step) and _is_none(softcap):
        given = [("q", q), ("k", k), ("v", v), ("q_begin", cu_seqlens_q), ("q_lengths", seqused_q)]
        given += [("kv_lengths", seqused_k), ("k_scale", k_descale), ("v_scale", v_descale), ("k_table", table)]
        given.append(("q_scale", q_descale))
        # With a table and lengths the sums of keys are not looked at.
        if table is None or seqused_k is None:
            given.append(("kv_begin" if table is None else "kv_sums", cu_seqlens_k))
        sizes = (max_seqlen_q, max_seqlen_k, int(return_softmax_lse is True), *(step or ()))
        if type(return_softmax_lse) is bool:
            repeated = _repeated.of_call(q, given, softmax_scale, causal, window_size, sizes)
        if repeated is not None and (found := repeated.run()) is not None:
            return found
    call = Call(q, k, v, step, num_splits, others or {})
    call.repeated, call.dropout = repeated, dropout
    return _varlen(
        call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
        causal, window_size, softcap, alibi_slopes, sinks, return_softmax_lse, table, out, scales, chunk,
    )  # fmt: skip


def _is_step(step):
    return step is None or type(step) is Step


def _is_none(softcap):
    return type(softcap) is float and softcap == 0.0


def _varlen(
    call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal,
    window_size, softcap, alibi_slopes, sinks, return_softmax_lse, table=None, out=None, scales=(None,) * 6, chunk=0,
):  # fmt: skip
    """The call itself."""
    if cu_seqlens_q is None:
        raise InvalidArgument(
            "cu_seqlens_q is None, but rows of q are packed; pass [batch + 1] first rows, or see "
            "flash_attn_with_kvcache"
        )
    call.queries(q, cu_seqlens_q, max_seqlen_q, seqused_q)
    args = call.args
    if table is None:
        if cu_seqlens_k is None:
            raise InvalidArgument(
                "cu_seqlens_k and block_table are both None; pass one of them, which say where keys lie"
            )
        call.packed_keys(k, v, cu_seqlens_k, seqused_k, max_seqlen_k)
    else:
        call.store(k, v, "k", "v", table)
        if seqused_k is None and cu_seqlens_k is None:
            raise InvalidArgument(
                "seqused_k and cu_seqlens_k are both None; pass one of them beside a block_table: the lengths"
            )
        # Where both are there, seqused_k decides, as in flash-attention.
        args.kv_lengths = call.ints("seqused_k", seqused_k, call.batch)
        if seqused_k is None:
            args.kv_sums = call.ints("cu_seqlens_k", cu_seqlens_k, call.batch + 1)
        call.bound_keys(max_seqlen_k)
    q_descale, k_descale, v_descale, k_scale, v_scale, out_scale = scales
    call.scales(q_descale, ("k_descale", k_descale, "k_scale", k_scale), ("v_descale", v_descale, "v_scale", v_scale))
    return call.run(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, out, return_softmax_lse, out_scale, chunk
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    k_scale=None,
    v_scale=None,
    out_scale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    s_aux=None,
    learnable_sink=None,
    scheduler_metadata=None,
    num_splits=0,
    return_softmax_lse=False,
    out=None,
    **others,
):
    """Attention over a KV cache, after new rows were appended to it if there are any.

    q: ``[batch, rows, heads, head_dim]``, or ``[total_q, heads, head_dim]`` with ``cu_seqlens_q`` and ``max_seqlen_q``.
    k_cache, v_cache: ``[slots, room, kv_heads, head_dim]``; or pages ``[pages, page_tokens, kv_heads, head_dim]`` with
        ``block_table`` (``page_table``); or, there, the two layouts of :func:`reshape_and_cache`. Dtypes as in
        :func:`flash_attn_varlen_func`. V's head dim may differ.
    k, v: new rows, ``[batch, new, kv_heads, head_dim]``, or ``[total_new, kv_heads, head_dim]`` with
        ``cu_seqlens_k_new``: they are written behind ``cache_seqlens``, and q sees them.
    cache_seqlens: keys of each sequence before that, padding included: int32 or int64 ``[batch]``, or a number for
        all. The whole room when not given, which is not for new rows.
    cache_batch_idx: slot of each sequence, ``[batch]``; else that of its own number. Beside a table, the table's row of
        each sequence, which is gathered by PyTorch or NumPy first.
    cache_leftpad: tokens before each sequence's first key, ``[batch]``.
    rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: new rows and q are rotated from the sequence's length on,
        or from ``rotary_seqlens``, ``[batch]``, on; q's rows all by the first position where neither causal nor a
        window is asked for.
    rotary_interleaved: whether neighbours turn together (GPT-J), or halves (NeoX).
    max_seqlen_k: the most keys of a sequence, new ones included; from shapes when not given.
    The other arguments are those of :func:`flash_attn_varlen_func`.
    Gives O shaped as q, and with ``return_softmax_lse`` the log-sum-exp, float32 ``[batch, heads, rows]`` or
    ``[heads, total_q]``.
    """
    if type(q) not in _of_type and foreign(q):
        return _other_libraries.through(flash_attn_with_kvcache, locals())
    table = one_of("block_table", block_table, "page_table", page_table)
    repeated = None
    # Without new rows, and nothing but tensors of lengths and places beside the three.
    if (
        k is None and v is None and rotary_cos is None and rotary_sin is None and cu_seqlens_k_new is None
        and rotary_seqlens is None and k_scale is None and v_scale is None and out_scale is None
        and alibi_slopes is None and s_aux is None and learnable_sink is None and out is None and not others
        and no_chunk(attention_chunk)
        and num_splits in (None, 0, 1) and type(return_softmax_lse) is bool and _is_none(softcap)
        and _is_step(scheduler_metadata)
    ):  # fmt: skip
        given = (
            ("q", q), ("k", k_cache), ("v", v_cache), ("q_begin", cu_seqlens_q), ("kv_lengths", cache_seqlens),
            ("k_table", table), ("slots", cache_batch_idx), ("left_pad", cache_leftpad), ("k_scale", k_descale),
            ("v_scale", v_descale), ("q_scale", q_descale),
        )  # fmt: skip
        sizes = (max_seqlen_q, max_seqlen_k, int(return_softmax_lse), *(scheduler_metadata or ()))
        repeated = _repeated.of_call(q, given, softmax_scale, causal, window_size, sizes)
        if repeated is not None and (found := repeated.run()) is not None:
            return found
    call = Call(q, k_cache, v_cache, scheduler_metadata, num_splits, others)
    call.repeated, args = repeated, call.args
    call.queries(q, cu_seqlens_q, max_seqlen_q, None)
    call.store(k_cache, v_cache, "k_cache", "v_cache", table, cache_batch_idx)
    call.bound_keys(max_seqlen_k)
    args.left_pad = call.ints("cache_leftpad", cache_leftpad, call.batch)
    first = call.ints("rotary_seqlens", rotary_seqlens, call.batch)
    begin = call.ints("cu_seqlens_k_new", cu_seqlens_k_new, call.batch + 1)
    if isinstance(cache_seqlens, numbers.Integral):
        same = bound("cache_seqlens", cache_seqlens)
        cache_seqlens = call.kept(call.tensors.full(call.batch, same, call.length_type or "int32", q))
    args.kv_lengths = call.ints("cache_seqlens", cache_seqlens, call.batch)
    call.scales(q_descale, ("k_descale", k_descale, "k_scale", k_scale), ("v_descale", v_descale, "v_scale", v_scale))
    if (k is None) != (v is None):
        raise InvalidArgument("of k and v one is None; pass the new rows of both, or of neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("of rotary_cos and rotary_sin one is None; pass both, or neither")
    rotary = None
    if rotary_cos is not None:
        advances = mask_of(causal, window_of(window_size))[0] != abi.FULL
        rotary = rotary_cos, rotary_sin, bool(rotary_interleaved), first, advances
    if k is not None:
        if cache_seqlens is None:
            raise InvalidArgument("cache_seqlens is None, but there are new rows of k; pass the lengths before them")
        q = call.append(q, k, v, begin, rotary)
    elif rotary is not None or begin:
        named = "rotary_cos and rotary_sin" if rotary else "cu_seqlens_k_new"
        raise InvalidArgument(
            f"{named} belong to new rows, but k and v are None; pass those, or rotate q before the call"
        )
    sinks = one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    return call.run(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, out, return_softmax_lse, out_scale,
        attention_chunk,
    )  # fmt: skip


def attend_beside_e5m2(
    q, k, v, scale, causal, window_size, softcap, slopes, chunk, descales, out_scale, return_lse
):  # fmt: skip
    """:func:`flashtune.flash_attn_func` of queries of e4m3 over keys of e5m2, by kernels of ragged batches, whose
    sequences are all as long."""
    call = Call(q, k, v, None, 0, {})
    call.queries(q, None, None, None)
    for name, t in (("k", k), ("v", v)):
        shape = tuple(getattr(t, "shape", ()))
        if len(shape) != 4 or shape[0] != call.batch:
            raise InvalidTensor(
                f"{name} has the shape {shape}, but it is [batch, rows, heads, head_dim] with the {call.batch} "
                "sequences of q; give it so"
            )
    call.store(k, v, "k", "v", None)
    call.bound_keys(None)
    batch, kv_heads = call.batch, tuple(k.shape)[2]
    for name, scales in zip(("q_descale", "k_descale", "v_descale"), descales):
        shape = None if scales is None else tuple(getattr(scales, "shape", ()))
        if shape not in (None, (batch, kv_heads)):
            raise Unsupported(
                f"{name} has the shape {shape} beside k of {k.dtype}, which has scales of heads alone: float32 "
                f"[batch, heads_kv] = {(batch, kv_heads)}; pass such, or k and v of float8_e4m3fn"
            )
    of_q, of_k, of_v = descales
    call.scales(of_q, ("k_descale", of_k, "k_scale", None), ("v_descale", of_v, "v_scale", None))
    return call.run(q, scale, causal, window_size, softcap, slopes, None, None, return_lse, out_scale, chunk)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype="auto", k_scale=None, v_scale=None
):
    """Writes new rows into pages, as vLLM's operator of this name does.

    key: ``[rows, kv_heads, head_dim]``; value: ``[rows, kv_heads, head_dim_v]``.
    key_cache, value_cache: ``[pages, page_tokens, kv_heads, head_dim]`` and of ``head_dim_v``, any strides with a
        contiguous last dimension; of key's dtype, float8_e4m3fn, float8_e5m2 or int8; or uint8, which
        ``kv_cache_dtype`` gives a meaning.
    slot_mapping: ``page * page_tokens + token`` of each row, int32 or int64; negative ones, and those behind the last
        page, are left out. With fewer slots than rows the last rows are left out.
    kv_cache_dtype: ``"auto"``, or ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"``.
    k_scale, v_scale: what elements of a quantised cache are multiplied by when they are read, float32: a number,
        ``[1]``, ``[kv_heads]``, or ``[pages, page_tokens, kv_heads]``. Tensors beside other caches are ignored, as
        vLLM does.
    """
    if type(key) not in _of_type and foreign(key):
        return _other_libraries.through(reshape_and_cache_flash, locals())
    _cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, 4)


def reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype="auto", k_scale=None, v_scale=None
):
    """:func:`reshape_and_cache_flash` into the older layout: ``key_cache`` ``[pages, kv_heads, head_dim / x,
    page_tokens, x]``, where ``x`` elements have 16 bytes, and ``value_cache`` ``[pages, kv_heads, head_dim_v,
    page_tokens]``."""
    if type(key) not in _of_type and foreign(key):
        return _other_libraries.through(reshape_and_cache, locals())
    _cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, 5)


_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}


def _cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, rank):
    call = Call(key, key_cache, value_cache, None, 0, {}, "key")
    tensors = call.tensors
    if kv_cache_dtype != "auto" and kv_cache_dtype not in _CACHE_DTYPES:
        raise Unsupported(f"kv_cache_dtype is {kv_cache_dtype!r}; it is one of auto, {', '.join(_CACHE_DTYPES)}")
    named = _CACHE_DTYPES.get(kv_cache_dtype)
    kv = call.view("key", key, 3), call.view("value", value, 3)
    stores = [call.view(n, t) for n, t in (("key_cache", key_cache), ("value_cache", value_cache))]
    if named is not None:
        for name, view in zip(("key_cache", "value_cache"), stores):
            if view.dtype not in (named, "uint8"):
                raise InvalidTensor(
                    f"{name} is {view.dtype}, but kv_cache_dtype says {named}; pass 'auto' or a cache of that type"
                )
    found = len(stores[0].shape)
    if found != rank:
        other = "reshape_and_cache" if rank == 4 else "reshape_and_cache_flash"
        raise InvalidTensor(f"key_cache has {found} dimensions, but it has {rank} here; see {other}")
    args = call.args
    call.batch, call.heads, args.q_dtype = 1, 0, call.dtype("key", kv[0])
    args.head_dim_qk = kv[0].shape[2]
    call.place(*stores, "key_cache", "value_cache", named)
    call.scales(None, ("k_scale", None, "k_scale", k_scale), ("v_scale", None, "v_scale", v_scale), ignored=True)
    slots = call.view("slot_mapping", slot_mapping, 1, unit=False)
    rows = slots.shape[0]
    if slots.dtype not in abi.INTS or rows > 1 and slots.strides[0] != 1:
        raise InvalidTensor(
            f"slot_mapping is {slots.dtype} with a stride of {slots.strides[0]}; pass contiguous int64 or int32"
        )
    if rows > kv[0].shape[0]:
        raise InvalidTensor(f"slot_mapping has {rows} slots, but key has {kv[0].shape[0]} rows; pass one for each row")
    more = abi.Append(slot_mapping=slots.address, slot_type=abi.INTS[slots.dtype], new_rows=rows)
    call.new_rows(more, *kv, ("key", "value"), rows)
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache)):
        require_writeable(tensors, name, t)
    call.launch(more)
