"""FlexAttention's functions as the text of score programs: they are called once with values that write down what is
done with them. What each operation becomes is in :mod:`._words`.

Numbers of Python are written into the text, so another number is another kernel; tensors are read at run time.
"""

import linecache
import math
import os
import sys
import types

from ..errors import InvalidArgument, InvalidTensor, Unsupported

# Where a traced value lies among the types of the language.
BOOL, INT, FLOAT = "bool", "int", "float"
# Longer expressions get a name, so that a value that is used often does not make the text grow with each use.
_LONGEST = 60
_LARGEST_INT = 1 << 63
_LARGEST_FLOAT = 3.4028234663852886e38
_HERE = os.path.dirname(os.path.abspath(__file__))
_STORAGES = {
    "bool": BOOL,
    "int32": INT,
    "int64": INT,
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "float32": FLOAT,
}


class Traced:
    """What a function became: ``text`` of its value, the ``tensors`` and numbers that it reads by name, and the
    coordinates among ``b``, ``h``, ``q`` and ``kv`` that it depends on. :func:`flashtune.attention` takes both."""

    def __init__(self, text, tensors, coordinates):
        self.text, self.tensors, self.coordinates = text, tensors, coordinates

    def __repr__(self):
        return f"<flashtune.flex.Traced {self.text!r}>"


