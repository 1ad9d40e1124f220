"""Is what a contender computes attention? Compared with fp64, at a small size of every kind of problem."""

from dataclasses import replace

import torch

from .contenders import DTYPES, Unsupported, unfused


def small(case):
    """A case of the same kind that fp64 computes at once."""
    group = case.heads // case.kv_heads
    q_len = min(case.q_len, 256)
    kv_len = 1024 if case.q_len == 1 else q_len
    window = None if case.window is None else 64
    return replace(case, batch=2, heads=2 * group, kv_heads=2, q_len=q_len, kv_len=kv_len, window=window)


def kinds(cases):
    """One small case for every kind, in order."""
    return list(dict.fromkeys(small(c) for c in cases))


NAN = "NaN"


def is_wrong(check):
    """Whether an answer was given and is wrong; a contender that fails at the small size may still do the large one."""
    return not check["passed"] and ("max_error" in check or check.get("note") == NAN)


def told(check):
    """What is wrong with an answer."""
    found = f"{check['max_error']:.1e}" if "max_error" in check else check["note"]
    return f"wrong answer: its error is {found}, that of unfused attention {check['unfused_error']:.1e}"


def check(contender, case, device):
    """A contender's answer beside fp64, as a report has it; None where it does not compute such cases."""
    generator = torch.Generator().manual_seed(1)
    shape = lambda heads, rows: (case.batch, rows, heads, case.head_dim)
    sizes = [shape(case.heads, case.q_len), shape(case.kv_heads, case.kv_len), shape(case.kv_heads, case.kv_len)]
    drawn = [torch.randn(s, generator=generator) for s in sizes]
    q, k, v = (t.to(DTYPES[case.dtype]).to(device) for t in drawn)
    exact = unfused(case, q.double(), k.double(), v.double())
    error = lambda o: (o.double() - exact).abs().max().item()
    yardstick = error(unfused(case, q, k, v))
    found = {"contender": contender.name, "case": case.facts(), "unfused_error": yardstick, "passed": False}
    try:
        with torch.no_grad():
            own = error(contender.prepare(case, q, k, v)())
    except Unsupported:
        return None
    except Exception as e:  # whatever a peer raises is a finding, not our failure
        return found | {"note": repr(e)[:200]}
    # NaN compares false, and has no place in JSON.
    passed = own <= 2 * yardstick + 1e-5
    return found | ({"max_error": own} if own == own else {"note": NAN}) | {"passed": passed}
