//! Faults of what `forward/sm90` does for score programs: lists of live blocks, runs of keys in memory, biases.

use super::Fault;

/// Of kernels that go by lists of key blocks, with [`ANYWHERE`].
pub const LISTS: &[Fault] = &[
    [
        "a cut block taken for a whole one",
        "forward/sm90/lists.cuh",
        "if (any && none) return kMixed;",
        "if (any && none) return kWhole;",
        "the oracle says",
    ],
    [
        "a block left out",
        "forward/sm90/lists.cuh",
        "__popc(wholes & below)]",
        "__popc(wholes & below) / 2]",
        "the oracle says",
    ],
    [
        "whole blocks behind the last key",
        "forward/sm90/lists.cuh",
        "n >= window.full_end)) kind = kMixed",
        "n > window.full_end)) kind = kMixed",
        "the oracle says",
    ],
    [
        "the mask of another row",
        "forward/sm90/lists.cuh",
        "if (lane == i * 4 + c)",
        "if (lane == (i ^ 1) * 4 + c)",
        "the oracle says",
    ],
    ["keys of a share one off", "forward/sm90/lists.cuh", "c * 2 + i % 2", "c * 2 + (i + 1) % 2", "the oracle says"],
    [
        "the lists of another head",
        "forward/sm90/mask_units.cuh",
        "kMaskByHead ? tile.head",
        "kMaskByHead ? 0",
        "the oracle says",
    ],
    [
        "block numbers taken for places",
        "forward/sm90/producer.cuh",
        "args.v, arrived, block, work.tile",
        "args.v, arrived, n, work.tile",
        "the oracle says",
    ],
    [
        "non-finite elements of V stay out",
        "forward/sm90/epilogue.cuh",
        "place < work.all.end; place++",
        "place < work.all.full_end; place++",
        "the oracle says",
    ],
];

/// Of kernels whose lists come of a tensor of bools, with [`DENSE_MASK`], and with [`BESIDE`] other conditions.
pub const DENSE: &[Fault] = &[
    [
        "a cut block taken for a whole one, aligned",
        "forward/sm90/dense_mask.cuh",
        "return any && none ? kMixed : any ? kWhole : kHidden;",
        "return any ? kWhole : kHidden;",
        "the oracle says",
    ],
    [
        "whole and hidden blocks mixed up",
        "forward/sm90/dense_mask.cuh",
        "any ? kWhole : kHidden;",
        "any ? kHidden : kWhole;",
        "the oracle says",
    ],
    [
        "the last keys forgotten",
        "forward/sm90/dense_mask.cuh",
        "head.kv_len - first));",
        "(head.kv_len - first) / 16 * 16));",
        "the oracle says",
    ],
    [
        "rows a byte too far apart, aligned",
        "forward/sm90/dense_mask.cuh",
        "mask.data + q * mask.row + first_key",
        "mask.data + q * (mask.row - 1) + first_key",
        "the oracle says|broke down",
    ],
    [
        "words of rows that begin anywhere, unshifted",
        "forward/sm90/dense_mask.cuh",
        "__funnelshift_r(w[i], w[i + 1], off)",
        "w[i]",
        "the oracle says",
    ],
    [
        "a word without its successor",
        "forward/sm90/dense_mask.cuh",
        "w[4] = from[off == 0 ? 3 : 4];",
        "w[4] = from[3];",
        "the oracle says",
    ],
    [
        "what lies behind the tensor",
        "forward/sm90/dense_mask.cuh",
        "((high + align) & ~align) <= mask.end",
        "((high + align) & ~align) > 0",
        "broke down",
    ],
    [
        "bits of another share, aligned",
        "forward/sm90/dense_mask.cuh",
        "chunk % 2 * 2 + chunk / 4",
        "chunk / 4 * 2 + chunk % 2",
        "the oracle says",
    ],
    [
        "keys and those eight further mixed up",
        "forward/sm90/dense_mask.cuh",
        "true_bytes(first) >> 7 | true_bytes(second) >> 5",
        "true_bytes(second) >> 7 | true_bytes(first) >> 5",
        "the oracle says",
    ],
    [
        "half of a word never joined",
        "forward/sm90/dense_mask.cuh",
        "(mine & 0xffff) | other << 16",
        "(mine & 0xffff)",
        "the oracle says",
    ],
    [
        "bytes of which the lowest bit alone counts",
        "forward/sm90/dense_mask.cuh",
        "(((w & 0x7f7f7f7f) + 0x7f7f7f7f) | w) & 0x80808080",
        "(w << 7) & 0x80808080",
        "the oracle says",
    ],
    [
        "the mask of another head",
        "forward/sm90/dense_mask.cuh",
        "ft_clamp64(at[a], tensor.length[a])",
        "ft_clamp64(0, tensor.length[a])",
        "the oracle says",
    ],
    [
        "conditions beside it forgotten",
        "forward/sm90/dense_mask.cuh",
        "bits.even & rest.even, bits.odd & rest.odd",
        "bits.even, bits.odd",
        "the oracle says",
    ],
    [
        "a block that is left out by what stands beside it",
        "forward/sm90/dense_mask.cuh",
        "if (rest < 0) return kHidden;",
        "if (rest < 0) return kWhole;",
        "the oracle says",
    ],
];

