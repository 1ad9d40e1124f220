// Programmatic dependent launch (PTX griddepcontrol): a kernel's thread blocks may start while the launch before it in
// the stream still runs, which hides the launch itself and the drain of the one before. Until it waits, a kernel
// writes nothing that others read or write, and what it reads of them it reads again.

// The runtime starts no stage early of a module without this symbol: a kernel that does not wait must not start so.
extern "C" __device__ unsigned ft_waits_for_launch_before = 1;

// All that was launched before is done, and what it wrote can be read. By all threads.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch may start its thread blocks where there is room. It waits for the end of this one by itself.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
