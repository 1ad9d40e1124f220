"""flashtune beside its peers: cuDNN, FlashAttention 2, 3 and 4, FlexAttention, FlashInfer; in one process, in turn.

    python3 benches/peers.py OUT [--suites forward,heads] [--peers flashtune,cudnn,fa2,fa3,fa4,flex]
    python3 benches/peers.py OUT --suites decode,chunk,varlen,paged,quantised,skewed     # serving
    python3 benches/peers.py OUT --device cpu          # PyTorch's attention for the CPU
    python3 benches/peers.py OUT --suites decode --dry-run        # cases, bytes and aims, as JSON

Suites of dense tensors (forward, heads, gqa, window, dense-decode) and of serving are of runs of their own. The
latter have cases by name; on the CPU they run at small sizes, to see that everything works.

Writes OUT/peers.json after every point, and at the end Markdown, HTML and SVG beside it (by `flashtune report`).
Needs PyTorch, `libflashtune` (`cargo build --release -p flashtune-c`) and the command; a peer that is not there is
left out, and the report says why.
"""

import argparse
import json
from pathlib import Path

from side_by_side import cases, serving_cases, tuning

SUITES = (*cases.SUITES, *serving_cases.SUITES)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    words = lambda text: tuple(text.split(","))
    numbers = lambda text: tuple(int(n) for n in text.split(","))
    add("out", type=Path, help="folder for the report")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--suites", type=words, default=("forward",), help=f"of {','.join(SUITES)}")
    add("--cases", type=words, help="of the suites of serving: those whose name holds one of these words")
    add("--peers", type=words, help="contenders; the first is compared with the others")
    add("--dtypes", type=words, help="of f16,bf16,f32")
    add("--masks", type=words, help="of full,causal, for the suites forward and heads")
    add("--head-dims", type=numbers, help="for the suite forward")
    add("--seq-lens", type=numbers, help="for the suite forward")
    add("--rounds", type=int, default=15, help="rounds of one repeat")
    add("--repeats", type=int, default=3)
    add("--flashtune", help="the command, else that of this repository or package")
    add(
        "--tune-budget-s",
        type=float,
        help="seconds of tuning per case before; 0, as without it at serving, does not tune",
    )
    add("--dry-run", action="store_true", help="print what would be measured, as JSON; needs no PyTorch")
    a = parser.parse_args()
    for name, known in (("suites", SUITES), ("dtypes", cases.BYTES), ("masks", ("full", "causal"))):
        require_known(parser, name, getattr(a, name) or (), known)
    if min(a.rounds, a.repeats) < 1:
        parser.error("--rounds and --repeats must be at least 1")
    a.serving = a.suites[0] in serving_cases.SUITES
    if any((suite in serving_cases.SUITES) != a.serving for suite in a.suites):
        parser.error(f"--suites: {','.join(a.suites)} are dense tensors and serving; run them apart")
    if a.tune_budget_s is None:
        a.tune_budget_s = 0 if a.serving else 10
    if a.cases and not a.serving:
        parser.error("--cases: only cases of serving have names; narrow others by --dtypes, --head-dims and so on")
    return parser, a


def require_known(parser, option, words, known):
    unknown = [word for word in words if word not in known]
    if unknown:
        parser.error(f"--{option}: {','.join(unknown)} is none of {','.join(known)}")


def grid(a):
    """What the suites range over: the device's usual, and what the options say."""
    usual = cases.Grid.default(a.device)
    given = {name: getattr(a, name) or getattr(usual, name) for name in ("dtypes", "head_dims", "masks", "seq_lens")}
    return cases.Grid(**given, tokens=usual.tokens, width=usual.width)


def main():
    parser, a = arguments()
    if a.serving:
        todo = serving_cases.points(a.suites, a.device, a.cases)
    else:
        todo = cases.points(a.suites, grid(a), a.device)
    if not todo:
        parser.error(
            f"--cases: no case of {','.join(a.suites)} has one of {','.join(a.cases)} in its name; see --dry-run"
        )
    if a.dry_run:
        listed = lambda case: case.listed() if a.serving else {**case.facts(), **case.counts()}
        print(json.dumps([{"suite": suite, **listed(case)} for suite, case in todo], indent=1))
        return
    # From here on PyTorch is needed.
    if a.serving:
        from side_by_side import serving_peers as contenders
    else:
        from side_by_side import contenders

    known = contenders.known()
    names = a.peers or contenders.DEFAULT[a.device].split(",")
    require_known(parser, "peers", names, known)
    measure(a, todo, [known[name] for name in names])


