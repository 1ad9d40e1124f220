"""What the device reaches at best, in the same process: a matrix product and a copy, by PyTorch."""

import torch

from .contenders import DTYPES


def measure(ceilings, clock, device, dtypes):
    """Adds the ceilings to those of a report. Of two measurements the higher counts: other load holds them down."""
    rate, how = copy(clock, device)
    if rate > ceilings.get("copy", {}).get("gbytes_per_s", 0):
        ceilings["copy"] = {"gbytes_per_s": rate, "how": how}
    known = {c["dtype"]: c for c in ceilings["matmul"]}
    for dtype in dtypes:
        tflops, how = matmul(clock, device, dtype)
        if tflops > known.get(dtype, {}).get("tflops", 0):
            known[dtype] = {"dtype": dtype, "tflops": tflops, "how": how}
    ceilings["matmul"] = list(known.values())


def copy(clock, device):
    """1e9 bytes per second, read and written, and by what."""
    size = (2 << 30) if device == "cuda" else (512 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.best(lambda: target.copy_(source)) / 1e6, f"Tensor.copy_ of {size >> 20} MiB"


def matmul(clock, device, dtype):
    """1e12 operations per second on normals (zeros would cost less power), and by what."""
    n = 2048 if device == "cpu" else 4096 if dtype == "f32" else 8192
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2 * n**3 / clock.best(lambda: a @ b) / 1e9, f"torch.matmul, {n} x {n}"
