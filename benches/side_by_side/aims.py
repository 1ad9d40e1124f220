"""What a case is to reach, and whether it did: arithmetic on figures of one run. Needs no PyTorch."""

import math
from dataclasses import dataclass

# A time within this part of its aim counts as reached.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Measured:
    """What aims are computed from: `own` and `other` are microseconds of this project and of the best peer at a
    case (None where nobody ran), by the case's name; `read` is the read rate of the device in 1e9 bytes per
    second."""

    own: dict
    other: dict
    read: float


@dataclass(frozen=True)
class Us:
    """At most so many microseconds, on an H200."""

    us: float
    of_device = "H200"

    def limit(self, case, measured):
        return self.us

    def __str__(self):
        return f"{self.us:g} us"


@dataclass(frozen=True)
class Tflops:
    """At least so many 1e12 operations per second, on an H200."""

    tflops: float
    of_device = "H200"

    def limit(self, case, measured):
        return case.flops() / self.tflops / 1e6

    def __str__(self):
        return f"{self.tflops:g} TFLOP/s"


@dataclass(frozen=True)
class ReadRate:
    """At least this share of the read rate that the run measured, by the bytes that must be read and written."""

    share: float
    of_device = ""

    def limit(self, case, measured):
        return case.ideal_bytes() / (measured.read * self.share) / 1e3 if measured.read else None

    def __str__(self):
        return f"{100 * self.share:.0f} % of the read rate"


@dataclass(frozen=True)
class BestOther:
    """At least so much of the best peer's speed."""

    factor: float
    of_device = ""

    def limit(self, case, measured):
        other = measured.other.get(case.name)
        return None if other is None else other / self.factor

    def __str__(self):
        return f"{self.factor:g} of the best other"


@dataclass(frozen=True)
class OfCase:
    """At most so many times this project's own time of another case."""

    name: str
    factor: float
    of_device = ""

    def limit(self, case, measured):
        own = measured.own.get(self.name)
        return None if own is None else own * self.factor

    def __str__(self):
        return f"{self.factor:g} of {self.name}"


def applies(aim, device_name):
    """Whether an aim is one for this device: absolute figures are an H200's."""
    return aim is not None and aim.of_device in device_name


def reached(us, limit):
    return us <= limit * (1 + TOLERANCE)


def times(point, of_project):
    """Microseconds of a point's contenders as (own, best other, its name); None where nobody ran. Variants of this
    project (other bounds, no hints) are neither."""
    ran = {r["contender"]: r["latency_us"]["median"] for r in point["results"] if "latency_us" in r}
    others = {name: us for name, us in ran.items() if not name.startswith(of_project)}
    best = min(others, key=others.get) if others else None
    return ran.get(of_project), others.get(best), best


def judge(todo, points, read, device_name, of_project="flashtune"):
    """Puts the aim of each case into its point, now that all is measured, and gives a line for each."""
    told = [times(point, of_project) for point in points]
    names = [case.name for _, case in todo]
    measured = Measured(
        {name: own for name, (own, _, _) in zip(names, told) if own is not None},
        {name: other for name, (_, other, _) in zip(names, told) if other is not None},
        read,
    )
    lines = []
    for (suite, case), point, (own, other, who) in zip(todo, points, told):
        words = [f"{suite:9} {case.name:42}", "did not run" if own is None else f"{own:8.1f} us"]
        words += (
            []
            if own is None
            else [f"{case.ideal_bytes() / own / 1e3:6.0f} GB/s {case.flops() / own / 1e6:6.1f} TFLOP/s"]
        )
        words.append("no other ran" if other is None else f"best other {who} {other:.1f}")
        if own and other:
            words.append(f"({other / own:.3f}x)")
        if applies(case.aim, device_name):
            limit = case.aim.limit(case, measured)
            point["aim"] = {"what": str(case.aim)} | ({} if limit is None else {"us": limit})
            words.append(f"aim {case.aim}" + ("" if limit is None else f" = {limit:.1f} us"))
            if own and limit:
                words.append("reached" if reached(own, limit) else f"missed by {100 * (own / limit - 1):.0f} %")
        lines.append(", ".join(words))
    lines += means(todo, told)
    return lines


def means(todo, told):
    """The geometric mean of the speed beside the best other, for each suite where there is one."""
    lines = []
    for suite in dict.fromkeys(suite for suite, _ in todo):
        ratios = [other / own for (s, _), (own, other, _) in zip(todo, told) if s == suite and own and other]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"{suite}: {mean:.3f} of the best other in the geometric mean of {len(ratios)} cases")
    return lines
