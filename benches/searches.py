"""Searches of other tuners' kinds on the recorded tables of `tuner/testdata/tables`, beside which flashtune's own
stands.

    python3 benches/searches.py [--seeds 100] > TABLE.md

Counted are evaluations until one is within 1 % of the table's best; a schedule that failed counts, and one that was
evaluated before does not. Each is written here after its description, none is taken from a tuner:

chance    picks without repetition
ILS       iterated local search, as Kernel Tuner has it: first improvement among schedules that differ in one field,
          then three fields at random
GA        a genetic algorithm of 20: tournaments of 3, uniform crossover, a field of ten mutated
LFBO      likelihood-free Bayesian optimisation, as Helion has it: a random forest tells the best third of what was
          evaluated from the rest; batches of 6, the likeliest of all that are open, one of six by chance

Each begins by chance: none has a model of the device, nor a default. Needs scikit-learn for LFBO. flashtune's own
figures are what `searches_of_recorded_tables_find_the_best_soon` prints.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

TABLES = Path(__file__).resolve().parents[1] / "tuner/testdata/tables"
NAMES = [
    "h200-bf16-d128-causal-8k",
    "h200-bf16-d128-full-2k",
    "h200-bf16-d64-causal-2k",
    "h200-bf16-d256-causal-2k",
    "h200-bf16-d256-causal-keys-2k",
    "cpu-bf16-d64-causal-512",
    "cpu-bf16-d128-decode",
    "cpu-f32-d128-full-256",
]


class Space:
    """A table: every schedule as a tuple of its fields, and its time."""

    def __init__(self, name):
        table = json.loads((TABLES / f"{name}.json").read_text())
        all = [{**fields, "family": family} for schedule, _ in table["trials"] for family, fields in schedule.items()]
        names = sorted({name for fields in all for name in fields})
        # A field that is not written has its usual value.
        self.points = [tuple(json.dumps(f.get(n), sort_keys=True) for n in names) for f in all]
        self.times = [us if us is not None else float("inf") for _, us in table["trials"]]
        self.good = {i for i, us in enumerate(self.times) if us * 0.99 <= min(self.times)}
        values = [sorted({p[f] for p in self.points}, key=self.order) for f in range(len(self.points[0]))]
        self.varies = [f for f, v in enumerate(values) if len(v) > 1]
        # Numbers keep their order; words are numbered.
        self.rows = [[values[f].index(p[f]) for f in self.varies] for p in self.points]

    @staticmethod
    def order(text):
        value = json.loads(text)
        return (0, value, "") if isinstance(value, (int, float)) else (1, 0, text)

    def neighbours(self, i, far=1):
        """Schedules of the table that differ in so many fields."""
        row = self.rows[i]
        return [j for j, other in enumerate(self.rows) if j != i and sum(a != b for a, b in zip(row, other)) <= far]


class Done(Exception):
    pass


class Count:
    """Evaluates, until one is good."""

    def __init__(self, space):
        self.space, self.seen = space, {}

    def __call__(self, i):
        if i not in self.seen:
            self.seen[i] = self.space.times[i]
            if i in self.space.good:
                raise Done
        return self.seen[i]

    def open(self):
        return [i for i in range(len(self.space.points)) if i not in self.seen]


def chance(space, count, rng):
    for i in rng.sample(range(len(space.points)), len(space.points)):
        count(i)


def ils(space, count, rng):
    at = rng.randrange(len(space.points))
    while count.open():
        moved = True
        while moved:
            moved = False
            near = space.neighbours(at)
            rng.shuffle(near)
            for j in near:
                if count(j) < count(at):
                    at, moved = j, True
                    break
        # The kick: as many fields as there must be until something new is met.
        for far in range(3, len(space.varies) + 1):
            new = [j for j in space.neighbours(at, far) if j not in count.seen]
            if new:
                other = rng.choice(new)
                at = other if count(other) < 1.1 * count(at) or rng.random() < 0.3 else at
                break
        else:
            at = rng.choice(count.open())
            count(at)


def ga(space, count, rng, size=20):
    population = rng.sample(range(len(space.points)), min(size, len(space.points)))
    for i in population:
        count(i)
    while count.open():
        children = []
        for _ in range(size):
            a, b = (min(rng.sample(population, min(3, len(population))), key=count.seen.get) for _ in range(2))
            child = [x if rng.random() < 0.5 else y for x, y in zip(space.rows[a], space.rows[b])]
            for f in range(len(child)):
                if rng.random() < 0.1:
                    child[f] = rng.choice(space.rows)[f]
            # The table's nearest to what was bred.
            apart = lambda j: sum(x != y for x, y in zip(space.rows[j], child))  # noqa: E731
            least = min(map(apart, range(len(space.rows))))
            children.append(rng.choice([j for j in range(len(space.rows)) if apart(j) == least]))
        if all(c in count.seen for c in children):
            children[0] = rng.choice(count.open())
        for c in children:
            count(c)
        population = sorted({*population, *children}, key=count.seen.get)[:size]


def lfbo(space, count, rng, batch=6):
    from sklearn.ensemble import RandomForestClassifier

    for i in rng.sample(range(len(space.points)), 10):
        count(i)
    while left := count.open():
        seen = sorted(count.seen, key=count.seen.get)
        best = max(1, len(seen) // 3)
        forest = RandomForestClassifier(30, min_samples_leaf=2, random_state=rng.randrange(1 << 30))
        forest.fit([space.rows[i] for i in seen], [1] * best + [0] * (len(seen) - best))
        chances = forest.predict_proba([space.rows[i] for i in left])[:, 1]
        rng.shuffle(order := list(range(len(left))))
        order.sort(key=lambda k: -chances[k])
        picks = [left[k] for k in order[: batch - 1]]
        picks += rng.sample([i for i in left if i not in picks] or picks, 1)
        for i in picks:
            count(i)


SEARCHES = {"chance": chance, "ILS": ils, "GA": ga, "LFBO": lfbo}


def evaluations(space, search, seed):
    count = Count(space)
    try:
        search(space, count, random.Random(seed))
    except Done:
        return len(count.seen)
    raise AssertionError("the best is in the table")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--searches", default=",".join(SEARCHES))
    a = parser.parse_args()
    names = a.searches.split(",")
    print("| table | schedules | within 1 % | " + " | ".join(names) + " |")
    print("|---|---|---|" + "---|" * len(names))
    for name in NAMES:
        space = Space(name)
        cells = []
        for search in names:
            all = sorted(evaluations(space, SEARCHES[search], seed) for seed in range(a.seeds))
            cells.append(f"{statistics.median(all):.0f} ({all[len(all) * 9 // 10]})")
        print(f"| {name} | {len(space.points)} | {len(space.good)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
