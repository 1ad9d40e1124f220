// The PTX instructions that kernels use, as functions: a generated source calls these where it had inline assembly.
// An instruction's name has `_` for `.` and `__` for `::`; its operands follow in the order of its text, brackets and
// braces taken off, but for the braces around registers of a matrix, which become a `Registers`.

#pragma once
#include <cstddef>
#include <cstdint>

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = unsigned long long;

// What is launched before a kernel, by thread blocks of its own size.
struct First {
    void (*run)(const void* args);
    int threads;
};
struct Kernel {
    int threads, shared_bytes, blocks_per_sm;
    std::size_t argument_bytes;
    void (*run)(const void* args);
    First before[2];
};
extern Kernel kernel;     // of the present launch
extern Kernel kernels[];  // the stages, defined by the generated source

struct Index {
    u32 x;
};
Index thread_index();
Index block_index();
Index grid_dim();

// Gives all lanes of the calling warp each other's word.
const u32* exchange(const char* what, u32 lanes, u32 word);
void synchronize_block();
// A point where another thread may go on.
void maybe_let_others();
u32 shared_address(const void* p);

// ------------------------------------------------------------------------------------------------------- scalars

void cvt_rn_f16x2_f32(u32& d, float high, float low);
void cvt_rn_bf16x2_f32(u32& d, float high, float low);
void cvt_rn_f16_f32(u16& d, float x);
void cvt_f32_f16(float& d, u16 x);
void cvt_rn_f16x2_e4m3x2(u32& d, u16 x);
void cvt_rn_satfinite_e4m3x2_f32(u16& d, float high, float low);
void cvt_rn_f16x2_e5m2x2(u32& d, u16 x);
void mul_rn_f16x2(u32& d, u32 x, u32 y);
void add_rn_f16x2(u32& d, u32 x, u32 y);
void sub_rn_f16x2(u32& d, u32 x, u32 y);
void fma_rn_f16x2(u32& d, u32 x, u32 y, u32 z);
void fma_rn_bf16x2(u32& d, u32 x, u32 y, u32 z);
void ex2_approx_ftz_f32(float& d, float x);
void lg2_approx_ftz_f32(float& d, float x);
void rcp_approx_ftz_f32(float& d, float x);
void ex2_approx_f32(float& d, float x);
void lg2_approx_f32(float& d, float x);
void sqrt_rn_f32(float& d, float x);
void cvt_rmi_s64_f32(long long& d, float x);
void cvt_rpi_s64_f32(long long& d, float x);
void cvt_rzi_s64_f32(long long& d, float x);
void cvt_rni_s64_f32(long long& d, float x);
void atom_add_acq_rel_gpu_global_u32(u32& old, u32* counter, u32 n);
void atom_inc_acq_rel_gpu_global_u32(u32& old, u32* counter, u32 last);
void cp_reduce_async_bulk_global_shared__cta_bulk_group_add_f32(void* to, u32 from, u32 bytes);
void atom_global_add_u32(u32& old, u32* counter, u32 n);
void max_NaN_f32(float& d, float x, float y);
inline void shl_b32(u32& d, u32 x, u32 count) { d = count > 31 ? 0 : x << count; }
inline void mov_u32(u32& d, u32 x) { d = x; }
inline void mov_b32(u32& d, u16 low, u16 high) { d = low | u32(high) << 16; }
inline void mov_b32(u16& low, u16& high, u32 x) { low = u16(x), high = u16(x >> 16); }
inline void mov_b32(int& d, int x) { d = x; }
void prmt_b32(u32& d, u32 x, u32 y, u32 selector);
inline void add_u16x2(u32& d, u32 x, u32 y) { d = ((x & 0xffff0000) + (y & 0xffff0000)) | ((x + y) & 0xffff); }
template <typename T> void ld_global_cg_b32(T& d, const T* p) { d = *p; }
template <typename T> void ld_global_cg_u32(T& d, const T* p) { d = *p; }
template <typename T> void ld_global_cg_f32(T& d, const T* p) { d = *p; }
template <typename T> void ld_relaxed_gpu_global_u32(T& d, const T* p) { d = *p; }
template <typename T> void ld_acquire_gpu_global_u32(T& d, const T* p) { d = *p; }
template <typename T> void st_global_u32(T* to, u32 x) { *reinterpret_cast<u32*>(to) = x; }
template <typename T> void st_global_v2_u32(T* to, u32 x, u32 y) {
    u32* const words = reinterpret_cast<u32*>(to);
    words[0] = x, words[1] = y;
}
inline void st_global_v4_f32(float* to, float x, float y, float z, float w) {
    to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}
