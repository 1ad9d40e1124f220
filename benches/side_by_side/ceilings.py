"""What the device reaches at best, in the same process: a matrix product and a copy, by PyTorch."""

import torch

from .contenders import DTYPES


def measure(ceilings, clock, device, dtypes):
    """Adds the ceilings to those of a report; of two measurements the higher counts: what holds one down is other load."""
    big = device == "cuda"
    size = (2 << 30) if big else (512 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * size / clock.best(lambda: target.copy_(source)) / 1e6
    if rate > (ceilings.get("copy") or {}).get("gbytes_per_s", 0):
        ceilings["copy"] = {"gbytes_per_s": rate, "how": f"Tensor.copy_ of {size >> 20} MiB"}
    del source, target
    for dtype in dtypes:
        n = 8192 if big and dtype != "f32" else 4096 if big else 2048
        a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(DTYPES[dtype]) for _ in range(2))
        tflops = 2 * n**3 / clock.best(lambda: a @ b) / 1e9
        known = {c["dtype"]: c for c in ceilings.setdefault("matmul", [])}
        if tflops > known.get(dtype, {}).get("tflops", 0):
            known[dtype] = {"dtype": dtype, "tflops": tflops, "how": f"torch.matmul, {n} x {n}"}
        ceilings["matmul"] = list(known.values())
