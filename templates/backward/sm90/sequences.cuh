// Packed sequences: what the stages compute, found once from the lengths on the device.
//
// The first stage orders the sequences by their tiles of dS, the most first (more than kSequencesThreads keep their
// order), and lays the pairs of a sequence and a KV head into waves one after the other, each of which has room for so
// many tiles of dS. It leaves, at the start of the scratch memory, which all waves read:
//
//   starts     of each wave, and of the end, the first key block and the first row block
//   sequences  a SequenceRecord for each, in their order
//   owners     of key blocks, and of row blocks: whose each is. Those of all heads share an entry
//   statistics of all queries; and behind them is dS of a wave
//
// Blocks are numbered sequence by sequence; of one that several waves share, first those of the heads of the first
// wave. All of it is cut to the bounds that the host knows, whatever the arrays hold.

constexpr int kSequencesThreads = 512;
static_assert(kSequencesThreads == @{ sequences_threads }@, "the threads that the host launches");

struct alignas(16) SequenceRecord {
    int batch;                     // whose it is
    int q_row, q_len;              // first row in Q, dO and dQ, and how many
    int kv_row, kv_len;
    int key_entry, key_blocks;     // owners of its key blocks
    int row_entry, row_blocks;
    int wave, together, of_wave;   // of the first head; heads with it in that wave; heads of each later wave
    i64 first, slots;              // tiles of dS before it in its wave; of one head
};
static_assert(sizeof(SequenceRecord) == @{ sequence_bytes }@, "the scratch memory that the host counts");

// How many owners there can be, and where everything lies.
struct Table {
    const KernelArgs& args;
    int key_entries, row_entries;
    i64 row_tiles;  // of kBlockQ queries, with what rounding adds for each sequence

    __device__ __forceinline__ explicit Table(const KernelArgs& args) : args(args) {
        const BackwardArgs& a = args.backward;
        key_entries = int(a.kv_rows / kKeys) + a.batch, row_entries = int(a.q_rows / kRowBlock) + a.batch;
        row_tiles = a.q_rows / kBlockQ + a.batch;
    }
    static __device__ __forceinline__ i64 padded(i64 bytes) { return (bytes + 127) / 128 * 128; }
    // Of each wave the first key block and the first row block.
    __device__ __forceinline__ uint2* starts() const { return (uint2*)args.backward.scratch; }
    __device__ __forceinline__ int most_waves() const { return args.backward.batch * args.backward.kv_heads; }
    __device__ __forceinline__ SequenceRecord* sequences() const {
        return (SequenceRecord*)((char*)starts() + padded((i64(most_waves()) + 1) * 8));
    }
    __device__ __forceinline__ int* key_owners() const {
        return (int*)((char*)sequences() + padded(i64(args.backward.batch) * sizeof(SequenceRecord)));
    }
    __device__ __forceinline__ int* row_owners() const {
        return (int*)((char*)key_owners() + padded(i64(key_entries) * 4));
    }
    // Of a head, from a tile of kBlockQ queries on.
    __device__ __forceinline__ float* statistics(int head, i64 tile) const {
        return (float*)((char*)row_owners() + padded(i64(row_entries) * 4)) + (head * row_tiles + tile) * kBlockQ * 2;
    }
    __device__ __forceinline__ char* ds() const { return (char*)statistics(args.backward.heads, 0); }
};

// The tile of statistics that a sequence begins with: a tile more for each sequence before covers what rounding adds.
__device__ __forceinline__ i64 first_tile(const SequenceRecord& s) { return s.q_row / kBlockQ + i64(s.batch); }

// Heads [first, last) that a wave has of a sequence, and how many of them take turns.
struct WaveHeads {
    int first, last;
    __device__ __forceinline__ WaveHeads(const SequenceRecord& s, int wave, int kv_heads) {
        const int later = wave - s.wave;
        first = later == 0 ? 0 : s.together + (later - 1) * s.of_wave;
        last = min_of(later == 0 ? s.together : first + s.of_wave, kv_heads);
    }
    // So many that `rows`, which are those whose Q and dO L2 holds, are not exceeded.
    __device__ __forceinline__ int section(const SequenceRecord& s, int rows, int group) const {
        return min_of(max_of(rows / max_of(s.q_len * group, 1), 1), last - first);
    }
};

