"""What the package needs to know about tensors of PyTorch and arrays of NumPy. Imports neither: whoever passes one has
imported its library. Those of other libraries come by :mod:`flashtune._dlpack`.

A described tensor is the part of the argument struct that stands for it: ``(address, batch, heads, rows, dim, four
strides in elements, dtype, 0)``.
"""

import ctypes
import functools
import sys

from . import _dlpack, _known_calls
from ._library import BF16, E4M3, F16, F32
from .errors import InvalidTensor, Unsupported

_DTYPES = "dtypes are float16, bfloat16 and float32, and of forward passes float8_e4m3fn; convert the tensor"


class Torch:
    """Tensors of PyTorch, on CUDA devices and on the CPU."""

    def __init__(self, torch):
        self.torch = torch
        self.tensor = torch.Tensor
        self.dtypes = {torch.float16: F16, torch.bfloat16: BF16, torch.float32: F32}
        # PyTorch has it from 2.1 on.
        if hasattr(torch, "float8_e4m3fn"):
            self.dtypes[torch.float8_e4m3fn] = E4M3
        self.names = {}
        self.float32, self.strided, self.new_like = torch.float32, torch.strided, torch.empty_like
        self.forward_ad = torch.autograd.forward_ad
        self.plain = (torch.Tensor, torch.nn.Parameter)
        # Whether vmap or grad of torch.func is around a call; and how many modes look at operators, as tracers do.
        self.transform = torch._C._functorch.peek_interpreter_stack
        self.modes, self.is_compiling = torch._C._len_torch_dispatch_stack, torch.compiler.is_compiling
        # The stream's handle without an object around it, where this PyTorch has the function.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.raw_stream = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def by_operator(self, q, k, v, program=None):
        """Whether a call must be seen by PyTorch, as an operator of its own: because a gradient is asked for, or
        because it is traced or transformed. What is not goes to the library directly, which costs the host a third."""
        torch = self.torch
        if torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled() and (q.requires_grad or _requires_grad(k) or _requires_grad(v)):
            return True
        if program is not None and torch.is_grad_enabled() and any(map(_requires_grad, program.values.values())):
            return True
        return type(q) not in self.plain or self.transform() is not None or self.modes() > 0

    def rows(self, table, index):
        """Rows of a table by their numbers; -1 throughout for one that there is not."""
        most, index = table.shape[0] - 1, index.long()
        found = table.index_select(0, index.clamp(0, most))
        return found.masked_fill_(((index < 0) | (index > most))[:, None], -1)

    def narrow_and_graded(self, q, k, v):
        """Whether a gradient is asked for of operands of e4m3, which have none."""
        torch = self.torch
        if self.dtypes.get(getattr(q, "dtype", None)) != E4M3 or not torch.is_grad_enabled():
            return False
        return any(map(_requires_grad, (q, k, v)))

    def ungraded(self, function, arguments):
        """A call of such operands, whose results refuse gradients when they are wanted."""
        from .torch import _narrow

        return _narrow.through(function, arguments)

    def unseen(self, q, k, v):
        """The device of plain tensors of which neither autograd nor anybody else has to see a call, as q says it; None
        where the long way has to look closer. Of k and v :meth:`are_there` says whether they are there, too."""
        tensor = self.tensor
        if self.is_compiling() or type(q) is not tensor or type(k) is not tensor or type(v) is not tensor:
            return None
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return None
        if self.transform() is not None or self.modes() > 0 or self.forward_ad._current_level >= 0:
            return None
        return q.device

    def are_there(self, device, k, v):
        return k.device == device and v.device == device

    @property
    def operators(self):
        """The operators of PyTorch."""
        from .torch import _operators

        return _operators

    @property
    def varlen(self):
        """The operator of packed sequences, as a function."""
        from .torch import _varlen

        return _varlen.attend

    def device(self, q, k, v):
        """The device that all three are on; refuses what cannot be computed on."""
        if not (isinstance(k, self.tensor) and isinstance(v, self.tensor)):
            raise InvalidTensor(
                f"q is a torch.Tensor, k is a {type(k).__name__} and v a {type(v).__name__}; pass three of one kind"
            )
        device = q.device
        if k.device != device or v.device != device:
            raise InvalidTensor(f"q is on {device}, k on {k.device}, v on {v.device}; move them to one device")
        if (q.requires_grad or k.requires_grad or v.requires_grad) and self.torch.is_grad_enabled():
            raise Unsupported(
                "a gradient would be needed, but this function has none within autograd; flash_attn_func, attention, "
                "scaled_dot_product_attention and flash_attn_varlen_func (of packed keys, without out) have: call one "
                "of them, or this one under torch.no_grad() or with detach()"
            )
        # Within torch.autograd.forward_ad.dual_level() only.
        if self.forward_ad._current_level >= 0:
            if any(self.forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
                raise Unsupported("a tangent would be needed, but there is no forward-mode gradient; pass the primals")
        return device

    def name(self, device):
        """The library's name of a device."""
        name = self.names.get(device)
        if name is None:
            if device.type not in ("cpu", "cuda"):
                raise Unsupported(f"tensors on {device} are not supported; move them to a cuda device or the cpu")
            name = self.names[device] = "cpu" if device.type == "cpu" else str(device)
        return name

    def is_tensor(self, t):
        return isinstance(t, self.tensor)

    def check_out(self, out, device):
        if not isinstance(out, self.tensor):
            raise InvalidTensor(f"out is a {type(out).__name__}; pass a torch.Tensor as q is")
        if self.device(out, out, out) != device:
            raise InvalidTensor(f"out is on {out.device}, q on {device}; allocate it there")

    def describe(self, name, t, bshd):
        dtype = self.dtypes.get(t.dtype)
        if dtype is None:
            raise Unsupported(f"{name} is {t.dtype}; {_DTYPES}")
        if t.layout is not self.strided:
            raise Unsupported(f"{name} has the layout {t.layout}; convert it with to_dense()")
        if t.is_neg():
            raise Unsupported(f"{name} is the negative of what its memory holds; resolve it with resolve_neg()")
        try:
            if bshd:
                (b, s, h, d), (sb, ss, sh, sd) = t.shape, t.stride()
            else:
                (b, h, s, d), (sb, sh, ss, sd) = t.shape, t.stride()
            return t.data_ptr(), b, h, s, d, sb, sh, ss, sd, dtype, 0
        except ValueError:
            raise four_dims(name, tuple(t.shape), bshd) from None
        except RuntimeError as e:
            raise no_memory(name, e) from None

    def forms(self, q, k, v):
        """All that :meth:`describe` looks at but the memory, as a key. Raises RuntimeError for what has no strides."""
        return (
            q.shape, q.stride(), q.dtype, q.layout, k.shape, k.stride(), k.dtype, k.layout,
            v.shape, v.stride(), v.dtype, v.layout,
        )  # fmt: skip

    def addresses_of(self, ts):
        """Those of tensors that :meth:`forms_of` has taken, or RuntimeError where one has no memory to read."""
        addresses = [t.data_ptr() for t in ts]
        # Within torch.func.functionalize tensors stand for others. To the library no address is no tensor.
        if 0 in addresses and any(t.data_ptr() == 0 and t.numel() > 0 for t in ts):
            raise RuntimeError("its address is 0, as where torch.func.functionalize is around the call")
        return addresses

    def forms_of(self, ts):
        """All that :meth:`side` and :meth:`device` look at but the memory, of tensors or None, the first one a tensor,
        as a key. None where one of them has to be looked at by these."""
        device, grad = ts[0].device, self.torch.is_grad_enabled()
        if self.forward_ad._current_level >= 0:
            return None
        forms = [device]
        for t in ts:
            if t is None:
                forms.append(None)
            elif type(t) is self.tensor and t.device == device and t.layout is self.strided and not t.is_nested:
                if t.is_neg() or grad and t.requires_grad:
                    return None
                forms += t.shape, t.stride(), t.dtype
            else:
                return None
        return tuple(forms)

    @functools.cached_property
    def known_calls(self):
        """What makes calls that the library knows, or None. Looked for by the first call: the library is there then."""
        return _known_calls.of_type(self.tensor)

    def are_plain(self, ts):
        """Whether these are tensors of which nobody has to see a call, and whose memory holds their values."""
        grad, tensor = self.torch.is_grad_enabled(), self.tensor
        if self.forward_ad._current_level >= 0:
            return False
        for t in ts:
            if type(t) is not tensor or t.is_neg() or grad and t.requires_grad:
                return False
        return True

    def addresses(self, q, k, v):
        """Those of tensors of forms that were described before; None, or a RuntimeError, where :meth:`describe` has to
        say why one has no memory to read."""
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        return q.data_ptr(), k.data_ptr(), v.data_ptr()

    def side(self, name, t, device):
        """A tensor that a score program reads: address, shape, strides in elements, name of the dtype."""
        if not isinstance(t, self.tensor):
            raise side_kind(name, t, "torch.Tensor")
        if t.device != device:
            raise InvalidTensor(f"the tensor {name} is on {t.device}, q on {device}; move it there")
        if t.requires_grad and self.torch.is_grad_enabled():
            raise no_gradient_of(name)
        if t.is_neg():
            raise Unsupported(
                f"the tensor {name} is the negative of what its memory holds; resolve it with resolve_neg()"
            )
        if t.layout is not self.torch.strided:
            raise Unsupported(f"the tensor {name} has the layout {t.layout}; convert it with to_dense()")
        try:
            (address,) = self.addresses_of([t])
            return address, tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")
        except RuntimeError as e:
            raise no_memory(name, e) from None

    def tell_apart(self, t):
        """The tensor that ``t`` is or is a view of, and what changes where its contents do, or its place in that one.
        None where that cannot be told: in a graph capture, whose replays find other contents, and of tensors without a
        version."""
        if type(t) not in self.plain or t.is_inference() or t.is_cuda and self.torch.cuda.is_current_stream_capturing():
            return None
        owner = t if t._base is None else t._base
        return owner, t._version, t.data_ptr(), t.shape, t.stride(), t.dtype

    def empty(self, shape, like):
        # Half of what torch.empty takes with a dtype and a device to parse.
        return like.new_empty(shape)

    def empty_wide(self, shape, like):
        """O beside e4m3 operands."""
        return like.new_empty(shape, dtype=self.torch.bfloat16)

    def empty_e4m3(self, shape, like):
        """What is quantised."""
        if E4M3 not in self.dtypes.values():
            raise Unsupported("this PyTorch has no float8_e4m3fn; use one from 2.1 on")
        return like.new_empty(shape, dtype=self.torch.float8_e4m3fn)

    def empty_like(self, like):
        """Contiguous memory: what is of a projection's slice, or transposed, has a result that is not."""
        # Two thirds of `empty`, for what is contiguous.
        return self.new_like(like) if like.is_contiguous() else like.new_empty(like.shape)

    def zeros(self, shape, like):
        return self.torch.zeros(shape, dtype=like.dtype, device=like.device)

    def empty_lse(self, shape, like):
        return like.new_empty(shape, dtype=self.float32)

    def full(self, n, value, dtype, like):
        """``n`` times a number, of a dtype by its name."""
        return self.torch.full((n,), value, dtype=getattr(self.torch, dtype), device=like.device)

    def is_writeable(self, _t):
        return True

    def address(self, t):
        return t.data_ptr()

    def stream(self, device):
        return self.raw_stream(device.index) if device.type == "cuda" else 0


_Address = ctypes.c_size_t


def _field_of_address(numpy):
    """Where in an array's object the address of its elements stands, or 0 where that is not known."""
    if sys.implementation.name != "cpython":
        return 0
    field = object.__basicsize__
    probes = [numpy.zeros(4)[1:], numpy.zeros((3, 2), numpy.float16).T, numpy.empty(0)]
    known = all(_Address.from_address(id(a) + field).value == a.__array_interface__["data"][0] for a in probes)
    return field if known else 0


class NumPy:
    """Arrays of NumPy, on the CPU. bfloat16 as the package ml_dtypes defines it."""

    # As for PyTorch.
    known_calls = None

    def __init__(self, numpy):
        self.numpy = numpy
        # Not their subclasses: the mask of a masked array would be lost.
        self.kinds = {numpy.ndarray, numpy.memmap}
        self.dtypes = {numpy.dtype("float16"): F16, numpy.dtype("float32"): F32}
        # The address of the elements is the first field of an array behind what all objects have. Reading it there
        # takes a fifth of what the array's interface takes, which is a microsecond for each of four tensors.
        self.field = _field_of_address(numpy)

    def by_operator(self, _q, _k, _v, _program=None):
        return False

    def rows(self, table, index):
        """As for PyTorch."""
        numpy, most = self.numpy, table.shape[0] - 1
        found = table[numpy.clip(index, 0, most)]
        found[(index < 0) | (index > most)] = -1
        return found

    def narrow_and_graded(self, _q, _k, _v):
        return False

    def unseen(self, q, k, v):
        """As for PyTorch."""
        kinds = self.kinds
        return "cpu" if type(q) in kinds and type(k) in kinds and type(v) in kinds else None

    def are_there(self, _device, _k, _v):
        return True

    def device(self, _q, k, v):
        if type(k) not in self.kinds or type(v) not in self.kinds:
            raise InvalidTensor(
                f"q is a numpy.ndarray, k is a {type(k).__name__} and v a {type(v).__name__}; pass three of one kind"
            )
        return "cpu"

    def name(self, device):
        return device

    def is_tensor(self, t):
        return type(t) in self.kinds

    def check_out(self, out, _device):
        if type(out) not in self.kinds or not out.flags.writeable:
            raise InvalidTensor(
                f"out is a {type(out).__name__} or cannot be written; pass a writeable numpy.ndarray as q is"
            )

    def dtype(self, name, dtype):
        # ml_dtypes may be imported later than we are.
        if dtype.name == "bfloat16" and dtype.isnative:
            self.dtypes[dtype] = BF16
            return BF16
        if dtype.name == "float8_e4m3fn":
            self.dtypes[dtype] = E4M3
            return E4M3
        raise Unsupported(f"{name} is {dtype}; {_DTYPES}")

    def describe(self, name, t, bshd):
        dtype = self.dtypes.get(t.dtype) or self.dtype(name, t.dtype)
        size = t.itemsize
        if any(n % size for n in t.strides):
            raise InvalidTensor(f"{name} has strides of {t.strides} bytes, which are no whole elements; copy the array")
        try:
            if bshd:
                (b, s, h, d), (sb, ss, sh, sd) = t.shape, t.strides
            else:
                (b, h, s, d), (sb, sh, ss, sd) = t.shape, t.strides
        except ValueError:
            raise four_dims(name, t.shape, bshd) from None
        return self.address(t), b, h, s, d, sb // size, sh // size, ss // size, sd // size, dtype, 0

    def forms(self, q, k, v):
        """As for PyTorch."""
        return q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype

    def addresses_of(self, ts):
        """As for PyTorch."""
        return [self.address(t) for t in ts]

    def forms_of(self, ts):
        """As for PyTorch."""
        forms = []
        for t in ts:
            if t is None:
                forms.append(None)
            elif type(t) in self.kinds:
                forms += t.shape, t.strides, t.dtype
            else:
                return None
        return tuple(forms)

    def addresses(self, q, k, v):
        """As for PyTorch."""
        return self.address(q), self.address(k), self.address(v)

    def side(self, name, t, _device):
        """As for PyTorch."""
        if type(t) not in self.kinds:
            raise side_kind(name, t, "numpy.ndarray")
        if any(n % t.itemsize for n in t.strides):
            raise InvalidTensor(f"{name} has strides of {t.strides} bytes, which are no whole elements; copy the array")
        if not t.dtype.isnative:
            raise InvalidTensor(f"{name} is {t.dtype}, of another byte order; convert it")
        return self.address(t), t.shape, tuple(n // t.itemsize for n in t.strides), t.dtype.name

    def empty(self, shape, like):
        return self.numpy.empty(shape, like.dtype)

    def empty_wide(self, shape, _like):
        """As for PyTorch. Whoever has e4m3 has imported the package that defines both."""
        return self.numpy.empty(shape, sys.modules["ml_dtypes"].bfloat16)

    def empty_e4m3(self, shape, _like):
        """As for PyTorch."""
        try:
            from ml_dtypes import float8_e4m3fn
        except ImportError:
            raise Unsupported("NumPy has no float8_e4m3fn without the package ml_dtypes; install it") from None
        return self.numpy.empty(shape, float8_e4m3fn)

    def empty_like(self, like):
        return self.numpy.empty(like.shape, like.dtype)

    def zeros(self, shape, like):
        return self.numpy.zeros(shape, like.dtype)

    def empty_lse(self, shape, _like):
        return self.numpy.empty(shape, self.numpy.float32)

    def full(self, n, value, dtype, _like):
        return self.numpy.full(n, value, dtype)

    def is_writeable(self, t):
        return t.flags.writeable

    def address(self, t):
        if self.field:
            return _Address.from_address(id(t) + self.field).value
        return t.__array_interface__["data"][0]

    def stream(self, _device):
        return 0


def side_kind(name, t, wanted):
    return InvalidTensor(f"the value of {name} is a {type(t).__name__}; pass a {wanted} as q is, or a number")


def no_gradient_of(name):
    return Unsupported(
        f"a gradient of {name} would be needed, but this function has none within autograd; flash_attn_func, attention "
        "and scaled_dot_product_attention have: call one of them, or this one under torch.no_grad() or with detach()"
    )


def _requires_grad(t):
    # Of another kind than q, as it may be: `device` refuses that.
    return getattr(t, "requires_grad", False)


def no_memory(name, e):
    return Unsupported(f"{name} is no tensor with memory of its own (nested, or inside of vmap, jvp or a trace): {e}")


def four_dims(name, shape, bshd):
    order = "[batch, rows, heads, head_dim]" if bshd else "[batch, heads, rows, head_dim]"
    return InvalidTensor(
        f"{name} has the shape {shape}, but it is {order}; add the missing dimensions with unsqueeze or None"
    )


# By the exact type of a tensor, so that finding the adapter of a known type is one look-up.
_of_type = {_dlpack.View: _dlpack.Views()}


def foreign(q):
    """Whether a tensor of a type that was not met before is to be taken by DLPack. Subclasses of NumPy's arrays are
    not: the mask of a masked array would be lost."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    of_these = tuple(kind for kind in (getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None)) if kind)
    return hasattr(type(q), "__dlpack__") and hasattr(type(q), "__dlpack_device__") and not isinstance(q, of_these)


def adapter(q):
    """The adapter for a tensor's library."""
    found = _of_type.get(type(q))
    return of_kind(type(q)) if found is None else found


def of_kind(kind):
    """The adapter for a type of tensors."""
    found = _of_type.get(kind)
    if found is None:
        found = _of_type[kind] = _new(kind)
    return found


def _new(kind):
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        make, loaded = Torch, torch
    elif numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        make, loaded = NumPy, numpy
    else:
        raise InvalidTensor(
            f"q is a {kind.__name__}; pass a torch.Tensor, a plain numpy.ndarray, or where a function takes them an "
            "array of a library that exports DLPack"
        )
    # One adapter for all kinds of one library.
    return next((a for a in _of_type.values() if type(a) is make), None) or make(loaded)
