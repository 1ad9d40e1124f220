"""The operators ``flashtune::attend`` and ``flashtune::attend_backward``: schemas, kernels, shapes, gradients, vmap.

What a score program reads is split by kind, since an operator takes no dict: tensors, whole numbers and floats, each
with a list of names.
"""

import numbers
import re

import torch

from .. import _dense_call
from .. import engine as _engine
from .._dropout import Dropout
from .._programs import Program
from .._tensors import adapter
from ..block_mask import handle_of
from ..errors import InvalidArgument, InvalidTensor, Unsupported
from . import _counts

_PROGRAM = (
    "str? mask, str? score, str? sink, str[] tensor_names, Tensor[] tensors, str[] int_names, SymInt[] ints, "
    "str[] float_names, float[] floats, float? scale, bool bshd, bool grouped, int kind, SymInt left, SymInt right"
)
_LIBRARY = torch.library.Library("flashtune", "DEF")
# Compilers keep the strides that a program was written with: any with a contiguous last dimension are ours.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_LIBRARY.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_PROGRAM}, SymInt block_mask, str caller, bool exact) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)
# The same with what O loses by rounding, which the backward pass then reads.
_LIBRARY.define(
    f"attend_precise(Tensor q, Tensor k, Tensor v, {_PROGRAM}, SymInt block_mask, str caller, bool exact) -> "
    "(Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
# And with scores dropped, by a state on the device.
_LIBRARY.define(
    f"attend_dropout(Tensor q, Tensor k, Tensor v, {_PROGRAM}, SymInt block_mask, str caller, bool exact, "
    "Tensor rng_state, float dropout_p) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    f"attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_PROGRAM}, "
    "int[] needs, Tensor? residual=None, Tensor? rng_state=None, float dropout_p=0.0) -> "
    "(Tensor, Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
attend_op = torch.ops.flashtune.attend.default
attend_precise_op = torch.ops.flashtune.attend_precise.default
attend_dropout_op = torch.ops.flashtune.attend_dropout.default
attend_backward_op = torch.ops.flashtune.attend_backward.default

# Where the arguments of a program stand in `attend`.
_FIRST, _LAST = 3, 18
_TENSORS = 7


def of_transform():
    """The error where ``torch.func`` takes a gradient around a call: PyTorch has no such rule for operators that take
    lists of tensors. vmap around ``loss.backward()`` and ``torch.autograd.grad`` is served."""
    transform = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    if transform is None or transform.key() not in (kinds.Grad, kinds.Jvp):
        return None
    return Unsupported(
        "a transform of torch.func (grad, vjp, jvp) is around attention; take gradients by loss.backward() or "
        "torch.autograd.grad()"
    )


def asks_for_gradient(t):
    """Whether autograd follows a tensor, also where ``vmap`` shows one that says it does not."""
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_batchedtensor(t):
            t = torch._C._functorch.get_unwrapped(t)
    return t.requires_grad


def attend(
    q, k, v, bshd, kind, left, right, scale, return_lse, program=None, block_mask=None, grouped=True, caller="",
    precise=False, return_residual=False, dropout=None,
):  # fmt: skip
    """One call by way of the operator: O, with ``return_lse`` the log-sum-exp, with ``return_residual`` what O lost."""
    precise = precise or return_residual
    if precise and dropout is not None:
        raise Unsupported("precise and dropout_p are both given to autograd; pass one of them")
    eager = not precise and dropout is None and is_eager(q, k, v)
    if not eager and not torch.compiler.is_compiling() and (error := of_transform()) is not None:
        raise error
    texts, split = _split(program)
    handle = 0
    if block_mask is not None:
        handle = handle_of(block_mask, device_name(q))
        # Operators take numbers with a sign.
        handle -= (handle >> 63) << 64
        # A backward pass takes the mask itself: what was found of it for the kernels of the forward pass is theirs.
        texts, split = _with_mask(texts, split, block_mask)
    scale = None if scale is None else float(scale)
    # Gradients recompute P from the log-sum-exp by fp32 products: theirs are those of the same forward pass.
    exact = torch.is_grad_enabled() and any(map(asks_for_gradient, (q, k, v, *split[1])))
    args = (*texts, *split, scale, bshd, grouped, kind, left, right, handle, caller, exact)
    if precise:
        out, lse, lost = attend_precise_op(q, k, v, *args)
        results = (out, *((lse,) if return_lse else ()), *((lost,) if return_residual else ()))
        return results if len(results) > 1 else out
    if dropout is not None:
        state = state_tensor(dropout, q)
        if torch.is_grad_enabled() and any(map(asks_for_gradient, split[1])):
            raise Unsupported("gradients of what a score program reads know no dropout; pass dropout_p=0.0")
        out, lse = attend_dropout_op(q, k, v, *args, state, dropout.p)
    elif eager and all(type(t) in _PLAIN for t in split[1]):
        out, lse = _Attend.apply(q, k, v, args, *split[1])
    else:
        out, lse = attend_op(q, k, v, *args)
    return (out, lse) if return_lse else out


def state_tensor(dropout, q):
    """The state of a dropout as operators take it."""
    state = dropout.state
    if isinstance(state, tuple):
        return torch.tensor([n - (n >> 63 << 64) for n in state], dtype=torch.int64, device=q.device)
    return state


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_eager(q, k, v):
    """Whether nobody but autograd has to see a call: no compiler, transform or mode. Then a node of autograd's does,
    without an operator, whose way through PyTorch's dispatcher and back takes several times as long."""
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return torch.autograd.forward_ad._current_level < 0


def is_last(dout, dlse):
    """Whether nobody sees a backward pass. Under create_graph it goes by way of the operator, of which the gradient
    says that there is none, and so it does where gradients are batched."""
    dlse = dout if dlse is None else dlse
    return not torch.is_grad_enabled() and is_eager(dout, dlse, dout)


class _Attend(torch.autograd.Function):
    """``attend`` and its gradients, for calls that no compiler sees."""

    @staticmethod
    def forward(ctx, q, k, v, args, *side):
        args = (*args[:4], list(side), *args[5:])
        out, lse = _attend(q, k, v, *args)
        args = args[: _LAST - _FIRST]
        ctx.needs = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        if any(ctx.needs_input_grad):
            _check(q, k, v, out, lse, args, ctx.needs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *side)
        ctx.args = args
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *side = ctx.saved_tensors
        none = [None] * (1 + len(side))
        if dout is None and dlse is None:
            return None, None, None, *none
        if dout is None:
            dout = torch.zeros_like(out)
        run = _backward if is_last(dout, dlse) else attend_backward_op
        args = (*ctx.args[:4], side, *ctx.args[5:])
        dq, dk, dv, read = run(dout, q, k, v, out, lse, dlse, *args, ctx.needs)
        for i, gradient in zip(ctx.needs, read):
            none[1 + i] = gradient
        return dq, dk, dv, *none


def _split(program):
    """The texts, and names and values of tensors, of whole numbers, of floats."""
    if program is None:
        return (None, None, None), ([], [], [], [], [], [])
    names, tensors, int_names, ints, float_names, floats = split = ([], [], [], [], [], [])
    for name, value in program.values.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"the name {name!r} in tensors is no text")
        if isinstance(value, torch.Tensor):
            names.append(name)
            tensors.append(value)
        elif isinstance(value, bool):
            raise InvalidTensor(f"the value of {name} is a bool; pass a torch.Tensor as q is, or a number")
        elif isinstance(value, (int, torch.SymInt, numbers.Integral)):
            int_names.append(name)
            ints.append(value)
        elif isinstance(value, (float, torch.SymFloat, numbers.Real)):
            float_names.append(name)
            floats.append(float(value))
        else:
            raise InvalidTensor(
                f"the value of {name} is a {type(value).__name__}; pass a torch.Tensor as q is, or a number"
            )
    return program.written, split


