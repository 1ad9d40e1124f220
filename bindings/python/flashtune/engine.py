"""Engines: a device, the layers of stored kernels, and a policy."""

import ctypes
import json as _json
import os
import sys
import threading

from . import _dense_call, _other_libraries
from . import _library as abi
from ._dense_call import mask_of
from ._dropout import of_call, with_state
from ._programs import Program
from ._tensors import _of_type, adapter, foreign
from .block_mask import BlockMask
from .errors import EngineClosed, InvalidArgument


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
        # Of its GPU.
        self._index = None if self.device == "cpu" else int(self.device.removeprefix("cuda:"))
        # Kept here: looked up once, not in every call.
        self._forward = lib.flashtune_forward
        self._forward_ragged, self._backward = lib.forward_ragged_packed, lib.flashtune_backward
        # Plain calls that succeeded, by all that was looked at but addresses and the stream; ragged ones apart.
        self._again = {}
        self._again_ragged, self._again_backward = {}, {}
        # Numbers of what calls are given beside tensors, by which the library knows them.
        self._numbers = {}

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
        out_scale=None,
    ):
        """Attention of ``q`` over ``k`` and ``v``: what :func:`flash_attn_func` computes, on this engine.

        layout: ``"bshd"`` for ``[batch, rows, heads, head_dim]``, ``"bhsd"`` for ``[batch, heads, rows, head_dim]``.
        out: memory for the result, of the dtype of ``q``, beside float8_e4m3fn of any; a new contiguous tensor when not
        given.
        mask, score, sink, tensors, block_mask: a score program and what it reads, as :func:`attention` takes them.
        return_weights: also the attention weights, float32 ``[batch, heads, q_len, kv_len]``, as the last result.
        precision: how float32 is multiplied: ``"exact"``, without tensor cores; ``"tf32x3"``, by three TF32 products to
        one, which keep float32's error; ``"tf32"``, by one, which keeps 11 bits. The last two are refused for other
        dtypes, on the CPU and on GPUs before sm_80. ``None`` is ``"tf32x3"`` where a GPU has that, and ``"exact"``
        elsewhere, where weights are returned, and in calls that take part in autograd.
        q_descale, k_descale, v_descale, descale_rows, dropout_p, rng_state, return_rng_state, out_scale: as
        :func:`flash_attn_func` takes them.
        """
        if type(q) not in _of_type and foreign(q):
            return _other_libraries.through(Engine.forward, locals())
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
        found = _dense_call.attend(
            self, tensors_of, q, k, v, bshd, kind, left, right, scale, return_lse, out,
            program=program, block_mask=block_mask, return_weights=return_weights, precision=precision,
            descales=(q_descale, k_descale, v_descale), descale_rows=descale_rows, dropout=dropout,
            out_scale=out_scale,
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
        if self.device != "cpu":
            _wait_for(self.device)
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


def _wait_for(device):
    """Waits for all work on a GPU, by a library that has launched some."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize(device)
    elif cupy is not None:
        cupy.cuda.Device(int(device[5:])).synchronize()


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