class Trace:
    """One function's."""

    def __init__(self, what, prefix, device, sizes):
        self.what, self.prefix, self.device, self.sizes = what, prefix, device, sizes
        self.statements, self.count = [], 0
        # By what makes them the same memory: the tensor, its name, and the texts that index each axis.
        self.read = {}
        self.numbers = {}
        self.names = {}
        self.coordinates = set()
        # Whether the function has computed something of its tensors alone, such as a number that is in the text now.
        self.looked_inside = False
        self.traced = None

    def refuse(self, what, remedy="", error=Unsupported):
        """The error of an operation that has no words, with the line that does it."""
        remedy = f"; {remedy}" if remedy else ""
        return error(f"{self.what} {what}{remedy} ({_place()})")

    def value(self, text, kind, low=None, whole=None):
        """A value of an expression. ``low``: ints are known to be no less; ``whole``: the int that a float is."""
        if len(text) > _LONGEST:
            name = f"_{self.prefix}{self.count}"
            self.count += 1
            self.statements.append(f"{name} = {text};")
            text = name
        return Value(self, text, kind, low, whole)

    def lift(self, x, doing):
        """Whatever is combined with a traced value, as one."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Partial):
            raise self.refuse(f"{doing}s {x.describe()}", "index every axis", InvalidTensor)
        if isinstance(x, bool):
            return Value(self, "true" if x else "false", BOOL)
        if isinstance(x, int):
            if not -_LARGEST_INT < x < _LARGEST_INT:
                raise self.refuse(f"{doing}s {x}", "ints have 64 bits", InvalidArgument)
            return Value(self, f"({x})" if x < 0 else str(x), INT, x)
        if isinstance(x, float):
            return Value(self, _float(x), FLOAT)
        if _is_tensor(x):
            if x.shape == () or tuple(x.shape) == ():
                return self.scalar(x)
            raise self.refuse(
                f"{doing}s a tensor of shape {tuple(x.shape)} to a traced value",
                "the functions compute one score at a time: index the tensor",
                InvalidTensor,
            )
        if hasattr(x, "item") and hasattr(x, "dtype"):
            # A number of NumPy.
            return self.lift(x.item(), doing)
        remedy = "traced values meet numbers, tensors and one another"
        raise self.refuse(f"{doing}s a {type(x).__name__}", remedy, InvalidArgument)

    def scalar(self, tensor):
        """A tensor without axes: its value is read at run time, so that another needs no other kernel."""
        looked_inside = self.looked_inside
        found = self._scalar(tensor)
        self.looked_inside = looked_inside
        return found

    def _scalar(self, tensor):
        if _on_cpu(tensor) and self.device != "cpu":
            x = tensor.item()
            if isinstance(x, bool):
                x = int(x)
            key = id(tensor)
            name = self.numbers.get(key, (None,))[0]
            if name is None:
                name = self.name(tensor)
                self.numbers[key] = name, tensor, x
            found = Value(self, name, FLOAT if isinstance(x, float) else INT)
            return Value(self, f"({name} != 0)", BOOL) if _storage(tensor) == "bool" else found
        return self.load(tensor.reshape(1), [0], tensor)

    def name(self, tensor):
        known = self.names.get(id(tensor)) or f"t{len(self.read) + len(self.numbers)}"
        name = f"{self.prefix}{known}"
        taken = {n for n, *_ in self.numbers.values()} | {entry.name for entry in self.read.values()}
        return name if name not in taken else f"{name}_{len(taken)}"

    def load(self, tensor, index, named=None):
        """An element of a tensor; `named` is the one that the function has captured."""
        looked_inside = self.looked_inside
        found = self._load(tensor, index, named)
        self.looked_inside = looked_inside
        return found

    def _load(self, tensor, index, named):
        storage = _storage(tensor)
        kind = _STORAGES.get(storage)
        if kind is None:
            raise self.refuse(f"reads a tensor of {storage}", f"score programs read {', '.join(_STORAGES)}: convert it")
        if len(tensor.shape) > 4:
            raise self.refuse(f"reads a tensor of {len(tensor.shape)} axes", "score programs read up to 4: join some")
        key = _memory(tensor)
        entry = self.read.get(key)
        if entry is None:
            source = tensor if named is None else named
            entry = self.read[key] = _Read(self.name(source), tensor, source)
        places = []
        for axis, (i, n) in enumerate(zip(index, tensor.shape)):
            i = self.lift(i, "indexe")
            if i.kind == BOOL:
                raise self.refuse("indexes a tensor by a bool", "pass an int", InvalidTensor)
            if i.kind == FLOAT:
                raise self.refuse("indexes a tensor by a float", "round it first: .to(torch.int32)", InvalidTensor)
            if i.low is None or i.low < 0:
                # From the end, as tensors are indexed.
                length = self.length(entry, axis, n)
                i = self.value(f"select({i.text} < 0, {i.text} + {length}, {i.text})", INT)
            entry.places[axis].add(i.text)
            places.append(i.text)
        return self.value(f"{entry.name}[{', '.join(places)}]", kind)

    def length(self, entry, axis, n):
        """The length of an axis as a number that is read at run time: it changes with the sequence for many."""
        name = f"{entry.name}_n{axis}"
        self.numbers[name] = name, None, n
        return name

    def index(self, tensor, index, named=None, before=()):
        """``tensor[index]`` with traced values in the index; of an axis that is left out, more may come."""
        index = index if isinstance(index, tuple) else (index,)
        places = list(before) or [None] * len(tensor.shape)
        open_axes = [a for a, p in enumerate(places) if p is None]
        if Ellipsis in [i for i in index if i is Ellipsis]:
            at = next(n for n, i in enumerate(index) if i is Ellipsis)
            fill = len(open_axes) - len(index) + 1
            index = (*index[:at], *[slice(None)] * fill, *index[at + 1 :])
        if len(index) > len(open_axes):
            what = f"reads a tensor of shape {tuple(tensor.shape)} by {len(index)} indices"
            raise self.refuse(what, "give one for each axis", InvalidTensor)
        for axis, i in zip(open_axes, index):
            if isinstance(i, slice):
                if i != slice(None):
                    remedy = "take the slice before, or index the element"
                    raise self.refuse("slices a tensor that it indexes by a traced value", remedy)
                continue
            if i is None:
                raise self.refuse("adds an axis to a tensor that it indexes by a traced value", "leave it out")
            if isinstance(i, int) and not isinstance(i, bool) and i < 0:
                i += tensor.shape[axis]
            places[axis] = i
        if all(p is not None for p in places):
            return self.load(tensor, places, named)
        return Partial(self, tensor, places, named)

    def finish(self, value):
        """The text, and what it reads."""
        tensors = {}
        for name, _, x in self.numbers.values():
            tensors[name] = x
        for entry in self.read.values():
            tensors[entry.name] = self.fitted(entry)
        used = {c for c in ("b", "h", "q", "kv") if c in self.coordinates}
        return Traced(" ".join([*self.statements, value.text]), tensors, used)

    def fitted(self, entry):
        """A tensor that is read by a coordinate and may be longer than that goes, as long as it goes."""
        tensor = entry.tensor
        for axis, places in enumerate(entry.places):
            size = self.sizes.get(next(iter(places))) if len(places) == 1 else None
            length = tensor.shape[axis]
            if size is None or length in (size, 1):
                continue
            if length < size:
                name, by = entry.name[len(self.prefix) :], next(iter(places))
                raise InvalidTensor(
                    f"{self.what} reads axis {axis} of {name}, which has length {length}, by {by}, which goes to {size}"
                )
            tensor = tensor[(slice(None),) * axis + (slice(0, size),)]
        return tensor


class _Read:
    def __init__(self, name, tensor, source):
        self.name, self.tensor, self.source = name, tensor, source
        self.places = [set() for _ in tensor.shape]


class Value:
    """A number or a truth value that is not known yet: of one score, an index, or what was computed of them. Answers to
    what is done with tensors without axes."""

    __slots__ = ("trace", "_text", "kind", "low", "whole")
    # Before NumPy's own.
    __array_priority__ = 1000

    def __init__(self, trace, text, kind, low=None, whole=None):
        self.trace, self._text, self.kind, self.low, self.whole = trace, text, kind, low, whole

    @property
    def text(self):
        """The text, which says that the value is used."""
        if self._text in ("b", "h", "q", "kv"):
            self.trace.coordinates.add(self._text)
        return self._text

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        if method != "__call__":
            raise self.trace.refuse(f"calls numpy.{ufunc.__name__}.{method}")
        return call(ufunc, args, kwargs)

    def __array_function__(self, func, _types, args, kwargs):
        return call(func, args, kwargs)

    # What a tensor without axes says of itself.
    shape = ()
    ndim = 0
    requires_grad = False

    @property
    def dtype(self):
        torch = sys.modules.get("torch")
        name = {BOOL: "bool", INT: "int32", FLOAT: "float32"}[self.kind]
        return name if torch is None else getattr(torch, name)

    @property
    def device(self):
        torch = sys.modules.get("torch")
        return self.trace.device if torch is None else torch.device(self.trace.device)

    def size(self, dim=None):
        return () if dim is None else ()[dim]

    def dim(self):
        return 0

    def numel(self):
        return 1

    def is_floating_point(self):
        return self.kind == FLOAT

    def __getattr__(self, name):
        from ._words import METHODS, WORDS

        if name.startswith("__"):
            raise AttributeError(name)
        word = METHODS.get(name) or WORDS.get(name)
        if word is None:
            raise self.trace.refuse(f"uses .{name} of a traced value", "score programs have no word for it")
        return lambda *args, **kwargs: word(self.trace, self, *args, **kwargs)

    def __hash__(self):
        return id(self)

    def __bool__(self):
        raise self.trace.refuse(
            "branches on a traced value (if, while, and, or, not, assert, min, max)",
            "choose by torch.where, and join conditions by & | ~",
        )

    def _no_number(self, how):
        remedy = "compute with torch's functions, and index tensors"
        return self.trace.refuse(f"makes a number of Python of a traced value ({how})", remedy)

    def __int__(self):
        raise self._no_number("int()")

    def __float__(self):
        raise self._no_number("float(), or a function of math")

    def __index__(self):
        raise self._no_number("range(), or the index of a list or of a NumPy array that is no closure's or global's")

    def __complex__(self):
        raise self._no_number("complex()")

    def __round__(self, *_):
        raise self._no_number("round()")

    def __iter__(self):
        raise self.trace.refuse("iterates over a traced value")

    def __len__(self):
        raise self.trace.refuse("takes the length of a traced value")

    def __getitem__(self, _):
        raise self.trace.refuse("indexes a traced value", "it has no axes")

    def __repr__(self):
        return f"<traced {self.kind} {self._text}>"


class Partial:
    """A captured tensor of which some axes are indexed."""

    __array_priority__ = 1000

    def __init__(self, trace, tensor, places, named):
        self.trace, self.tensor, self.places, self.named = trace, tensor, places, named

    def describe(self):
        rest = [n for n, p in zip(self.tensor.shape, self.places) if p is None]
        return f"a tensor of which axes of {rest} are not indexed"

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    def __getitem__(self, index):
        return self.trace.index(self.tensor, index, self.named, self.places)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.trace.refuse(f"uses .{name} of {self.describe()}", "index every axis", InvalidTensor)


class Captured:
    """An array of NumPy that a function has captured: it can be indexed by traced values."""

    def __init__(self, trace, array, name):
        self.trace, self.array, self.name = trace, array, name
        trace.names.setdefault(id(array), name)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, Value) for i in index):
            return self.trace.index(self.array, index, self.array)
        return Captured(self.trace, self.array[index], self.name) if self.array[index].shape else self.array[index]

    def __getattr__(self, name):
        return getattr(self.array, name)

    def __len__(self):
        return len(self.array)


def call(func, args, kwargs):
    """A function of torch or NumPy, with a traced value among its arguments."""
    from ._words import WORDS

    found = _find((*args, *kwargs.values()))
    name = getattr(func, "__name__", str(func))
    plain = name.strip("_")
    if name in ("__getitem__", "index"):
        return found.trace.index(args[0], args[1], args[0])
    word = WORDS.get(plain)
    if word is None and name.startswith("__r") and plain[1:] in WORDS:
        word, args = WORDS[plain[1:]], args[::-1]
    if word is None:
        module = getattr(func, "__module__", None) or type(func).__module__
        raise found.trace.refuse(f"calls {name} ({module})", "score programs have no word for it")
    try:
        return word(found.trace, *args, **kwargs)
    except TypeError as e:
        if "got an unexpected keyword" in str(e) or "positional argument" in str(e):
            what = f"calls {name} with arguments that score programs have no words for: {e}"
            raise found.trace.refuse(what) from None
        raise


def _find(args):
    for a in args:
        if isinstance(a, (Value, Partial)):
            return a
        if isinstance(a, (tuple, list)) and (found := _find(tuple(a))) is not None:
            return found
    return None


def tracer(function, what, prefix, device, sizes):
    """The :class:`Trace` of a function, for ``score_mod`` (of five arguments) and ``mask_mod`` (of four); its
    ``traced`` is what the function became."""
    if not callable(function):
        raise InvalidArgument(f"{what} is a {type(function).__name__}; pass a function, as FlexAttention takes it")
    is_mask = what == "mask_mod"
    t = Trace(what, prefix, device, sizes)
    coordinates = [Value(t, name, INT, 0) for name in ("b", "h", "q", "kv")]
    arguments = coordinates if is_mask else [Value(t, "score", FLOAT), *coordinates]
    function = _prepared(function, t, {})
    with _mode(t):
        found = function(*arguments)
    found = t.lift(found, "return")
    if is_mask and found.kind != BOOL:
        kind = "an int" if found.kind == INT else "a float"
        raise Unsupported(f"{what} gives {kind}; a mask is a bool: write a comparison")
    if not is_mask and found.kind != FLOAT:
        from ._words import number

        found = t.value(f"float({number(t, found).text})", FLOAT)
    t.traced = t.finish(found)
    return t


def _mode(trace):
    """Sees tensors that are indexed by traced values, which have no say in that themselves."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _Nothing()
    global _Mode
    if _Mode is None:
        from torch.overrides import TorchFunctionMode

        class Mode(TorchFunctionMode):
            def __init__(self, trace):
                super().__init__()
                self.trace = trace

            def __torch_function__(self, func, _types, args=(), kwargs=None):
                if _find((*args, *(kwargs or {}).values())) is not None:
                    return call(func, args, kwargs or {})
                if getattr(func, "__name__", "") not in _OF_THE_SHAPE:
                    self.trace.looked_inside = True
                return func(*args, **(kwargs or {}))

        _Mode = Mode
    return _Mode(trace)