inline void fence_acq_rel_gpu() {}
inline void selp_b32(u32& d, u32 a, u32 b, bool which) { d = which ? a : b; }
inline void setp_ne_b32(bool& d, u32 a, u32 b) { d = a != b; }
inline void setp_eq_b32(bool& d, u32 a, u32 b) { d = a == b; }
inline void add_s64(u64& d, u64 a, u64 b) { d = a + b; }
#define ptx_ctaid_x (ptx::block_index().x)

// ------------------------------------------------------------------------------------------------- shared memory

void ld_shared_v4_u32(u32& x, u32& y, u32& z, u32& w, u32 address);
void st_shared_v4_u32(u32 address, u32 x, u32 y, u32 z, u32 w);
void ld_shared_u32(u32& d, u32 address);
void ld_shared_v2_f32(float& x, float& y, u32 address);
void st_shared_u32(u32 address, u32 x);
void red_shared_or_b32(u32 address, u32 x);
void atom_shared_or_b32(u32& old, u32 address, u32 x);
void ld_shared_u16(u16& d, u32 address);
void st_shared_u16(u32 address, u16 x);
void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d);
void fence_proxy_async_shared__cta();
void fence_proxy_async();

// ------------------------------------------------------------------------------------------------------ barriers

void bar_sync(u32 id, u32 threads);
void bar_arrive(u32 id, u32 threads);
void bar_red_popc_u32(u32& counted, u32 id, u32 threads, bool mine);
void bar_red_or_pred(bool& any, u32 id, u32 threads, bool mine);
void mbarrier_init_shared__cta_b64(u32 address, u32 arrivals);
void fence_mbarrier_init_release_cluster();
void mbarrier_arrive_shared__cta_b64(u32 address);
void mbarrier_arrive_expect_tx_shared__cta_b64(u32 address, u32 bytes);
void mbarrier_try_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity, u32 nanoseconds);
void mbarrier_test_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity);
void nanosleep_u32(u32 nanoseconds);
// Launches come one after the other here: what the one before writes comes late to this block.
void griddepcontrol_wait();
inline void griddepcontrol_launch_dependents() {}
void setmaxnreg_dec_sync_aligned_u32(u32 registers);
void setmaxnreg_inc_sync_aligned_u32(u32 registers);

// --------------------------------------------------------------------------------------------------- copy engine

void prefetch_tensormap(const void* map);
void cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    u32 to, const void* map, int c0, int c1, int c2, int c3, u32 barrier, u64 hint);
void cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    u32 to, const void* map, int c0, int c1, int c2, int c3, int c4, u32 barrier, u64 hint);
void cp_async_bulk_tensor_4d_global_shared__cta_bulk_group(const void* map, int c0, int c1, int c2, int c3, u32 from);
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(u32 to, const void* from, u32 bytes,
                                                                       u32 barrier);
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(u32 to, const void* from,
                                                                                     u32 bytes, u32 barrier, u64 hint);
void cp_async_bulk_global_shared__cta_bulk_group(void* to, u32 from, u32 bytes);
void cp_async_bulk_tensor_5d_global_shared__cta_bulk_group(const void* map, int c0, int c1, int c2, int c3, int c4,
                                                           u32 from);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group_read(u32 pending);
