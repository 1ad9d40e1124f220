"""Engines: a device, the layers of stored kernels, and a policy."""

import ctypes
import json as _json
import math
import numbers
import operator
import os
import struct
import sys
import threading

from . import _dlpack
from . import _library as abi
from ._dropout import of_call, with_state
from ._programs import PackedProgram, Program, pack_gradients
from ._tensors import _of_type, adapter, foreign
from .block_mask import BlockMask, handle_of
from .errors import EngineClosed, InvalidArgument, InvalidTensor


# Calls of an engine that are known by their form. One of 256 forms is found again as fast as one of two; a decode
# without a cache meets a new one in each step, and starts over.
_MOST_CALLS = 256
# Behind what a repeated backward pass packs anew: window, mask, scale and a program come before packed sequences.
_PROGRAM_AT = abi.BACKWARD_ARGS.size - abi.BACKWARD_AGAIN.size
_PACKED_AT = _PROGRAM_AT + abi.PROGRAM_ARGS.size
# Where dropout is behind what every call packs.
_FORWARD_DROPOUT_AT = sum(
    part.size for part in (abi.PROGRAM_ARGS, abi.BLOCK_MASK, abi.WEIGHTS, abi.DESCALES, abi.TENSOR)
)
_DROPOUT_AT = abi.PROGRAM_ARGS.size + abi.BACKWARD_PACKED.size + abi.GRADIENTS.size + abi.TENSOR.size


