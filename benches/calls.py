"""What a warm call costs the host, through Python and PyTorch: microseconds of processor time.

    python3 benches/calls.py [--device cuda] [--rounds 40]

Small tensors, so that a GPU keeps up and nothing is waited for. `library` is the part that is not Python's: the
call less one with a function that does nothing in the library's place. Beside them PyTorch's own kernel, forward, and
forward and backward. The aims on CUDA are 12 us for `flash_attn_func` and 15 for `flash_attn_with_kvcache`, on the
CPU 6 for `flash_attn_func`.
"""

import argparse
import time

from programs import load


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100, help="calls of a round")
    return parser.parse_args()


def calls(torch, flashtune, device):
    """Calls by name: of flashtune, and of PyTorch."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k, v = (random(1, 128, 4, 64) for _ in range(3)) if device == "cuda" else (random(1, 1, 1, 32) for _ in range(3))
    asks = [t.clone().requires_grad_() for t in (q, k, v)]
    last = q[:, -1:]
    pages, table, lengths = random(8, 16, q.shape[2], q.shape[3]), ints([list(range(8))]), ints([100])
    packed, sums = random(64, q.shape[2], q.shape[3]), ints([0, 40, 64])
    packed_asks = [packed.clone().requires_grad_() for _ in range(3)]
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    head_asks = [t.clone().requires_grad_() for t in heads]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def gradients(out, asked):
        return torch.autograd.grad(out, asked, out)

    return {
        "flash_attn_func": lambda: flashtune.flash_attn_func(q, k, v, causal=True),
        "flash_attn_with_kvcache, pages": lambda: flashtune.flash_attn_with_kvcache(
            last, pages, pages, cache_seqlens=lengths, block_table=table, causal=True
        ),
        "flash_attn_varlen_func": lambda: flashtune.flash_attn_varlen_func(
            packed, packed, packed, sums, sums, 40, 40, causal=True
        ),
        "flash_attn_func, with gradients": lambda: gradients(flashtune.flash_attn_func(*asks, causal=True), asks),
        "flash_attn_varlen_func, with gradients": lambda: gradients(
            flashtune.flash_attn_varlen_func(*packed_asks, sums, sums, 40, 40, causal=True), packed_asks
        ),
        "PyTorch": lambda: sdpa(*heads, is_causal=True),
        "PyTorch, with gradients": lambda: gradients(sdpa(*head_asks, is_causal=True), head_asks),
    }


def cost(torch, a, call):
    """The least of the rounds."""
    for _ in range(20):
        call()
    least = float("inf")
    for _ in range(a.rounds):
        if a.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter() if a.device == "cuda" else time.process_time()
        for _ in range(a.calls):
            call()
        end = time.perf_counter() if a.device == "cuda" else time.process_time()
        least = min(least, (end - begin) / a.calls)
    return least * 1e6


def main():
    a = arguments()
    import torch

    torch.set_num_threads(1)
    flashtune = load()
    engine = flashtune.Engine(a.device, quick_first=False)
    flashtune.set_default_engine(engine)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}, flashtune {flashtune.version()}: us of a warm call")
    every = calls(torch, flashtune, a.device)
    whole = {name: cost(torch, a, call) for name, call in every.items()}
    # What is remembered of the calls now goes nowhere.
    for function in ("_forward", "_forward_ragged", "_backward"):
        setattr(engine, function, lambda *_: 0)
    lib = flashtune._library.library()
    lib.flashtune_forward_ragged = lambda *_: 0
    known = flashtune._tensors.of_kind(torch.Tensor).known_calls
    if known is not None:
        known.call = lambda *_: 0
    for name, us in whole.items():
        part = "" if name.startswith("PyTorch") else f"{us - cost(torch, a, every[name]):10.1f}"
        print(f"{name:42}{us:8.1f}{part}", "" if part == "" else " library", flush=True)


if __name__ == "__main__":
    main()
