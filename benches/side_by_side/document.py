"""The report that is written: the data that `flashtune report` reads and renders."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

METHOD = [
    "All contenders run in one process, in turn: each once per round, in an order that rotates; medians over rounds.",
    "The spread is that of the medians of repeats.",
    "Operations are counted on live (query, key) pairs, two products each.",
    "Caches are flushed before every launch; on a GPU the time is that between two events.",
    "Ceilings were measured in the same process, before and after; the higher of both counts.",
    "Clock and power are means of readings while the GPU worked.",
]


def device_facts(device, conditions):
    if device == "cpu":
        return {
            "name": cpu_name(),
            "arch": platform.machine(),
            "units": torch.get_num_threads(),
            "driver": f"{platform.system()} {platform.release()}",
        }
    p = torch.cuda.get_device_properties(0)
    return {
        "name": p.name,
        "arch": f"sm_{p.major}{p.minor}",
        "units": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "cache_bytes": p.L2_cache_size,
        "driver": conditions.driver() or "unknown",
    }


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit():
    """The commit of the repository that this lies in, if it lies in one."""
    root = Path(__file__).resolve().parents[2]
    try:
        told = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
        )
    except OSError:
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def software(contenders):
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for contender in contenders:
        version = contender.version()
        if version and not version.startswith("torch"):
            found[contender.name] = version
    source = commit()
    if source:
        found["benches"] = source
    return found


def new(device, conditions, contenders):
    facts = device_facts(device, conditions)
    return {
        "format": 1,
        "title": f"Attention forward on {facts['name']}: peers side by side",
        "made": {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "software": software(contenders),
        },
        "device": facts,
        "method": METHOD,
        "ceilings": {"matmul": [], "absent": []},
        "points": [],
        "checks": [],
    }


def point(suite, case):
    """A point without results, by arithmetic alone."""
    return {"suite": suite, "case": case.facts(), **case.counts(), "results": []}


def save(report, path):
    """Writes the report whole or not at all: a run that is cut short keeps what it has."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def render(binary, path):
    """Markdown, HTML and SVG beside the JSON; says what to do when the command is not there."""
    outputs = {form: str(path.with_suffix(f".{ending}")) for form, ending in FORMS.items()}
    options = [word for form, file in outputs.items() for word in (f"--{form}", file)]
    if binary is None:
        print(f"render it with: flashtune report {path} {' '.join(options)}", flush=True)
        return
    subprocess.run([binary, "report", str(path), *options], check=True)
    print("wrote", path, *outputs.values(), flush=True)


FORMS = {"markdown": "md", "html": "html", "svg": "svg"}
