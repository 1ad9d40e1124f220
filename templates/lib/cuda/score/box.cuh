// The least and the greatest element of a side tensor in a box of indices, found by the lanes of a warp together: what
// a mask that depends on the tensor can be in a tile.

template <typename T> struct Extremes {
    T least, greatest;
    __device__ __forceinline__ void join(T x, T y) {
        least = x < least ? x : least;
        greatest = y > greatest ? y : greatest;
    }
};

// One axis: the first and the last index, the tensor's length, and the distance from one element to the next.
struct BoxAxis {
    i64 first, last;
    int length;
    i64 stride;
};

// The most loads of a lane; a box that takes more is not looked at.
constexpr int kMostBoxLoads = 64;

// Sixteen bools, one in each byte: whether all are true, and whether any is.
__device__ __forceinline__ void join_bools(Extremes<bool>& found, uint4 bools) {
    const u32 any = bools.x | bools.y | bools.z | bools.w;
    const auto zero_byte = [](u32 w) { return (w - 0x01010101u) & ~w & 0x80808080u; };
    const u32 zeros = zero_byte(bools.x) | zero_byte(bools.y) | zero_byte(bools.z) | zero_byte(bools.w);
    found.join(zeros == 0, any != 0);
}

// `unknown` of an empty box, and of one that is too large. Indices beyond an axis read the nearest element.
template <typename Element, int kAxes, typename T>
__device__ __forceinline__ Extremes<T> look_at_box(const Element* data, const BoxAxis (&axes)[kAxes],
                                                   Extremes<T> unknown) {
    const int lane = threadIdx.x % 32;
    int extent[kAxes];
    i64 count = 1;
    u64 together = (u64)data;  // of its bits, the low ones are zeros where sixteen bytes may be read at once
#pragma unroll
    for (int a = 0; a < kAxes; a++) {
        const i64 first = ft_clamp64(axes[a].first, axes[a].length), last = ft_clamp64(axes[a].last, axes[a].length);
        if (axes[a].first > axes[a].last) return unknown;
        data += first * axes[a].stride;
        extent[a] = int(last - first) + 1;
        count *= extent[a];
        if (a + 1 < kAxes && extent[a] > 1) together |= u64(axes[a].stride);
    }
    const BoxAxis& along = axes[kAxes - 1];
    together |= (u64)data | u64(extent[kAxes - 1]);
    const bool wide = sizeof(Element) == 1 && along.stride == 1 && together % 16 == 0;
    if (wide) extent[kAxes - 1] /= 16, count /= 16;
    if (count > kMostBoxLoads * 32) return unknown;
    Extremes<T> found = {unknown.greatest, unknown.least};
#pragma unroll 4
    for (int i = lane; i < int(count); i += 32) {
        const Element* at = data;
        int rest = i;
#pragma unroll
        for (int a = kAxes - 1; a > 0; a--) {
            at += i64(rest % extent[a]) * (wide && a == kAxes - 1 ? 16 : axes[a].stride);
            rest /= extent[a];
        }
        at += i64(rest) * (wide && kAxes == 1 ? 16 : axes[0].stride);
        if constexpr (sizeof(Element) == 1) {
            if (wide) {
                join_bools(found, *(const uint4*)at);
            } else {
                found.join(*at != 0, *at != 0);
            }
        } else {
            found.join(T(*at), T(*at));
        }
    }
    if constexpr (sizeof(Element) == 1) {
        return Extremes<T>{!__any_sync(0xffffffff, !found.least), __any_sync(0xffffffff, found.greatest) != 0};
    } else {
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            found.join(__shfl_xor_sync(0xffffffff, found.least, apart),
                       __shfl_xor_sync(0xffffffff, found.greatest, apart));
        }
        return found;
    }
}