void cp_async_bulk_wait_group(u32 pending);

// -------------------------------------------------------------------------------------------- copies by threads

void cp_async_cg_shared_global_L2__128B(u32 to, const void* from, u32 size, u32 bytes);
void cp_async_ca_shared_global(u32 to, const void* from, u32 size, u32 bytes);
void cp_async_commit_group();
void cp_async_wait_group(u32 pending);

// ------------------------------------------------------------------------------------------------- warp matrices

void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address);
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address);
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                       u32 a2, u32 a3, u32 b0, u32 b1, const float& c0, const float& c1,
                                                       const float& c2, const float& c3);
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                         u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                         const float& c1, const float& c2, const float& c3);
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                        u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                        const float& c1, const float& c2, const float& c3);
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                      u32 b0, const float& c0, const float& c1, const float& c2,
                                                      const float& c3);
void mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                         u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                         const float& c1, const float& c2, const float& c3);

// -------------------------------------------------------------------------------------------- warpgroup matrices

// Of both operands, or of A and of B.
enum class Format { bf16, f16, e4m3, e5m2, e4m3_e5m2 };
constexpr bool is_fp8(Format format) { return format >= Format::e4m3; }
template <int count> struct Registers {
    float* at[count];
};

void wgmma_fence_sync_aligned();
void wgmma_commit_group_sync_aligned();
void wgmma_wait_group_sync_aligned(u32 pending);

// One instruction as a thread issues it.
struct MatrixStep {
    Format format;
    int columns;
    bool a_in_registers;
    u64 a, b;         // descriptors
    bool keep;        // D += A B, otherwise D = A B
    bool a_by_depth;  // A lies in memory by depth ("MN-major")
    bool b_by_depth;
    bool operator==(const MatrixStep& o) const {
        return format == o.format && columns == o.columns && a_in_registers == o.a_in_registers && a == o.a &&
               b == o.b && keep == o.keep && a_by_depth == o.a_by_depth && b_by_depth == o.b_by_depth;
    }
};
void issue(const MatrixStep& step, float* const* d, const u32* a);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <Format format, int columns>
void wgmma_mma_async_sync_aligned(Registers<columns / 2> d, u64 a, u64 b, bool keep, int sign_a, int sign_b,
                                  int depth_a, int depth_b) {
    if (sign_a != 1 || sign_b != 1) fail("wgmma with a sign is not emulated");
    issue({format, columns, false, a, b, keep, depth_a != 0, depth_b != 0}, d.at, nullptr);
}
struct ARegisters {
    u32 a[4];
};
// Of 8 bits, whose operands lie by rows alone.
template <Format format, int columns>
void wgmma_mma_async_sync_aligned(Registers<columns / 2> d, u64 a, u64 b, bool keep, int sign_a, int sign_b) {
    static_assert(is_fp8(format));
    if (sign_a != 1 || sign_b != 1) fail("wgmma with a sign is not emulated");
    issue({format, columns, false, a, b, keep, false, false}, d.at, nullptr);
}
template <Format format, int columns>
void wgmma_mma_async_sync_aligned(Registers<columns / 2> d, ARegisters a, u64 b, bool keep, int sign_a, int sign_b) {
    static_assert(is_fp8(format));
    if (sign_a != 1 || sign_b != 1) fail("wgmma with a sign is not emulated");
    issue({format, columns, true, 0, b, keep, false, false}, d.at, a.a);
}
template <Format format, int columns>
void wgmma_mma_async_sync_aligned(Registers<columns / 2> d, ARegisters a, u64 b, bool keep, int sign_a, int sign_b,
                                  int depth_b) {
    if (sign_a != 1 || sign_b != 1) fail("wgmma with a sign is not emulated");
    issue({format, columns, true, 0, b, keep, false, depth_b != 0}, d.at, a.a);
}

}  // namespace ptx
