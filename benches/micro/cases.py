"""What is measured: variants to compile, and for each group a function that runs its cases and yields rows.

A row is a dict of the case's words and figures; `group` and `case` name it.
"""

import ctypes
from ctypes import c_float, c_uint64
from dataclasses import dataclass, field

import instructions

TILE = 32768
ROLES, WORDS = 8, 4


@dataclass(frozen=True)
class Variant:
    file: str
    kernel: str
    constants: tuple  # of (name, value): pasted in front, enumerators by name
    helpers: str = field(default="", repr=False)
    shared: str = ""  # a file that several kernels build on

    @property
    def name(self):
        return "-".join([self.kernel, *(f"{n[1:]}={v}" for n, v in self.constants)])

    def source(self, read):
        # Constants that are enumerators are only known behind the enumeration, so all are macros.
        defines = "".join(f"#define {n} {v}\n" for n, v in self.constants)
        return read("common.cuh") + self.helpers + defines + (self.shared and read(self.shared)) + read(self.file)


class Bench:
    """A device with its records and compiled variants."""

    def __init__(self, device, cubins):
        self.device, self.cubins, self.functions = device, cubins, {}
        self.grid = device.multiprocessors
        self.records = device.allocate(1024 * ROLES * WORDS * 8)

    def function(self, variant, shared):
        key = (variant.name, shared)
        if key not in self.functions:
            self.functions[key] = self.device.kernel(self.cubins(variant), variant.kernel, shared)
        return self.functions[key]

    def run(self, variant, threads, shared, arguments, grid=None, cluster=1, repeats=5):
        """(milliseconds, records by block and role)."""
        function = self.function(variant, shared)
        grid = grid or self.grid
        self.device.clear(self.records, 1024 * ROLES * WORDS * 8)
        work = lambda: self.device.launch(function, grid, threads, shared, arguments, cluster)
        ms = self.device.milliseconds(work, repeats)
        flat = self.device.read(self.records, grid * ROLES * WORDS)
        at = lambda block, role: tuple(flat[(block * ROLES + role) * WORDS + i] for i in range(WORDS))
        return ms, [[at(block, role) for role in range(ROLES)] for block in range(grid)]


def clocks(records, roles=(0,)):
    """Mean over thread blocks of the clocks from the first start to the last end of the roles."""
    spans = [max(b[r][1] for r in roles) - min(b[r][0] for r in roles) for b in records]
    return max(1, sum(spans) / len(spans))


def mhz(records, ms, roles=(0,)):
    return round(clocks(records, roles) / ms / 1e3)


# Sinks of dQ.

SINKS = [
    "kBulkStore",
    "kBulkF32",
    "kBulkS32",
    "kBulkU64",
    "kBulkBf16",
    "kRedF32",
    "kRedV2",
    "kRedV4",
    "kRedS32",
    "kRedU64",
]


def sink(kind, piece=TILE):
    return Variant("sinks.cu", "sinks", (("kSink", kind), ("kTileBytes", TILE), ("kPieceBytes", piece)))


def sink_cases():
    """(sink, piece, where, members, tiles, shift, reads)."""
    for kind in SINKS:
        yield kind, TILE, "L2", 16, 64, 0, 0
        yield kind, TILE, "L2", 16, 64, 1, 0
        yield kind, TILE, "L2", 1, 4, 0, 0
        yield kind, TILE, "HBM", 16, 1024, 1, 0
    for kind in ["kBulkStore", "kBulkF32", "kBulkS32", "kRedV4"]:
        yield kind, TILE, "L2", 4, 16, 1, 0
        yield kind, TILE, "HBM", 1, 64, 0, 0
        yield kind, TILE, "L2", 16, 64, 1, 1
        yield kind, TILE, "HBM", 16, 1024, 1, 1
    for kind in ["kBulkF32", "kBulkS32"]:
        for piece in [512, 2048, 8192]:
            yield kind, piece, "L2", 16, 64, 1, 0
    yield "kNothing", TILE, "L2", 16, 64, 1, 1