// Tiles of dS before those of a head of a sequence, in the head's wave.
__device__ __forceinline__ i64 slots_before_head(const SequenceRecord& s, int kv_head, int group) {
    const int nth = kv_head < s.together ? kv_head : (kv_head - s.together) % s.of_wave;
    return (kv_head < s.together ? s.first : 0) + i64(nth) * group * s.slots;
}

// What a thread block computes at a time: a block of keys of a KV head, or of rows of a head.
struct Item {
    int batch, q_row, q_len, kv_row, kv_len, head, block;  // head: of keys the KV head
    i64 tile, slot;                                        // of the sequence's statistics; of dS of the KV head

    // Numbered within the wave.
    static __device__ __forceinline__ Item of_keys(const Table& table, int index) {
        const BackwardArgs& a = table.args.backward;
        const int heads = a.kv_heads, group = a.heads / heads;
        const SequenceRecord s = table.sequences()[table.key_owners()[index / heads]];
        const WaveHeads wave(s, table.args.first_pair, heads);
        const int at = index - s.key_entry * heads - wave.first * s.key_blocks;
        const int section = wave.section(s, table.args.keys_section, group), whole = section * s.key_blocks;
        const int first = at / whole * section, within = at % whole;
        const int members = min_of(section, wave.last - wave.first - first);
        const int head = wave.first + first + within % members;
        return {s.batch, s.q_row, s.q_len, s.kv_row, s.kv_len, head, within / members, first_tile(s),
                slots_before_head(s, head, group)};
    }
    // The last rows first, as for dense tensors.
    static __device__ __forceinline__ Item of_rows(const Table& table, int index) {
        const BackwardArgs& a = table.args.backward;
        const int heads = a.heads, group = heads / a.kv_heads;
        const SequenceRecord s = table.sequences()[table.row_owners()[index / heads]];
        const WaveHeads wave(s, table.args.first_pair, a.kv_heads);
        const int at = index - (s.row_entry * a.kv_heads + wave.first * s.row_blocks) * group;
        const int section = wave.section(s, table.args.queries_section, group), whole = section * group * s.row_blocks;
        const int first = at / whole * section, within = at % whole;
        const int members = min_of(section, wave.last - wave.first - first) * group;
        const int head = (wave.first + first) * group + within % members, kv_head = head / group;
        return {s.batch, s.q_row, s.q_len, s.kv_row, s.kv_len, head, s.row_blocks - 1 - within / members,
                first_tile(s), slots_before_head(s, kv_head, group) + i64(head % group) * s.slots};
    }

    // Through shared memory, in kBytesItem.
    __device__ __forceinline__ void write(u32 to) const {
        store_shared_16(to, uint4{u32(batch), u32(q_row), u32(q_len), u32(kv_row)});
        store_shared_16(to + 16, uint4{u32(kv_len), u32(head), u32(block), 0});
        store_shared_16(to + 32, uint4{u32(tile), u32(u64(tile) >> 32), u32(slot), u32(u64(slot) >> 32)});
    }
    static __device__ __forceinline__ Item read(u32 from) {
        const uint4 x = load_shared_16(from), y = load_shared_16(from + 16), z = load_shared_16(from + 32);
        return {int(x.x), int(x.y), int(x.z), int(x.w), int(y.x), int(y.y), int(y.z), i64(u64(z.y) << 32 | z.x),
                i64(u64(z.w) << 32 | z.z)};
    }
    static constexpr int kBlock = 24;  // where `block` lies
    static __device__ __forceinline__ Lengths lengths(u32 from) {
        return {int(load_shared_4(from + 8)), int(load_shared_4(from + 16))};
    }
    // By the thread, or the warp, that loads; `Ring` is an ItemRing.
    template <typename Ring> __device__ __forceinline__ void tell(u32 smem, Ring& ring) const {
        if (!kListed || lane() == 0) {
            ring.acquire(smem);
            write(ring.buffer(smem));
            ring.commit(smem);
        }
        ring.advance();
    }
    // That there are no more.
    template <typename Ring> static __device__ __forceinline__ void tell_end(u32 smem, Ring& ring) {
        Item none = {};
        none.block = -1;
        none.tell(smem, ring);
    }

