"""Time: on a GPU between events, with the L2 cache flushed before every launch; on the CPU by the wall clock."""

import statistics
import time

import torch


class CudaClock:
    """Launches go to the current stream one after the other. The flush before each is long enough for the host to be
    ahead, so that its own work is not in the times."""

    warm_up = 3

    def __init__(self):
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(max(4 * cache, 512 << 20), dtype=torch.uint8, device="cuda")

    def round(self, runs, between=None):
        """Milliseconds of every run, in order. `between` is called while the GPU works."""
        events = []
        for run in runs:
            self.flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            events.append((start, end))
        if between:
            between()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def best(self, run, seconds=0.5):
        """The least milliseconds of a run, without a flush."""
        times = []
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < seconds:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)


class CpuClock:
    """Caches are flushed by writing more than they hold."""

    warm_up = 1

    def __init__(self):
        self.flush = torch.empty(64 << 20, dtype=torch.uint8)

    def round(self, runs, between=None):
        times = []
        for run in runs:
            self.flush.zero_()
            # PyTorch's threads stay awake for a while after their work, on cores that others need.
            time.sleep(0.005)
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        if between:
            between()
        return times

    def best(self, run, seconds=0.5):
        times = []
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return min(times)


def race(clock, runs, rounds, repeats, between):
    """Latencies by name, as a report has them. In every round each contender runs once, in an order that rotates; all
    of it is repeated, and the repeats' medians are kept to show how far they lie apart. `between` is called once per
    repeat, while the device works."""
    names = list(runs)
    samples = {name: [] for name in names}
    medians = {name: [] for name in names}
    for _ in range(clock.warm_up):
        clock.round(runs.values())
    for _ in range(repeats):
        own = {name: [] for name in names}
        for r in range(rounds):
            order = names[r % len(names) :] + names[: r % len(names)]
            times = clock.round([runs[n] for n in order], between if r == rounds - 1 else None)
            for name, ms in zip(order, times):
                own[name].append(ms * 1e3)
        for name in names:
            samples[name] += own[name]
            medians[name].append(statistics.median(own[name]))
    return {name: latency(samples[name], medians[name]) for name in names}


def latency(samples, medians):
    ordered = sorted(samples)
    at = lambda p: ordered[round((len(ordered) - 1) * p)]
    # The middle of an even number of samples is one of them, so that percentiles ascend.
    found = {"median": at(0.5), "p10": at(0.1), "p90": at(0.9), "samples": len(ordered)}
    return found | ({"repeats": medians} if len(medians) > 1 else {})
