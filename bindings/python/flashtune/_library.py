"""Finding, loading and declaring ``libflashtune``; the counterpart of ``bindings/c/include/flashtune.h``."""

import ctypes
import os
import struct
import threading
from pathlib import Path

from .errors import Error, Missing, of_status

ABI_VERSION = 1
VARIABLE = "FLASHTUNE_LIBRARY"
NAME = "libflashtune.so"

# Constants of the header.
F16, BF16, F32, E4M3 = 1, 2, 3, 4
POLICIES = {"default": 0, "tune": 1, "sealed": 2}
QUICK_FIRST = {None: 0, True: 1, False: 2}
THREADS = {"own": 0, "openmp": 1}
OPENMP_IF_LOADED = 2
ON_MISS = {"nearest": 0, "refuse": 1}
FULL, CAUSAL, WINDOW = 0, 1, 2
SCALE_IS_GIVEN = 1
PRECISIONS = {None: 0, "exact": 2, "tf32x3": 4, "tf32": 8}
TEXT, JSON = 0, 1
BUFFER_TOO_SMALL = 11

# flashtune_forward_args: struct_size, flags; four tensors (data, shape, strides, dtype, reserved); lse, stream,
# window_left, window_right, mask, softmax_scale. Packed per call: no object is shared between threads, and it is faster
# than assigning to the fields of a ctypes structure.
FORWARD_ARGS = struct.Struct("=II" + 4 * "Q4q4qii" + "QQqqif")


# The same with all but addresses and the stream as bytes, of a call like one before.
FORWARD_AGAIN = struct.Struct("=8s" + 4 * "Q72s" + "QQ24s")
assert FORWARD_AGAIN.size == FORWARD_ARGS.size

# What follows for a score program: three texts, the inputs, their number, and the size of one. Plain calls leave it
# out.
PROGRAM_ARGS = struct.Struct("=QQQQQQ")
# And behind it a block mask.
BLOCK_MASK = struct.Struct("=Q")
# And behind that the address of the weights.
WEIGHTS = struct.Struct("=Q")
# And behind that the scales of e4m3 operands: addresses, and strides of each.
DESCALES = struct.Struct("=QQQ6q")
# And behind that, as behind the gradients of flashtune_backward_args, what O loses by rounding: a tensor as above.
TENSOR = struct.Struct("=Q4q4qii")
# And behind that, of both, dropout: the probability, a seed, an offset, and addresses of what is added to them.
DROPOUT = struct.Struct("=dQQQQ")
# And behind that, of a forward pass, what shares a scale in e4m3 operands: kind, rows, and the third stride of each.
DESCALES_BY = struct.Struct("=" + 3 * "iiq")
# And behind that, of a forward pass, the address of what an e4m3 O is multiplied by.
O_SCALE = struct.Struct("=Q")
DESCALE_HEAD, DESCALE_TOKEN, DESCALE_BLOCK, DESCALE_CHANNEL = range(4)
# flashtune_backward_args: struct_size, flags; eight tensors as above; lse, dlse, stream, window_left, window_right,
# mask, softmax_scale; and the end of a score program, always; of packed sequences q_begin, kv_begin, q_lengths,
# kv_lengths, batch, max_q, max_kv, length_type, reserved; and gradients of what the program reads, as inputs, and their
# number.
BACKWARD_ARGS = struct.Struct("=II" + 8 * "Q4q4qii" + "QQQqqif")
BACKWARD_PACKED = struct.Struct("=4Q3qii")
# The same up to the stream, with all but addresses as bytes, of a call like one before.
BACKWARD_AGAIN = struct.Struct("=8s" + 8 * "Q72s" + "QQQ")
assert BACKWARD_AGAIN.size == BACKWARD_ARGS.size - struct.calcsize("=qqif")
PACKED_AGAIN = struct.Struct("=4Q")
GRADIENTS = struct.Struct("=QQ")
# flashtune_quantise_args: struct_size, flags; q, k, v and what they become as above; addresses of the scales, their
# strides; k_mean and its strides; kv_heads; cos, sin, their stride, rows, dim, dtype and the type of positions;
# addresses of the positions, their strides, and first ones; of Q and K each; and what shares a scale, as above.
QUANTISE_ARGS = struct.Struct("=II" + 6 * "Q4q4qii" + "QQQ6qQ2qq" + "QQqqqii" + "QQ4q" + 3 * "iiq")
QUANTISE_INTERLEAVED, QUANTISE_HADAMARD, QUANTISE_MEAN, QUANTISE_WHOLE = 1, 2, 4, (8, 16, 32)
# flashtune_block_mask_args: struct_size, reserved, text, the inputs, their number, the size of one; batch, heads,
# kv_heads, q_len, kv_len.
BLOCK_MASK_ARGS = struct.Struct("=IiQQQQ5q")
# flashtune_input: name, data, shape, strides, storage, rank, int_value, float_value.
INPUT = struct.Struct("=QQ4q4qiiqd")
# Flags of flashtune_ragged and flashtune_append_args, places of keys, kinds of scales.
RAGGED_SCALE, APPEND_INTERLEAVED, APPEND_Q_ONE_POSITION = 1, 1, 2
DENSE, PACKED, TABLE = 1, 2, 3
SCALES_HEAD, SCALES_TOKEN = 1, 2
# Integers of lengths and tables, and elements of a store, by the names of dtypes.
INTS = {"int32": 0, "uint32": 1, "int64": 2}
DTYPES = {"float16": F16, "bfloat16": BF16, "float32": F32}
QUANTISED = {"float8_e4m3fn": 4, "float8_e5m2": 5, "int8": 6}
STORAGES = {"float32": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5, "bool": 6}