def _with_mask(texts, split, block_mask):
    """The program with the mask that a block mask was made of."""
    if texts[0] is not None:
        return texts, split
    own = Program(block_mask.mask, tensors=block_mask.values)
    _, more = _split(own)
    for i in (0, 2, 4):
        if clash := set(more[i]) & {name for j in (0, 2, 4) for name in split[j]}:
            # The values of a call count, and the library compares them with those of the block mask.
            keep = [n not in clash for n in more[i]]
            more[i][:] = [n for n, kept in zip(more[i], keep) if kept]
            more[i + 1][:] = [x for x, kept in zip(more[i + 1], keep) if kept]
    return (block_mask.mask, *texts[1:]), tuple(a + b for a, b in zip(split, more))


def _program(mask, score, sink, tensor_names, tensors, int_names, ints, float_names, floats):
    """The score program of an operator's arguments, if there is one."""
    if mask is None and score is None and sink is None:
        return None
    values = dict(zip(tensor_names, tensors))
    values.update(zip(int_names, ints))
    values.update(zip(float_names, floats))
    return Program(mask, score, sink, values)


def device_name(t):
    """The library's name of a tensor's device."""
    return adapter(t).name(t.device)


def count(device):
    """Counts a call of PyTorch's function that did not come by way of the operator."""
    _counts.served(device)