class Engine:
    """Attention on one device. One engine serves all threads.

    device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or a ``torch.device``.
    policy: what to do when no tuned kernel fits: ``"default"`` takes the default schedule and compiles it, ``"tune"``
        tunes now (seconds to minutes for the first call of a class of sizes), ``"sealed"`` runs no compiler and raises
        :class:`Sealed` when no stored kernel serves.
    cache_dir, templates_dir: instead of ``FLASHTUNE_CACHE`` and ``FLASHTUNE_TEMPLATES``.
    bundles: bundle files to search after the cache, before those of ``FLASHTUNE_BUNDLES``.
    quick_first: whether calls of a kernel that must be compiled first are answered by a schedule that compiles in a
        quarter of the time, with the same bits, until their own is there; ``None``: what ``FLASHTUNE_QUICK_FIRST``
        says, else yes.
    scratch_limit: most bytes of scratch memory that a backward pass takes on a GPU beside the gradients; ``None``:
        1 GiB. One that would take more runs in waves of KV heads, with the same bytes as results.
    threads: whose threads run kernels on the CPU, with the same bytes as results: ``"own"``, the library's;
        ``"openmp"``, those of the OpenMP runtime that is loaded in this process (of PyTorch's, as many as
        ``torch.get_num_threads()`` says), an error without one; ``None``: OpenMP's where PyTorch is loaded, else the
        library's. OpenMP's threads keep cores busy while they wait: beside them, others find none.
    allow_paths: instruction paths that are taken although no card is known to have executed them, by the names that
        ``explain`` gives; those of ``FLASHTUNE_ALLOW_PATHS`` beside. ``flashtune check`` on the card makes it
        unnecessary there.
    """

    def __init__(
        self,
        device,
        *,
        policy="default",
        cache_dir=None,
        templates_dir=None,
        bundles=(),
        quick_first=None,
        scratch_limit=None,
        threads=None,
        allow_paths=(),
    ):
        self.device = _device_name(device)
        if not isinstance(policy, str) or policy not in abi.POLICIES:
            raise InvalidArgument(f"policy is {policy!r}; it is one of {', '.join(abi.POLICIES)}")
        if isinstance(bundles, (str, bytes, os.PathLike)):
            raise InvalidArgument(f"bundles is {bundles!r}; pass a list of paths")
        if isinstance(allow_paths, (str, bytes)) or not all(isinstance(path, str) for path in allow_paths):
            raise InvalidArgument(f"allow_paths is {allow_paths!r}; pass a list of names")
        if quick_first is not None and not isinstance(quick_first, bool):
            raise InvalidArgument(f"quick_first is {quick_first!r}; it is True, False or None")
        if scratch_limit is not None and (type(scratch_limit) is not int or not 0 < scratch_limit < 1 << 64):
            raise InvalidArgument(f"scratch_limit is {scratch_limit!r}; it is a positive number of bytes, or None")
        if threads is not None and (not isinstance(threads, str) or threads not in abi.THREADS):
            raise InvalidArgument(f"threads is {threads!r}; it is {', '.join(map(repr, abi.THREADS))} or None")
        unsaid = abi.OPENMP_IF_LOADED if "torch" in sys.modules else abi.THREADS["own"]
        files = [_path("a bundle", b) for b in bundles]
        options = abi.Options(
            struct_size=ctypes.sizeof(abi.Options),
            policy=abi.POLICIES[policy],
            device=self.device.encode(),
            cache_dir=None if cache_dir is None else _path("cache_dir", cache_dir),
            templates_dir=None if templates_dir is None else _path("templates_dir", templates_dir),
            bundles=(ctypes.c_char_p * len(files))(*files),
            bundles_len=len(files),
            quick_first=abi.QUICK_FIRST[quick_first],
            scratch_limit=scratch_limit or 0,
            threads=unsaid if threads is None else abi.THREADS[threads],
            allow_paths=",".join(allow_paths).encode() or None,
        )
        handle = ctypes.c_uint64()
        lib = abi.library()
        abi.require(lib.flashtune_engine_open(options, handle))
        self._handle, self._closed = handle.value, False
        # Kept here: looked up once, not in every call.
        self._forward = lib.flashtune_forward
        self._forward_ragged, self._backward = lib.forward_ragged_packed, lib.flashtune_backward
        # Plain calls that succeeded, by all that was looked at but addresses and the stream; ragged ones apart.
        self._again = {}
        self._again_ragged, self._again_backward = {}, {}

    def forward(
        self,
        q,
        k,
        v,
        *,
        scale=None,
        causal=False,
        window=(-1, -1),
        layout="bshd",
        return_lse=False,
        out=None,
        mask=None,
        score=None,
        sink=None,
        tensors=None,
        block_mask=None,
        return_weights=False,
        precision=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        descale_rows=1,
        dropout_p=0.0,
        rng_state=None,
        return_rng_state=False,
    ):
        """Attention of ``q`` over ``k`` and ``v``: what :func:`flash_attn_func` computes, on this engine.

        layout: ``"bshd"`` for ``[batch, rows, heads, head_dim]``, ``"bhsd"`` for ``[batch, heads, rows, head_dim]``.
        out: memory for the result, of the dtype of ``q``; a new contiguous tensor when not given.
        mask, score, sink, tensors, block_mask: a score program and what it reads, as :func:`attention` takes them.
        return_weights: also the attention weights, float32 ``[batch, heads, q_len, kv_len]``, as the last result.
        precision: how float32 is multiplied: ``"exact"``, without tensor cores; ``"tf32x3"``, by three TF32 products to
        one, which keep float32's error; ``"tf32"``, by one, which keeps 11 bits. The last two are refused for other
        dtypes, on the CPU and on GPUs before sm_80. ``None`` is ``"tf32x3"`` where a GPU has that, and ``"exact"``
        elsewhere, where weights are returned, and in calls that take part in autograd.
        q_descale, k_descale, v_descale, descale_rows, dropout_p, rng_state, return_rng_state: as
        :func:`flash_attn_func` takes them.
        """
        if type(q) not in _of_type and foreign(q):
            return _dlpack.through(Engine.forward, locals())
        if layout != "bshd" and layout != "bhsd":
            raise InvalidArgument(f"layout is {layout!r}; it is 'bshd' or 'bhsd'")
        program = None
        if mask is not None or score is not None or sink is not None:
            program = Program(mask, score, sink, tensors)
        kind, left, right = mask_of(causal, window)
        bshd = layout == "bshd"
        tensors_of, dropout = adapter(q), None
        if dropout_p or return_rng_state:
            dropout = of_call(tensors_of, q, dropout_p, rng_state)
        found = self._attend(
            tensors_of, q, k, v, bshd, kind, left, right, scale, return_lse, out,
            program=program, block_mask=block_mask, return_weights=return_weights, precision=precision,
            descales=(q_descale, k_descale, v_descale), descale_rows=descale_rows, dropout=dropout,
        )  # fmt: skip
        return with_state(found, dropout) if return_rng_state else found

    def quantise(
        self, q=None, k=None, v=None, *, scales="head", block_rows=128, subtract_mean=False, hadamard=False,
        rotary_cos=None, rotary_sin=None, rotary_interleaved=True, q_positions=0, k_positions=0, kv_heads=None,
        layout="bshd",
    ):  # fmt: skip
        """:func:`flashtune.quantise` on this engine."""
        from ._quantise import of_engine

        return of_engine(
            self, q, k, v, scales, block_rows, subtract_mean, hadamard, rotary_cos, rotary_sin, rotary_interleaved,
            q_positions,
            k_positions, kv_heads, layout,
        )  # fmt: skip

    def create_block_mask(self, mask, B, H, Q_LEN, KV_LEN, *, tensors=None, H_KV=None):
        """:func:`create_block_mask` for calls of this engine."""
        return BlockMask(self, mask, B, H, Q_LEN, KV_LEN, tensors, H_KV)

    def _attend(
        self,
        tensors,
        q,
        k,
        v,
        bshd,
        mask,
        left,
        right,
        scale,
        return_lse,
        out=None,
        top_left=False,
        grouped=True,
        program=None,
        block_mask=None,
        return_weights=False,
        precision=None,
        descales=(None, None, None),
        descale_rows=1,
        residual=False,
        dropout=None,
    ):
        """The one path to the library. ``mask``, ``left`` and ``right`` are the header's; ``top_left`` replaces them by
        PyTorch's causal mask; without ``grouped`` all tensors must have as many heads. With ``residual`` what O loses
        by rounding comes behind it and the log-sum-exp; weights come last."""
        device = tensors.device(q, k, v)
        name = tensors.name(device)
        if name != self.device:
            raise InvalidTensor(
                f"q, k and v are on {name}, the engine computes on {self.device}; move them, or use an engine there"
            )
        key = None
        scaled = any(scales is not None for scales in descales)
        plain = block_mask is None and out is None and not return_weights
        plain = plain and not scaled and not residual and dropout is None
        side = ()
        if plain and (scale is None or type(scale) is float):
            try:
                forms, side = (tensors.forms(q, k, v), ()) if program is None else _forms(tensors, program, (q, k, v))
            except RuntimeError:
                # What is told below.
                forms = None
            if forms is not None:
                key = (forms, bshd, mask, left, right, scale, return_lse, top_left, grouped, precision)
                known = self._again.get(key)
                if known is not None:
                    result = self._attend_again(known, tensors, device, q, k, v, side)
                    if result is not None:
                        return result
        qd = tensors.describe("q", q, bshd)
        kd = tensors.describe("k", k, bshd)
        vd = tensors.describe("v", v, bshd)
        _, b, h, s, _, _, _, _, _, dtype, _ = qd
        dv = vd[4]
        new, o_dtype = (tensors.empty_wide, abi.BF16) if dtype == abi.E4M3 else (tensors.empty, dtype)
        if not grouped and h != kd[2]:
            raise InvalidTensor(
                f"query has {h} heads, key {kd[2]}; pass enable_gqa=True for query heads that share a key head"
            )
        if top_left:
            mask, left, right, kd, vd = _top_left_causal(qd, kd, vd)
        if out is None:
            # Contiguous, so its strides are known without asking.
            if bshd:
                out = new((b, s, h, dv), q)
                strides = (s * h * dv, dv, h * dv, 1)
            else:
                out = new((b, h, s, dv), q)
                strides = (h * s * dv, s * dv, dv, 1)
            od = (tensors.address(out), b, h, s, dv, *strides, o_dtype, 0)
        else:
            tensors.check_out(out, device)
            od = tensors.describe("out", out, bshd)
            for other, described in (("q", qd), ("k", kd), ("v", vd)):
                if _overlap(od, described):
                    raise InvalidTensor(
                        f"out shares memory with {other}, which is read while out is written; pass other memory"
                    )
        lse = tensors.empty_lse((b, h, s), q) if return_lse else None
        more, _kept = (b"", None) if program is None else program.pack(tensors, device)
        if block_mask is not None:
            # An operator has its number, of a block mask that was looked at before.
            number = block_mask % (1 << 64) if isinstance(block_mask, int) else handle_of(block_mask, name)
            more = (more or bytes(abi.PROGRAM_ARGS.size)) + abi.BLOCK_MASK.pack(number)
        weights = None
        if return_weights:
            weights = tensors.empty_lse((b, h, s, kd[3]), q)
            before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size
            more = more.ljust(before, b"\0") + abi.WEIGHTS.pack(tensors.address(weights))
        if scaled:
            before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size + abi.WEIGHTS.size
            scales, by = _descales(tensors, device, descales, descale_rows, (qd, kd, vd))
            more = more.ljust(before, b"\0") + scales
        lost = None
        if residual:
            lost = _empty_residual(tensors, tuple(out.shape), q)
            before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size + abi.WEIGHTS.size + abi.DESCALES.size
            more = more.ljust(before, b"\0") + abi.TENSOR.pack(*tensors.describe("residual", lost, bshd))
        if dropout is not None:
            more = more.ljust(_FORWARD_DROPOUT_AT, b"\0") + dropout.pack(tensors, device)
        if scaled and by is not None:
            more = more.ljust(_FORWARD_DROPOUT_AT + abi.DROPOUT.size, b"\0") + by
        try:
            flags = abi.PRECISIONS[precision]
        except (KeyError, TypeError):
            raise InvalidArgument(f"precision is {precision!r}; it is 'exact', 'tf32x3', 'tf32', or None") from None
        try:
            args = abi.FORWARD_ARGS.pack(
                abi.FORWARD_ARGS.size + len(more),
                flags if scale is None else flags | abi.SCALE_IS_GIVEN,
                *qd,
                *kd,
                *vd,
                *od,
                0 if lse is None else tensors.address(lse),
                tensors.stream(device),
                left,
                right,
                mask,
                0.0 if scale is None else scale,
            )
        except (struct.error, OverflowError) as e:
            raise InvalidArgument(f"the softmax scale is {scale!r}, but it is a finite number: {e}") from None
        status = self._forward(self._handle, args + more)
        if status:
            raise abi.failure(status)
        global _last
        _last = self
        # O of e4m3 is of another dtype, which a repeated call would have to ask for.
        if key is not None and dtype == o_dtype:
            if len(self._again) >= _MOST_CALLS:
                self._again.clear()
            again = None if program is None else PackedProgram(program, tensors, device)
            # All but q, k, v, o, lse and stream, as the layout of the struct has them.
            fixed = [args[a:b] for a, b in ((0, 8), (16, 88), (96, 168), (176, 248), (256, 328), (344, 368))]
            like_q = qd[1:9] == od[1:9] and tuple(q.shape) == tuple(out.shape)
            shapes = None if like_q else tuple(out.shape), (b, h, s) if return_lse else None
            self._again[key] = (*fixed, *shapes, again)
        if weights is not None or lost is not None:
            return (out, *(t for t in (lse, lost, weights) if t is not None))
        return out if lse is None else (out, lse)

    def _again_plain(self, tensors, device, q, k, v, bshd, mask, scale, return_lse, top_left=False, grouped=True):
        """A call without windows and options, if one like it has been made; else None."""
        try:
            forms = tensors.forms(q, k, v)
        except RuntimeError:
            return None
        # As `_attend` writes it.
        known = self._again.get((forms, bshd, mask, 0, 0, scale, return_lse, top_left, grouped, None))
        return None if known is None else self._attend_again(known, tensors, device, q, k, v)

    def _attend_again(self, known, tensors, device, q, k, v, side=()):
        """A call like one before, with other addresses; None where a tensor has no memory to read. ``side``: the
        tensors that its program reads."""
        head, of_q, of_k, of_v, of_o, tail, shape, lse_shape, program = known
        try:
            addresses = tensors.addresses(q, k, v)
            read = tensors.addresses_of(side) if side else ()
        except RuntimeError:
            return None
        if addresses is None:
            return None
        at_q, at_k, at_v = addresses
        # O is contiguous, and where it has the shape and strides of q, so is q.
        out = tensors.empty_like(q) if shape is None else tensors.empty(shape, q)
        lse = None if lse_shape is None else tensors.empty_lse(lse_shape, q)
        args = abi.FORWARD_AGAIN.pack(
            head, at_q, of_q, at_k, of_k, at_v, of_v, tensors.address(out), of_o,
            0 if lse is None else tensors.address(lse), 0 if self.device == "cpu" else tensors.stream(device), tail,
        )  # fmt: skip
        if program is not None:
            more, _kept = program.pack(read)
            args += more
        status = self._forward(self._handle, args)
        if status:
            raise abi.failure(status)
        global _last
        _last = self
        return out if lse is None else (out, lse)

    def _gradients(
        self, tensors, dout, q, k, v, out, lse, dlse, bshd, mask, left, right, scale, into, program, run=True,
        packed=None, needs=(), key=None, residual=None, dropout=None,
    ):  # fmt: skip
        """dQ, dK and dV, and with names in ``needs`` a dict of the gradients of these, too. ``mask``, ``left`` and
        ``right`` are the header's; without ``run`` all but the launch. ``packed`` is the end of the arguments that
        packed sequences have: tensors are then ``[rows, heads, head_dim]``, and rows of no sequence are 0 in new
        gradients. ``key`` is what such a call is to be known by."""
        device = tensors.device(q, k, v)
        name = tensors.name(device)
        if name != self.device:
            raise InvalidTensor(
                f"q, k and v are on {name}, the engine computes on {self.device}; move them, or use an engine there"
            )
        given_into = into is not None
        plain = not given_into and packed is None and run and not needs and residual is None
        plain = plain and dropout is None
        if plain and (scale is None or type(scale) is float):
            forms, side = _forms(tensors, program, (q, k, v, dout, out, lse, dlse))
            if forms is not None:
                key = (forms, bshd, mask, left, right, scale)
                known = self._again_backward.get(key)
                if known is not None:
                    given = dout, q, k, v, out
                    result = self._gradients_again(known, tensors, device, given, lse, dlse, side=side)
                    if result is not None:
                        return result
        given = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
        for one, t in (("dout", dout), ("out", out)):
            if not tensors.is_tensor(t) or tensors.device(t, t, t) != device:
                raise InvalidTensor(f"{one} is a {type(t).__name__}; pass a tensor of the kind and on the device of q")
        # Packed rows are those of one entry of the batch.
        whole = (lambda name, t: t) if packed is None else _one_entry
        described = {one: tensors.describe(one, whole(one, t), bshd) for one, t in given.items()}
        if into is None:
            new = tensors.empty if packed is None else tensors.zeros
            into = tuple(new(tuple(t.shape), t) for t in (q, k, v))
            read = _empty_gradients(needs, program, tensors, q)
        elif not isinstance(into, (tuple, list)) or len(into) != (4 if needs else 3):
            form = "(dq, dk, dv, a dict of the gradients that needs names)" if needs else "(dq, dk, dv)"
            raise InvalidArgument(f"into is a {type(into).__name__}; it is {form}")
        else:
            *into, read = into if needs else (*into, {})
            if not isinstance(read, dict) or set(read) != set(needs):
                raise InvalidArgument(f"into has gradients of {list(read)}, but needs names {list(needs)}")
            for t in (*into, *read.values()):
                tensors.check_out(t, device)
        written = [tensors.describe(one, whole(one, t), bshd) for one, t in zip(("dq", "dk", "dv"), into)]
        # New memory is nobody else's.
        for i, one in enumerate(written if given_into else ()):
            others = [*described.items(), *zip(("dq", "dk", "dv"), written[:i])]
            for other, where in others:
                if _overlap(one, where):
                    raise InvalidTensor(f"{('dq', 'dk', 'dv')[i]} shares memory with {other}; pass other memory")
        _, b, h, s, *_ = described["q"]
        shape = (b, h, s) if packed is None else (h, s)
        rows = [_rows("the log-sum-exp", lse, shape, tensors, device)]
        rows.append(0 if dlse is None else _rows("dlse", dlse, shape, tensors, device))
        more, _kept = (bytes(abi.PROGRAM_ARGS.size), None) if program is None else program.pack(tensors, device)
        by_name, _kept_too = pack_gradients(read, tensors, device)
        if packed is not None or by_name or residual is not None or dropout is not None:
            more += packed or bytes(abi.BACKWARD_PACKED.size)
        more += by_name
        if residual is not None:
            if not tensors.is_tensor(residual) or tensors.device(residual, residual, residual) != device:
                kind = type(residual).__name__
                raise InvalidTensor(f"residual is a {kind}; pass a tensor of the kind and on the device of q")
            lost = tensors.describe("residual", whole("residual", residual), bshd)
            more = more if by_name else more + bytes(abi.GRADIENTS.size)
            more += abi.TENSOR.pack(*lost)
        if dropout is not None:
            more = more.ljust(_DROPOUT_AT, b"\0") + dropout.pack(tensors, device)
        views = [described[one] for one in ("dout", "q", "k", "v", "out")] + written
        try:
            args = abi.BACKWARD_ARGS.pack(
                abi.BACKWARD_ARGS.size + len(more),
                0 if scale is None else abi.SCALE_IS_GIVEN,
                *[field for view in views for field in view],
                *rows,
                tensors.stream(device),
                left,
                right,
                mask,
                0.0 if scale is None else scale,
            )
        except (struct.error, OverflowError) as e:
            raise InvalidArgument(f"the softmax scale is {scale!r}, but it is a finite number: {e}") from None
        args += more
        abi.require((self._backward if run else abi.library().flashtune_prepare_backward)(self._handle, args))
        if not run:
            return None
        global _last
        _last = self
        if key is not None:
            if len(self._again_backward) >= _MOST_CALLS:
                self._again_backward.clear()
            # All but the addresses of eight tensors, lse and dlse, and the stream.
            parts = [args[:8]]
            for at in range(8, 8 + 8 * 80, 80):
                parts += [0, args[at + 8 : at + 80]]
            like = [described[name][1:9] == one[1:9] for name, one in zip("qkv", written)]
            again = None if program is None else PackedProgram(program, tensors, device)
            self._again_backward[key] = (parts, like, args[abi.BACKWARD_AGAIN.size :], again)
        return (*into, read) if needs else tuple(into)

    def _gradients_again(self, known, tensors, device, given, lse, dlse, packed=None, side=()):
        """A backward pass like one before, with other addresses; None where a tensor has no memory to read. ``packed``
        are the addresses of first rows and lengths, 0 for none; ``side`` the tensors that its program reads."""
        parts, like, tail, program = known
        if packed is not None:
            tail = tail[:_PACKED_AT] + abi.PACKED_AGAIN.pack(*packed) + tail[_PACKED_AT + abi.PACKED_AGAIN.size :]
        try:
            addresses = tensors.addresses_of(given)
            rows = tensors.address(lse), 0 if dlse is None else tensors.address(dlse)
            read = tensors.addresses_of(side) if side else ()
        except RuntimeError:
            return None
        if program is not None:
            more, _kept = program.pack(read)
            tail = tail[:_PROGRAM_AT] + more + tail[_PROGRAM_AT + abi.PROGRAM_ARGS.size :]
        # They are contiguous, as some of what they are the gradients of is.
        if packed is None:
            new = [tensors.empty_like(t) if alike else tensors.empty(t.shape, t) for t, alike in zip(given[1:4], like)]
        else:
            new = [tensors.zeros(tuple(t.shape), t) for t in given[1:4]]
        dq, dk, dv = into = tuple(new)
        parts = parts.copy()
        parts[1::2] = *addresses, tensors.address(dq), tensors.address(dk), tensors.address(dv)
        stream = 0 if self.device == "cpu" else tensors.stream(device)
        args = abi.BACKWARD_AGAIN.pack(*parts, *rows, stream)
        status = self._backward(self._handle, args + tail)
        if status:
            raise abi.failure(status)
        global _last
        _last = self
        return into

    def explain(self, *, as_dict=False):
        """Which kernel the last call ran on, from where it comes, and why no other did: text, or a dict."""
        text = self._text(abi.library().flashtune_explain, abi.JSON if as_dict else abi.TEXT)
        return _json.loads(text) if as_dict else text

    def preload(self, manifest):
        """Loads the kernels of what a file lists (as :meth:`write_untuned` writes it), compiling or tuning by policy.
        What cannot be had is an :class:`Error` that names each entry; the others are loaded.
        """
        abi.require(abi.library().flashtune_preload(self._handle, _path("manifest", manifest)))

    def seal(self, on_miss="nearest"):
        """Loads the kernels of all records that may be used here; from then on nothing is compiled or tuned and no file
        is read. Gives a digest: processes with equal digests run the same kernels.

        on_miss: what happens to sizes that no kernel was sealed in for: ``"nearest"`` runs the nearest one of the
            problem, ``"refuse"`` raises :class:`Sealed`.
        """
        if not isinstance(on_miss, str) or on_miss not in abi.ON_MISS:
            raise InvalidArgument(f"on_miss is {on_miss!r}; it is one of {', '.join(abi.ON_MISS)}")
        digest = ctypes.create_string_buffer(65)
        abi.require(abi.library().flashtune_seal(self._handle, abi.ON_MISS[on_miss], digest))
        return digest.value.decode()

    def counters(self):
        """What the engine counted, as a dict: calls by what they ran on, refusals, compilations, verification
        failures."""
        return _json.loads(self._text(abi.library().flashtune_counters, abi.JSON))

    def prometheus(self):
        """:meth:`counters` as the text that Prometheus scrapes."""
        text = self._text(abi.library().flashtune_counters, abi.TEXT)
        counts = sys.modules.get("flashtune.torch._counts")
        return text if counts is None else text + counts.prometheus(self.device)

    def write_metrics(self, file):
        """Writes :meth:`prometheus` to a file that is whole whenever it is read: for node_exporter's textfile
        collector.

        Each line has the label ``process`` with the file's name (``rank0`` of ``rank0.prom``), since a collector
        refuses two files with the same lines. To be called now and then, as often as the collector is scraped.
        """
        abi.require(abi.library().flashtune_write_metrics(self._handle, _path("file", file)))

    def write_untuned(self, file):
        """Appends the sizes that were met untuned to a file that ``flashtune tune --from`` takes; gives their
        number."""
        classes = ctypes.c_uint64()
        abi.require(abi.library().flashtune_write_untuned(self._handle, _path("file", file), classes))
        return classes.value

    def _text(self, function, form):
        """A text of the library, however long it is."""
        length = ctypes.c_size_t(4096)
        while True:
            buffer = ctypes.create_string_buffer(length.value + 1)
            status = function(self._handle, form, buffer, len(buffer), length)
            # Another thread's call may have made it longer since.
            if status != abi.BUFFER_TOO_SMALL:
                break
        abi.require(status)
        return buffer.value.decode()

    def close(self):
        """Gives back what the engine holds; calls fail with :class:`EngineClosed` from now on. On CUDA it waits for the
        device first, because kernels are unloaded. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        torch = sys.modules.get("torch")
        if self.device != "cpu" and torch is not None:
            torch.cuda.synchronize(self.device)
        abi.require(abi.library().flashtune_engine_close(self._handle))

    @property
    def closed(self):
        """Whether :meth:`close` was called."""
        return self._closed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<flashtune.Engine on {self.device}{', closed' if self.closed else ''}>"


def mask_of(causal, window):
    """Mask and reaches for the arguments ``causal`` and ``window_size`` of flash-attention: a negative reach is
    unbounded, and causal bounds the right side to the query's own position."""
    if type(window) is tuple and len(window) == 2:
        left, right = window
        # The usual case, without a look at what else may be a number.
        if type(left) is int and type(right) is int and left < 0 and right < 0:
            return (abi.CAUSAL if causal else abi.FULL), 0, 0
    try:
        # What reaches further than every length is as good as any other number of that kind.
        left, right = (max(-1, min(operator.index(n), 1 << 40)) for n in window)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"window_size is {window!r}; it is (left, right), whole numbers of keys, with -1 for an unbounded side"
        ) from None
    if causal:
        if left < 0:
            return abi.CAUSAL, 0, 0
        return abi.WINDOW, left, 0
    if left < 0 and right < 0:
        return abi.FULL, 0, 0
    return abi.WINDOW, left, right


