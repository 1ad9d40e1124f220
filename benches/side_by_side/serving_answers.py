"""Is what a contender computes of a serving case attention? Every result is compared with fp64 at its own size,
before it is timed."""

import torch

# Rows whose scores are kept at once: of 2048 rows beside 32k keys with 8 heads to a KV head they would be 4 GiB in
# fp64.
ROWS_AT_ONCE = 512


def attention(case, data, node, dtype):
    """Unfused attention of one launch in a dtype, [total rows, heads, head dim]: the reference in fp64, and the
    yardstick of errors in the dtype that kernels multiply in."""
    out = torch.empty(case.total_rows, case.heads, case.head_dim, dtype=dtype, device=data.device)
    group, at = case.heads // case.kv_heads, 0
    for b, rows in enumerate(case.rows):
        q = data.q[at : at + rows].to(dtype)
        k, v = data.values(node, b, dtype)
        for head in range(case.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            for first in range(0, rows, ROWS_AT_ONCE):
                part = slice(first, min(rows, first + ROWS_AT_ONCE))
                place = slice(at + part.start, at + part.stop)
                out[place, heads] = one_head(
                    case, b, part, q[part, heads], k[:, head], v[:, head], sinks(data, heads, dtype)
                )
        at += rows
    return out


def sinks(data, heads, dtype):
    return None if data.sinks is None else data.sinks[heads].to(dtype)


def one_head(case, b, part, q, k, v, sinks):
    """Rows `part` of a sequence, [rows, group, head dim], on the keys of one head."""
    scores = torch.einsum("rgd,nd->rgn", q * case.head_dim**-0.5, k)
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    at = torch.arange(part.start, part.stop, device=q.device)[:, None] + case.lengths[b] - case.rows[b]
    keys = torch.arange(case.lengths[b], device=q.device)[None]
    hidden = torch.zeros(scores.shape[0], scores.shape[2], dtype=torch.bool, device=q.device)
    if case.causal:
        hidden |= keys > at
    if case.window is not None:
        hidden |= keys <= at - case.window
    scores.masked_fill_(hidden[:, None], float("-inf"))
    if sinks is not None:
        # One more key without a value.
        sink = sinks[None, :, None].expand(scores.shape[0], -1, 1)
        return torch.einsum("rgn,nd->rgd", torch.cat([scores, sink], -1).softmax(-1)[..., :-1], v)
    return torch.einsum("rgn,nd->rgd", scores.softmax(-1), v)


class Expected:
    """The answers of one case, computed once for all contenders: those of its first and its last launch."""

    def __init__(self, case, data):
        self.case, self.data = case, data
        self.nodes = sorted({0, data.nodes - 1})
        self.exact = {node: attention(case, data, node, torch.float64) for node in self.nodes}
        # Beside a quantised cache kernels multiply in f16: the yardstick is that, on the numbers that the cache stands
        # for, its result in the dtype of the queries as theirs is.
        yardstick = torch.float16 if case.is_quantised else data.dtype
        worst = [self.error(attention(case, data, node, yardstick).to(data.dtype), node) for node in self.nodes]
        self.unfused_error = max(worst)

    def error(self, out, node):
        """The largest error of an answer; NaN where it has one."""
        return (out.reshape(self.exact[node].shape).double() - self.exact[node]).abs().max().item()

    def check(self, contender, out_of):
        """A contender's answers beside the exact ones, as a report has it. `out_of(node)` gives one."""
        errors = [self.error(out_of(node), node) for node in self.nodes]
        worst = max(errors) if all(e == e for e in errors) else float("nan")
        largest = max(exact.abs().max().item() for exact in self.exact.values())
        bound = 2 * self.unfused_error + 1e-5 + contender.slack(self.case) * largest
        found = {"contender": contender.name, "case": self.case.facts(), "unfused_error": self.unfused_error}
        note = contender.note(self.case)
        found |= {"note": note} if note else {}
        if worst != worst:
            return found | {"passed": False, "note": "NaN"}
        return found | {"max_error": worst, "passed": worst <= bound}
