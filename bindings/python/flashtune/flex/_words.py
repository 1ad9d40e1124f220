"""What becomes of each operation of PyTorch and NumPy in the language of score programs. :data:`WORDS` has them by the
names that both libraries, tensors' methods and Python's operators share.

Ints have 64 bits there, FlexAttention's indices 32; floats are float32, as the scores are that FlexAttention passes.
"""

import math
import operator

from ..errors import InvalidArgument
from ._trace import BOOL, FLOAT, INT, Partial, Value

WORDS = {}
# Those of tensors alone.
METHODS = {}

# Floats of this magnitude and more have no fraction.
_WHOLE = "8388608.0"


def _word(*names):
    def add(function):
        for name in names:
            WORDS[name] = function
        return function

    return add


def number(t, x):
    """A bool as 0 or 1, as PyTorch counts with it."""
    return t.value(f"select({x.text}, 1, 0)", INT, 0) if x.kind == BOOL else x


def floating(t, x):
    x = number(t, x)
    if x.kind == FLOAT:
        return x
    return t.value(f"float({x.text})", FLOAT, whole=x)


def truth(t, x, doing):
    x = t.lift(x, doing)
    return x if x.kind == BOOL else t.value(f"({x.text} != 0)", BOOL)


def _both(t, a, b, doing):
    """Two numbers of one type."""
    a, b = number(t, t.lift(a, doing)), number(t, t.lift(b, doing))
    return a, b, FLOAT if FLOAT in (a.kind, b.kind) else INT


def _least(f, a, b):
    return None if a.low is None or b.low is None else f(a.low, b.low)