def measure(a, todo, peers):
    import torch
    from side_by_side import answers, ceilings, clock, conditions, document

    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU; use --device cpu, or install a PyTorch with CUDA")
    torch.manual_seed(0)
    absent, there = {}, []
    for peer in peers:
        try:
            peer.load(a.device)
            there.append(peer)
        except Exception as e:  # a peer that is not there is a finding
            absent[peer.name] = told(e)
            print(f"{peer.name} is not there: {absent[peer.name]}", flush=True)
    binary = tuning.find(a.flashtune)
    gpu = a.device == "cuda"
    state = conditions.Conditions(uuid()) if gpu else None
    ticks = clock.CudaClock() if gpu else clock.CpuClock()
    if a.tune_budget_s and any(p.name == "flashtune" for p in there):
        if binary is None:
            raise SystemExit("error: nothing tunes without the command; name it by --flashtune, or --tune-budget-s 0")
        a.tuned = 0
        for i, (_, case) in enumerate(todo):
            print(f"tuning {i + 1}/{len(todo)}: {case}", flush=True)
            tune = tuning.tune_serving if a.serving else tuning.tune
            a.tuned += tune(binary, a.device, case, a.tune_budget_s)
    if a.serving:
        from side_by_side import serving_run

        document.render(binary, serving_run.measure(a, todo, peers, there, absent, state, ticks)[1])
        return
    report = document.new(a.device, state, there)
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "peers.json"
    dtypes = sorted({case.dtype for _, case in todo})
    ceilings.measure(report["ceilings"], ticks, a.device, dtypes)
    for kind in answers.kinds(case for _, case in todo):
        checks = (answers.check(peer, kind, a.device) for peer in there)
        report["checks"] += [check for check in checks if check]
    wrong = {(c["contender"], *kind_of(c["case"])): c for c in report["checks"] if answers.is_wrong(c)}
    for check in wrong.values():
        print(f"{check['contender']} {check['case']}: {answers.told(check)}", flush=True)
    for suite, case in todo:
        point = document.point(suite, case)
        point["results"] = run(a, case, peers, there, absent, wrong, ticks, state)
        found = state and state.take()
        if found:
            point["conditions"] = found
        report["points"].append(point)
        document.save(report, path)
        times = [f"{r['contender']} {r['latency_us']['median']:.1f}" for r in point["results"] if "latency_us" in r]
        print(f"{suite:8} {case}: us {', '.join(times)}", flush=True)
    ceilings.measure(report["ceilings"], ticks, a.device, dtypes)
    document.save(report, path)
    document.render(binary, path)


def uuid():
    """The GPU's UUID, where this PyTorch tells it."""
    import torch

    found = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{found}" if found else None


def run(a, case, peers, there, absent, wrong, ticks, state):
    """The results of one case: latencies, and the reasons of those that did not run."""
    import torch
    from side_by_side import answers, clock, contenders

    shape = lambda heads, rows: (case.batch, rows, heads, case.head_dim)
    tensor = lambda heads, rows: torch.randn(shape(heads, rows), device=a.device).to(contenders.DTYPES[case.dtype])
    q, k, v = tensor(case.heads, case.q_len), tensor(case.kv_heads, case.kv_len), tensor(case.kv_heads, case.kv_len)
    runs, kernels, why = {}, {}, dict(absent)
    with torch.no_grad():
        for peer in there:
            check = wrong.get((peer.name, *kind_of(case.facts())))
            if check:
                why[peer.name] = answers.told(check)
                continue
            try:
                call = peer.prepare(case, q, k, v)
                call()
                if a.device == "cuda":
                    torch.cuda.synchronize()
                runs[peer.name], kernels[peer.name] = call, peer.kernel()
            except Exception as e:  # of one peer at one case: recorded
                why[peer.name] = told(e)
        times = clock.race(ticks, runs, a.rounds, a.repeats, state and state.read) if runs else {}
    results = []
    for peer in peers:
        result = {"contender": peer.name}
        if peer.name in times:
            result["latency_us"] = times[peer.name]
            if kernels[peer.name]:
                result["schedule"] = kernels[peer.name]
        else:
            result["absent"] = why[peer.name]
        results.append(result)
    return results


def kind_of(facts):
    """What a wrong answer at a small size says something about."""
    mask = facts["mask"].split(":")[0]
    return facts["dtype"], facts["head_dim_qk"], mask, facts["heads"] // facts["kv_heads"], facts["q_len"] == 1


def told(error):
    """An error in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


if __name__ == "__main__":
    main()