    __device__ __forceinline__ Pair pair_of_keys(const BackwardArgs& args) const {
        return {batch, head, args.heads / args.kv_heads, q_row, kv_row, {q_len, kv_len}};
    }
    __device__ __forceinline__ Pair pair_of_rows(const BackwardArgs& args) const {
        const int group = args.heads / args.kv_heads;
        return {batch, head / group, group, q_row, kv_row, {q_len, kv_len}};
    }
};
// One's way from who finds it to who computes it.
template <int kAt>
using ItemRing = Pipeline<kItems, kAt + kItems * kBytesItem, kAt + kItems * (kBytesItem + 8), kAt, kBytesItem>;

// The sum over a thread and those before it, by all threads. `of_warps` has room for one of each warp.
template <typename T> __device__ __forceinline__ T sum_until(T x, T* of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const T other = __shfl_up_sync(0xffffffff, x, apart);
        if (lane >= apart) x += other;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < warp; i++) x += of_warps[i];
    return x;
}

// Of the sequences that are laid out together.
struct SequencesShared {
    i64 size[kSequencesThreads], first[kSequencesThreads];  // tiles of dS of a pair; before it in its wave
    int rows[kSequencesThreads][5];                         // as the first five of a record
    int wave[kSequencesThreads], together[kSequencesThreads], of_wave[kSequencesThreads];
    int begins[kSequencesThreads];  // whether a wave begins with its first head
    i64 of_warps[kSequencesThreads / 32];
    i64 used;  // tiles of the last wave so far
    int last;  // that wave
};
static_assert(sizeof(SequencesShared) + 16 == @{ sequences_smem_bytes }@, "the shared memory that the host asks for");

// Puts the pairs of a sequence behind those of the ones before, in as many waves as they take.
__device__ __forceinline__ void lay_out(SequencesShared& shared, int at, int heads, i64 room) {
    const i64 size = shared.size[at];
    const i64 fit = size == 0 ? heads : min_of<i64>((room - shared.used) / size, heads);
    if (fit == 0) shared.last++, shared.used = 0;
    const int of_wave = size == 0 ? heads : int(max_of<i64>(min_of<i64>(room / size, heads), 1));
    const int together = fit == 0 ? of_wave : int(fit), rest = heads - together;
    shared.wave[at] = shared.last, shared.first[at] = shared.used;
    shared.together[at] = together, shared.of_wave[at] = of_wave, shared.begins[at] = fit == 0;
    if (rest == 0) {
        shared.used += together * size;
    } else {
        shared.last += div_up(rest, of_wave);
        shared.used = ((rest - 1) % of_wave + 1) * size;
    }
}