def _engine_of(tensors, q):
    name = tensors.name(q.device)
    engine = _engine._engines.get(name)
    return _engine.default_engine(name) if engine is None or engine.closed else engine


def _attend_precise(q, k, v, *args):
    """The kernel of ``attend_precise``."""
    return _attend(q, k, v, *args, residual=True)


def _attend_dropout(q, k, v, *args):
    """The kernel of ``attend_dropout``."""
    *args, state, p = args
    return _attend(q, k, v, *args, dropout=Dropout(p, state))


def _attend(q, k, v, *args, residual=False, dropout=None):
    """The kernel of ``attend``."""
    scale, bshd, grouped, kind, left, right, handle, caller, exact = args[9:]
    tensors = adapter(q)
    engine = _engine_of(tensors, q)
    result = _dense_call.attend(
        engine, tensors, q, k, v, bshd, kind, left, right, scale, True,
        grouped=grouped, program=_program(*args[:9]), block_mask=handle or None,
        precision="exact" if exact and q.dtype is torch.float32 else None, residual=residual, dropout=dropout,
    )  # fmt: skip
    if caller:
        _counts.served(engine.device)
    return result


def _backward(dout, q, k, v, out, lse, dlse, *args):
    """The kernel of ``attend_backward``. ``needs`` are the places of tensors whose gradients are wanted, too."""
    scale, bshd, _grouped, kind, left, right, needs, *more = args[9:]
    residual, state, p = (*more, *(None, None, 0.0)[len(more) :])
    names = [args[3][i] for i in needs]
    tensors = adapter(q)
    # Sums and slices leave gradients with any strides.
    dout = dout if dout.stride(-1) == 1 or dout.numel() == 0 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, *read = _dense_call.gradients(
        _engine_of(tensors, q), tensors, dout, q, k, v, out, lse, dlse, bshd, kind, left, right, scale, None,
        _program(*args[:9]), needs=names,
        residual=residual, dropout=None if state is None else Dropout(p, state),
    )  # fmt: skip
    return dq, dk, dv, list(read[0].values()) if read else []


def _shapes(q, v, bshd):
    if q.dim() != 4 or v.dim() != 4:
        raise InvalidTensor(f"q has the shape {tuple(q.shape)} and v {tuple(v.shape)}; both have four dimensions")
    b, h, s = (q.shape[0], q.shape[2], q.shape[1]) if bshd else q.shape[:3]
    return (*q.shape[:3], v.shape[3]), (b, h, s)


def _attend_fake(q, k, v, *args):
    out, rows = _shapes(q, v, args[10])
    return q.new_empty(out), q.new_empty(rows, dtype=torch.float32)


