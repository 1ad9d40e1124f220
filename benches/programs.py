"""Score programs: flashtune, FlexAttention and FlashAttention-4 in one process, in turn.

    python3 benches/programs.py [--cases window,document] [--peers flex,fa4] [--variant NAME=TEMPLATES] [--prepared]

Prints a table of TFLOP/s on the scores that are visible, what they are of dense causal attention's, which runs in every
round beside them (a GPU's clock falls while it works), and of FlexAttention's, and the largest error of a few rows
beside fp64. Needs PyTorch and `libflashtune` (`cargo build --release -p flashtune-c`).
"""

import argparse
import json
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from side_by_side.programs import CASES, Size


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", type=lambda t: t.split(","), default=[""], help="parts of the names of those that are measured")
    add("--peers", type=lambda t: [p for p in t.split(",") if p], default=["flex", "fa4"], help="of flex,fa4")
    add("--variant", action="append", default=[], metavar="NAME=DIR",
        help="flashtune with other templates, as one more")
    add("--prepared", action="store_true",
        help="beside flashtune itself with block masks made before, as FlexAttention has its own")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--rounds", type=int, default=15)
    add("--heads", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--length", type=int, help="queries and keys, instead of each case's own")
    add("--cache", type=Path, help="flashtune's cache folder, such as one that was tuned")
    add("--json", type=Path, help="file for the results")
    a = parser.parse_args()
    if a.rounds < 1:
        parser.error("--rounds must be at least 1")
    for peer in a.peers:
        if peer not in ("flex", "fa4"):
            parser.error(f"--peers: {peer} is none of flex,fa4")
    for variant in a.variant:
        if "=" not in variant:
            parser.error(f"--variant: {variant} is no NAME=DIR")
    cases = [c for c in CASES if any(part in c.name for part in a.cases)]
    if not cases:
        parser.error(f"--cases: of {', '.join(c.name for c in CASES)} none is meant")
    return a, cases


def load():
    """The package: in the repository, and in the package that `cargo xtask package` makes."""
    try:
        import flashtune
    except ImportError:
        root = Path(__file__).resolve().parents[1]
        sys.path += [str(root / "bindings/python"), str(root / "python")]
        import flashtune
    flashtune.version()
    return flashtune


# flashtune with a block mask.
PREPARED = "prepared"


def main():
    a, cases = arguments()
    import torch

    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU; use --device cpu, or install a PyTorch with CUDA")
    flashtune = load()
    folders = dict([("flashtune", None)] + [v.split("=", 1) for v in a.variant])
    # What is measured is the kernel itself, not what answers while it is compiled.
    engines = {
        name: flashtune.Engine(
            a.device, templates_dir=folder or None, cache_dir=a.cache and str(a.cache / name), quick_first=False
        )
        for name, folder in folders.items()
    }
    torch.manual_seed(0)
    from side_by_side import clock

    ticks = clock.CudaClock() if a.device == "cuda" else clock.CpuClock()
    copy = copy_rate(torch, a.device, ticks)
    names = [*engines, *([PREPARED] if a.prepared else []), *a.peers]
    width = max(len(c.name) for c in cases)
    print(f"copies: {copy:.0f} GB/s; TFLOP/s on visible scores, (of dense causal, of flex), "
          "errors in units of 1e-4 of a row's largest")
    print(" " * width, *(f"{n:>20}" for n in names), flush=True)
    compile_ahead(torch, a, cases, engines)
    dense = Dense(torch, a, engines["flashtune"])
    results = []
    for case in cases:
        point = measure(torch, a, case, engines, dense, ticks)
        results.append(point)
        print(f"{case.name:{width}}", *(f"{cell(point['results'].get(n, {})):>20}" for n in names), told(point),
              flush=True)
        if a.device == "cuda":
            torch.cuda.empty_cache()
    if a.json:
        a.json.write_text(json.dumps({"copy_gb_s": copy, "points": results}, indent=1) + "\n")


def compile_ahead(torch, a, cases, engines):
    """Kernels of all cases at once, on as many threads as the CPU has; what fails is told where it is measured."""

    def call(engine, case):
        size = Size(torch, a.device, a.heads, a.length or case.length)
        try:
            ours(engine, case, case.tensors(size), *random_qkv(torch, a, size.length))()
        except Exception:
            pass

    with ThreadPoolExecutor() as pool:
        for engine in engines.values():
            for case in cases:
                pool.submit(call, engine, case)
    if a.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def random_qkv(torch, a, length):
    shape = (1, length, a.heads, a.head_dim)
    return [torch.randn(shape, device=a.device).to(torch.bfloat16) for _ in range(3)]


def cell(result):
    if "tflops" not in result:
        return "-"
    of = "/".join(f"{x:.2f}" for x in (result["of_causal"], result.get("of_flex")) if x)
    return f"{result['tflops']:.0f} ({of}) {result['error'] * 1e4:.1f}"


def told(point):
    """The kernel, what the bias takes, and why someone is absent."""
    ours = point["results"]["flashtune"]
    parts = [ours.get("schedule", "")]
    us, without = point["results"].get(PREPARED, {}).get("us"), ours.get("us")
    if us and without:
        parts.append(f"{without:.0f} us, prepared {us:.0f} ({100 * (without - us) / without:.1f} % less)")
    if "bias_gb_s" in ours:
        parts.append(f"{ours['us']:.0f} us, {ours['bias_gb_s']:.0f} GB/s")
    parts += [f"{n}: {r['absent']}" for n, r in point["results"].items() if r.get("absent")]
    return "  ".join(parts)


def copy_rate(torch, device, ticks):
    """GB/s of a copy in memory, read and written."""
    source = torch.ones(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return 2 * source.numel() / ticks.best(lambda: to.copy_(source)) / 1e6


class Dense:
    """Dense causal attention at the usual length."""

    def __init__(self, torch, a, engine):
        length = a.length or CASES[0].length
        q, k, v = random_qkv(torch, a, length)
        self.run = lambda: engine.forward(q, k, v, causal=True)
        self.flops = 4 * (length * (length + 1) // 2) * a.head_dim * a.heads


def measure(torch, a, case, engines, dense, ticks):
    """Rates and errors of everyone at one case."""
    length = a.length or case.length
    tensors = case.tensors(Size(torch, a.device, a.heads, length))
    q, k, v = random_qkv(torch, a, length)
    visible = case.visible and case.visible(**tensors)
    changed = case.changed and case.changed(**tensors)
    runs, results = {}, {}
    with torch.no_grad():
        makers = {name: lambda e=engine: ours(e, case, tensors, q, k, v) for name, engine in engines.items()}
        if a.prepared and "mask" in case.ours:
            makers[PREPARED] = lambda: prepared(engines["flashtune"], case, tensors, q, k, v)
        if "flex" in a.peers:
            makers["flex"] = lambda: flex(torch, visible, changed, q, k, v)
        if "fa4" in a.peers:
            makers["fa4"] = lambda: fa4(torch, case, tensors, q, k, v)
        exact = Rows(torch, visible, changed, q, k, v)
        for name, make in makers.items():
            try:
                run = make()
                results[name] = {"error": exact.error(run()) if run else None}
                if run:
                    runs[name] = run
            except Exception as e:  # of one at one case: told
                results[name] = {"absent": " ".join(f"{type(e).__name__}: {e}".split())[:160]}
            if name in engines and name in runs:
                found = engines[name].explain(as_dict=True)
                results[name]["schedule"] = f"{found['family']} {found['schedule']}"
        times = race(runs | {"dense": dense.run}, a.rounds, ticks)
    base = dense.flops / times.pop("dense") / 1e9
    pairs = live(torch, visible, length, a.device)
    for name, ms in times.items():
        r = results[name]
        r |= {"us": ms * 1e3, "tflops": 4 * pairs * a.head_dim * a.heads / ms / 1e9}
        r["of_causal"] = r["tflops"] / base
        if case.bias_bytes:
            r["bias_gb_s"] = case.bias_bytes * pairs * a.heads / ms / 1e6
    for r in results.values():
        if "tflops" in r and "tflops" in results.get("flex", {}):
            r["of_flex"] = r["tflops"] / results["flex"]["tflops"]
    return {
        "case": case.name, "dense_tflops": base, "length": length, "pairs": pairs, "aim": case.aim, "results": results,
    }


def race(runs, rounds, ticks):
    """Median milliseconds: in every round each runs once, in an order drawn anew."""
    times, order = {name: [] for name in runs}, list(runs)
    for r in range(rounds + 2):
        random.shuffle(order)
        for name, ms in zip(order, ticks.round([runs[n] for n in order])):
            if r >= 2:
                times[name].append(ms)
    return {name: statistics.median(found) for name, found in times.items()}


def ours(engine, case, tensors, q, k, v):
    options = dict(case.ours)
    if set(options) != {"causal"}:
        options["tensors"] = options.get("tensors", {}) | tensors
    return lambda: engine.forward(q, k, v, **options)


def prepared(engine, case, tensors, q, k, v):
    """The same with the mask's part made before the calls that are timed."""
    options = dict(case.ours)
    tensors = options.pop("tensors", {}) | tensors
    batch, length, heads, _ = q.shape
    mask = engine.create_block_mask(options.pop("mask"), batch, heads, length, k.shape[1], tensors=tensors)
    return lambda: engine.forward(q, k, v, block_mask=mask, tensors=tensors if "score" in options else None, **options)


def flex(torch, visible, changed, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    views = [t.transpose(1, 2) for t in (q, k, v)]
    length = q.shape[1]
    blocks = visible and create_block_mask(visible, None, None, length, length, device=q.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*views, score_mod=changed, block_mask=blocks).transpose(1, 2)


def fa4(torch, case, tensors, q, k, v):
    if case.fa4 is None:
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    first = lambda out: out[0] if isinstance(out, tuple) else out
    if "doc_q" not in tensors:
        return lambda: first(flash_attn_func(q, k, v, **case.fa4))
    lengths = torch.bincount(tensors["doc_q"][0])
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    options = case.fa4 | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return lambda: first(flash_attn_varlen_func(q[0], k[0], v[0], **options))[None]


def live(torch, visible, length, device):
    """(query, key) pairs that are attended, of one head."""
    if visible is None:
        return length * length
    keys, pairs = torch.arange(length, device=device)[None], 0
    for first in range(0, length, 1024):
        rows = torch.arange(first, min(first + 1024, length), device=device)[:, None]
        pairs += int(visible(0, 0, rows, keys).expand(rows.shape[0], length).sum())
    return pairs


class Rows:
    """Some rows of two heads in fp64, to hold an answer against."""

    def __init__(self, torch, visible, changed, q, k, v):
        length, heads = q.shape[1], q.shape[2]
        self.rows = torch.randint(length, (48,), device=q.device)
        self.rows[:2] = torch.tensor([0, length - 1])
        self.heads, self.exact = (0, heads - 1), []
        at, keys = self.rows[:, None], torch.arange(length, device=q.device)[None]
        for h in self.heads:
            s = q[0, self.rows, h].double() @ k[0, :, h].double().T * q.shape[-1] ** -0.5
            if changed:
                s = changed(s, 0, h, at, keys)
            if visible:
                s = s.masked_fill(~visible(0, h, at, keys), float("-inf"))
            self.exact.append(s.softmax(-1) @ v[0, :, h].double())

    def error(self, out):
        """The largest of their errors, each as a part of its row's largest element; NaN is not below anything."""
        found = []
        for h, exact in zip(self.heads, self.exact):
            largest = exact.abs().amax(-1, keepdim=True)
            found.append(((out[0, self.rows, h].double() - exact).abs() / largest).max().item())
        return max(found) if all(x == x for x in found) else float("inf")


if __name__ == "__main__":
    main()
