"""What :func:`flashtune.torch.activate` has taken over, and what went to PyTorch's kernels by reason."""

import collections
import threading

_lock = threading.Lock()
_served = collections.Counter()
_fallbacks = collections.Counter()


def served(device):
    """Counts a call of PyTorch's function that flashtune computes."""
    with _lock:
        _served[device] += 1


def fallback(device, reason):
    """Counts one that goes to PyTorch's kernels; gives whether it is the first of its reason."""
    with _lock:
        _fallbacks[device, reason] += 1
        return sum(n for (_, other), n in _fallbacks.items() if other == reason) == 1


def counters():
    """Calls of ``scaled_dot_product_attention`` that flashtune has computed, by device, and those that went to
    PyTorch's own kernels, by reason, since the process began:
    ``{"served": {"cuda:0": 12}, "fallback": {"dropout": 1}}``. Calls within compiled code count when they run; of those
    that go to PyTorch, when they are compiled."""
    with _lock:
        reasons = collections.Counter()
        for (_, reason), n in _fallbacks.items():
            reasons[reason] += n
        return {"served": dict(_served), "fallback": dict(reasons)}


def prometheus(device):
    """The counters of a device as lines for Prometheus."""
    with _lock:
        lines = [
            "# HELP flashtune_sdpa_total Calls of PyTorch's scaled_dot_product_attention that flashtune computed.",
            "# TYPE flashtune_sdpa_total counter",
            f'flashtune_sdpa_total{{device="{device}"}} {_served[device]}',
            "# HELP flashtune_fallback_total Calls of it that went to PyTorch's own kernels, by reason.",
            "# TYPE flashtune_fallback_total counter",
        ]
        lines += [
            f'flashtune_fallback_total{{device="{device}",reason="{reason}"}} {n}'
            for (where, reason), n in sorted(_fallbacks.items())
            if where == device
        ]
    return "\n".join(lines) + "\n"
