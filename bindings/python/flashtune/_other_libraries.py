"""Calls on tensors of libraries that this package does not know, such as arrays of CuPy and JAX: taken by DLPack, with
results of the caller's library.

By the first tensor a call has a home, which says on which stream it runs and where results are made:

- on the host, new memory that the library takes over by its ``from_dlpack``;
- on a GPU, if the library has streams and arrays that may be written, as CuPy has: its current stream, and arrays of
  its own;
- on a GPU else, as for JAX: the default stream, and memory of this package's that the library takes over. The call
  waits for the kernel, since the library, which does not see it, may give the operands' memory to others at once.
"""

import contextlib
import ctypes
import sys

from . import _dlpack
from . import _library as abi
from .errors import InvalidTensor, Unsupported

_DTYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}


class _Home:
    # Told to exporters; None on the host.
    told = None
    stream = 0
    # Whether memory was made, as every call does before it launches that writes none of the caller's.
    has_results = False

    def __init__(self, library, kind):
        self.from_dlpack, self.kind = getattr(library, "from_dlpack", None), kind

    def handed_over(self, view):
        """A result as a tensor of the caller's library."""
        if self.from_dlpack is None:
            raise Unsupported(
                f"the library of {self.kind.__name__} has no from_dlpack that takes the log-sum-exp or weights; leave "
                "them out"
            )
        try:
            return self.from_dlpack(view)
        finally:
            if _dlpack.is_taken(view):
                view.managed = None

    def refuse_without_room(self):
        """Refuses a call that brings no ``out`` where results have no way to the caller."""
        if self.from_dlpack is None:
            raise Unsupported(f"the library of {self.kind.__name__} has no from_dlpack that takes a result; pass out=")

    def finish(self):
        """Before what was taken is given back."""


class _Host(_Home):
    def empty(self, shape, dtype):
        return _at_home(_dlpack.result(shape, dtype), self)

    def full(self, n, value, dtype):
        t = self.empty((n,), dtype)
        (_DTYPES[dtype] * n).from_address(t.address)[:] = [value] * n
        return t


class _WritableGpu(_Home):
    """Of a library as CuPy. Its memory is its streams': what it gets back it gives to work behind the call."""

    def __init__(self, library, kind, number):
        super().__init__(library, kind)
        self.library, self.number = library, number
        # Of the dtypes that calls bring, some have names that the library's own function does not know.
        self.dtypes = {}
        with library.cuda.Device(number):
            self.stream = int(library.cuda.get_current_stream().ptr)
        # 0 is no stream of the protocol's: 1 is the default stream.
        self.told = self.stream or 1

    def refuse_without_room(self):
        pass

    def _view(self, array):
        view = _dlpack.take("a result", array, self.told)
        view.of = array
        return _at_home(view, self)

    def empty(self, shape, dtype):
        with self.library.cuda.Device(self.number):
            return self._view(self.library.empty(shape, dtype=self.dtypes.get(dtype, dtype)))

    def full(self, n, value, dtype):
        with self.library.cuda.Device(self.number):
            return self._view(self.library.full(n, value, dtype=dtype))


class _OtherGpu(_Home):
    told = 1

    def __init__(self, library, kind, number):
        super().__init__(library, kind)
        self.library, self.number = library, number

    def _engine(self):
        from .engine import default_engine

        return default_engine(f"cuda:{self.number}")._handle

    def empty(self, shape, dtype):
        managed = ctypes.c_void_p()
        code, bits = _dlpack.code_of(dtype)
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        abi.require(abi.library().flashtune_empty_dl(self._engine(), sizes, len(shape), code, bits, managed))
        return _at_home(_dlpack.adopted(managed.value, "a result"), self)

    def full(self, n, value, dtype):
        array = self.library.full(n, value, dtype=dtype)
        view = _dlpack.take("a number", array, self.told)
        view.of = array
        return _at_home(view, self)

    def finish(self):
        abi.require(abi.library().flashtune_synchronize(self._engine(), None))


def _at_home(view, home):
    view.home, home.has_results = home, True
    return view


def _is_foreign(t):
    return hasattr(t, "__dlpack__") and hasattr(t, "__dlpack_device__") and type(t) is not _dlpack.View


def _library_of(t):
    """The module that has ``from_dlpack`` for a tensor, or None."""
    space = None
    if hasattr(t, "__array_namespace__"):
        space = t.__array_namespace__()
    if not hasattr(space, "from_dlpack"):
        space = sys.modules.get(type(t).__module__.partition(".")[0])
    return space


def _place_of(name, t):
    """``None`` on the host, else the number of a GPU."""
    kind, number = t.__dlpack_device__()
    if kind in _dlpack.HOST:
        return None
    if kind in _dlpack.CUDA:
        return int(number)
    raise Unsupported(
        f"{name} is a {type(t).__name__} on a device of DLPack's type {int(kind)}; copy it to the cpu or a GPU of CUDA"
    )


def _home_of(q):
    library, place = _library_of(q), _place_of("q", q)
    if place is None:
        return _Host(library, type(q))
    if hasattr(library, "empty") and hasattr(getattr(library, "cuda", None), "get_current_stream"):
        return _WritableGpu(library, type(q), place)
    return _OtherGpu(library, type(q), place)


def through(function, arguments):
    """Calls a function of this package whose first tensor is of no library that it knows: with
    :class:`flashtune._dlpack.View` in the place of all that export DLPack, and with results of the caller's library."""
    q = next(iter(v for name, v in arguments.items() if name != "self"))
    others = arguments.pop("others", {})
    arguments = {**arguments, **others}
    taken, results = {}, []
    home = None

    def one(name, t):
        if not _is_foreign(t):
            return t
        if id(t) not in taken:
            place = _place_of(name, t)
            view = taken[id(t)] = _dlpack.take(name, t, None if place is None else home.told or 1)
            view.of, view.home = t, home
            device = "cpu" if place is None else f"cuda:{place}"
            if view.device != device:
                raise InvalidTensor(
                    f"{name} is on {device} by __dlpack_device__, on {view.device} by its capsule; check its exporter"
                )
            # They are immutable, and their capsules do not say so.
            view.read_only |= type(t).__module__.partition(".")[0] in ("jax", "jaxlib")
            if isinstance(home, _WritableGpu) and type(t) is home.kind:
                home.dtypes[view.dtype] = t.dtype
        return taken[id(t)]

    try:
        home = _home_of(q)
        if arguments.get("out") is None and "slot_mapping" not in arguments:
            home.refuse_without_room()
        for name, value in arguments.items():
            if isinstance(value, dict):
                arguments[name] = {key: one(key, v) for key, v in value.items()}
            else:
                arguments[name] = one(name, value)
        try:
            with _dlpack.on_stream(home.stream):
                found = function(**arguments)
        except BaseException:
            # What was launched before it reads what is given back now.
            if home.has_results:
                with contextlib.suppress(Exception):
                    home.finish()
            raise
        home.finish()
        results = found if isinstance(found, tuple) else () if found is None else (found,)
        given = [home.handed_over(t) if t.of is None else t.of for t in results]
        return tuple(given) if isinstance(found, tuple) else given[0] if given else None
    finally:
        for view in (*taken.values(), *results):
            view.release()
