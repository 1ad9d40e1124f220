"""One call over a ragged batch or into a cache on its way to the library: tensors become addresses, strides and sizes,
and what does not fit is refused by its name. :mod:`flashtune.serving` has the functions."""

import ctypes
import math
import numbers
from collections import namedtuple

from . import _library as abi
from . import engine as _engine
from ._dense_call import mask_of
from ._other_builds import refuse_others, short as _short
from ._tensors import adapter
from .errors import InvalidArgument, InvalidTensor, Unsupported
from .functional import _changed, _default

Step = namedtuple("Step", "max_seqlen_q max_seqlen_k expected_keys expected_longest")
Step.__doc__ = """What :func:`prepare_step` found of a step: bounds (None: those of the call), and hints (0:
unknown)."""

# A tensor: address, shape, strides in elements, name of the dtype.
_View = namedtuple("_View", "address shape strides dtype")

# Queries beside which O has a dtype of its own.
_NARROW = "float8_e4m3fn"

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, **dict.fromkeys(abi.QUANTISED, 1)}

def check(step, num_splits, others):
    """Refuses arguments of other builds that mean something, and what other libraries prepared."""
    refuse_others(num_splits, others)
    if step is not None and not isinstance(step, Step):
        raise Unsupported(
            f"scheduler_metadata is a {type(step).__name__}; pass what flashtune.prepare_step gave, or None"
        )


