"""The mask of the call before: what kernels have found of it, for calls that bring the same one."""

import contextlib
import re
import threading

from .block_mask import BlockMask

_of_thread = threading.local()


@contextlib.contextmanager
def mask_memo():
    """Within the block, calls of this thread with the mask of the call before go by what was found of it then: to be
    put around the forward pass of a model whose layers all get one mask.

        with flashtune.torch.mask_memo():
            out = model(inputs)

    Of :func:`attention`, :func:`scaled_dot_product_attention` and, where that is activated, PyTorch's own function,
    without gradients. A mask is the same if it has the text, sizes and numbers of the one before, and its tensors are
    views of the same tensors with the same address, shape, strides and version, on the same stream. The memo holds
    these tensors, so that nothing else comes to lie where they are. It is dropped at the next different mask and at the
    end of the block. Calls within a graph capture pass it by, and so do tensors of inference mode, which have no
    version.

    PyTorch counts a new version for every change by its operators. It sees none where others write: a kernel of Triton
    or CuPy, another process, ``tensor.data``. So nothing is kept outside of such a block, and whoever changes a mask
    like that within one calls ``drop()`` of what the block gives.
    """
    before, memo = active(), Memo()
    _of_thread.memo = memo
    try:
        yield memo
    finally:
        _of_thread.memo = before
        memo.drop()


def active():
    """The memo of the block that this thread is in, or None."""
    return getattr(_of_thread, "memo", None)


class Memo:
    """One mask: what it is known by, and what was found of it."""

    def __init__(self):
        self._key = self._owners = self._block_mask = None
        # Calls that went by what a call before had found, and those that looked.
        self.hits = self.misses = 0

    def drop(self):
        """Forgets the mask. What was found goes back behind the calls under way."""
        self._key = self._owners = None
        block_mask, self._block_mask = self._block_mask, None
        if block_mask is not None:
            block_mask.close()

    def block_mask(self, tensors, engine, program, query, key):
        """What was found of a program's mask, or what the call is to leave it in. None where it may not be kept."""
        tell = getattr(tensors, "tell_apart", None)
        if tell is None:
            return None
        stream = None if engine.device == "cpu" else tensors.stream(query.device)
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2], key.shape[1])
        text = program.written[0]
        known, owners, read = [engine._handle, text, stream, sizes], [], {}
        for name, value in program.values.items():
            # What the score alone reads may be another in each layer.
            if not re.search(rf"\b{re.escape(name)}\b", text):
                continue
            read[name] = value
            if not hasattr(value, "shape"):
                known.append((name, type(value), value))
                continue
            told = tell(value)
            if told is None:
                self.drop()
                return None
            owners.append(told[0])
            known.append((name, *told[1:]))
        # Tensors by identity: those that compare equal may be others.
        same = self._owners is not None and len(owners) == len(self._owners)
        if same and self._key == known and all(a is b for a, b in zip(owners, self._owners)):
            self.hits += 1
            return self._block_mask
        self.drop()
        self.misses += 1
        batch, heads, q_len, kv_len, kv_heads = sizes
        self._block_mask = BlockMask(engine, text, batch, heads, q_len, kv_len, read, kv_heads)
        self._key, self._owners = known, owners
        return self._block_mask
