"""Writes a trace for `flashtune bench --trace`: prompts and outputs of lognormal lengths, arrivals of a Poisson
process.

    python3 benches/traces.py [--count 1000] [--seed 1] [--rate 4] > day.txt

A line is a request: tokens of the prompt, tokens of the output, second of the arrival (none with --rate 0). The
same options give the same bytes. The means are those of chat: prompts of 770 tokens, outputs of 240; the largest
are cut at --longest.
"""

import argparse
import math
import random
import sys


def requests(count, seed, rate, prompt, output, sigma, longest):
    """(prompt, output, arrival) of each."""
    chance, now = random.Random(seed), 0.0
    # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
    draw = lambda mean: min(longest, max(1, round(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
    for _ in range(count):
        now += chance.expovariate(rate) if rate else 0.0
        yield draw(prompt), draw(output), now


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--count", type=int, default=1000)
    add("--seed", type=int, default=1)
    add("--rate", type=float, default=4.0, help="requests per second; 0 writes no arrivals")
    add("--prompt", type=float, default=770, help="mean tokens of a prompt")
    add("--output", type=float, default=240, help="mean tokens of an output")
    add("--sigma", type=float, default=1.1, help="spread of the logarithms")
    add("--longest", type=int, default=32768)
    a = parser.parse_args()
    if min(a.count, a.prompt, a.output, a.longest) < 1 or a.rate < 0 or not 0 <= a.sigma <= 4:
        parser.error("--count, --prompt, --output and --longest are at least 1, --rate at least 0, --sigma from 0 to 4")
    made = " ".join(f"--{name} {value:g}" for name, value in vars(a).items())
    print(f"# prompt output{' arrival' if a.rate else ''}; traces.py {made}")
    for prompt, output, now in requests(**vars(a)):
        print(prompt, output, *([f"{now:.3f}"] if a.rate else []))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.stderr.close()