_Mode = None
# What says nothing of a tensor's elements: `__get__` is an attribute, which gives a number of the shape or a tensor.
_OF_THE_SHAPE = ("__get__", "__len__", "dim", "is_floating_point", "numel", "size", "stride")


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def _prepared(function, t, done):
    """The function with names for the tensors that it has captured, and with its arrays of NumPy as ones that traced
    values can index."""
    if not isinstance(function, types.FunctionType):
        return function
    if function in done:
        return done[function]
    done[function] = function
    code = function.__code__
    cells = function.__closure__ or ()
    changed = False
    closure = []
    for name, cell in zip(code.co_freevars, cells):
        try:
            x = cell.cell_contents
        except ValueError:
            closure.append(cell)
            continue
        new = _seen(name, x, t, done)
        closure.append(cell if new is x else types.CellType(new))
        changed |= new is not x
    replaced = {}
    for name in code.co_names:
        if name in function.__globals__:
            x = function.__globals__[name]
            if (new := _seen(name, x, t, done)) is not x:
                replaced[name] = new
    if not (changed or replaced):
        return function
    known = {**function.__globals__, **replaced} if replaced else function.__globals__
    made = types.FunctionType(code, known, function.__name__, function.__defaults__, tuple(closure))
    made.__kwdefaults__ = function.__kwdefaults__
    done[function] = made
    return made


