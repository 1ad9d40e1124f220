"""Who is measured. A contender that is not there, or does not compute a case, says so; that is recorded and not fatal.

Tensors are [batch, rows, heads, head dim], as projections make them; PyTorch's functions get transposed views.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class Unsupported(Exception):
    """The contender has no way to compute this case."""


class Contender:
    """One implementation. `load` finds it, or raises; `prepare` gives a function of no arguments that computes one case
    on given tensors and returns O in the layout of Q."""

    name = ""

    def load(self, device):
        pass

    def prepare(self, case, q, k, v):
        raise NotImplementedError

    def kernel(self):
        """What ran in the last call, if it can be said."""
        return None

    def version(self):
        return None


def refuse(condition, why):
    if condition:
        raise Unsupported(why)


class Flashtune(Contender):
    """This project, through its Python package."""

    name = "flashtune"

    def load(self, device):
        # What is measured is the kernel itself, not what answers while it is compiled.
        os.environ.setdefault("FLASHTUNE_QUICK_FIRST", "0")
        try:
            import flashtune
        except ImportError:
            # In the repository and in the package that `cargo xtask package` makes.
            root = Path(__file__).resolve().parents[2]
            sys.path += [str(root / "bindings/python"), str(root / "python")]
            import flashtune
        self.flashtune = flashtune
        flashtune.version()  # without the library there is nothing to measure

    def prepare(self, case, q, k, v):
        attention, window = self.flashtune.flash_attn_func, case.window_size
        return lambda: attention(q, k, v, causal=case.causal, window_size=(window[0], -1))

    def kernel(self):
        told = self.flashtune.explain(as_dict=True)
        status = told["status"]
        return f"{told['family']} {told['schedule']} ({status['kind'] if isinstance(status, dict) else status})"

    def version(self):
        return self.flashtune.version()


class Sdpa(Contender):
    """PyTorch's scaled_dot_product_attention, with one of its backends where that is named."""

    def __init__(self, name, backend=None):
        self.name, self.backend_name = name, backend

    def load(self, device):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        refuse(self.backend_name and device == "cpu", "a CUDA kernel")
        self.backend = self.backend_name and getattr(SDPBackend, self.backend_name)
        self.choose = sdpa_kernel

    def prepare(self, case, q, k, v):
        refuse(case.window is not None, "no sliding windows without a mask in memory")
        refuse(case.causal and case.q_len != case.kv_len, "its causal mask is aligned at the top left")
        views = [t.transpose(1, 2) for t in (q, k, v)]
        options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

        def run():
            if self.backend is None:
                return F.scaled_dot_product_attention(*views, **options).transpose(1, 2)
            with self.choose([self.backend]):
                return F.scaled_dot_product_attention(*views, **options).transpose(1, 2)

        return run

    def version(self):
        return f"{torch.backends.cudnn.version()}" if self.name == "cudnn" else f"torch {torch.__version__}"


def load_fa3(device, library):
    """Loads a build of FlashAttention-3 below FA3_DIR, and the CUDA 12 runtime that lies beside it."""
    refuse(device == "cpu", "a CUDA kernel")
    base = Path(os.environ.get("FA3_DIR", "/opt/fa3"))
    runtime = base / "nvidia/cuda_runtime/lib/libcudart.so.12"
    if runtime.exists():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(base / library))


class Fa3(Contender):
    """FlashAttention-3 as xformers builds it: FA3_DIR (default /opt/fa3) holds xformers/flash_attn_3/_C.so, and the
    CUDA 12 runtime that it needs under nvidia/cuda_runtime/lib."""

    name = "fa3"

    def load(self, device):
        load_fa3(device, "xformers/flash_attn_3/_C.so")
        self.forward = torch.ops.flash_attn_3.fwd

    def prepare(self, case, q, k, v):
        options = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
        # One query fills the GPU only when the keys are split; 0 leaves the number to the library.
        options["num_splits"] = 0 if case.q_len == 1 else 1
        if case.window is not None:
            left, right = case.window_size
            options |= {"window_size_left": left, "window_size_right": right}
        return lambda: self.forward(q, k, v, **options)[0]


class Fa4(Contender):
    """FlashAttention-4, the package flash-attn-4."""

    name = "fa4"

    def load(self, device):
        refuse(device == "cpu", "a CUDA kernel")
        from flash_attn.cute import flash_attn_func

        self.attention = flash_attn_func

    def prepare(self, case, q, k, v):
        options = {"causal": case.causal, "num_splits": 0 if case.q_len == 1 else 1}
        if case.window is not None:
            options["window_size"] = case.window_size

        def run():
            out = self.attention(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return run


class Flex(Contender):
    """PyTorch's FlexAttention, compiled for every case anew."""

    name = "flex"

    def load(self, device):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attention, self.block_mask = flex_attention, create_block_mask

    def prepare(self, case, q, k, v):
        torch._dynamo.reset()
        views = [t.transpose(1, 2) for t in (q, k, v)]
        block_mask = None
        if case.causal or case.window is not None:
            shift, left = case.kv_len - case.q_len, case.kv_len if case.window is None else case.window
            right = 0 if case.causal else case.kv_len

            def visible(_batch, _head, i, j):
                return (j <= i + shift + right) & (j >= i + shift - left)

            block_mask = self.block_mask(visible, None, None, case.q_len, case.kv_len, device=q.device)
        compiled = torch.compile(self.attention)
        options = {"block_mask": block_mask, "enable_gqa": case.heads != case.kv_heads}
        return lambda: compiled(*views, **options).transpose(1, 2)


class Unfused(Contender):
    """Matrix product, softmax, matrix product, every result in the dtype."""

    name = "unfused"

    def prepare(self, case, q, k, v):
        refuse(case.scores_bytes() > 4 << 30, "its matrix of scores exceeds 4 GiB")
        return lambda: unfused(case, q, k, v)


def hidden(case, device):
    """True where a query does not see a key, [q_len, kv_len]; None when it sees all."""
    if not case.causal and case.window is None:
        return None
    at = torch.arange(case.q_len, device=device)[:, None] + case.kv_len - case.q_len
    keys = torch.arange(case.kv_len, device=device)[None]
    out = torch.zeros(case.q_len, case.kv_len, dtype=torch.bool, device=device)
    if case.causal:
        out |= keys > at
    if case.window is not None:
        out |= keys < at - case.window
    return out


def unfused(case, q, k, v):
    """Unfused attention in the tensors' dtype: the yardstick of errors, and in fp64 the reference."""
    group = case.heads // case.kv_heads
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q * case.head_dim**-0.5) @ k.transpose(-1, -2)
    mask = hidden(case, q.device)
    if mask is not None:
        scores.masked_fill_(mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def known():
    """Every contender, by name."""
    contenders = [
        Flashtune(),
        Sdpa("torch"),
        Sdpa("cudnn", "CUDNN_ATTENTION"),
        Sdpa("fa2", "FLASH_ATTENTION"),
        Fa3(),
        Fa4(),
        Flex(),
        Unfused(),
    ]
    return {c.name: c for c in contenders}


DEFAULT = {"cuda": "flashtune,cudnn,fa2,fa3,fa4", "cpu": "flashtune,torch"}
