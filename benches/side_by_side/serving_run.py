"""Measuring the serving suites: every result is compared with fp64, then launches are timed in a graph that reads
other keys in each, and single launches beside."""

import torch

from . import aims, ceilings, clock, document
from .contenders import Unsupported
from .serving_answers import Expected
from .serving_data import Data

METHOD = [
    "All contenders run in one process, in turn: each once per round, in an order that rotates; medians over rounds.",
    "A time is that of one launch in a graph of 16 or more, which take the caches of as many layers in turn: no key "
    "is read again before 256 MiB of others, so that none comes from the L2 cache. Single launches, replayed alone "
    "after the L2 cache was flushed, stand beside. On the CPU launches follow each other without a graph.",
    "Bytes are those of the keys and values that a row sees, of Q and of O; operations those of live "
    "(query, key) pairs.",
    "Every result was compared with fp64 at its own size, as the graph computed it, before it was timed.",
    "The read rate, and the other ceilings, were measured in the same process, before and after; the higher counts.",
]


class Launches:
    """The launches of one contender at one case, captured where there are graphs, with what the first capture
    computed."""

    def __init__(self, call, nodes, is_cuda):
        # Graphs hold addresses alone: what the call owns (tables, scales, copies) lives as long as they do.
        self.nodes, self.call = nodes, call
        if not is_cuda:
            self.outputs = {}
            self.all = lambda: self.outputs.update((i, call(i)) for i in range(nodes))
            self.one = lambda: call(0)
            self.all()
            return
        # What is compiled, allocated or chosen once happens before.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        many, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(many):
            self.outputs = {i: call(i) for i in range(nodes)}
        with torch.cuda.graph(single):
            self.kept = call(0)
        for out in self.outputs.values():
            out.fill_(float("nan"))
        many.replay()
        torch.cuda.synchronize()
        self.all, self.one = many.replay, single.replay


def measure(a, todo, peers, there, absent, state, ticks):
    """The report of the suites, saved after every case."""
    is_cuda = a.device == "cuda"
    report = document.new(a.device, state, there)
    report["title"] = f"Attention of serving on {report['device']['name']}: peers side by side"
    tuned = (
        f"{a.tuned} of {len(todo)} cases were tuned for {a.tune_budget_s:g} s each."
        if a.tune_budget_s
        else "Nothing was tuned."
    )
    report["method"] = [*METHOD, tuned]
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "peers.json"
    # On the CPU sizes are small ones, which no product of matrices says anything of.
    dtypes = sorted({case.dtype for _, case in todo}) if is_cuda else []
    measure_ceilings(report["ceilings"], ticks, a.device, dtypes)
    for suite, case in todo:
        point = document.point(suite, case)
        point["results"] = run(a, case, peers, there, absent, ticks, state, report["checks"])
        found = state and state.take()
        if found:
            point["conditions"] = found
        report["points"].append(point)
        document.save(report, path)
        shown = [f"{r['contender']} {r['latency_us']['median']:.1f}" for r in point["results"] if "latency_us" in r]
        print(f"{suite:9} {case}: us {', '.join(shown)}", flush=True)
        if is_cuda:
            torch.cuda.empty_cache()
    measure_ceilings(report["ceilings"], ticks, a.device, dtypes)
    read = report["ceilings"]["read"]["gbytes_per_s"]
    lines = aims.judge(todo, report["points"], read, report["device"]["name"])
    document.save(report, path)
    print(f"\nread rate {read:.0f} GB/s ({report['ceilings']['read']['how']})")
    for name, why in absent.items():
        print(f"without {name}: {why}")
    print("\n".join(lines), flush=True)
    return report, path


def run(a, case, peers, there, absent, ticks, state, checks):
    """The results of one case: latencies, and the reasons of those that did not run."""
    data = Data(case, a.device)
    launches, kernels, why = {}, {}, dict(absent)
    with torch.no_grad():
        expected = Expected(case, data)
        for peer in there:
            try:
                launches[peer.name] = Launches(peer.prepare(case, data), data.nodes, a.device == "cuda")
                kernels[peer.name] = peer.kernel()
                check = expected.check(peer, launches[peer.name].outputs.__getitem__)
            except Unsupported as e:
                why[peer.name] = str(e)
                continue
            except Exception as e:  # of one peer at one case: recorded
                launches.pop(peer.name, None)
                why[peer.name] = told(e)
                continue
            checks.append(check)
            if not check["passed"]:
                del launches[peer.name]
                error = f"{check['max_error']:.1e}" if "max_error" in check else check["note"]
                why[peer.name] = (
                    f"wrong answer: its error is {error}, that of unfused attention {expected.unfused_error:.1e}"
                )
                print(f"{peer.name} {case}: {why[peer.name]}", flush=True)
        read = state and state.read
        many = race(ticks, {n: l.all for n, l in launches.items()}, data.nodes, a, read)
        one = race(ticks, {n: l.one for n, l in launches.items()}, 1, a, read)
    results = []
    for peer in peers:
        result = {"contender": peer.name}
        note = peer.note(case)
        if peer.name in many:
            result |= {"latency_us": many[peer.name], "single_us": one[peer.name]}
            result |= {"schedule": kernels[peer.name]} if kernels[peer.name] else {}
            result |= {"note": note} if note else {}
        else:
            result["absent"] = why[peer.name]
        results.append(result)
    return results


def measure_ceilings(found, ticks, device, dtypes):
    ceilings.measure(found, ticks, device, dtypes)
    read_rate(found, ticks, device)


def race(ticks, runs, nodes, a, between):
    """[`clock.race`], in microseconds of one launch."""
    if not runs:
        return {}
    return {
        name: per_launch(latency, nodes)
        for name, latency in clock.race(ticks, runs, a.rounds, a.repeats, between).items()
    }


def per_launch(latency, nodes):
    found = {name: latency[name] / nodes for name in ("median", "p10", "p90")} | {"samples": latency["samples"]}
    return found | ({"repeats": [us / nodes for us in latency["repeats"]]} if "repeats" in latency else {})


def read_rate(found, ticks, device):
    """Adds the rate at which the device reads memory to the ceilings: of several ways to read, and of two
    measurements, the highest."""
    size = (4 << 30) if device == "cuda" else (512 << 20)
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    ways = {"sum": numbers.sum, "largest": numbers.max, "sum of rows": lambda: numbers.view(-1, 1 << 15).sum(1)}
    for name, way in ways.items():
        rate = size / ticks.best(way) / 1e6
        if rate > found.get("read", {}).get("gbytes_per_s", 0):
            found["read"] = {"gbytes_per_s": rate, "how": f"{name} of {size >> 20} MiB of float32 by PyTorch"}


def told(error):
    """An error in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