def run_sinks(bench):
    device, size, grid, rounds = bench.device, 8 * 1024 * TILE, 128, 1024
    target, source = device.allocate(size), device.allocate(32 << 20)
    for kind, piece, where, members, tiles, shift, reads in sink_cases():
        arguments = [c_uint64(target), c_uint64(source), c_uint64((32 << 20) - 1), c_uint64(bench.records)]
        arguments += [rounds, tiles, members, shift, reads]
        function = bench.function(sink(kind, piece), 4 * TILE)
        device.clear(target, size)
        device.launch(function, grid, 288, 4 * TILE, arguments)
        right = check_sink(device, target, kind, rounds * members // tiles, (grid // members) * tiles)
        ms, records = bench.run(sink(kind, piece), 288, 4 * TILE, arguments, grid)
        yield {
            "case": f"{kind[1:]} {where} x{members}"
            + (" shifted" if shift else "")
            + (" +reads" if reads else "")
            + (f" pieces {piece}" if piece != TILE else ""),
            "GB/s": 0 if kind == "kNothing" else round(grid * rounds * TILE / ms / 1e6),
            "read GB/s": round(grid * rounds * TILE / ms / 1e6) if reads else 0,
            "MHz": mhz(records, ms),
            "right": right,
        }
    device.free(target), device.free(source)


def check_sink(device, target, kind, count, tiles):
    """Whether the first and last tile hold what was added: a sum of ones."""
    if kind == "kNothing":
        return True
    types = {"kBulkU64": c_uint64, "kRedU64": c_uint64, "kBulkBf16": ctypes.c_uint16}
    floats = kind in ("kBulkF32", "kRedF32", "kRedV2", "kRedV4")
    of = c_float if floats else types.get(kind, ctypes.c_uint32)
    wanted = 1 if kind == "kBulkStore" else count
    if kind == "kBulkBf16":
        wanted = int.from_bytes(bytes(c_float(count))[2:], "little")
    n = TILE // ctypes.sizeof(of)
    return all(set(device.read(target + at * TILE, n, of)) == {wanted} for at in (0, tiles - 1))


# Ordered sums.

HOPS = Variant("turns.cu", "hops", (("kOrder", 0), ("kTileBytes", TILE)))


def turn(order):
    return Variant("turns.cu", "turns", (("kOrder", order), ("kTileBytes", TILE)))


def run_turns(bench):
    device, target, flags = bench.device, bench.device.allocate(16 << 20), bench.device.allocate(1 << 20)
    function = bench.function(HOPS, TILE)
    for members, size in [(2, 0), (16, 0), (128, 0), (2, TILE), (16, TILE)]:
        arguments = [c_uint64(flags), c_uint64(target), c_uint64(bench.records), 200, size]

        def work():
            device.ask("cuMemsetD32Async", c_uint64(flags), 0, ctypes.c_size_t(16), device.stream)
            device.launch(function, members, 128, TILE, arguments)

        ms = device.milliseconds(work)
        yield {"case": f"hop of {members}, {size} bytes a turn", "ns": round(ms * 1e6 / (200 * members))}
    members, tiles, rounds, grid = 16, 64, 512, 128
    for compute in [0, 2000, 3600]:
        for order, name in [(0, "no order"), (1, "in turn"), (2, "in turn, shifted")]:
            function = bench.function(turn(order), 2 * TILE)
            arguments = [c_uint64(flags), c_uint64(target), c_uint64(bench.records), rounds, tiles, members, compute]

            def work():
                device.ask("cuMemsetD32Async", c_uint64(flags), 0, ctypes.c_size_t(8 * tiles), device.stream)
                device.launch(function, grid, 64, 2 * TILE, arguments)

            ms = device.milliseconds(work)
            yield {
                "case": f"{name}, {compute} clocks a tile",
                "ns": round(ms * 1e6 / rounds),
                "GB/s": round(grid * rounds * TILE / ms / 1e6),
            }
    device.free(target), device.free(flags)


# Products beside other traffic of shared memory.

BESIDE = [
    "kStoreV4",
    "kDqStore",
    "kStMatrix",
    "kStMatrixTrans",
    "kLoadV4",
    "kBulkLoad",
    "kBulkStore",
    "kBulkF32",
    "kBulkS32",
    "kRedV4",
    "kExp2",
]


def product(form, n, groups=2, beside="kAlone"):
    helpers = "".join(instructions.shared(f"mma_ss_{a}{b}", n, a, b) for a, b in [(0, 0), (0, 1), (1, 1)])
    helpers += "".join(instructions.registers(f"mma_rs_{b}", n, b) for b in (0, 1))
    constants = (("kForm", form), ("kN", n), ("kGroups", groups), ("kBeside", beside))
    return Variant("products.cu", "products", constants, helpers)


def product_cases():
    for form, columns in [
        ("kSs", [64, 128, 192, 256]), ("kSsDepthB", [64, 128, 256]), ("kSsDepthAB", [64, 128, 256]),
        ("kRs", [64, 128, 192]), ("kRsDepthB", [64, 128, 192]),
    ]:  # fmt: skip
        for n in columns:
            yield form, n, 2, "kAlone"
    for n in [64, 128]:
        yield "kSs", n, 3, "kAlone"
    for form, n in [("kSs", 64), ("kSs", 128), ("kRsDepthB", 128), ("kNone", 128)]:
        for beside in BESIDE:
            yield form, n, 2, beside


def run_products(bench):
    device = bench.device
    source, target = device.allocate(132 * 4 * TILE + (1 << 20)), device.allocate(132 * 4 * TILE + (1 << 20))
    for form, n, groups, beside in product_cases():
        iterations = 3_000_000 // (8 * n // 2 * groups)
        shared = groups * 16384 + n * 256 + 65536 + 1024
        arguments = [c_uint64(source), c_uint64(target), c_uint64(bench.records), iterations]
        ms, records = bench.run(product(form, n, groups, beside), groups * 128 + 128, shared, arguments)
        roles = range(groups)
        row = {
            "case": f"{form[1:]} n{n} x{groups}" + (f" + {beside[1:]}" if beside != "kAlone" else ""),
            "MHz": mhz(records, ms, roles),
        }
        if form != "kNone":
            per_step = clocks(records, roles) / (iterations * 8 * groups)
            row |= {"clk/step": round(per_step, 1), "of ideal": round(n / 2 / per_step, 3)}
        if beside != "kAlone":
            workers = [r for b in records for r in b[4:8] if r[2]]
            rate = sum(r[2] / max(1, r[1] - r[0]) for r in workers) / len(records)
            row["op/clk" if beside == "kExp2" else "B/clk"] = round(rate, 1)
        yield row
    device.free(source), device.free(target)


# Single instructions.

UNITS = {
    "kExp2": 1, "kF2I": 1, "kF2L": 1, "kPack": 1, "kFma": 1, "kFixed": 1, "kSharedAdd": 4, "kStep": 0.5,
    "kStoreV4": 16, "kStMatrix": 16, "kStMatrixTrans": 16, "kLdMatrix": 16, "kLdMatrixTrans": 16, "kLoadV4": 16,
}  # fmt: skip


def unit(name):
    return Variant("units.cu", "units", (("kUnit", name),))


def run_units(bench):
    for name, each in UNITS.items():
        iterations = 2000
        ms, records = bench.run(unit(name), 512, 131072, [c_uint64(bench.records), iterations, c_float(0.999)])
        rate = 512 * 16 * iterations * each / clocks(records, range(ROLES))
        yield {"case": name[1:], "B/clk" if each >= 4 else "op/clk": round(rate, 1), "MHz": mhz(records, ms)}


# Between thread blocks of a cluster.

CLUSTER_TILE = 16384


def way(name):
    return Variant("cluster.cu", "between", (("kWay", name), ("kTileBytes", CLUSTER_TILE)))


def cluster_cases():
    for name in ["kBulkCopy", "kBulkS32"]:
        for size in [2, 4, 8]:
            yield name, size
    for name in ["kStoreV4", "kLoadV4", "kRedF32", "kRedS32", "kRoundTrip", "kSync"]:
        yield name, 2
    yield "kStoreV4", 4
    yield "kSync", 8


def run_cluster(bench):
    for name, size in cluster_cases():
        rounds, shared = 200 if name.startswith("kRed") else 2000, 5 * CLUSTER_TILE
        ms, records = bench.run(way(name), 256, shared, [c_uint64(bench.records), rounds, size], 128, size)
        span = clocks(records)
        row = {"case": f"{name[1:]} of {size}", "MHz": mhz(records, ms)}
        if name in ("kRoundTrip", "kSync"):
            row["clk"] = round(span / rounds)
        else:
            row["B/clk"] = round(rounds * CLUSTER_TILE / span, 1)
            row["GB/s"] = round(128 * rounds * CLUSTER_TILE / ms / 1e6)
        if name == "kBulkS32":
            row["right"] = all(b[0][3] == 1 + rounds // 4 for b in records)
        yield row


# dS through memory.


def stream(name, tile=16384):
    return Variant("streams.cu", "streams", (("kStream", name), ("kTileBytes", tile)))


def stream_cases():
    yield "kWrite", 512, 0
    yield "kRead", 512, 0
    yield "kWriteReading", 512, 0
    for ring in [4, 8, 16]:
        yield "kRing", 1024, ring


def run_streams(bench):
    device = bench.device
    target, source = device.allocate(512 * bench.grid * 16384), device.allocate(32 << 20)
    for name, rounds, ring in stream_cases():
        arguments = [
            c_uint64(target),
            c_uint64(source),
            c_uint64((32 << 20) - 1),
            c_uint64(bench.records),
            rounds,
            ring,
        ]
        ms, records = bench.run(stream(name), 128, 4 * 32768 + 32768, arguments)
        tile_rate = bench.grid * rounds * 16384 / ms / 1e6
        yield {
            "case": name[1:] + (f" of {ring * bench.grid * 16384 >> 20} MB" if ring else ""),
            "GB/s": 0 if name == "kRead" else round(tile_rate),
            "read GB/s": round(tile_rate * {"kWrite": 0, "kWriteReading": 2}.get(name, 1)),
            "MHz": mhz(records, ms),
        }
    device.free(target), device.free(source)


# Launches.


def launched(mode):
    return Variant("launches.cu", "launches", (("kProgrammatic", mode),))


def run_launches(bench):
    device, count, shared = bench.device, 32, 200 * 1024
    for mode, name in [(0, "plain"), (1, "programmatic"), (2, "programmatic, prologue before the wait")]:
        function = bench.function(launched(mode), shared)
        for work_clocks, prologue in [(0, 0), (4000, 0), (4000, 1500)]:
            arguments = [c_uint64(bench.records), work_clocks, prologue]

            def chain():
                for _ in range(count):
                    device.launch(function, bench.grid, 384, shared, arguments, programmatic=bool(mode))

            replay = device.graph(chain)
            row = {"case": f"{name}, {work_clocks} + {prologue} clocks"}
            row["us in a graph"] = round(device.milliseconds(replay, 9) * 1e3 / count, 2)
            row["us eager"] = round(device.milliseconds(chain, 9) * 1e3 / count, 2)
            yield row


# The loop of a backward pass.


def loop(d, m, sink, owner, early, loads, math):
    # What setmaxnreg hands out is what the launch took: 168 registers of 384 threads (504 in all), or 128 of 512.
    # Keys and queries of 64 x 128 need 224 where a third warpgroup forms dQ: that is left 56, enough for 32 columns.
    registers, of_dq, columns = [(208, 72, 64), (240, 24, d // 2 if m == 64 else 64), (224, 56, 32)][owner]
    if owner == 2 and (d, m) == (64, 64):
        registers, of_dq, columns = 216, 72, 64
    helpers = instructions.shared("mma_s", m, 0, 0) + instructions.registers("mma_dkv", d, 1)
    helpers += instructions.shared("mma_dq", columns, 1, 1)
    constants = (
        ("kD", d),
        ("kM", m),
        ("kSink", sink),
        ("kOwner", owner),
        ("kEarly", early),
        ("kLoads", loads),
        ("kMath", math),
    )
    constants += (("kDqColumns", columns), ("kRegisters", registers), ("kDqRegisters", of_dq))
    return Variant("loop.cu", "loop", constants, helpers, "step.cuh")


def loop_cases():
    for d, m in [(128, 64), (64, 128), (64, 64)]:
        yield d, m, "kNoDq", 1, 0, 0, 0
        yield d, m, "kNoDq", 1, 0, 0, 1
        for early in [0, 1] if m == 64 else [0]:
            yield d, m, "kNoDq", 1, early, 1, 1
            yield d, m, "kSpill", 1, early, 1, 1
        # With four warpgroups, D 128 has too few registers for M 64, and D 64 for M 128.
        for owner in [0, 1, 2] if (d, m) == (64, 64) else [1, 2]:
            yield d, m, "kDqOnly", owner, 0, 0, 1
            for sink in ["kDqOnly", "kDqF32", "kDqS32", "kDqRed"]:
                yield d, m, sink, owner, 0, 1, 1
        if d == 128:
            yield d, m, "kDqF32", 1, 1, 1, 1


def run_loops(bench):
    device, tiles, members = bench.device, 64, 33
    target, source = device.allocate(tiles * bench.grid * 32768), device.allocate(32 << 20)
    for d, m, sink, owner, early, loads, math in loop_cases():
        staging = m * d * 4 if sink in ("kDqF32", "kDqS32") else 0
        shared = 2 * 128 * d * 2 + 4 * m * d * 2 + 2 * m * 128 * 2 + staging
        steps = 3000 * 64 * 128 // (m * d)
        arguments = [c_uint64(source), c_uint64((32 << 20) - 1), c_uint64(target), c_uint64(bench.records)]
        arguments += [steps, tiles, members, c_float(0.125)]
        variant = loop(d, m, sink, owner, early, loads, math)
        ms, records = bench.run(variant, 384 if owner else 512, shared, arguments, repeats=7)
        products = 4 if sink in ("kNoDq", "kSpill") else 5
        flop = products * 2 * m * 128 * d
        per_step = clocks(records, range(3)) / steps
        words = ["by a third", "by both", "by a third that loads"][owner] if products == 5 else "only"
        row = {
            "case": f"D{d} M{m} {sink[1:]} {words}" + " early" * early + " loads" * loads + " math" * math,
            "clk/step": round(per_step),
            "of ideal": round(flop / 4096 / per_step, 3),
            "TFLOP/s": round(flop * steps * bench.grid / ms / 1e9),
            "MHz": mhz(records, ms, range(3)),
        }
        if sink not in ("kNoDq", "kDqOnly"):
            row["sink GB/s"] = round(bench.grid * steps * m * (256 if sink == "kSpill" else d * 4) / ms / 1e6)
        yield row
    device.free(target), device.free(source)


def both(d, sink, order, pieces, shift):
    m = 8192 // d
    helpers = instructions.shared("mma_s", m, 0, 0) + instructions.registers("mma_dkv", d, 1)
    helpers += instructions.shared("mma_dq", 64, 1, 1)
    constants = (("kD", d), ("kM", m), ("kSink", sink), ("kOrder", order), ("kPieces", pieces), ("kShift", shift))
    return Variant("both.cu", "both", constants + (("kStages", 2), ("kEarly", 0), ("kMath", 1)), helpers, "step.cuh")


def both_cases():
    for d in [64, 128]:
        yield d, "kNoDq", 0, 1, 1
        yield d, "kDqOnly", 0, 1, 1
        for pieces in [1, 2]:
            for order, shift in [(0, 2), (1, 1), (1, 2)]:
                yield d, "kDqF32", order, pieces, shift


def run_both(bench):
    device, members = bench.device, 33
    target, source = device.allocate(66 * bench.grid * 32768), device.allocate(32 << 20)
    flags = device.allocate(1 << 18)
    for d, sink, order, pieces, shift in both_cases():
        m = 8192 // d
        shared = 2 * 128 * d * 2 + 4 * m * d * 2 + 2 * m * 128 * 2 + 2 * m * d * 4
        steps = 3008
        arguments = [c_uint64(source), c_uint64((32 << 20) - 1), c_uint64(target), c_uint64(flags)]
        arguments += [c_uint64(bench.records), steps, members * shift, members, c_float(0.125)]
        function = bench.function(both(d, sink, order, pieces, shift), shared)

        def work():
            device.ask("cuMemsetD32Async", c_uint64(flags), 0, ctypes.c_size_t(1 << 16), device.stream)
            device.launch(function, bench.grid, 384, shared, arguments)

        ms = device.milliseconds(work, 7)
        flat = device.read(bench.records, bench.grid * ROLES * WORDS)
        records = [
            [tuple(flat[(b * ROLES + r) * WORDS + w] for w in range(WORDS)) for r in range(ROLES)]
            for b in range(bench.grid)
        ]
        flop = (4 if sink == "kNoDq" else 5) * 2 * m * 128 * d
        yield {
            "case": f"D{d} {sink[1:]}" + f" in turn, {shift} steps apart" * order + f" {pieces} pieces",
            "clk/step": round(clocks(records, range(3)) / steps),
            "TFLOP/s": round(flop * steps * bench.grid / ms / 1e9),
            "MHz": mhz(records, ms, range(3)),
        }
    device.free(target), device.free(source), device.free(flags)


GROUPS = {
    "sinks": (run_sinks, lambda: [sink(k, p) for k, p, *_ in sink_cases()]),
    "loops": (run_loops, lambda: [loop(*c) for c in loop_cases()]),
    "both": (run_both, lambda: [both(*c) for c in both_cases()]),
    "turns": (run_turns, lambda: [HOPS, turn(0), turn(1), turn(2)]),
    "products": (run_products, lambda: [product(*c) for c in product_cases()]),
    "units": (run_units, lambda: [unit(u) for u in UNITS]),
    "cluster": (run_cluster, lambda: [way(n) for n, _ in cluster_cases()]),
    "streams": (run_streams, lambda: [stream(n) for n, *_ in stream_cases()]),
    "launches": (run_launches, lambda: [launched(m) for m in range(3)]),
}
