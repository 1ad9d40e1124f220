// Loads from global memory that others may write while a kernel runs.

// The word at `at` as it is now, 0 unless it is `there`. It goes past the multiprocessor's own cache, whose copy the
// next reader would get. A predicate and no branch: 26 loads are asked for together.
__device__ __forceinline__ int load_if(const int* at, bool there) {
    int word;
    asm volatile(
        "{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b32 %0, 0;\n @p ld.global.cg.b32 %0, [%1];}"
        : "=r"(word) : "l"(at), "r"(int(there)));
    return word;
}