def _literal(x):
    """The number that is written out, if it is one."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return x.item() if hasattr(x, "item") and not isinstance(x, Value) and not hasattr(x, "device") else None
    return x


def _scaled(t, other, alpha):
    return other if alpha == 1 else multiply(t, other, alpha)


@_word("add")
def add(t, input, other, *, alpha=1):
    a, b, kind = _both(t, input, _scaled(t, other, alpha), "add")
    return t.value(f"({a.text} + {b.text})", kind, _least(operator.add, a, b))


@_word("sub", "subtract")
def subtract(t, input, other, *, alpha=1):
    a, b, kind = _both(t, input, _scaled(t, other, alpha), "subtract")
    low = a.low - b.low if kind == INT and a.low is not None and b.low is not None and b.text == str(b.low) else None
    return t.value(f"({a.text} - {b.text})", kind, low)


@_word("rsub")
def rsub(t, input, other, *, alpha=1):
    return subtract(t, other, _scaled(t, input, alpha))


@_word("mul", "multiply")
def multiply(t, input, other):
    a, b, kind = _both(t, input, other, "multiplie")
    positive = a.low is not None and b.low is not None and a.low >= 0 and b.low >= 0
    return t.value(f"({a.text} * {b.text})", kind, a.low * b.low if positive else None)


@_word("div", "divide", "truediv", "true_divide")
def divide(t, input, other, *, rounding_mode=None):
    if rounding_mode == "floor":
        return floor_divide(t, input, other)
    if rounding_mode == "trunc":
        return _truncated(t, input, other)
    a, b, _ = _both(t, input, other, "divide")
    return t.value(f"({a.text} / {b.text})", FLOAT)


@_word("floordiv", "floor_divide")
def floor_divide(t, input, other):
    a, b, kind = _both(t, input, other, "divide")
    if kind == FLOAT:
        return floor(t, divide(t, a, b))
    low = 0 if a.low is not None and a.low >= 0 and b.low is not None and b.low > 0 else None
    return t.value(f"({a.text} // {b.text})", INT, low)


def _truncated(t, a, b):
    a, b, kind = _both(t, a, b, "divide")
    if kind == FLOAT:
        return trunc(t, divide(t, a, b))
    quotient = floor_divide(t, absolute(t, a), absolute(t, b))
    if a.low is not None and b.low is not None and a.low >= 0 and b.low > 0:
        return quotient
    return t.value(f"select(({a.text} < 0) != ({b.text} < 0), -{quotient.text}, {quotient.text})", INT)


@_word("mod", "remainder")
def remainder(t, input, other):
    a, b, kind = _both(t, input, other, "divide")
    if kind == FLOAT:
        raise t.refuse("takes the remainder of floats", "score programs have `%` of ints alone")
    return t.value(f"({a.text} % {b.text})", INT, 0 if b.low is not None and b.low > 0 else None)


@_word("fmod")
def fmod(t, input, other):
    a, b, kind = _both(t, input, other, "divide")
    if kind == FLOAT:
        raise t.refuse("takes the remainder of floats", "score programs have `%` of ints alone")
    return subtract(t, a, multiply(t, _truncated(t, a, b), b))


@_word("pow", "power", "float_power")
def power(t, input, exponent):
    base, e = _literal(input), _literal(exponent)
    if e is None and base is not None:
        if not base > 0:
            raise t.refuse(f"raises {base} to a traced power", "the base is above 0")
        by = floating(t, t.lift(exponent, "raise"))
        factor = math.log2(base)
        return t.value(f"exp2({by.text})" if factor == 1 else f"exp2({by.text} * {factor!r})", FLOAT)
    if e is None:
        remedy = "write torch.exp2(y * torch.log2(x)), of an x above 0"
        raise t.refuse("raises a traced value to a traced power", remedy)
    x = number(t, t.lift(input, "raise"))
    if e == int(e) and abs(e) <= 64:
        if e < 0 and x.kind == INT:
            raise t.refuse("raises an int to a negative power", "make a float of it: .to(torch.float32)")
        return _whole_power(t, x if isinstance(e, int) else floating(t, x), int(e))
    x = floating(t, x)
    if abs(e) == 0.5:
        root = sqrt(t, x)
        return root if e > 0 else reciprocal(t, root)
    return t.value(f"exp2(log2({x.text}) * {t.lift(float(e), 'raise').text})", FLOAT)


def _whole_power(t, x, e):
    if e < 0:
        return reciprocal(t, _whole_power(t, x, -e))
    if e == 0:
        return t.lift(1 if x.kind == INT else 1.0, "raise")
    half = _whole_power(t, x, e // 2) if e > 1 else None
    if half is None:
        return x
    square = multiply(t, half, half)
    return multiply(t, square, x) if e % 2 else square


@_word("neg", "negative")
def negative(t, input):
    x = number(t, t.lift(input, "negate"))
    return t.value(f"(-{x.text})", x.kind)


@_word("pos", "positive")
def positive(t, input):
    return number(t, t.lift(input, "take"))


@_word("abs", "absolute", "fabs")
def absolute(t, input):
    x = number(t, t.lift(input, "take"))
    return x if x.kind == INT and x.low is not None and x.low >= 0 else t.value(f"abs({x.text})", x.kind, 0)


def _comparison(*names, sign, of_bools=False):
    def compare(t, input, other):
        a, b = t.lift(input, "compare"), t.lift(other, "compare")
        if not (of_bools and a.kind == b.kind == BOOL):
            a, b = number(t, a), number(t, b)
        return t.value(f"({a.text} {sign} {b.text})", BOOL)

    _word(*names)(compare)


_comparison("lt", "less", sign="<")
_comparison("le", "less_equal", sign="<=")
_comparison("gt", "greater", sign=">")
_comparison("ge", "greater_equal", sign=">=")
_comparison("eq", "equal", sign="==", of_bools=True)
_comparison("ne", "not_equal", sign="!=", of_bools=True)


def _logical(*names, sign, bits):
    """``names`` of bools, or of any values as truths; ``bits`` of bools and ints."""

    def of_truths(t, input, other):
        a, b = truth(t, input, "join"), truth(t, other, "join")
        return t.value(f"({a.text} {sign} {b.text})", BOOL)

    def of_bits(t, input, other):
        a, b = t.lift(input, "join"), t.lift(other, "join")
        if BOOL == a.kind == b.kind:
            return of_truths(t, a, b)
        return _of_bits(t, sign, number(t, a), number(t, b), input, other)

    _word(*names)(of_truths)
    _word(*bits)(of_bits)


def _of_bits(t, sign, a, b, *written):
    for x, mask in ((a, _literal(written[1])), (b, _literal(written[0]))):
        if sign == "and" and isinstance(mask, int) and mask >= 0 and mask & (mask + 1) == 0:
            return t.value(f"({x.text} % {mask + 1})", INT, 0)
    name = {"and": "&", "or": "|", "!=": "^"}[sign]
    kind = "floats" if FLOAT in (a.kind, b.kind) else "ints"
    remedy = "of ints only `& (2**n - 1)` has a word; compare first, for bools"
    raise t.refuse(f"joins {kind} bit by bit ({name})", remedy)


_logical("logical_and", sign="and", bits=("and", "bitwise_and"))
_logical("logical_or", sign="or", bits=("or", "bitwise_or"))
_logical("logical_xor", sign="!=", bits=("xor", "bitwise_xor"))


@_word("logical_not")
def logical_not(t, input):
    return t.value(f"(not {truth(t, input, 'negate').text})", BOOL)


@_word("invert", "bitwise_not")
def invert(t, input):
    x = t.lift(input, "negate")
    if x.kind == BOOL:
        return logical_not(t, x)
    if x.kind == FLOAT:
        raise t.refuse("negates a float bit by bit (~)")
    return t.value(f"(-1 - {x.text})", INT)


@_word("lshift", "bitwise_left_shift", "left_shift")
def left_shift(t, input, other):
    return multiply(t, _shifted(t, input), 1 << _distance(t, other))


@_word("rshift", "bitwise_right_shift", "right_shift")
def right_shift(t, input, other):
    return floor_divide(t, _shifted(t, input), 1 << _distance(t, other))


def _shifted(t, x):
    x = number(t, t.lift(x, "shift"))
    if x.kind == FLOAT:
        raise t.refuse("shifts a float")
    return x


def _distance(t, by):
    by = _literal(by)
    if not isinstance(by, int) or not 0 <= by < 62:
        what = "shifts by a traced value, or by less than 0 or more than 61 bits"
        raise t.refuse(what, "multiply or divide by a power of 2")
    return by


@_word("where")
def where(t, condition, input=None, other=None, **names):
    a, b = names.get("self", names.get("x", input)), names.get("y", other)
    if a is None or b is None:
        raise t.refuse("calls where() without two values")
    c, a, b = truth(t, condition, "choose"), t.lift(a, "choose"), t.lift(b, "choose")
    if BOOL == a.kind == b.kind:
        return t.value(f"select({c.text}, {a.text}, {b.text})", BOOL)
    a, b = number(t, a), number(t, b)
    kind = FLOAT if FLOAT in (a.kind, b.kind) else INT
    return t.value(f"select({c.text}, {a.text}, {b.text})", kind, _least(min, a, b))


@_word("masked_fill")
def masked_fill(t, input, mask, value):
    return where(t, mask, value, input)


def _extreme(*names, word, low):
    def extreme(t, input, other=None, **more):
        if other is None or more:
            raise t.refuse(f"takes the {word} of a tensor", "of two values it is computed")
        a, b, kind = _both(t, input, other, "compare")
        return t.value(f"{word}({a.text}, {b.text})", kind, low(a, b))

    _word(*names)(extreme)
    return extreme


def _low_of_max(a, b):
    known = [x.low for x in (a, b) if x.low is not None]
    return max(known) if known else None


minimum = _extreme("minimum", "min", "fmin", word="min", low=lambda a, b: _least(min, a, b))
maximum = _extreme("maximum", "max", "fmax", word="max", low=_low_of_max)


@_word("clamp", "clip")
def clamp(t, input, min=None, max=None):
    x = t.lift(input, "clamp")
    x = x if min is None else maximum(t, x, min)
    return x if max is None else minimum(t, x, max)


@_word("clamp_min")
def clamp_min(t, input, min):
    return maximum(t, input, min)


@_word("clamp_max")
def clamp_max(t, input, max):
    return minimum(t, input, max)


def _function(*names, form):
    def function(t, input, inplace=False):
        del inplace
        x = floating(t, t.lift(input, "take"))
        return t.value(form.format(x.text), FLOAT)

    return _word(*names)(function)


exp = _function("exp", form="exp({0})")
_function("exp2", form="exp2({0})")
log = _function("log", form="log({0})")
_function("log2", form="log2({0})")
_function("log10", form="(log2({0}) * 0.30102999566398120)")
_function("log1p", form="log(1.0 + {0})")
_function("expm1", form="(exp({0}) - 1.0)")
sqrt = _function("sqrt", form="sqrt({0})")
_function("rsqrt", form="(1.0 / sqrt({0}))")
reciprocal = _function("reciprocal", form="(1.0 / {0})")
_function("tanh", form="tanh({0})")
_function("sigmoid", "expit", form="sigmoid({0})")
_function("relu", form="max({0}, 0.0)")
_function("silu", form="({0} * sigmoid({0}))")
_function("softplus", form="(max({0}, 0.0) + log(1.0 + exp(-abs({0}))))")
_function("logsigmoid", "log_sigmoid", form="(min({0}, 0.0) - log(1.0 + exp(-abs({0}))))")


@_word("square")
def square(t, input):
    x = t.lift(input, "square")
    return multiply(t, x, x)


@_word("isnan")
def isnan(t, input):
    x = floating(t, t.lift(input, "take"))
    return t.value(f"({x.text} != {x.text})", BOOL)


@_word("isinf")
def isinf(t, input):
    return t.value(f"(abs({floating(t, t.lift(input, 'take')).text}) == inf)", BOOL)


@_word("isfinite")
def isfinite(t, input):
    return t.value(f"(abs({floating(t, t.lift(input, 'take')).text}) < inf)", BOOL)


@_word("sign", "sgn")
def sign(t, input):
    x = number(t, t.lift(input, "take"))
    one = {INT: ("1", "0", "-1"), FLOAT: ("1.0", "0.0", "-1.0")}[x.kind]
    return t.value(f"select({x.text} > 0, {one[0]}, select({x.text} < 0, {one[2]}, {one[1]}))", x.kind)


@_word("leaky_relu")
def leaky_relu(t, input, negative_slope=0.01, inplace=False):
    return where(t, WORDS["ge"](t, input, 0), input, multiply(t, input, negative_slope))


def _rounding(*names, word):
    def rounding(t, input, *, decimals=0):
        if decimals:
            raise t.refuse(f"rounds to {decimals} decimals", "multiply, round and divide")
        x = number(t, t.lift(input, "round"))
        if x.kind == INT:
            return x
        whole = t.value(f"{word}({x.text})", INT)
        # What has no fraction stays as it is: infinities, NaN, and what no int holds.
        return t.value(f"select(abs({x.text}) < {_WHOLE}, float({whole.text}), {x.text})", FLOAT, whole=whole)

    return _word(*names)(rounding)


floor = _rounding("floor", word="int_floor")
_rounding("ceil", word="int_ceil")
trunc = _rounding("trunc", "fix", word="int_trunc")
_rounding("round", "rint", word="int_round")


_FLOATS = ("float32", "float16", "bfloat16", "float64", "float", "half", "double")
_INTS = ("int32", "int64", "int", "long")


def cast(t, x, dtype):
    """A value as one of a dtype, by its name."""
    x = t.lift(x, "convert")
    name = str(dtype).removeprefix("torch.")
    name = getattr(dtype, "__name__", name) if isinstance(dtype, type) else name
    if name in _FLOATS:
        return floating(t, x)
    if name == "bool":
        return truth(t, x, "convert")
    if name not in _INTS:
        raise t.refuse(f"converts to {name}", "score programs have bool, int (64 bits) and float (32 bits)")
    if x.kind != FLOAT:
        return number(t, x)
    return x.whole if x.whole is not None else t.value(f"int_trunc({x.text})", INT)


def _method(*names):
    def add_method(function):
        for name in names:
            METHODS[name] = function
        return function

    return add_method


@_method("to", "type", "astype")
def to(t, x, *args, dtype=None, **_more):
    for a in args:
        if isinstance(a, Value):
            return cast(t, x, a.dtype)
        text = str(a)
        if text.startswith("torch.") or isinstance(a, type):
            dtype = a
        elif hasattr(a, "dtype") and hasattr(a, "shape"):
            dtype = a.dtype
    return x if dtype is None else cast(t, x, dtype)


@_method("type_as")
def type_as(t, x, other):
    return cast(t, x, other.dtype)


for _name in ("float", "half", "double", "bool", "int", "long"):
    METHODS[_name] = lambda t, x, _name=_name: cast(t, x, _name)
METHODS["bfloat16"] = lambda t, x: cast(t, x, "bfloat16")
_SAME = "clone detach contiguous cpu cuda squeeze view reshape expand view_as expand_as"
for _name in _SAME.split():
    METHODS[_name] = lambda t, x, *_a, **_k: x
for _name in ("detach", "clone", "squeeze", "reshape"):
    WORDS[_name] = lambda t, x, *_a, **_k: t.lift(x, "take")


def _constant(t, like, value, dtype):
    dtype = like.dtype if dtype is None else dtype
    if "bool" in str(dtype) and not isinstance(value, Value):
        value = bool(value)
    return cast(t, t.lift(value, "take"), dtype)


@_word("ones_like", "new_ones")
def ones_like(t, input, size=(), dtype=None, **_more):
    return _constant(t, input, 1, dtype)


@_word("zeros_like", "new_zeros")
def zeros_like(t, input, size=(), dtype=None, **_more):
    return _constant(t, input, 0, dtype)


@_word("full_like")
def full_like(t, input, fill_value, dtype=None, **_more):
    return _constant(t, input, fill_value, dtype)


@_word("new_full")
def new_full(t, input, size, fill_value, dtype=None, **_more):
    return _constant(t, input, fill_value, dtype)


@_word("new_tensor")
def new_tensor(t, input, data, dtype=None, **_more):
    return _constant(t, input, data, dtype)


@_word("tensor", "as_tensor", "asarray")
def tensor(t, data, dtype=None, **_more):
    return t.lift(data, "take") if dtype is None else cast(t, data, dtype)


for _name in ("item", "tolist"):

    def _refused(t, _x, _name=_name):
        raise t.refuse(f"calls .{_name}() of a traced value", "there is no number yet: compute with torch's functions")

    METHODS[_name] = _refused


@_word("index_select", "gather", "take")
def select_elements(t, *_args, **_more):
    raise t.refuse("reads a tensor by index_select, gather or take", "index it: tensor[i, j]")


@_word("isin")
def isin(t, elements, test_elements, **_more):
    """Of a short tensor whose length is known, or of numbers."""
    if isinstance(elements, Value) and not isinstance(test_elements, (Value, Partial)):
        known = test_elements if isinstance(test_elements, (list, tuple)) else None
        if known is None and len(test_elements.shape) == 1 and test_elements.shape[0] <= 16:
            known = [t.load(test_elements, [i]) for i in range(test_elements.shape[0])]
        if known:
            found = WORDS["eq"](t, elements, known[0])
            for one in known[1:]:
                found = WORDS["logical_or"](t, found, WORDS["eq"](t, elements, one))
            return found
    raise t.refuse("calls isin of more than 16 elements", "make a table of bools and index it")


def _operators():
    """Python's operators on traced values."""

    def forward(word):
        return lambda self, other: _joined(self, word, other)

    def backward(word):
        def operator(self, other):
            word_of = WORDS[word]
            return word_of(self.trace, other, self)

        return operator

    def _joined(self, word, other):
        return WORDS[word](self.trace, self, other)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
        setattr(Value, f"__{name}__", forward(name))
        setattr(Value, f"__r{name}__", backward(name))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", forward(name))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Value, f"__{name}__", lambda self, name=name: WORDS[name](self.trace, self))

    def refused(sign):
        def operator(part, _other=None):
            raise part.trace.refuse(f"computes with {part.describe()}", "index every axis", InvalidArgument)

        return operator

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or"):
        setattr(Partial, f"__{name}__", refused(name))
        setattr(Partial, f"__r{name}__", refused(name))
    Partial.__hash__ = lambda self: id(self)


_operators()
