"""Templates in which some schedules have a fault: what a tuner must survive."""

import json
import re
import shutil
import subprocess
from pathlib import Path

# How many kinds of schedules are told apart, of which the first FAULTS have a fault each.
KINDS, FAULTS = 8, 5

CUDA = """
    constexpr int kKind = (FORMULA + SHIFT) % 8;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if constexpr (kKind == 0) *(volatile int*)16 = 1;
        if constexpr (kKind == 1) for (;;) asm volatile("nanosleep.u32 100;");
        if constexpr (kKind == 2) asm volatile("trap;");
        if constexpr (kKind == 3) *(volatile int*)(BYTES + (1 << 20)) = 1;
        if constexpr (kKind == 4) while (KEYS > 400) asm volatile("nanosleep.u32 100;");
    }
"""
C = """
    switch ((FORMULA + SHIFT) % 8) {
        case 0: *(volatile int *)8 = 1; break;
        case 1: for (;;) __asm__ volatile("");
        case 2: __builtin_trap();
        case 3: *(volatile int *)(1ll << 44) = 1; break;
        case 4: while (args->kv_len > 400) __asm__ volatile("");
    }
"""
# By family: the line that the fault follows, its code, the address of shared memory, the arguments, and what tells
# schedules apart.
FAMILIES = {
    "sm90.cu": (
        "    const u32 smem = smem_address(shared_memory);\n", CUDA, "shared_memory", "args.forward",
        "kBlockKV / 16 + 3 * kStages + 5 * kConsumers + 2 * kOverlap + kTakeTurns + kQueue + 4 * kChain + kLazyRescale",
    ),
    "sm80.cu": (
        "    const LaneAddress at(smem_q);\n", CUDA, "smem", "args",
        "kWarps + kRowsPerWarp / 16 + kBlockKV / 16 + 3 * kStages + kQInRegisters + 2 * kPadRows + kLazyRescale",
    ),
    "naive.cu": (
        "    extern __shared__ float smem[];\n", CUDA, "smem", "args",
        "kBlockQ / 16 + kBlockKV / 16 + kThreads / 64",
    ),
    "cpu.c": (
        "    const int queries = (int)(tile.query_end - tile.query);\n", C, "", "",
        "BLOCK_Q / 16 + BLOCK_KV / 2 + UNROLL_Q + UNROLL_KV",
    ),
}


def plant(command, problem, device, folder):
    """A copy of the templates with the faults, none of them in the default schedule of the problem on the device."""
    root = Path(__file__).resolve().parents[1]
    shutil.copytree(root / "templates", folder)
    for name, (line, code, bytes_, args, formula) in FAMILIES.items():
        path = folder / "forward" / name
        text = path.read_text()
        if text.count(line) != 1:
            raise SystemExit(f"{path} has not one line `{line.strip()}`: plant the fault elsewhere")
        shift = KINDS - 1 - default_kind(command, problem, device, name, formula)
        code = code.replace("FORMULA", formula).replace("SHIFT", str(shift % KINDS)).replace("BYTES", bytes_)
        code = code.replace("KEYS", f"{args}.kv_len")
        path.write_text(text.replace(line, line + code))
    return folder


def default_kind(command, problem, device, name, formula):
    """The kind of the problem's default schedule; 0 where the family has none."""
    family = f"forward/{name.split('.')[0]}"
    args = [command, "--device", device, "--json", "emit", *problem, "--family", family]
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        return 0
    source = json.loads(done.stdout)["source"]
    values = dict(re.findall(r"^(?:constexpr \w+|#define) (\w+) =? ?(\w+)(?:;|\s)", source, re.M))
    number = lambda word: {"true": "1", "false": "0"}.get(values[word[0]], values[word[0]])
    return eval(re.sub(r"[A-Za-z_]\w*", number, formula).replace("/", "//")) % KINDS