class Options(ctypes.Structure):
    """flashtune_options."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("policy", ctypes.c_int32),
        ("device", ctypes.c_char_p),
        ("cuda_context", ctypes.c_void_p),
        ("cache_dir", ctypes.c_char_p),
        ("templates_dir", ctypes.c_char_p),
        ("bundles", ctypes.POINTER(ctypes.c_char_p)),
        ("bundles_len", ctypes.c_uint64),
        ("quick_first", ctypes.c_int32),
        ("checked", ctypes.c_int32),
        ("scratch_limit", ctypes.c_uint64),
        ("parallel", ctypes.c_void_p),
        ("parallel_context", ctypes.c_void_p),
        ("parallel_threads", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("allow_paths", ctypes.c_char_p),
    ]


def _fields(text):
    """Fields of a C structure: lines of a type and of names, each with its number of elements if it is an array."""
    c = ctypes
    types = {"u32": c.c_uint32, "i32": c.c_int32, "i64": c.c_int64, "u64": c.c_uint64, "ptr": c.c_uint64}
    types |= {"f32": c.c_float, "f64": c.c_double}
    fields = []
    for line in text.strip().splitlines():
        kind, *names = line.split()
        for name in names:
            name, _, n = name.partition(":")
            fields.append((name, types[kind] * int(n) if n else types[kind]))
    return fields


class Ragged(ctypes.Structure):
    """flashtune_ragged; addresses are plain numbers."""

    _fields_ = _fields("""
        u32 struct_size flags
        ptr q
        i64 q_stride:3
        i32 q_dtype o_dtype
        i64 heads head_dim_qk head_dim_v
        ptr q_begin q_lengths tree k v
        i32 kv_type index
        i64 kv_heads pages page_tokens k_stride:4 v_stride:4
        ptr k_scale v_scale
        i64 k_scale_stride:3 v_scale_stride:3
        i32 k_scales v_scales table_type length_type
        ptr slots kv_begin pages_begin k_table v_table
        i64 table_stride table_capacity
        ptr kv_lengths kv_sums last_page left_pad
        i64 kv_added
        ptr kv_added_begin o
        i64 o_stride:3
        ptr lse
        i64 lse_stride:3 batch total_q max_q max_kv expected_keys expected_longest window_left window_right
        i32 mask
        f32 softmax_scale
        ptr mask_program score_program sink_program inputs inputs_len input_size
        f64 dropout_p
        u64 dropout_seed dropout_offset
        ptr dropout_seed_at dropout_offset_at q_scale
        i64 q_scale_stride:2
        ptr o_scale
    """)


class Append(ctypes.Structure):
    """flashtune_append_args; addresses are plain numbers."""

    _fields_ = _fields("""
        u32 struct_size flags
        ptr k_new v_new
        i64 k_new_stride:3 v_new_stride:3
        i32 dtype kv_type
        i64 batch new_rows
        ptr new_begin
        i64 kv_heads head_dim_qk head_dim_v
        ptr k v
        i64 k_stride:4 v_stride:4 pages page_tokens
        ptr k_scale v_scale
        i64 k_scale_stride:3 v_scale_stride:3
        i32 k_scales v_scales
        ptr slot_mapping
        i32 slot_type index
        ptr k_table v_table pages_begin slots
        i64 table_stride table_capacity
        i32 table_type length_type
        ptr lengths length_sums last_page
        i64 max_kv
        ptr q q_out
        i64 q_stride:3 q_out_stride:3 heads q_rows
        ptr q_begin cos sin
        i64 rotary_stride rotary_rows rotary_dim
        i32 rotary_dtype position_type
        ptr k_positions q_positions first_position
    """)


def candidates():
    """Where the library is looked for, in order: the variable alone if it is set, else beside the package, then in the
    build folder of the repository that the package lies in."""
    named = os.environ.get(VARIABLE)
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parent
    found = [package / "lib" / NAME]
    if len(package.parents) > 2 and (package.parents[2] / "bindings" / "c" / "Cargo.toml").is_file():
        target = Path(os.environ.get("CARGO_TARGET_DIR") or package.parents[2] / "target")
        found += [target / profile / NAME for profile in ("release", "debug")]
    return found


def find():
    """The path of the library; :class:`Missing` tells where it was looked for."""
    places = candidates()
    for path in places:
        if path.is_file():
            return path
    where = ", ".join(map(str, places))
    raise Missing(
        f"{NAME} was not found ({where}); build it with `cargo build --release -p flashtune-c`, "
        f"or set {VARIABLE} to its path"
    )


def _load(path):
    try:
        # Calls through CDLL let other Python threads run meanwhile.
        lib = ctypes.CDLL(str(path))
        lib.flashtune_abi_version.restype = ctypes.c_uint32
        abi = lib.flashtune_abi_version()
    except (OSError, AttributeError) as e:
        raise Missing(f"{path} cannot be loaded as {NAME}: {e}; set {VARIABLE} to one that can") from e
    if abi != ABI_VERSION:
        raise Error(
            f"{path} has ABI {abi}, this package needs {ABI_VERSION}; use the package and the library of one version"
        )
    status, handle, pointer = ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER
    text = (status, [handle, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t, pointer(ctypes.c_size_t)])
    declared = {
        "flashtune_version": (ctypes.c_char_p, []),
        "flashtune_last_error": (ctypes.c_char_p, []),
        "flashtune_status_name": (ctypes.c_char_p, [ctypes.c_int32]),
        "flashtune_engine_open": (status, [pointer(Options), pointer(handle)]),
        "flashtune_engine_close": (status, [handle]),
        # The packed struct goes as bytes: the library gets the address of their content.
        "flashtune_forward": (status, [handle, ctypes.c_char_p]),
        "flashtune_backward": (status, [handle, ctypes.c_char_p]),
        "flashtune_prepare_backward": (status, [handle, ctypes.c_char_p]),
        "flashtune_forward_ragged": (status, [handle, pointer(Ragged), ctypes.c_void_p]),
        "flashtune_quantise": (status, [handle, ctypes.c_char_p, ctypes.c_void_p]),
        "flashtune_append": (status, [handle, pointer(Append), ctypes.c_void_p]),
        "flashtune_block_mask_create": (status, [handle, ctypes.c_char_p, pointer(handle)]),
        "flashtune_block_mask_destroy": (status, [handle]),
        "flashtune_block_mask_bytes": (status, [handle, pointer(ctypes.c_uint64)]),
        "flashtune_empty_dl": (
            status,
            [handle, pointer(ctypes.c_int64), ctypes.c_int32, ctypes.c_uint8, ctypes.c_uint8, pointer(ctypes.c_void_p)],
        ),
        "flashtune_synchronize": (status, [handle, ctypes.c_void_p]),
        "flashtune_explain": text,
        "flashtune_counters": text,
        "flashtune_preload": (status, [handle, ctypes.c_char_p]),
        "flashtune_seal": (status, [handle, ctypes.c_int32, ctypes.c_char_p]),
        "flashtune_write_metrics": (status, [handle, ctypes.c_char_p]),
        "flashtune_write_untuned": (status, [handle, ctypes.c_char_p, pointer(ctypes.c_uint64)]),
    }
    for name, (restype, argtypes) in declared.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    # The same function for a struct that was packed as bytes.
    packed = lib["flashtune_forward_ragged"]
    packed.restype, packed.argtypes = status, [handle, ctypes.c_char_p, ctypes.c_void_p]
    lib.forward_ragged_packed = packed
    return lib


_lock = threading.Lock()
_loaded = None


def library():
    """The library, loaded by the first call."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load(find())
    return _loaded


def failure(status):
    """The error of the last call on this thread, which gave ``status``."""
    lib = library()
    message = lib.flashtune_last_error().decode(errors="replace")
    name = lib.flashtune_status_name(status)
    return of_status(name.decode() if name else str(status), message)


def require(status):
    """Raises unless a call succeeded."""
    if status:
        raise failure(status)
