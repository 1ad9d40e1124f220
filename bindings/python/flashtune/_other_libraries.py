"""Calls on tensors of libraries that this package does not know, such as arrays of CuPy and JAX: taken by DLPack, with
results of the caller's library.

By the first tensor a call has a home, which says on which stream it runs and where results are made:

- on the host, new memory that the library takes over by its ``from_dlpack``;
- on a GPU, if the library has streams and arrays that may be written, as CuPy has: its current stream, and arrays of
  its own;
- on a GPU else, as for JAX: the default stream, and memory of this package's that the library takes over.

What is given back a library may give to others at once, and only CuPy and its like do so in the order of the stream
that the kernel is on. A call that has taken anything of another library waits for the kernel.
"""

import contextlib
import ctypes
import sys

from . import _dlpack
from . import _library as abi
from .errors import InvalidTensor, Unsupported

_DTYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}


class _Home:
    # Told to exporters on a GPU: 1 is the default stream.
    told = 1
    stream = 0

    def __init__(self, library, q):
        self.library, self.kind = library, type(q)
        self.from_dlpack = getattr(library, "from_dlpack", None)

    def takes(self, t, view):
        """Is told of every tensor that is taken."""

    def given(self, result):
        """What the caller gets of a result."""
        if type(result) is not _dlpack.View:
            return result
        if result.of is not None:
            return result.of
        if self.from_dlpack is None:
            raise Unsupported(
                f"the library of {self.kind.__name__} has no from_dlpack that takes the log-sum-exp or weights; leave "
                "them out"
            )
        try:
            return self.from_dlpack(result)
        finally:
            if _dlpack.is_taken(result):
                result.managed = None

    def refuse_without_room(self):
        """Refuses a call that brings no ``out`` where results have no way to the caller."""
        if self.from_dlpack is None:
            raise Unsupported(f"the library of {self.kind.__name__} has no from_dlpack that takes a result; pass out=")

    def finish(self):
        """Before what was taken is given back, also where the call has failed."""


class _Host(_Home):
    def empty(self, shape, dtype):
        return _at_home(_dlpack.result(shape, dtype), self)

    def full(self, n, value, dtype):
        t = self.empty((n,), dtype)
        (_DTYPES[dtype] * n).from_address(t.address)[:] = [value] * n
        return t


class _Gpu(_Home):
    def __init__(self, library, q, number, engine):
        super().__init__(library, q)
        self.number, self.device, self.explicit = number, f"cuda:{number}", engine

    def wait(self):
        # Where there is no engine, nothing was launched.
        engine = self.explicit or _open_engine(self.device)
        if engine is not None and not engine.closed:
            abi.require(abi.library().flashtune_synchronize(engine._handle, self.stream or None))


class _WritableGpu(_Gpu):
    """Of a library as CuPy."""

    def __init__(self, library, q, number, engine):
        super().__init__(library, q, number, engine)
        # Of the dtypes that calls bring, some have names that the library's own function does not know.
        self.dtypes, self.has_others = {}, False
        with library.cuda.Device(number):
            self.stream = int(library.cuda.get_current_stream().ptr)
        self.told = self.stream or 1

    def refuse_without_room(self):
        pass

    def takes(self, t, view):
        if type(t) is self.kind:
            self.dtypes[view.dtype] = t.dtype
        else:
            self.has_others |= view.device != "cpu"

    def finish(self):
        if self.has_others:
            self.wait()

    def empty(self, shape, dtype):
        with self.library.cuda.Device(self.number):
            return _view_of(self.library.empty(shape, dtype=self.dtypes.get(dtype, dtype)), self)

    def full(self, n, value, dtype):
        with self.library.cuda.Device(self.number):
            return _view_of(self.library.full(n, value, dtype=dtype), self)


class _OtherGpu(_Gpu):
    def __init__(self, library, q, number, engine):
        super().__init__(library, q, number, engine)
        self.place, self.numbers = getattr(q, "device", None), []

    def finish(self):
        try:
            self.wait()
        finally:
            for view in self.numbers:
                view.release()
            self.numbers.clear()

    def empty(self, shape, dtype):
        from .engine import default_engine

        engine = self.explicit or default_engine(self.device)
        managed = ctypes.c_void_p()
        code, bits = _dlpack.code_of(dtype)
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        abi.require(abi.library().flashtune_empty_dl(engine._handle, sizes, len(shape), code, bits, managed))
        return _at_home(_dlpack.adopted(managed.value, "a result"), self)

    def full(self, n, value, dtype):
        try:
            array = self.library.full(n, value, dtype=dtype, device=self.place)
        except (AttributeError, TypeError) as e:
            raise Unsupported(
                f"the library of {self.kind.__name__} has no full(shape, value, dtype=, device=), which makes an array "
                f"of a number ({value}) on {self.device}; pass an array in its place"
            ) from e
        # Until the call has waited for the kernel that reads it.
        self.numbers.append(_view_of(array, self))
        return self.numbers[-1]


def _open_engine(device):
    """The default engine of a device, if one was opened."""
    from .engine import _engines

    return _engines.get(device)


def _view_of(array, home):
    view = _dlpack.take(f"an array of {type(array).__module__}", array, home.told)
    view.of = array
    return _at_home(view, home)


def _at_home(view, home):
    view.home = home
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


def _home_of(name, q, engine):
    library, place = _library_of(q), _place_of(name, q)
    if place is None:
        return _Host(library, q)
    if hasattr(library, "empty") and hasattr(getattr(library, "cuda", None), "get_current_stream"):
        return _WritableGpu(library, q, place, engine)
    return _OtherGpu(library, q, place, engine)


def through(function, arguments):
    """Calls a function of this package whose first tensor is of no library that it knows: with
    :class:`flashtune._dlpack.View` in the place of all that export DLPack, and with results of the caller's library."""
    first, q = next((name, v) for name, v in arguments.items() if name != "self")
    others = arguments.pop("others", {})
    arguments = {**arguments, **others}
    taken, results = {}, []
    home = _home_of(first, q, arguments.get("self"))

    def one(name, t):
        if not _is_foreign(t):
            return t
        if id(t) not in taken:
            place = _place_of(name, t)
            view = taken[id(t)] = _dlpack.take(name, t, None if place is None else home.told)
            view.of, view.home = t, home
            device = "cpu" if place is None else f"cuda:{place}"
            if view.device != device:
                raise InvalidTensor(
                    f"{name} is on {device} by __dlpack_device__, on {view.device} by its capsule; check its exporter"
                )
            # They are immutable, and their capsules do not say so.
            view.read_only |= type(t).__module__.partition(".")[0] in ("jax", "jaxlib")
            home.takes(t, view)
        return taken[id(t)]

    try:
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
            with contextlib.suppress(Exception):
                home.finish()
            raise
        home.finish()
        results = found if isinstance(found, tuple) else (found,)
        given = tuple(home.given(t) for t in results)
        return given if isinstance(found, tuple) else given[0]
    finally:
        for view in (*taken.values(), *results):
            if type(view) is _dlpack.View:
                view.release()