def _attend_precise_fake(q, k, v, *args):
    out, lse = _attend_fake(q, k, v, *args)
    return out, lse, torch.empty_like(out, dtype=torch.bfloat16)


def _attend_dropout_fake(q, k, v, *args):
    return _attend_fake(q, k, v, *args)


def _backward_fake(dout, q, k, v, *args):
    tensors, needs = args[7], args[18]
    read = [tensors[i].new_empty(tensors[i].shape) for i in needs]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), read


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", _attend, _device)
    _LIBRARY.impl("attend_precise", _attend_precise, _device)
    _LIBRARY.impl("attend_dropout", _attend_dropout, _device)
    _LIBRARY.impl("attend_backward", _backward, _device)
torch.library.register_fake("flashtune::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("flashtune::attend_precise", _attend_precise_fake, lib=_LIBRARY)
torch.library.register_fake("flashtune::attend_dropout", _attend_dropout_fake, lib=_LIBRARY)
torch.library.register_fake("flashtune::attend_backward", _backward_fake, lib=_LIBRARY)


# What the library has said yes to: it is asked once for a kind of call, at its forward pass.
_prepared = set()


def _setup(ctx, inputs, output):
    q, k, v = inputs[:3]
    out, lse, *lost = output
    args = inputs[_FIRST:_LAST]
    # Those whose gradients are wanted of what a program reads.
    ctx.needs = [i for i, t in enumerate(inputs[_TENSORS]) if t.requires_grad]
    _check(q, k, v, out, lse, args, ctx.needs, *lost)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*lost)
    ctx.lost = len(lost)
    ctx.save_for_backward(q, k, v, out, lse, *lost, *inputs[_TENSORS])
    ctx.dropout = ()
    ctx.more = (*args[:4], None, *args[5:])
    ctx.after = len(inputs) - _LAST


def _setup_dropout(ctx, inputs, output):
    q, k, v = inputs[:3]
    out, lse = output
    *args, state, p = inputs[_FIRST:]
    args = args[: _LAST - _FIRST]
    ctx.needs = []
    _check(q, k, v, out, lse, args, (), dropout=Dropout(p, state))
    ctx.set_materialize_grads(False)
    ctx.lost = 0
    ctx.save_for_backward(q, k, v, out, lse, *inputs[_TENSORS], state)
    ctx.dropout = (p,)
    ctx.more = (*args[:4], None, *args[5:])
    ctx.after = len(inputs) - _LAST


def _check(q, k, v, out, lse, args, needs, residual=None, dropout=None):
    """Raises where the library has no gradients of a call, while its forward pass is under way. Not while tracing,
    where there is no memory: there the backward pass raises."""
    if type(out) is not torch.Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    tensors = adapter(q)
    engine = _engine_of(tensors, q)
    side = args[4]
    names = (*args[:3], *args[3], *args[5], *args[7], *needs)
    sizes = (q.shape[-1], v.shape[-1], residual is not None, dropout is not None)
    key = (engine._handle, q.dtype, *sizes, args[12], names, *((t.dtype, t.dim()) for t in side))
    if key in _prepared:
        return
    scale, bshd, _grouped, kind, left, right = args[9:]
    with torch.no_grad():
        _dense_call.gradients(
            engine, tensors, out, q, k, v, out, lse, None, bshd, kind, left, right, scale, None,
            _program(*args[:9]), run=False,
            needs=[args[3][i] for i in needs], residual=residual, dropout=dropout,
        )  # fmt: skip
    _prepared.add(key)


def _gradients(ctx, dout, dlse, *_):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    residual = tensors.pop(0) if ctx.lost else None
    dropped = (tensors.pop(), *ctx.dropout) if ctx.dropout else ()
    more = (*ctx.more[:4], tensors, *ctx.more[5:])
    none = [_none_for(arg) for arg in more] + [None] * ctx.after
    if dout is None and dlse is None:
        return None, None, None, *none
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, read = attend_backward_op(dout, q, k, v, out, lse, dlse, *more, ctx.needs, residual, *dropped)
    for i, gradient in zip(ctx.needs, read):
        none[_TENSORS - _FIRST][i] = gradient
    return dq, dk, dv, *none