// One thread block, in the first wave.
extern "C" __global__ void __launch_bounds__(kSequencesThreads)
    @{ entry }@_sequences(const __grid_constant__ KernelArgs args) {
    extern __shared__ u8 shared_memory[];
    SequencesShared& shared = *(SequencesShared*)(shared_memory + (16 - smem_address(shared_memory) % 16) % 16);
    const BackwardArgs& a = args.backward;
    const Table table(args);
    const int t = threadIdx.x, group = a.heads / a.kv_heads;
    const i64 room = args.ds_bytes / kBytesSlot;
    let_next_launch_begin();
    wait_for_launch_before();
    if (args.first_pair > 0) return;
    if (t == 0) shared.used = 0, shared.last = 0;
    int key_entries = 0, row_entries = 0;  // of the sequences before
#pragma unroll 1
    for (int base = 0; base < a.batch; base += kSequencesThreads) {
        const int count = min_of(a.batch - base, kSequencesThreads);
        SequenceRecord s;
        s.batch = base + t, s.q_row = s.q_len = s.kv_row = s.kv_len = 0;
        if (t < count) {
            const PackedRows q = packed_rows(a.q_begin, a.q_lengths, s.batch, a.q_words, a.q_rows, a.q_len);
            const PackedRows kv = packed_rows(a.kv_begin, a.kv_lengths, s.batch, a.kv_words, a.kv_rows, a.kv_len);
            s.q_row = int(q.first), s.q_len = q.rows, s.kv_row = int(kv.first), s.kv_len = kv.rows;
        }
        const i64 tiles = Visible(a, Lengths{s.q_len, s.kv_len}).slots();
        shared.size[t] = tiles;
        __syncthreads();
        int place = t;
        if (a.batch <= kSequencesThreads && t < count) {
            place = 0;
#pragma unroll 4
            for (int other = 0; other < count; other++)
                place += shared.size[other] > tiles || (shared.size[other] == tiles && other < t);
        }
        int* const rows = shared.rows[place];
        rows[0] = s.batch, rows[1] = s.q_row, rows[2] = s.q_len, rows[3] = s.kv_row, rows[4] = s.kv_len;
        __syncthreads();
        // From here on a thread has the sequence of its place.
        s.batch = shared.rows[t][0], s.q_row = shared.rows[t][1], s.q_len = shared.rows[t][2];
        s.kv_row = shared.rows[t][3], s.kv_len = shared.rows[t][4];
        s.slots = Visible(a, Lengths{s.q_len, s.kv_len}).slots();
        const int key_blocks = div_up(s.kv_len, kKeys), row_blocks = div_up(s.q_len, kRowBlock);
        int* const ints = (int*)shared.of_warps;
        const int keys_until = sum_until(key_blocks, ints), rows_until = sum_until(row_blocks, ints);
        const i64 size = s.slots * group, until = sum_until(size * a.kv_heads, shared.of_warps);
        const i64 used = shared.used;
        const int last = shared.last;
        shared.size[t] = size, shared.first[t] = used + until - size * a.kv_heads;
        shared.wave[t] = last, shared.together[t] = shared.of_wave[t] = a.kv_heads, shared.begins[t] = 0;
        const bool together = !__syncthreads_or(used + until > room);
        if (t == kSequencesThreads - 1 && together) shared.used = used + until;
        if (t == 0 && !together) {
#pragma unroll 1
            for (int i = 0; i < count; i++) lay_out(shared, i, a.kv_heads, room);
        }
        __syncthreads();
        s.wave = shared.wave[t], s.together = shared.together[t], s.of_wave = shared.of_wave[t];
        s.first = shared.first[t];
        s.key_entry = min_of(key_entries + keys_until - key_blocks, table.key_entries);
        s.row_entry = min_of(row_entries + rows_until - row_blocks, table.row_entries);
        s.key_blocks = min_of(key_blocks, table.key_entries - s.key_entry);
        s.row_blocks = min_of(row_blocks, table.row_entries - s.row_entry);
        if (t < count) {
            table.sequences()[base + t] = s;
#pragma unroll 1
            for (int i = 0; i < s.key_blocks; i++) table.key_owners()[s.key_entry + i] = base + t;
#pragma unroll 1
            for (int i = 0; i < s.row_blocks; i++) table.row_owners()[s.row_entry + i] = base + t;
            // Waves that begin with this sequence, or within it.
            const auto start = [&](int wave, int head) {
                if (wave < table.most_waves())
                    table.starts()[wave] = uint2{u32(s.key_entry * a.kv_heads + head * s.key_blocks),
                                                 u32((s.row_entry * a.kv_heads + head * s.row_blocks) * group)};
            };
            if (shared.begins[t] || base + t == 0) start(s.wave, 0);
#pragma unroll 1
            for (int head = s.together, wave = s.wave + 1; head < a.kv_heads; head += s.of_wave, wave++)
                start(wave, head);
        }
        // What the next ones come behind.
        if (t == kSequencesThreads - 1) ints[0] = keys_until, ints[1] = rows_until;
        __syncthreads();
        key_entries += ints[0], row_entries += ints[1];
        __syncthreads();
    }
    // The end, and waves that none of these lengths needs.
    const uint2 end = {u32(min_of(key_entries, table.key_entries) * a.kv_heads),
                       u32(min_of(row_entries, table.row_entries) * a.heads)};
#pragma unroll 1
    for (int wave = shared.last + 1 + t; wave <= table.most_waves(); wave += kSequencesThreads)
        table.starts()[wave] = end;
}