def _seen(name, x, t, done):
    if _is_array(x) and x.shape:
        return Captured(t, x, name)
    if _is_tensor(x):
        t.names.setdefault(id(x), name)
    elif isinstance(x, types.FunctionType) and not _is_library(x):
        return _prepared(x, t, done)
    elif isinstance(x, (tuple, list)) and any(isinstance(y, types.FunctionType) for y in x):
        new = [_seen(name, y, t, done) for y in x]
        return x if all(a is b for a, b in zip(new, x)) else type(x)(new)
    return x


def _is_library(function):
    return (function.__module__ or "").split(".")[0] in ("torch", "numpy", "flashtune") and not function.__closure__


def _is_array(x):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _is_tensor(x):
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(x, torch.Tensor)) or _is_array(x) or isinstance(x, Captured)


def _storage(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _on_cpu(tensor):
    return str(getattr(tensor, "device", "cpu")).startswith("cpu")


def _memory(tensor):
    """What makes two tensors the same to who reads them."""
    if _is_array(tensor):
        return tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype.name
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except RuntimeError:
        return id(tensor)


def _float(x):
    if math.isnan(x):
        return "nan"
    if abs(x) > _LARGEST_FLOAT:
        return "inf" if x > 0 else "(-inf)"
    return f"({x!r})" if math.copysign(1, x) < 0 else repr(x)


def _place():
    """The line of the function that is traced: the innermost one that is neither ours nor a library's."""
    frame = sys._getframe(2)
    torch = sys.modules.get("torch")
    ours = [_HERE] + ([] if torch is None else [os.path.dirname(torch.__file__)])
    numpy = sys.modules.get("numpy")
    ours += [] if numpy is None else [os.path.dirname(numpy.__file__)]
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(tuple(p + os.sep for p in ours)):
        frame = frame.f_back
    if frame is None:
        return "no line is known"
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}, line {line}" + (f": `{text}`" if text else "")