class Call:
    """One call on its way to the library: the arguments so far, and what must live until it returns."""

    def __init__(self, q, k, v, step, num_splits, others, name="q"):
        check(step, num_splits, others)
        self.step = step or Step(None, None, 0, 0)
        self.tensors = tensors = adapter(q)
        self.device = tensors.device(q, k, v)
        self.engine = _default(tensors, q)
        self.args = abi.Ragged(
            struct_size=ctypes.sizeof(abi.Ragged),
            expected_keys=self.step.expected_keys,
            expected_longest=self.step.expected_longest,
        )
        self.name, self.like, self.caches, self.keeps = name, q, (k, v), []
        # Whether q is of e4m3.
        self.narrow = False
        # The dtype of all lengths, and the argument that said so.
        self.length_type = self.length_name = None
        # What to remember the call by, if it is one that may come again.
        self.repeated = None
        self.dropout = None

    def kept(self, t):
        self.keeps.append(t)
        return t

    def view(self, name, t, rank=None, unit=True):
        """A tensor, whose last dimension is contiguous unless ``unit`` is False."""
        if getattr(t, "is_nested", False):
            raise Unsupported(f"{name} is a nested tensor; pass its rows packed, with their first rows, or padded")
        if not hasattr(t, "shape"):
            raise InvalidTensor(f"{name} is a {type(t).__name__}; pass a tensor or an array as q is")
        view = _View(*self.tensors.side(name, t, self.device))
        if rank is not None and len(view.shape) != rank:
            raise InvalidTensor(f"{name} has the shape {tuple(view.shape)}; it has {rank} dimensions")
        if unit and view.shape and view.shape[-1] > 1 and math.prod(view.shape) and view.strides[-1] != 1:
            raise InvalidTensor(
                f"{name} has a stride of {view.strides[-1]} in its last dimension; make that contiguous"
            )
        return view

    def dtype(self, name, view):
        dtype = abi.DTYPES.get(view.dtype)
        if dtype is None:
            raise Unsupported(f"{name} is {view.dtype}; dtypes are float16, bfloat16 and float32; convert the tensor")
        return dtype

    def ints(self, name, t, n):
        """The address of lengths or of first rows, 0 for None."""
        if t is None:
            return 0
        view = self.view(name, t, 1, unit=False)
        if view.dtype not in abi.INTS:
            raise InvalidTensor(f"{name} is {view.dtype}; pass int32 or int64")
        if view.shape[0] != n:
            raise InvalidTensor(f"{name} has {view.shape[0]} numbers, but there are {self.batch} sequences: it has {n}")
        if n > 1 and view.strides[0] != 1:
            raise InvalidTensor(f"{name} has a stride of {view.strides[0]}; make it contiguous")
        if self.length_type not in (None, view.dtype):
            raise InvalidTensor(
                f"{name} is {view.dtype}, {self.length_name} {self.length_type}; convert one: lengths have one dtype"
            )
        self.length_type, self.length_name = view.dtype, name
        self.args.length_type = abi.INTS[view.dtype]
        return view.address

    def queries(self, q, begin, most, used):
        args, packed = self.args, begin is not None
        view = self.view("q", q, 3 if packed else 4)
        self.narrow = view.dtype == _NARROW
        args.q_dtype = abi.E4M3 if self.narrow else self.dtype("q", view)
        *rows, self.heads, dim = view.shape
        self.packed_rows = packed
        if packed:
            count = getattr(begin, "shape", None)
            if count is None or len(count) != 1 or count[0] < 1:
                what = type(begin).__name__ if count is None else f"of the shape {tuple(count)}"
                raise InvalidTensor(f"cu_seqlens_q is {what}; pass [batch + 1] integers (arguments are taken by name)")
            self.batch, self.rows = count[0] - 1, rows[0]
            args.q_begin = self.ints("cu_seqlens_q", begin, self.batch + 1)
            args.total_q = self.rows
            most = bound("max_seqlen_q", self.step.max_seqlen_q if most is None else most)
            args.max_q = self.rows if most is None else min(most, self.rows)
            args.q_lengths = self.ints("seqused_q", used, self.batch)
        else:
            self.batch, self.rows = rows
            # Every sequence has them, whatever bound was named.
            args.max_q = self.rows
        args.batch, args.heads, args.head_dim_qk = self.batch, self.heads, dim
        self.set_q(view)

    def set_q(self, view):
        self.q = view
        self.args.q, self.args.q_stride = view.address, _rows(view)

    def packed(self, k, v):
        """K and V one sequence after the other."""
        k, v = self.view("k", k, 3), self.view("v", v, 3)
        args = self.args
        if k.shape[:2] != v.shape[:2]:
            raise InvalidTensor(f"k has the shape {tuple(k.shape)}, v {tuple(v.shape)}; rows and heads are the same")
        args.index, args.pages, args.page_tokens = abi.PACKED, 1, k.shape[0]
        self.stored = [_View(t.address, (1, *t.shape), (0, *t.strides), t.dtype) for t in (k, v)]
        self.place(*self.stored, "k", "v")
        self.room = k.shape[0]

    def store(self, k, v, k_name, v_name, table, slots=None):
        """K and V in a cache, with a table of pages or a slot for each sequence."""
        k, v = self.view(k_name, k), self.view(v_name, v, unit=False)
        args = self.args
        self.place(k, v, k_name, v_name)
        if table is None:
            args.index, self.room = abi.DENSE, args.page_tokens
            if slots is None:
                if args.pages < self.batch:
                    raise InvalidTensor(
                        f"{k_name} has {args.pages} slots, but there are {self.batch} sequences; pass cache_batch_idx "
                        "or a block_table"
                    )
                return
            view = self.view("cache_batch_idx", slots, 1, unit=False)
            shape, name, steps = (self.batch,), "cache_batch_idx", view.strides
            args.slots = view.address
        else:
            if slots is not None:
                table = self.rows_of_slots(table, slots)
            name, view = "block_table", self.view("block_table", table, 2, unit=False)
            shape, steps = (self.batch, view.shape[1]), view.strides[1:]
            args.index, args.k_table = abi.TABLE, view.address
            args.table_stride, args.table_capacity = view.strides[0], view.shape[1]
            self.room = view.shape[1] * args.page_tokens
        if view.dtype not in abi.INTS or tuple(view.shape) != shape or view.shape[-1] > 1 and steps[-1] != 1:
            raise InvalidTensor(
                f"{name} is {view.dtype} {tuple(view.shape)} with strides {tuple(view.strides)}; pass int32 or int64 "
                f"of [batch{', width' if table is not None else ''}] for {self.batch} sequences, contiguous in its "
                "last dimension"
            )
        args.table_type = abi.INTS[view.dtype]

    def rows_of_slots(self, table, slots):
        """The table's row of each sequence's slot, as flash-attention 3 reads both; pages of no slot are none."""
        view, rows = self.view("cache_batch_idx", slots, 1, unit=False), self.view("block_table", table, 2, unit=False)
        if view.dtype not in abi.INTS or rows.dtype not in abi.INTS or view.shape[0] != self.batch or not rows.shape[0]:
            raise InvalidTensor(
                f"cache_batch_idx is {view.dtype} {tuple(view.shape)} beside a block_table of {rows.dtype} "
                f"{tuple(rows.shape)}; pass int32 or int64 for {self.batch} sequences, and a table with a row a slot"
            )
        return self.kept(self.tensors.rows(table, slots))

    def place(self, k, v, k_name, v_name, element=None):
        """Sizes and strides of the store: rows contiguous, or K in pieces of 16 bytes beside V by columns.
        ``element`` is what bytes (uint8) mean."""
        args = self.args
        self.stored = [k, v]
        for name, view in ((k_name, k), (v_name, v)):
            if view.dtype == "uint8" and element is None:
                raise Unsupported(
                    f"{name} is uint8, which says nothing of its numbers; view it as float8_e4m3fn, float8_e5m2 or int8"
                )
        if k.dtype != v.dtype:
            raise InvalidTensor(f"{k_name} is {k.dtype}, {v_name} {v.dtype}; K and V are of one dtype")
        dtype = element or k.dtype
        self.quantised = dtype in abi.QUANTISED
        kind = abi.QUANTISED.get(dtype) or abi.DTYPES.get(dtype)
        if kind is None:
            raise Unsupported(
                f"{k_name} is {dtype}; a store is of q's dtype, or one of {', '.join(abi.QUANTISED)}; convert it"
            )
        if not self.quantised and kind != args.q_dtype:
            of_q = next((name for name, number in abi.DTYPES.items() if number == args.q_dtype), _NARROW)
            raise InvalidTensor(f"{k_name} is {dtype}, {self.name} {of_q}; convert one of them")
        args.kv_type = kind
        if len(k.shape) == 5:
            x = 16 // _ELEMENT_BYTES[k.dtype]
            if k.shape[4] != x or len(v.shape) != 4:
                raise InvalidTensor(
                    f"{k_name} has the shape {tuple(k.shape)}, {v_name} {tuple(v.shape)}; five dimensions are [pages, "
                    f"kv_heads, head_dim / {x}, page_tokens, {x}] beside [pages, kv_heads, head_dim_v, page_tokens]"
                )
            pages, heads, pieces, tokens, _ = k.shape
            dim, of_v, dim_v = pieces * x, (v.shape[0], v.shape[1], v.shape[3]), v.shape[2]
            same = of_v == (pages, heads, tokens)
            page, head, inner, token, _ = k.strides
            args.k_stride = (page, token, head, inner)
            page, head, column, token = v.strides
            args.v_stride = (page, token, head, column)
        else:
            if len(k.shape) != 4 or len(v.shape) != 4:
                raise InvalidTensor(
                    f"{k_name} has the shape {tuple(k.shape)}, {v_name} {tuple(v.shape)}; they are [pages, "
                    "page_tokens, kv_heads, head_dim]"
                )
            (pages, tokens, heads, dim), dim_v = k.shape, v.shape[3]
            same = tuple(v.shape[:3]) == (pages, tokens, heads)
            if dim_v > 1 and v.strides[3] != 1 and math.prod(v.shape):
                raise InvalidTensor(
                    f"{v_name} has a stride of {v.strides[3]} in its last dimension; make that contiguous"
                )
            args.k_stride, args.v_stride = (*k.strides[:3], 0), (*v.strides[:3], 0)
        if not same:
            raise InvalidTensor(
                f"{v_name} has the shape {tuple(v.shape)}, {k_name} {tuple(k.shape)}; all but head dims agree"
            )
        if dim != args.head_dim_qk:
            raise InvalidTensor(
                f"{k_name} has a head dim of {dim}, q or key one of {args.head_dim_qk}; they are the same"
            )
        args.k, args.v, args.pages, args.page_tokens = k.address, v.address, pages, tokens
        args.kv_heads, args.head_dim_v = heads, dim_v

    def packed_keys(self, k, v, begin, used, most):
        """Packed K and V with their lengths."""
        if begin is None:
            raise InvalidArgument("cu_seqlens_k is None, but rows of k are packed; pass [batch + 1] first rows")
        self.packed(k, v)
        self.args.kv_begin = self.ints("cu_seqlens_k", begin, self.batch + 1)
        self.args.kv_lengths = self.ints("seqused_k", used, self.batch)
        self.bound_keys(most)

    def of_gradients(self):
        """The same sequences at the end of the arguments of a backward pass."""
        a = self.args
        bounds = (a.batch, a.max_q, a.max_kv, a.length_type, 0)
        fields = (a.q_begin, a.kv_begin, a.q_lengths, a.kv_lengths)
        return abi.BACKWARD_PACKED.pack(*(f or 0 for f in fields), *bounds)

    def bound_keys(self, most):
        most = bound("max_seqlen_k", self.step.max_seqlen_k if most is None else most)
        self.args.max_kv = self.room if most is None else min(most, self.room)

    def scales(self, q_descale, of_k, of_v, ignored=False):
        if q_descale is None or not self.narrow:
            self.unused("q_descale", q_descale, True)
        else:
            self.args.q_scale, kind, strides = self.scale("q_descale", q_descale)
            if kind == abi.SCALES_TOKEN:
                raise InvalidTensor("q_descale is a scale for each token of the cache; q has one for each KV head")
            self.args.q_scale_stride = strides[:2]
        for which, (flash, a, own, b) in (("k", of_k), ("v", of_v)):
            name = own if b is not None else flash
            value = one_of(flash, a, own, b)
            if value is None:
                continue
            if not self.quantised:
                self.unused(name, value, ignored or a is not None)
                continue
            address, kind, strides = self.scale(name, value)
            setattr(self.args, f"{which}_scale", address)
            setattr(self.args, f"{which}_scales", kind)
            setattr(self.args, f"{which}_scale_stride", strides)

    def scale_output(self, value):
        """What an O of e4m3 is multiplied by before it is rounded."""
        if not self.narrow:
            raise InvalidArgument(f"out_scale is of q of {_NARROW}; leave it out, and quantise the result")
        view = self.view("out_scale", value, unit=False)
        if view.dtype != "float32" or math.prod(view.shape) != 1:
            raise InvalidTensor(
                f"out_scale is {view.dtype} of the shape {tuple(view.shape)}; it is float32 of one element"
            )
        self.args.o_scale = view.address

    def unused(self, name, value, ignored):
        """A scale of what is not quantised: flash-attention does not read it."""
        if value is None or isinstance(value, numbers.Real) and value == 1:
            return
        if isinstance(value, numbers.Real) or not ignored:
            raise Unsupported(
                f"{name} is {_short(value)}, but what it belongs to is not quantised; multiply softmax_scale or O by it"
            )

    def scale(self, name, value):
        if isinstance(value, numbers.Real):
            value = self.kept(self.tensors.full(1, float(value), "float32", self.like))
        view = self.view(name, value, unit=False)
        if view.dtype != "float32":
            raise InvalidTensor(f"{name} is {view.dtype}; convert it to float32")
        shape, strides, heads = tuple(view.shape), tuple(view.strides), self.args.kv_heads
        pages = self.args.pages, self.args.page_tokens, heads
        if len(shape) == 3 and shape == pages and self.args.index != abi.PACKED:
            return view.address, abi.SCALES_TOKEN, (strides[0], strides[2], strides[1])
        fits = len(shape) <= 2 and (not shape or shape[-1] in (1, heads))
        if not fits or len(shape) == 2 and shape[0] not in (1, self.batch):
            raise InvalidTensor(
                f"{name} has the shape {shape}; it is a number, [1], [kv_heads], [batch, kv_heads] or [batch, 1] (of "
                f"{self.batch} sequences, {heads} heads), or [pages, page_tokens, kv_heads] of a cache"
            )
        head = strides[-1] if shape and shape[-1] > 1 else 0
        sequence = strides[0] if len(shape) == 2 and shape[0] > 1 else 0
        return view.address, abi.SCALES_HEAD, (sequence, head, 0)

    def new_rows(self, more, k, v, names, rows):
        """What an append shares with the attention behind it, and its new rows."""
        args = self.args
        more.struct_size = ctypes.sizeof(abi.Append)
        for name, view, dim in ((names[0], k, args.head_dim_qk), (names[1], v, args.head_dim_v)):
            if (abi.E4M3 if view.dtype == _NARROW else abi.DTYPES.get(view.dtype)) != args.q_dtype:
                raise InvalidTensor(f"{name} is {view.dtype}, q or the other new rows are not; convert one of them")
            if tuple(view.shape[-2:]) != (args.kv_heads, dim) or view.shape[:-2] != k.shape[:-2]:
                raise InvalidTensor(
                    f"{name} has the shape {tuple(view.shape)}, beside {args.kv_heads} KV heads of {dim} elements in "
                    f"the cache and {names[0]} of {tuple(k.shape)}; they agree"
                )
        more.k_new, more.k_new_stride = k.address, _rows(k)
        more.v_new, more.v_new_stride = v.address, _rows(v)
        more.dtype, more.new_rows, more.batch = args.q_dtype, rows, self.batch
        for field in (
            "kv_type kv_heads head_dim_qk head_dim_v k v k_stride v_stride pages page_tokens k_scale v_scale "
            "k_scale_stride v_scale_stride k_scales v_scales index k_table v_table slots table_stride table_capacity "
            "table_type length_type max_kv"
        ).split():
            setattr(more, field, getattr(args, field))
        if more.dtype == abi.E4M3:
            self.as_pairs(more)

    def as_pairs(self, more):
        """Rows of e4m3 into a cache of e4m3 are copied as they are, two elements as one of 16 bits."""
        if self.stored[0].dtype != _NARROW or len(self.stored[0].shape) != 4:
            raise Unsupported(
                f"k and v are new rows of {_NARROW}, but the cache is {self.stored[0].dtype} with "
                f"{len(self.stored[0].shape)} dimensions; append to one of {_NARROW} of [pages, page_tokens, kv_heads, "
                "head_dim], or wider rows by reshape_and_cache_flash"
            )
        strides = "k_stride v_stride k_new_stride v_new_stride".split()
        odd = any(stride % 2 for name in strides for stride in getattr(more, name))
        if odd or more.head_dim_qk % 2 or more.head_dim_v % 2 or (more.k | more.v | more.k_new | more.v_new) % 2:
            raise Unsupported(
                f"k and v are new rows of {_NARROW} with an odd head dim, stride or address; make all of them even"
            )
        for name in strides:
            setattr(more, name, tuple(stride // 2 for stride in getattr(more, name)))
        more.head_dim_qk, more.head_dim_v = more.head_dim_qk // 2, more.head_dim_v // 2
        more.dtype = more.kv_type = abi.DTYPES["bfloat16"]
        more.k_scale = more.v_scale = more.k_scales = more.v_scales = 0

    def append(self, q, k, v, begin, rotary):
        """Appends new rows; gives q as attention takes it, rotated if asked for."""
        args = self.args
        if self.narrow and rotary is not None:
            raise Unsupported(
                f"k and v are new rows of {_NARROW}, which are copied and not rotated; rotate and round wider ones"
            )
        for name, t in (("k_cache", self.caches[0]), ("v_cache", self.caches[1])):
            require_writeable(self.tensors, name, t)
        rank = 3 if begin else 4
        k, v = self.view("k", k, rank), self.view("v", v, rank)
        if not begin and k.shape[0] != self.batch:
            raise InvalidTensor(
                f"k has rows for {k.shape[0]} sequences, but there are {self.batch}; pass as many, or cu_seqlens_k_new"
            )
        rows = k.shape[0] if begin else k.shape[1]
        more = abi.Append(new_begin=begin, lengths=args.kv_lengths)
        self.new_rows(more, k, v, ("k", "v"), rows)
        args.kv_added, args.kv_added_begin = (0, begin) if begin else (rows, 0)
        if rotary is not None:
            cos, sin, interleaved, more.first_position, advances = rotary
            cos, sin = self.view("rotary_cos", cos, 2), self.view("rotary_sin", sin, 2)
            if cos[1:] != sin[1:]:
                raise InvalidTensor(
                    f"rotary_cos is {cos.dtype} {tuple(cos.shape)}, rotary_sin {sin.dtype} {tuple(sin.shape)}, with "
                    f"strides {tuple(cos.strides)} and {tuple(sin.strides)}; make both alike"
                )
            more.cos, more.sin, more.rotary_dtype = cos.address, sin.address, self.dtype("rotary_cos", cos)
            more.rotary_rows, more.rotary_dim, more.rotary_stride = cos.shape[0], 2 * cos.shape[1], cos.strides[0]
            more.flags = abi.APPEND_INTERLEAVED * interleaved | abi.APPEND_Q_ONE_POSITION * (not advances)
            more.q, more.q_stride = self.q.address, _rows(self.q)
            more.heads, more.q_rows, more.q_begin = self.heads, self.rows, args.q_begin
            q = self.kept(self.tensors.empty(tuple(q.shape), q))
            self.set_q(self.view("q", q))
            more.q_out, more.q_out_stride = args.q, args.q_stride
        self.launch(more)
        return q

    def launch(self, more):
        stream = self.tensors.stream(self.device)
        abi.require(abi.library().flashtune_append(self.engine._handle, more, stream))
        _engine._last = self.engine

    def run(self, q, scale, causal, window, softcap, alibi_slopes, sinks, out, return_lse, out_scale=None, chunk=0):
        """The attention."""
        args, tensors, heads = self.args, self.tensors, self.heads
        args.mask, args.window_left, args.window_right = mask_of(causal, window_of(window))
        if scale is not None:
            try:
                args.softmax_scale, args.flags = scale, abi.RAGGED_SCALE
            except TypeError:
                raise InvalidArgument(f"softmax_scale is {scale!r}, but it is a finite number") from None
        shape = (*self.q.shape[:-1], args.head_dim_v)
        if out_scale is not None:
            self.scale_output(out_scale)
        if out is not None:
            tensors.check_out(out, self.device)
        elif self.narrow and out_scale is None:
            out = tensors.empty_wide(shape, q)
        else:
            out = tensors.empty(shape, q)
        view = self.view("out", out)
        # Beside e4m3 it is of any dtype.
        wanted = view.dtype if self.narrow else self.q.dtype
        if tuple(view.shape) != shape or view.dtype != wanted:
            raise InvalidTensor(
                f"out is {view.dtype} {tuple(view.shape)}, but the result is {wanted} {shape}; pass such memory"
            )
        if self.narrow:
            args.o_dtype = abi.E4M3 if view.dtype == _NARROW else self.dtype("out", view)
            if out_scale is not None and args.o_dtype != abi.E4M3:
                raise InvalidTensor(f"out_scale is given, but out is {view.dtype}; pass one of {_NARROW}")
        for name, other in (("q", self.q), ("k", self.stored[0]), ("v", self.stored[1])):
            if _overlap(view, other):
                raise InvalidTensor(
                    f"out shares memory with {name}, which is read while out is written; pass other memory"
                )
        args.o, args.o_stride = view.address, _rows(view)
        lse = None
        if return_lse:
            lse = tensors.empty_lse((heads, self.rows) if self.packed_rows else (self.batch, heads, self.rows), q)
            args.lse, args.lse_stride = tensors.address(lse), (heads * self.rows, self.rows, 1)
        program = _changed(softcap, alibi_slopes, sinks, chunk)
        if program is not None:
            packed, kept = program.pack(tensors, self.device)
            fields = "mask_program score_program sink_program inputs inputs_len input_size".split()
            for field, value in zip(fields, abi.PROGRAM_ARGS.unpack(packed)):
                setattr(args, field, value)
            self.keeps += kept
        if self.dropout is not None:
            names = "dropout_p dropout_seed dropout_offset dropout_seed_at dropout_offset_at".split()
            for field, value in zip(names, abi.DROPOUT.unpack(self.dropout.pack(tensors, self.device))):
                setattr(args, field, value)
        status = abi.library().flashtune_forward_ragged(self.engine._handle, args, tensors.stream(self.device))
        abi.require(status)
        _engine._last = self.engine
        if self.repeated is not None and program is None and self.dropout is None and not self.keeps:
            self.repeated.remember(args, out, lse)
        return out if lse is None else (out, lse)


def one_of(name, a, other, b):
    """The value of an argument that has two names."""
    if a is not None and b is not None and name != other:
        raise InvalidArgument(f"{name} and {other} are both given and mean the same; pass one")
    return b if a is None else a


def bound(name, n):
    """A number of the host; None stays."""
    if n is None:
        return None
    if not isinstance(n, numbers.Integral) or n < 0:
        raise InvalidArgument(
            f"{name} is {_short(n)}; pass a whole number of at least 0 (reading a tensor would wait for the device)"
        )
    return int(n)


def window_of(window):
    return (-1, -1) if window is None else window


def _rows(view):
    """Strides of batch, head and row of [batch, rows, heads, dim] or [rows, heads, dim]."""
    batch, row, head = ((0,) + tuple(view.strides[:-1]))[-3:]
    return batch, head, row


def require_writeable(tensors, name, t):
    if not tensors.is_writeable(t):
        raise InvalidTensor(f"{name} cannot be written, but new rows go there; pass a writeable array")


def _overlap(a, b):
    """Whether two tensors share an element, as far as addresses tell: those of interleaved rows share a range and
    none."""
    spans = []
    for address, shape, strides, dtype in (a, b):
        elements = math.prod(shape)
        if elements == 0:
            return False
        last = sum((n - 1) * stride for n, stride in zip(shape, strides))
        spans.append((address, address + (last + 1) * _ELEMENT_BYTES[dtype], last + 1 == elements))
    (start_a, end_a, dense_a), (start_b, end_b, dense_b) = spans
    return start_a == start_b or (dense_a and dense_b and start_a < end_b and start_b < end_a)