/// Bools of every head's own.
pub const DENSE_MASK: &str = "seen: bool[heads, q_len, kv_len]; mask = seen[h, q, kv];";
/// The same beside what cuts some blocks and leaves others out.
pub const BESIDE: &str = "seen: bool[heads, q_len, kv_len]; mask = not seen[h, q, kv] and kv // 4 <= q // 3 + 2;";

/// A mask that leaves out blocks of 32 keys and 128 queries, cuts some, and shows others whole, each head its own.
pub const ANYWHERE: &str = "mask = (q // 64 + 2 * (kv // 32) + h) % 3 == 0 or (kv + q + h) % 97 == 0;";

/// Of kernels whose runs of keys lie in memory, with [`DOCUMENTS`].
pub const RUNS: &[Fault] = &[
    [
        "the run of the row before",
        "forward/sm90/ranges.cuh",
        "* q_len + q];",
        "* q_len + max_of(q - 1, 0)];",
        "the oracle says",
    ],
    [
        "one key too many",
        "forward/sm90/ranges.cuh",
        "min_of(run.last, window.last) + 1",
        "min_of(run.last + 1, window.last) + 1",
        "the oracle says",
    ],
    [
        "blocks of a tile's first rows alone",
        "forward/sm90/ranges.cuh",
        "found[0].join(found[i]);",
        ";",
        "the oracle says|deadlock",
    ],
    ["blocks of one lane's rows alone", "forward/sm90/ranges.cuh", "ends.over_lanes();", "", "the oracle says"],
    [
        "runs of another head",
        "forward/sm90/mask_units.cuh",
        "kMaskByHead ? tile.head",
        "kMaskByHead ? 0",
        "the oracle says",
    ],
    ["a search that looks at half of the places", "lib/cuda/score/search.cuh", "& 0xffff", "& 0xff", "the oracle says"],
    [
        "ends looked for where they are not",
        "lib/cuda/score/program_blocks.cuh",
        "__shfl_sync(0xffffffff, x, 16)",
        "__shfl_sync(0xffffffff, x, 0)",
        "the oracle says",
    ],
    // Consumers that leave out blocks, and chain those tiles where nothing arrives between.
    [
        "a tile chained over keys that others ask for, trimmed",
        "forward/sm90/consumer.cuh",
        "(kTrim && after(work) > 0)",
        "false",
        "the oracle says|deadlock|on its way",
    ],
    [
        "a chained tile that begins with keys of others, trimmed",
        "forward/sm90/consumer.cuh",
        "(!kTrim || before(next) == 0)",
        "true",
        "the oracle says|deadlock|on its way",
    ],
    [
        "a tile that opens without the turn that others take, trimmed and chained",
        "forward/sm90/consumer.cuh",
        "if (kTrim && kChain) wait_turn();",
        "",
        "deadlock|more arrivals|has ended",
    ],
];

/// Documents of each head's own, shorter than a consumer's rows.
pub const DOCUMENTS: &str = "d: i32[batch, heads, *] nondecreasing; mask = d[b, h, q] == d[b, h, kv];";

