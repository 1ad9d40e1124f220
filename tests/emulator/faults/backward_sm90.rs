//! Faults of `backward/sm90`.

use super::Fault;

pub const BACKWARD_SM90: &[Fault] = &[
    // Masks, one query or key off.
    [
        "one query too many before the keys",
        KEY_STEPS,
        "mine - visible.shift - visible.right :",
        "mine - visible.shift - visible.right - 1 :",
        "the oracle says",
    ],
    [
        "one query too many behind the keys",
        KEY_STEPS,
        "mine - visible.shift + visible.left :",
        "mine - visible.shift + visible.left + 1 :",
        "the oracle says",
    ],
    [
        "a cut tile taken for a whole one",
        "backward/sm90/tiles.cuh",
        "tile < begin || tile >= end",
        "tile >= end",
        "the oracle says",
    ],
    // Tiles, heads and waves.
    [
        "the last query tile of a key block is lost",
        "backward/sm90/key_blocks.cuh",
        "end = visible.end(block);",
        "end = max_of(visible.end(block) - 1, begin);",
        "the oracle says",
    ],
    [
        "the first key block of a row is lost",
        "backward/sm90/queries.cuh",
        ": !written.has(mine + t))",
        ": !written.has(mine + t) || block == blocks.begin)",
        "the oracle says",
    ],
    [
        "the first head of a group for all",
        "backward/sm90/layout.cuh",
        "return kv_head * group + member;",
        "return kv_head * group + 0 * member;",
        "the oracle says",
    ],
    [
        "sums of the block before are left",
        KEY_STEPS,
        "        clear();\n        keys.wait(smem);",
        "        keys.wait(smem);",
        "the oracle says",
    ],
    [
        "every wave is the first",
        KEY_STEPS,
        "const Pair pair(args.backward, args.first_pair + at.pair);\n            finish",
        "const Pair pair(args.backward, at.pair);\n            finish",
        "the oracle says|gave different bytes",
    ],
    // Of the launch, not of a template.
    ["a wave too few", "backward/sm90.cu", "constexpr", "constexpr", "the oracle says"],
    [
        "dS lies over the statistics",
        "backward/sm90/layout.cuh",
        "statistics_of(args, heads) + head_index",
        "statistics_of(args, 0) + head_index",
        "the oracle says",
    ],
    ["dS with its rows in another order", KEY_STEPS, "((chunk ^ row) % 8) * 16", "(chunk % 8) * 16", "the oracle says"],
    // Statistics.
    ["no gradient by the log-sum-exp", "backward/sm90/statistics.cuh", "sum - a.dlse[at]", "sum", "the oracle says"],
    // What zero times NaN leaves.
    ["NaN of queries that are not seen", KEY_STEPS, "if (met)", "if (false)", "the oracle says"],
    [
        "NaN of keys that are not seen",
        "backward/sm90/queries.cuh",
        "if (any_non_finite(dq[t]))",
        "if (false)",
        "the oracle says",
    ],
    // Order and barriers.
    [
        "no fence after dS",
        KEY_STEPS,
        "        fence_async_proxy();\n    }\n    // The same for the thread",
        "    }\n    // The same for the thread",
        "no fence.proxy.async",
    ],
    [
        "dS overwritten while it is copied",
        KEY_LOADER,
        "    tma_store_wait_read();\n    spills.release(smem);",
        "    spills.release(smem);",
        "on its way|on their way|the oracle says",
    ],
    [
        "dS taken away before all of it is there",
        "backward/sm90/keys.cuh",
        "SpillRing::init(smem, i, kByGradient ? 4 : 4 * kWarpgroups, 1)",
        "SpillRing::init(smem, i, kByGradient ? 4 : 4 * kWarpgroups - 1, 1)",
        "no fence.proxy.async|on its way|on their way|never written|the oracle says",
    ],
    [
        "Q freed before dK has it",
        KEY_STEPS,
        "            wgmma_wait<0>();\n            wgmma_touch(dk);\n            if (lane() == 0) queries.release",
        "            if (lane() == 0) queries.release",
        "on its way|while wgmma ran|the oracle says",
    ],
    [
        "K overwritten before dK is away",
        KEY_STEPS,
        "            tma_store_wait_read();\n            mbarrier_arrive(ValueRing",
        "            mbarrier_arrive(ValueRing",
        "on its way|on their way|the oracle says",
    ],
    // A warpgroup for each gradient.
    [
        "by gradient: weights taken before they are there",
        KEY_STEPS,
        "        hands.wait(smem);\n",
        "",
        "never written|the oracle says|deadlock",
    ],
    [
        "by gradient: dV over V that dP is computed from",
        KEY_STEPS,
        "if (kByGradient) barrier_sync(3, 128 * kWarpgroups);",
        "",
        "no fence.proxy.async|while wgmma ran|the oracle says",
    ],
    [
        "by gradient: weights overwritten before they are taken",
        KEY_STEPS,
        "            hands.acquire(smem);\n            if constexpr (kListed) {",
        "            if constexpr (kListed) {",
        "the oracle says|deadlock|never written",
    ],
    // dQ beside dK and dV.
    [
        "joint: the last row block is not taken",
        "backward/sm90/joint.cuh",
        "while (next < count) {",
        "while (next < count - 1) {",
        "the oracle says",
    ],
    [
        "joint: tiles of other rows",
        "backward/sm90/queries.cuh",
        "        if (kJoint) store_shared_4(smem + L::kWhich + ring.stage * 8, u32(index));\n        ring.expect",
        "        if (kJoint) store_shared_4(smem + L::kWhich + ring.stage * 8, u32(index / 2));\n        ring.expect",
        "the oracle says|different bytes|deadlock",
    ],
    [
        "joint: a key block's number before the last one is read",
        "backward/sm90/joint.cuh",
        "kWarpgroups + 1);  // also",
        "kWarpgroups);  // also",
        "deadlock|the oracle says|arrive|phase|bytes",
    ],
    // dQ by key blocks in turns.
    ["turns: the second overwrites the first", TURNS, "if (turn == 0)", "if (turn <= 1)", "the oracle says"],
    ["turns: dQ overwritten while it is added", TURNS, "                tma_store_wait_read();\n", "", MOVING],
    [
        "turns: no fence after dQ",
        KEY_STEPS,
        "        fence_async_proxy();\n        __syncwarp();\n        if (lane() == 0) sums.commit(smem);",
        "        __syncwarp();\n        if (lane() == 0) sums.commit(smem);",
        "no fence.proxy.async",
    ],
    [
        "turns: dQ before the other's dS",
        KEY_STEPS,
        "        barrier_sync(5, 128 * kWarpgroups);\n",
        "",
        "no fence.proxy.async|never written|the oracle says|while wgmma ran",
    ],
    [
        "turns: the next K over one that dQ is formed from",
        TURNS,
        "ValueRing::init(smem, i, 1, 4 * kWarpgroups + 2)",
        "ValueRing::init(smem, i, 1, 4 * kWarpgroups + 1)",
        "on its way|on their way|the oracle says|more arrivals|deadlock|phase",
    ],
    [
        "turns: dK and dV of rows past the last",
        "backward/sm90/store.cuh",
        "if (first + h * 8 < rows && column",
        "if (column",
        "was written|were written|broke down|the oracle says",
    ],
    [
        "turns: the words of other lanes",
        "backward/sm90/store.cuh",
        "w[j] = has_bit ? other : w[j];",
        "w[j] = has_bit ? w[j] : w[j];",
        "the oracle says",
    ],
    [
        "two buffers: dS overwritten while dQ is formed from it",
        KEY_STEPS,
        "        if (kSlopes == 1) slopes.acquire(smem);\n",
        "",
        "while wgmma ran|on its way|on their way|no fence.proxy.async|the oracle says",
    ],
    [
        "two buffers: dQ not from zero",
        KEY_STEPS,
        "k_depth + k * 2048 / 16, k > 0);",
        "k_depth + k * 2048 / 16, true);",
        "the oracle says",
    ],
    [
        "turns: NaN of keys that are not seen",
        SUMS,
        "if (!__any_sync(0xffffffff, met != 0.0f)) return;",
        "return;",
        "the oracle says",
    ],
    ["turns: sums of other rows", SUMS, "+ threadIdx.x * 4;", "+ threadIdx.x % 32 * 4;", "the oracle says"],
    // Heads of a group walked by several thread blocks.
    [
        "walks: dK without the walk before",
        WALKS,
        "if constexpr (kHasK) add_accumulators(sums_k, dk);",
        "",
        "the oracle says",
    ],
    [
        "walks: dV onto the sums of dK",
        WALKS,
        "sums + kKeys * kColumnsQK + (kByGradient",
        "sums + (kByGradient",
        "the oracle says",
    ],
    [
        "walks: sums of another key block",
        WALKS,
        "walk_sums_of(args, key_block, slots)",
        "walk_sums_of(args, 0 * key_block, slots)",
        "the oracle says|gave different bytes",
    ],
    // Score programs.
    [
        "program: no slope",
        KEY_STEPS,
        "none ? -0.0f : fmaf(x, g.slope, 0.0f)",
        "none ? -0.0f : x + 0.0f",
        "the oracle says",
    ],
    [
        "program: its mask is not asked",
        KEY_STEPS,
        "if (kProgramMask) out = out",
        "if (false) out = out",
        "the oracle says",
    ],
    [
        "program: tiles that its mask cuts are lost",
        KEY_LOADER,
        "__ballot_sync(0xffffffff, kind >= 0)",
        "__ballot_sync(0xffffffff, kind > 0)",
        "the oracle says",
    ],
    [
        "program: the end is passed before all lanes have seen it",
        KEY_STEPS,
        "        __syncwarp();  // and all lanes",
        "        // and all lanes",
        "deadlock",
    ],
    [
        "dQ overwritten while it is copied",
        "backward/sm90/queries.cuh",
        "        if (threadIdx.x % 128 == 0) tma_store_wait_read();\n",
        "",
        // A copy that is late reads what the next tile's threads write, which they have not fenced yet.
        MOVING,
    ],
    // Packed sequences.
    [
        "packed: keys of another",
        KEY_LOADER,
        "pair.kv_row + at.block * kKeys, pair.kv_head, pair.entry);",
        "at.block * kKeys, pair.kv_head, pair.entry);",
        "the oracle says",
    ],
    [
        "packed: queries of another",
        KEY_LOADER,
        "pair.q_row + tile * kBlockQ, head",
        "tile * kBlockQ, head",
        "the oracle says",
    ],
    ["packed: keys behind the last are written", KEY_STEPS, "!kPacked || rows >= 64", "true", PACKED],
    ["packed: queries behind the last are written", QUERIES, "kPacked && row + 64 > visible.q_len", "false", PACKED],
    ["packed: a row too many", "backward/sm90/store.cuh", "if (r < rows)", "if (r <= rows)", PACKED],
    ["packed: a row too few", "backward/sm90/store.cuh", "if (r < rows)", "if (r + 1 < rows)", "the oracle says"],
    [
        "packed: the first head of a wave for all",
        SEQUENCES,
        "wave.first + first + within % members",
        "first + within % members",
        PACKED,
    ],
    ["packed: dS of all heads in one place", SEQUENCES, "i64(nth) * group * s.slots", "0 * nth", "the oracle says"],
    [
        "packed: dS of a sequence over another's",
        SEQUENCES,
        "shared.first[t] = used + until",
        "shared.first[t] = 0 * (used + until)",
        PACKED,
    ],
    [
        "packed: dS of all heads of a group in one place",
        SEQUENCES,
        "i64(head % group) * s.slots",
        "0",
        "the oracle says",
    ],
    ["packed: statistics of another", SEQUENCES, "i64(s.batch); }", "0; }", "the oracle says"],
    ["packed: waves that are too full", SEQUENCES, "if (fit == 0)", "if (false)", PACKED],
    ["packed: no end of the waves", SEQUENCES, "wave = shared.last + 1 + t", "wave = shared.last + 2 + t", PACKED],
    [
        "packed: rows of one side for the other",
        SEQUENCES,
        "s.kv_row = int(kv.first)",
        "s.kv_row = int(q.first)",
        PACKED,
    ],
    [
        "packed: what is said is not awaited",
        KEY_STEPS,
        "            items.wait(smem);\n            if",
        "            if",
        PACKED,
    ],
    [
        "packed: what is said is overwritten",
        SEQUENCES,
        "            ring.acquire(smem);\n            write",
        "            write",
        "deadlock|diverged|the oracle says|no sequence|broke down|on its way",
    ],
];

const KEY_LOADER: &str = "backward/sm90/key_loader.cuh";
const KEY_STEPS: &str = "backward/sm90/key_steps.cuh";
const QUERIES: &str = "backward/sm90/queries.cuh";
const SUMS: &str = "backward/sm90/sums.cuh";
const TURNS: &str = "backward/sm90/turns.cuh";
const SEQUENCES: &str = "backward/sm90/sequences.cuh";
/// What a copy that is late leads to: threads write what it has not read yet, fenced or not.
const MOVING: &str = "on its way|on their way|no fence.proxy.async after|the oracle says|gave different bytes";
/// Whatever rows of another sequence, or memory that is nobody's, lead to.
const PACKED: &str =
    "the oracle says|gave different bytes|no sequence|broke down|outside|deadlock|never written|on its way|ends in";
const WALKS: &str = "backward/sm90/walks.cuh";
