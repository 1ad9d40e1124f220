"""What docs/trust.md promises of the tuner, shown on the device that is there: real faults, kills and rivals.

    python3 benches/trust.py [--device cuda:0] [--shows repeat,kill,two,faults,...] [--json FILE]

repeat   one problem tuned with many seeds, each in a cache of its own that shares compiled kernels alone: which
         schedules win, and, raced against each other in the end, by how much they differ; the seconds cold and warm
kill     a tuner that is killed (SIGKILL) again and again, each a little later than the one before, until one ends: what
         each began with, and what was compiled twice
workers  a tuning whose workers and compilers are killed at random moments, on all devices where there are several
memory   the most that a tuning takes of a GPU's memory, by nvidia-smi, beside what its tensors take
two      two tuners of one problem on one cache, at once
faults   templates in which every second schedule has a planted fault (an illegal address, an endless loop, a trap, an
         address beyond shared memory, an endless loop with many keys alone): what each costs, and who wins
warm     a length tuned in an empty cache and beside half that length, whose results lead and whose kernels are there:
         seconds, schedules tried and compiled, and by how much the winners differ when raced together
family   four lengths of one problem tuned together in an empty cache: seconds, and how many kernels serve them
graph    one problem tuned for eager launches and for replayed graphs: who wins, and that neither answers for the other
devices  the same problems on one device and on all

Needs the command alone (`--flashtune`, else that of this repository or package).
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from planted import plant

ROOT = Path(__file__).resolve().parents[1]


PROBLEM = "--dtype bf16 --head-dim 128 --mask causal --heads 32 --kv-heads 8 --q-len 4096"


class Bench:
    """The command on one device, with folders that go when all is over."""

    def __init__(self, a):
        places = [ROOT / "bin/flashtune", ROOT / "target/release/flashtune"]
        self.command = str(a.flashtune or next((p for p in places if p.is_file()), "flashtune"))
        self.device, self.seeds = a.device, a.seeds
        self.folder = Path(tempfile.mkdtemp(prefix="flashtune-trust-"))
        self.problem = a.problem.split()
        self.trials, self.budget = str(a.trials), str(a.budget_s)

    def gpus(self):
        """How many GPUs there are to be used."""
        if self.device == "cpu":
            return 0
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())

    def cache(self, name):
        path = self.folder / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def args(self, cache, *more, device=None, problem=None):
        where = ["--device", device or self.device] if device != "all" else []
        return [self.command, *where, "--cache", str(cache), "--json", "tune", *(problem or self.problem), *more]

    def tune(self, cache, *more, device=None, problem=None):
        """One tuning: its report (None when it was refused), and the seconds of the whole command."""
        start = time.monotonic()
        args = self.args(cache, *more, device=device, problem=problem)
        done = subprocess.run(args, capture_output=True, text=True)
        seconds = time.monotonic() - start
        if done.returncode:
            print("  refused:", done.stderr.strip()[-300:])
            return None, seconds
        return json.loads(done.stdout), seconds

    def start(self, cache, env, *more):
        args = self.args(cache, *more, *self.limits())
        pipe = subprocess.PIPE
        return subprocess.Popen(args, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True)

    def limits(self):
        return ["--trials", self.trials, "--budget-s", self.budget]


def kernels(cache):
    """When each compiled kernel of a cache was written."""
    return {p.name: p.stat().st_mtime_ns for p in cache.glob("v*/artifacts/*/*.art")}


def share_kernels(source, target):
    for folder in source.glob("v*/artifacts"):
        shutil.copytree(folder, target / folder.relative_to(source), dirs_exist_ok=True, copy_function=os.link)
        for path in [target, *target.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)


def times(report):
    return {t["schedule"]: t["median_us"] for t in report["tuned"][0]["trials"] if t["result"] == "timed"}


def repeat(bench):
    won, rows, tried, before = {}, [], [], None
    for seed in range(bench.seeds):
        cache = bench.cache(f"repeat-{seed}")
        if before:
            share_kernels(before, cache)
        report, seconds = bench.tune(cache, "--seed", str(seed), *bench.limits())
        before = cache
        if not report:
            continue
        tuned = report["tuned"][0]
        won.setdefault(tuned["schedule"], []).append(seed)
        rows.append({key: tuned[key] for key in ("schedule", "median_us")} | {"seed": seed, "seconds": seconds})
        tried.append({t["schedule"] for t in tuned["trials"]})
        times_of = f"{tuned['median_us']:9.1f} us  {seconds:5.1f} s  {len(tried[-1])} tried"
        print(f"  seed {seed}: {times_of}  {tuned['schedule']}")
    if not rows:
        return None
    cold, warm = rows[0]["seconds"], [r["seconds"] for r in rows[1:]] or [float("nan")]
    most = max(len(seeds) for seeds in won.values())
    print(f"  cold {cold:.1f} s; with kernels compiled before {statistics.median(warm):.1f} s (median)")
    raced = None
    if len(won) > 1:
        report, _ = bench.tune(before, "--only", ",".join(won))
        if report:
            found = {name: us for name, us in times(report).items() if name in won}
            best = min(found.values())
            raced = {name: us / best for name, us in found.items()}
            for name, ratio in sorted(raced.items(), key=lambda item: item[1]):
                met = sum(name in names for names in tried)
                print(f"  raced together: {ratio:.4f} of the best, won {len(won[name])} of {met} times: {name}")
    near = sum(len(won[name]) for name, ratio in (raced or dict.fromkeys(won, 1.0)).items() if ratio <= 1.01)
    print(f"  the same winner {most} of {len(rows)} times; within 1 % of the best {near} of {len(rows)} times")
    found = {"runs": rows, "raced": raced, "same": most, "within": near}
    return found | {"cold_s": cold, "warm_s": warm}


def kill(bench):
    cache, rows = bench.cache("kill"), []
    env = {"FLASHTUNE_LOG": "info"}
    twice, before = 0, {}
    for limit in (*(1 + 0.5 * n for n in range(20)), None):
        start = time.monotonic()
        process = bench.start(cache, env)
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        seconds, now = time.monotonic() - start, kernels(cache)
        twice += sum(before[name] != now.get(name) for name in before)
        known = re.search(r"cut short.*lessons=(\d+)", err)
        known, new = int(known[1]) if known else 0, len(now) - len(before)
        rows.append({"seconds": seconds, "known": known, "new": new, "rc": process.returncode})
        before = now
        end = "killed after" if process.returncode else "ended after "
        print(f"  {end} {seconds:4.1f} s: began with {known} results, compiled {new}")
        if process.returncode == 0:
            break
    report = json.loads(out) if process.returncode == 0 else None
    if report:
        print(f"  winner {report['tuned'][0]['schedule']}; {len(before)} kernels, {twice} of them written twice")
    # What undisturbed tuning compiles.
    calm = bench.cache("calm")
    undisturbed, seconds = bench.tune(calm, *bench.limits())
    if undisturbed:
        winner = undisturbed["tuned"][0]["schedule"]
        print(f"  undisturbed: {seconds:.1f} s, {len(kernels(calm))} kernels, winner {winner}")
    return {"runs": rows, "twice": twice, "ended": bool(report)}


def children(parent):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (OSError, IndexError):
            pass
    return found


def workers(bench):
    chance, killed = random.Random(1), 0
    several = "all" if bench.gpus() > 1 else None
    more = ["--devices", "all"] if several else []
    problem = list(bench.problem)
    problem[problem.index("--q-len") + 1] += ",2k" if several else ""
    args = bench.args(bench.cache("workers"), *more, *bench.limits(), device=several, problem=problem)
    start = time.monotonic()
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out = []
    reader = threading.Thread(target=lambda: out.extend(process.communicate()))
    reader.start()
    # For ever would be for ever: each kill costs some of the work.
    while reader.is_alive() and killed < 12:
        time.sleep(chance.uniform(0.2, 1.0))
        those = children(process.pid)
        if those and reader.is_alive():
            os.kill(chance.choice(those), signal.SIGKILL)
            killed += 1
    reader.join()
    seconds = time.monotonic() - start
    if process.returncode:
        print(f"  {killed} killed; it FAILED: {out[1].strip()[-300:]}")
        return {"killed": killed, "ended": False}
    tuned = json.loads(out[0])["tuned"]
    failed = [t["reason"] for case in tuned for t in case["trials"] if t["result"] != "timed" and t["stage"] != "prune"]
    won = ", ".join(case["schedule"] for case in tuned)
    print(f"  {killed} killed, {seconds:.1f} s, {len(failed)} candidates blamed; winners {won}")
    for reason in failed[:3]:
        print("   ", reason[:150])
    return {"killed": killed, "ended": True, "blamed": failed, "seconds": seconds}


def memory(bench):
    def used():
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])

    try:
        before = used()
    except (OSError, IndexError):
        print("  there is no nvidia-smi here")
        return None
    most, over = [before], threading.Event()

    def watch():
        while not over.wait(0.1):
            most.append(used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    report, _ = bench.tune(bench.cache("memory"), *bench.limits())
    over.set()
    watcher.join()
    taken = max(most) - before
    print(f"  {taken} MiB more than before at most, in {len(most)} looks" + ("" if report else "; it was refused"))
    return {"mib": taken, "looks": len(most)}


def two(bench):
    cache, reports = bench.cache("two"), [None, None]

    def work(i):
        reports[i] = bench.tune(cache, *bench.limits())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = [(r["tuned"][0]["cached"], r["tuned"][0]["schedule"], s) if r else (None, None, s) for r, s in reports]
    for cached, schedule, seconds in found:
        print(f"  cached {str(cached).lower():5}  {seconds:5.1f} s  {schedule}")
    one = sorted(str(f[0]) for f in found) == ["False", "True"] and found[0][1] == found[1][1]
    print("  one tuned, the other took its result" if one else "  NOT one tuning and one result")
    return {"one": one}


# What stands in a worker's answer for each planted fault, on GPUs and on the CPU.
KINDS = {
    "illegal address": "ILLEGAL_ADDRESS|SIGSEGV",
    "endless loop on a part of the grid": "on a part of the grid: it did not come back",
    "endless loop": "did not come back",
    "trap": "LAUNCH_FAILED|ILLEGAL_INSTRUCTION|HARDWARE|ASSERT|SIGILL|SIGTRAP",
}


def faults(bench):
    templates = plant(bench.command, bench.problem, bench.device, bench.folder / "planted")
    start = time.monotonic()
    env = {"FLASHTUNE_LOG": "flashtune=debug,flashtune_tuner=debug"}
    process = bench.start(bench.cache("faults"), env, "--templates", str(templates))
    out = []
    reader = threading.Thread(target=lambda: out.append(process.stdout.read()))
    reader.start()
    last, costs, tail = start, {}, []
    for line in process.stderr:
        now = time.monotonic()
        tail = [*tail[-5:], line]
        if "a schedule failed" in line:
            reason = line.split("reason=", 1)[-1]
            stage = re.search(r"stage=(\w+)", line) or "??"
            kind = next((k for k, words in KINDS.items() if re.search(words, reason)), reason.strip()[:60])
            costs.setdefault(f"{stage[1]}: {kind}", []).append(now - last)
        if re.search("a schedule failed|compiled|right", line):
            last = now
    process.wait()
    reader.join()
    seconds = time.monotonic() - start
    for kind, spent in sorted(costs.items()):
        print(f"  {len(spent):3} x {kind}: {statistics.mean(spent):.2f} s on average, {max(spent):.2f} s at most")
    if process.returncode:
        print("  it FAILED:", "".join(tail)[-400:])
        return {"ended": False, "costs": costs}
    tuned = json.loads(out[0])["tuned"][0]
    timed = sum(t["result"] == "timed" for t in tuned["trials"])
    print(f"  {len(tuned['trials'])} tried, {timed} timed, {seconds:.1f} s; winner {tuned['schedule']}")
    return {"ended": True, "costs": costs, "timed": timed, "seconds": seconds, "winner": tuned["schedule"]}


def devices(bench):
    dims, lengths = ("64,128", "1k,4k") if bench.device != "cpu" else ("32,64", "128,256")
    problem = f"--dtype bf16 --head-dim {dims} --mask causal --q-len {lengths} --heads 16".split()
    rows = {}
    every = ["--devices", "all"] if bench.device != "cpu" else ["--devices", "cpu,cpu"]
    for name, device, more in (("one device", None, []), ("all devices", "all", every)):
        cache = bench.cache(name.replace(" ", "-"))
        what = {"device": device, "problem": problem}
        report, seconds = bench.tune(cache, *more, "--trials", bench.trials, "--budget-s", "120", **what)
        again, cached = bench.tune(cache, *more, "--trials", bench.trials, **what)
        if not (report and again):
            continue
        rows[name] = seconds
        known = sum(t["cached"] for t in again["tuned"])
        cases = len(report["tuned"])
        print(f"  {name:11}: {cases} cases in {seconds:.1f} s; again {cached:.1f} s, {known} from the cache")
    if len(rows) == 2:
        print(f"  {rows['one device'] / rows['all devices']:.2f} times as fast")
    return rows


def length(problem, factor):
    longer = list(problem)
    at = longer.index("--q-len") + 1
    longer[at] = str(factor * int(longer[at]))
    return longer


def warm(bench):
    beside, alone, longer = bench.cache("warm-beside"), bench.cache("warm-alone"), length(bench.problem, 2)
    first, seconds = bench.tune(beside, *bench.limits())
    if not first:
        return None
    print(f"  at first: {seconds:.1f} s, {len(first['tuned'][0]['trials'])} tried")
    rows = {}
    for name, cache in (("in an empty cache", alone), ("beside the half", beside)):
        before = set(kernels(cache))
        report, seconds = bench.tune(cache, *bench.limits(), problem=longer)
        if not report:
            return None
        tuned, new = report["tuned"][0], len(set(kernels(cache)) - before)
        rows[name] = {key: tuned[key] for key in ("schedule", "median_us")}
        rows[name] |= {"seconds": seconds, "tried": len(tuned["trials"]), "compiled": new}
        print(f"  {name}: {seconds:.1f} s, {len(tuned['trials'])} tried, {new} compiled, {tuned['median_us']:.1f} us  "
              f"{tuned['schedule']}")
    won = {row["schedule"] for row in rows.values()}
    if len(won) > 1:
        raced, _ = bench.tune(beside, "--only", ",".join(won), problem=longer)
        if raced:
            found = times(raced)
            best = min(found[name] for name in won)
            rows["raced"] = {name: found[name] / best for name in won}
            print("  raced together:", ", ".join(f"{found[name] / best:.4f} {name}" for name in sorted(won)))
    return rows


def family(bench):
    lengths = ",".join(length(bench.problem, n)[bench.problem.index("--q-len") + 1] for n in (1, 2, 4, 8))
    several = list(bench.problem)
    several[several.index("--q-len") + 1] = lengths
    report, seconds = bench.tune(bench.cache("family"), "--together", *bench.limits(), problem=several)
    if not report:
        return None
    serving = {t["schedule"] for t in report["tuned"]}
    print(f"  {len(report['tuned'])} lengths in {seconds:.1f} s, served by {len(serving)} kernels")
    return {"seconds": seconds, "kernels": sorted(serving)}


def graph(bench):
    cache, rows = bench.cache("graph"), {}
    for name, more in (("eager", []), ("graph", ["--graph"])):
        report, seconds = bench.tune(cache, *more, *bench.limits())
        again, cached = bench.tune(cache, *more, *bench.limits())
        if not (report and again):
            continue
        tuned = report["tuned"][0]
        rows[name] = {key: tuned[key] for key in ("schedule", "median_us", "gain_over_default", "launches", "cached")}
        rows[name] |= {"again_cached": again["tuned"][0]["cached"], "seconds": seconds}
        print(f"  {name}: {tuned['median_us']:9.1f} us, {tuned['gain_over_default'] or float('nan'):.3f}x the default  "
              f"{seconds:5.1f} s, again {cached:.1f} s  {tuned['schedule']}")
    own = [row["launches"] == name and not row["cached"] and row["again_cached"] for name, row in rows.items()]
    print("  each has a result of its own" if own == [True, True] else f"  NOT a result of its own each: {rows}")
    return rows


SHOWS = {
    "repeat": repeat, "kill": kill, "workers": workers, "memory": memory, "two": two, "faults": faults, "warm": warm,
    "family": family, "graph": graph, "devices": devices,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shows", default="repeat,kill,two,faults", help=f"of {','.join(SHOWS)}")
    add("--device", default="cuda:0")
    add("--flashtune", help="the command")
    add("--problem", default=PROBLEM, help="options of `tune`")
    add("--seeds", type=int, default=10)
    add("--trials", type=int, default=40)
    add("--budget-s", type=float, default=20)
    add("--json", type=Path, help="also write what was found")
    a = parser.parse_args()
    unknown = [name for name in a.shows.split(",") if name not in SHOWS]
    if unknown:
        parser.error(f"--shows: {','.join(unknown)} is none of {','.join(SHOWS)}")
    bench = Bench(a)
    found = {}
    try:
        for name in a.shows.split(","):
            start = time.monotonic()
            print(f"{name}:", flush=True)
            found[name] = SHOWS[name](bench)
            print(f"  ({time.monotonic() - start:.0f} s)", flush=True)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
        if a.json:
            a.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
