// What lies between launches: kernels that do nothing for `clocks` clocks. kProgrammatic: 0 none; 1 the next kernel may
// start at once, and waits before it works; 2 the same, with the work of its start before the wait.

extern "C" __global__ void __launch_bounds__(384, 1) launches(Record* records, u32 clocks, u32 prologue) {
    extern __shared__ __align__(1024) u8 memory[];
    const u64 start = clock_now();
    if (kProgrammatic) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (kProgrammatic == 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    while (clock_now() - start < prologue) {
    }
    if (kProgrammatic == 2) asm volatile("griddepcontrol.wait;" ::: "memory");
    const u64 from = clock_now();
    while (clock_now() - from < clocks) {
    }
    if (threadIdx.x == 0) records[blockIdx.x * kRoles] = {start, clock_now(), 1, 0};
}
