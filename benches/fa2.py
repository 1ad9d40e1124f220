"""flashtune's forward/sm80 beside PyTorch's flash backend (FlashAttention-2), in one process, interleaved.

Tunes every point with `flashtune tune` (the cache is kept between runs), takes the winner's source from `flashtune emit`,
compiles it here with NVRTC, checks it against fp32 attention (at most twice the error of unfused bf16 attention), and times both in rounds: flush of L2, one launch between
two events, the contenders in turn. Prints medians, and writes JSON and a Markdown table.

    python3 benches/fa2.py OUT_DIR [--flashtune target/release/flashtune] [--rounds 15] [--head-dims 64,128,256]

Needs a GPU, PyTorch with CUDA, and NVRTC (found through the loader's path, CUDA_HOME or /usr/local/cuda).
FLOPs are 4 * B * H * Sq * Sk * D, halved when causal.
"""

import argparse
import ctypes
import glob
import json
import os
import subprocess
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class ForwardArgs(ctypes.Structure):
    """codegen/src/abi.rs, version 1."""

    _fields_ = (
        [(n, ctypes.c_uint64) for n in ("q", "k", "v", "o", "lse", "weights")]
        + [(n, ctypes.c_int64 * 3) for n in ("q_stride", "k_stride", "v_stride", "o_stride")]
        + [(n, ctypes.c_int32) for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", "window_left", "window_right")]
        + [("scale", ctypes.c_float)]
    )


def load(name, *patterns):
    for path in [name, *[p for pattern in patterns for p in sorted(glob.glob(pattern), reverse=True)]]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise SystemExit(f"{name} was not found; set LD_LIBRARY_PATH")


def done(code, what):
    if code:
        raise RuntimeError(f"{what} failed with {code}")


class Kernel:
    """A tuned kernel, compiled from what `flashtune emit` prints."""

    def __init__(self, nvrtc, cuda, emitted):
        self.cuda = cuda
        self.threads = emitted["resources"]["threads"]
        self.smem = emitted["resources"]["smem_bytes"]
        warps_rows = emitted["schedule"].split("-")[0]  # w4x32: warps x rows per warp
        self.block_q = int(warps_rows[1:].split("x")[0]) * int(warps_rows.split("x")[1])
        program = ctypes.c_void_p()
        source = emitted["source"].encode()
        done(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
        options = (ctypes.c_char_p * len(emitted["options"]))(*[o.encode() for o in emitted["options"]])
        done(nvrtc.nvrtcCompileProgram(program, len(options), options), "nvrtcCompileProgram")
        size = ctypes.c_size_t()
        done(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        done(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        done(cuda.cuModuleLoadData(ctypes.byref(self.module), cubin), "cuModuleLoadData")
        entry = emitted["entry"].encode()
        done(cuda.cuModuleGetFunction(ctypes.byref(self.function), self.module, entry), "cuModuleGetFunction")
        done(cuda.cuFuncSetAttribute(self.function, 8, self.smem), "cuFuncSetAttribute")  # dynamic shared memory

    def __call__(self, q, k, v, o, window_right):
        b, sq, h, d = q.shape
        strides = lambda t: (ctypes.c_int64 * 3)(t.stride(0), t.stride(2), t.stride(1))
        args = ForwardArgs(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0, 0, strides(q), strides(k), strides(v), strides(o),
            b, h, k.shape[2], sq, k.shape[1], 2**31 - 1, window_right, d**-0.5,
        )  # fmt: skip
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        grid = -(-sq // self.block_q) * h * b
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        done(
            self.cuda.cuLaunchKernel(self.function, grid, 1, 1, self.threads, 1, 1, self.smem, stream, parameters, None),
            "cuLaunchKernel",
        )


def flashtune(binary, command, point, *more):
    b, h, hk, s, d, causal = point
    case = ["--dtype", "bf16", "--head-dim", d, "--mask", "causal" if causal else "full", "--batch", b, "--heads", h]
    case += ["--kv-heads", hk, "--q-len", s]
    line = [binary, command, "--device", "cuda", "--json", *map(str, case), *map(str, more)]
    return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)


def median_times(contenders, rounds, flush):
    """Milliseconds of every contender: all of them once per round, in an order that rotates."""
    times = {name: [] for name in contenders}
    for run in contenders.values():
        run(), run()
    torch.cuda.synchronize()
    names = list(contenders)
    for r in range(rounds):
        events = []
        for name in names[r % len(names) :] + names[: r % len(names)]:
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            contenders[name]()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end))
    return {n: (sorted(t)[len(t) // 2], min(t), max(t)) for n, t in times.items()}


def attention_unfused(q, k, v, causal):
    """Matrix product, softmax, matrix product, every result rounded to bf16 (PyTorch's math backend computes in fp32)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--flashtune", default="target/release/flashtune")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--budget-s", type=int, default=15, help="seconds of tuning per point")
    a = parser.parse_args()
    os.makedirs(a.out, exist_ok=True)
    cuda = load("libcuda.so.1")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvrtc = load("libnvrtc.so.13", f"{home}/lib64/libnvrtc.so*", "/usr/local/cuda*/lib64/libnvrtc.so*")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.manual_seed(time.time_ns() % 2**31)

    rows = []
    for d in map(int, a.head_dims.split(",")):
        for causal in (False, True):
            for s in (1024, 2048, 4096, 8192, 16384):
                b, h = 16384 // s, 2048 // d
                point = (b, h, h, s, d, causal)
                flashtune(a.flashtune, "tune", point, "--budget-s", a.budget_s)
                schedule = flashtune(a.flashtune, "explain", point)[0]["schedule"]
                kernel = Kernel(nvrtc, cuda, flashtune(a.flashtune, "emit", point, "--schedule", schedule))
                q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                o = torch.full_like(q, float("nan"))
                heads = lambda t: t.transpose(1, 2)

                def fa2():
                    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                        return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal)

                ours = lambda: kernel(q, k, v, o, 0)
                ours()
                # Errors on four heads, against fp32; the yardstick is unfused attention in bf16, as in the contract.
                some = [heads(t[:1, :, :4]) for t in (q, k, v)]
                with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
                    exact = F.scaled_dot_product_attention(*[t.float() for t in some], is_causal=causal)
                unfused = attention_unfused(*some, causal)
                off = lambda t: (t.float() - exact).abs().max().item()
                error, error_fa2, error_unfused = off(heads(o[:1, :, :4])), off(fa2()[:1, :4]), off(unfused)
                if not error <= 2 * error_unfused + 1e-5:  # also catches NaN
                    raise SystemExit(f"{point}: error {error} against {error_unfused} of unfused attention")
                t = median_times({"fa2": fa2, "flashtune": ours}, a.rounds, flush)
                flops = 4 * b * h * s * s * d * (0.5 if causal else 1)
                row = dict(
                    b=b, heads=h, d=d, causal=causal, s=s, schedule=schedule, error=error, error_fa2=error_fa2, error_unfused=error_unfused,
                    fa2=flops / t["fa2"][0] / 1e9, flashtune=flops / t["flashtune"][0] / 1e9,
                    ratio=t["fa2"][0] / t["flashtune"][0], ms={n: x for n, x in t.items()},
                )  # fmt: skip
                rows.append(row)
                print(f"d{d} {'causal' if causal else 'full':6} {s:6} fa2 {row['fa2']:6.1f} "
                      f"flashtune {row['flashtune']:6.1f} {row['ratio']:5.2f}x  {schedule}", flush=True)  # fmt: skip

    mean = torch.tensor([r["ratio"] for r in rows]).log().mean().exp().item()
    least = min(r["ratio"] for r in rows)
    print(f"geometric mean {mean:.3f}x, least {least:.3f}x")
    with open(f"{a.out}/fa2.json", "w") as f:
        json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rounds=a.rounds, rows=rows), f, indent=1)
    with open(f"{a.out}/fa2.md", "w") as f:
        f.write("| D | mask | B x H | length | FA2 | flashtune | ratio | error: flashtune / FA2 / unfused | schedule |\n")
        f.write("|---|---|---|---|---|---|---|---|---|\n")
        for r in rows:
            f.write(f"| {r['d']} | {'causal' if r['causal'] else 'full'} | {r['b']} x {r['heads']} | {r['s']} "
                    f"| {r['fa2']:.1f} | {r['flashtune']:.1f} | {r['ratio']:.2f} "
                    f"| {r['error']:.1e} / {r['error_fa2']:.1e} / {r['error_unfused']:.1e} | `{r['schedule']}` |\n")  # fmt: skip
        f.write(f"\nGeometric mean {mean:.3f}x, least {least:.3f}x.\n")


if __name__ == "__main__":
    main()