/// Of kernels that have biases brought, or copy those that the copy engine cannot bring.
pub const BIASES: &[Fault] = &[
    [
        "the biases of another row",
        "forward/sm90/bias.cuh",
        "row = lane % 16;",
        "row = (lane ^ 1) % 16;",
        "the oracle says",
    ],
    [
        "the biases of another head",
        "lib/cuda/score/program.cuh",
        "bias.index[kLeading - 1 - a] = index;",
        "bias.index[kLeading - 1 - a] = 0;",
        "the oracle says",
    ],
    [
        "the biases of another consumer",
        "forward/sm90/bias.cuh",
        "row = tile.row + c * 64;",
        "row = tile.row;",
        "the oracle says",
    ],
    [
        "the biases of the block before",
        "forward/sm90/bias.cuh",
        "first_key + chunk * 64, row,",
        "(first_key ^ kBlockKV) + chunk * 64, row,",
        "the oracle says",
    ],
    [
        "biases taken before they are there",
        "forward/sm90/bias.cuh",
        "biases.wait(smem, consumer);",
        "",
        "on its way|never written|the oracle says",
    ],
    [
        "a place of biases freed too early",
        "forward/sm90.cu",
        "copies_biases(args) ? 128 : 4",
        "copies_biases(args) ? 127 : 3",
        "read by ldmatrix|on its way|more arrivals|deadlock|the oracle says",
    ],
    [
        "biases given back before they are taken",
        "forward/sm90/bias.cuh",
        "biases.wait(smem, consumer);",
        "biases.wait(smem, consumer);\n        if (lane == 0) biases.release(smem, consumer);",
        "on its way|more arrivals|deadlock|the oracle says",
    ],
    [
        "bytes announced that nobody brings, copied by threads",
        "forward/sm90/bias.cuh",
        "__popc(args.biases_mapped) * kBytesBias",
        "kBiases * kBytesBias",
        "deadlock",
    ],
    [
        "a copy by threads told before it is made",
        "forward/sm90.cu",
        "copies_biases(args) ? 1 + 32 : 1",
        "copies_biases(args) ? 32 : 1",
        "on its way|more arrivals|never written|the oracle says|deadlock",
    ],
    [
        "keys behind the last, copied by threads",
        "forward/sm90/bias.cuh",
        "min_of(first_key + piece_of(round) * 8 + e, last_key)",
        "(first_key + piece_of(round) * 8 + e)",
        "broke down",
    ],
    [
        "rows one off, copied by threads",
        "forward/sm90/bias.cuh",
        "min_of(tile_row + row_of(round), last_row)",
        "min_of(tile_row + (row_of(round) ^ 1), last_row)",
        "the oracle says",
    ],
    [
        "what lies behind the tensor, copied by threads",
        "forward/sm90/bias.cuh",
        "at >= inside && (at & ~u64(15)) + 32 <= end",
        "at >= inside",
        "broke down",
    ],
    [
        "elements of a place before, copied by threads",
        "forward/sm90/bias.cuh",
        "at & 4 ? w[i + 1] : w[i]",
        "at & 4 ? w[i] : w[i + 1]",
        "the oracle says",
    ],
    [
        "biases given back while they are read",
        "forward/sm90/bias.cuh",
        "        fence_async_proxy();\n        __syncwarp();",
        "        __syncwarp();",
        "read by ldmatrix with no fence.proxy.async",
    ],
    [
        "a product that starts from zero",
        "forward/sm90/consumer.cuh",
        "kSeeded || step > 0",
        "step > 0",
        "the oracle says",
    ],
    [
        "what is added in units of other scores",
        "forward/sm90/consumer.cuh",
        "seed_unit = 1.0f / magnitude()",
        "seed_unit = 1.0f",
        "the oracle says",
    ],
    [
        "the first scores of a tile without what is added",
        "forward/sm90/consumer.cuh",
        "seed_first(work);",
        "",
        "deadlock|the oracle says|more arrivals|on its way|unfinished",
    ],
];

/// A bias for every score of every head.
pub const BIAS: &str = "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];";

/// Faults in how what is linear along the keys is added.
pub const RAMPS: &[Fault] = &[
    [
        "zero is the maximum of scores far below zero",
        "forward/sm90/softmax.cuh",
        "if (kShift) return shift_may_rise ||",
        "if (kShift) return false &&",
        "the oracle says",
    ],
    [
        "the ramp of the block beside",
        "forward/sm90/consumer.cuh",
        "program_ramps<kBlockKV / 8>(head(work), kept, row, key,",
        "program_ramps<kBlockKV / 8>(head(work), kept, row, key + kBlockKV,",
        "the oracle says",
    ],
];

/// A penalty that grows with the distance.
pub const RAMP: &str = "slope: f32[heads]; score = score + slope[h] * (kv - q);";
