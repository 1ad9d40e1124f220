// An entry of an array of 32- or 64-bit integers as it is read. Nothing waits for it before value(): memory's latency
// is a thousand cycles, and entries that are asked for together take that once.
struct Entry {
    int low, high;
    // Out of every range where it does not fit an int.
    __device__ __forceinline__ int value(int words) const {
        return words == 1 || high == low >> 31 ? low : -2147483647 - 1;
    }
};

// Entry i; none of an array that a call leaves out.
__device__ __forceinline__ Entry read_entry(const int* array, i64 i, int words) {
    Entry e = {0, 0};
    const int* const at = array + i * words;
    if (array != nullptr) e.low = __ldg(at);
    if (array != nullptr && words == 2) e.high = __ldg(at + 1);
    return e;
}

__device__ __forceinline__ int read_int(const int* array, i64 i, int words) {
    return read_entry(array, i, words).value(words);
}