def _none_for(arg):
    """No gradient, of the structure that PyTorch takes an argument for: an empty list is one of tensors."""
    tensors = isinstance(arg, list) and all(isinstance(t, torch.Tensor) for t in arg)
    return [None] * len(arg) if tensors else None


def _no_second(ctx, *_):
    raise Unsupported(
        "a gradient of a gradient of attention would be needed, and is not computed; leave out create_graph"
    )


torch.library.register_autograd("flashtune::attend", _gradients, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("flashtune::attend_precise", _gradients, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("flashtune::attend_dropout", _gradients, setup_context=_setup_dropout, lib=_LIBRARY)
torch.library.register_autograd("flashtune::attend_backward", _no_second, lib=_LIBRARY)


def _fold(info, dims, args, tensors):
    """Tensors with the mapped axis folded into their batch, and how many there are of it."""
    if any(d is not None for d in dims):
        folded = []
        for t, d in zip(args, dims):
            if t is None:
                folded.append(None)
                continue
            t = t.unsqueeze(0).expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            folded.append(t.reshape(info.batch_size * t.shape[1], *t.shape[2:]))
        return folded
    return list(args)


def _mappable(texts, tensors, handle=0):
    """Refuses what reads the batch: folding would change which one it is."""
    if tensors or handle or any(text is not None and re.search(r"\bb\b", text) for text in texts):
        raise Unsupported(
            "vmap over attention whose score program reads tensors or the batch, or with a block mask; make the mapped "
            "axis part of the batch yourself"
        )


def _unfold(results, n):
    return tuple(t.unflatten(0, (n, t.shape[0] // n)) for t in results), (0,) * len(results)


def _attend_vmap(info, in_dims, *args):
    _mappable(args[3:6], args[_TENSORS], args[_LAST])
    folded = _fold(info, in_dims[:3], args[:3], args[_TENSORS])
    return _unfold(attend_op(*folded, *args[3:]), info.batch_size)


def _attend_precise_vmap(info, in_dims, *args):
    _mappable(args[3:6], args[_TENSORS], args[_LAST])
    folded = _fold(info, in_dims[:3], args[:3], args[_TENSORS])
    return _unfold(attend_precise_op(*folded, *args[3:]), info.batch_size)


def _no_mapped_dropout():
    return Unsupported(
        "vmap over attention with dropout; make the mapped axis part of the batch yourself, so that each drops its own"
    )


def _attend_dropout_vmap(info, in_dims, *args):
    raise _no_mapped_dropout()


def _backward_vmap(info, in_dims, *args):
    _mappable(args[7:10], args[11])
    if len(args) > 24 and args[24] is not None:
        raise _no_mapped_dropout()
    if len(args) > 23 and args[23] is not None:
        (lost,) = _fold(info, (*in_dims[:7], in_dims[23]), (*args[:7], args[23]), args[11])[7:]
        args = (*args[:23], lost, *args[24:])
    folded = _fold(info, in_dims[:7], args[:7], args[11])
    # Nothing is read.
    *whole, _ = attend_backward_op(*folded, *args[7:])
    unfolded, dims = _unfold(whole, info.batch_size)
    return (*unfolded, []), (*dims, [])


torch.library.register_vmap("flashtune::attend", _attend_vmap, lib=_LIBRARY)
torch.library.register_vmap("flashtune::attend_precise", _attend_precise_vmap, lib=_LIBRARY)
torch.library.register_vmap("flashtune::attend_dropout", _attend_dropout_vmap, lib=_LIBRARY)
torch.library.register_vmap("flashtune::attend_backward", _backward_vmap, lib=_LIBRARY)