def _top_left_causal(qd, kd, vd):
    """A causal mask that starts at the first key, as PyTorch's ``is_causal`` does, in terms of ours, which ends at the
    last.

    With more keys than queries no query sees the keys beyond q_len: they are left out. With more queries than keys,
    query i stands q_len - kv_len keys further left than by PyTorch's count: it may look that much to the right.
    """
    q_len, kv_len = qd[3], kd[3]
    if q_len <= kv_len:
        # A value tensor of another length than the keys is the library's to refuse.
        kd, vd = ((*t[:3], q_len, *t[4:]) if t[3] == kv_len else t for t in (kd, vd))
        return abi.CAUSAL, 0, 0, kd, vd
    return abi.WINDOW, -1, q_len - kv_len, kd, vd


def top_left_sliced(q_len, k, v):
    """As :func:`_top_left_causal`, of tensors ``[batch, heads, rows, dim]``, whose gradients slices keep."""
    kv_len = k.shape[2]
    if q_len < kv_len:
        k, v = (t[:, :, :q_len] if t.shape[2] == kv_len else t for t in (k, v))
    if q_len <= kv_len:
        return abi.CAUSAL, 0, 0, k, v
    return abi.WINDOW, -1, q_len - kv_len, k, v


def _descales(tensors, device, descales, descale_rows, described):
    """The two parts of the arguments that scales of e4m3 operands are; the second is None where all are those of heads.

    How many axes a tensor has says what shares a scale: two, a head; three, of q and k rows, of v a channel.
    """
    rows = descale_rows
    if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1 or rows & (rows - 1):
        raise InvalidArgument(f"descale_rows is {rows!r}; it is the rows of q and k that share a scale, a power of two")
    kv = described[1]
    addresses, strides, by = [], [], []
    for name, scales, of in zip(("q_descale", "k_descale", "v_descale"), descales, described):
        if scales is None:
            addresses.append(0)
            strides += (0, 0)
            by += (abi.DESCALE_HEAD, 0, 0)
            continue
        address, found, stride, dtype = tensors.side(name, scales, device)
        _, batch, heads, count, dim = of[:5]
        by_head = (batch, kv[2])
        if name == "v_descale":
            finer, words = (batch, kv[2], dim), "[batch, heads_kv, head_dim_v]"
            kind = (abi.DESCALE_CHANNEL, 0)
        else:
            finer, words = (batch, heads, -(-count // rows)), "[batch, heads, rows]"
            kind = (abi.DESCALE_TOKEN, 0) if rows == 1 else (abi.DESCALE_BLOCK, rows)
            if rows > 1:
                words = f"[batch, heads, rows / {rows}]"
        if dtype != "float32" or found not in (by_head, finer):
            raise InvalidTensor(
                f"{name} is {dtype} of the shape {found}; it is float32 [batch, heads_kv] = {by_head}, where expand() "
                f"repeats one scale, or {words} = {finer}" + _of_rows(name, rows)
            )
        addresses.append(address)
        strides += stride[:2]
        by += (*kind, stride[2]) if len(found) == 3 else (abi.DESCALE_HEAD, 0, 0)
    finer = any(by[::3])
    return abi.DESCALES.pack(*addresses, *strides), abi.DESCALES_BY.pack(*by) if finer else None


def _of_rows(name, rows):
    if name == "v_descale":
        return "; scales of rows of v are not taken: quantise v by channel"
    return "" if rows > 1 else "; scales of blocks of rows need descale_rows="


def _overlap(a, b):
    """Whether two described tensors share an element, as far as addresses tell: those of interleaved rows share a range
    and no element."""
    (start_a, end_a, dense_a), (start_b, end_b, dense_b) = _span(a), _span(b)
    if start_a >= end_a or start_b >= end_b:
        return False
    return start_a == start_b or (dense_a and dense_b and start_a < end_b and start_b < end_a)


def _span(described):
    """First address, the one behind the last, and whether all between them is the tensor's."""
    address, shape, strides, size = described[0], described[1:5], described[5:9], 4 if described[9] == abi.F32 else 2
    # Described are batch, heads, rows and dim, and the strides in that order.
    last, elements = sum((n - 1) * stride for n, stride in zip(shape, strides)), math.prod(shape)
    return address, address + (last + 1) * size if elements else address, last + 1 == elements


def _forms(tensors, program, given):
    """What calls have in common that differ in memory alone, a key, or None; and the tensors that a program reads."""
    if program is None:
        return tensors.forms_of(given), ()
    form = program.form()
    if form is None:
        return None, ()
    key, side = form
    forms = tensors.forms_of((*given, *side))
    return None if forms is None else (key, forms), side


def _one_entry(name, t):
    """Packed rows as a batch of one."""
    if len(t.shape) != 3:
        raise InvalidTensor(f"{name} has the shape {tuple(t.shape)}; packed rows are [rows, heads, head_dim]")
    return t[None]
def _empty_residual(tensors, shape, q):
    """Memory for what O loses by rounding."""
    try:
        return tensors.empty_wide(shape, q)
    except (KeyError, AttributeError):
        raise Unsupported(
            "what O loses by rounding is kept in bfloat16, which there is not; import ml_dtypes, or pass tensors of "
            "PyTorch"
        ) from None


def _empty_gradients(needs, program, tensors, q):
    """Memory for the gradients of what a program reads: of the tensors' shapes and dtypes, and float32 for numbers."""
    written = {}
    for name in needs:
        value = None if program is None else program.values.get(name)
        if value is None:
            raise InvalidArgument(f"needs names {name!r}, which is not in tensors; name what is")
        shape = getattr(value, "shape", None)
        written[name] = tensors.empty_lse((), q) if shape is None else tensors.empty(tuple(shape), value)
    return written


def _rows(name, t, shape, tensors, device):
    """The address of a contiguous float32 tensor of a number for each query."""
    address, found, strides, dtype = tensors.side(name, t, device)
    dense = (shape[-2] * shape[-1], shape[-1], 1)[-len(shape) :]
    contiguous = all(n <= 1 or have == want for n, have, want in zip(shape, strides, dense)) or 0 in shape
    if dtype != "float32" or tuple(found) != shape or not contiguous:
        raise InvalidTensor(
            f"{name} is {dtype} of the shape {tuple(found)} with strides {tuple(strides)}; it is contiguous float32 "
            f"of the shape {shape}, a number for each {'batch, ' if len(shape) == 3 else ''}head and query"
        )
    return address


def _path(name, path):
    """A path as the library takes it."""
    try:
        data = os.fsencode(path)
    except TypeError:
        raise InvalidArgument(f"{name} is a {type(path).__name__}; pass a path") from None
    if b"\0" in data:
        raise InvalidArgument(f"{name} is {path!r}, which holds a zero byte")
    return data


def _device_name(device):
    name = str(device)
    if name == "cuda":
        torch = sys.modules.get("torch")
        current = torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
        return f"cuda:{current}"
    if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdigit()):
        raise InvalidArgument(f"device is {name!r}; it is cpu, cuda or cuda:N")
    return name


# Engines of the functions that take none, by the library's name of the device. They live as long as the process.
_engines = {}
_opening = threading.Lock()
_last = None


def default_engine(device):
    """The engine that :func:`flash_attn_func` and :func:`scaled_dot_product_attention` use for tensors on ``device``,
    opened by the first call with the settings of the ``FLASHTUNE_*`` variables, and again after it was closed."""
    name = _device_name(device)
    engine = _engines.get(name)
    if engine is None or engine.closed:
        with _opening:
            engine = _engines.get(name)
            if engine is None or engine.closed:
                engine = _engines[name] = Engine(name)
    return engine


def set_default_engine(engine):
    """Makes an engine the default of its device, e.g. one that tunes; gives the one that was."""
    if not isinstance(engine, Engine):
        raise InvalidArgument(f"engine is a {type(engine).__name__}; pass a flashtune.Engine")
    if engine.closed:
        raise EngineClosed("the engine is closed; open another")
    with _opening:
        previous = _engines.get(engine.device)
        _engines[engine.device] = engine
    return previous


def explain(*, as_dict=False):
    """:meth:`Engine.explain` of the engine that was called last, in any thread."""
    if _last is None:
        raise InvalidArgument("nothing was computed yet; call attention first")
    return _last.explain(as_dict=as_dict)
