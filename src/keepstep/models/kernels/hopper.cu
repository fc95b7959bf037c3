// Hopper's (sm_90a) own instructions: barriers that copies report to, copies of boxes, and matmuls by warpgroups.
//
// The compiling code expands the lists between at signs: NUMBERS n is %0 to %(n-1), OPERANDS name n the
// variables name[0] to name[n-1] as operands that an instruction reads and writes.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

// ---- barriers ----

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ---- registers of a warpgroup's threads ----

template <int COUNT> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- shared memory ----

__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ __align__(1024) char room[];
  return (u32)__cvta_generic_to_shared(room);
}

__device__ __forceinline__ u32 word(u32 at) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ void set_word(u32 at, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void put_zeros(u32 at) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
// Ordinary stores to shared memory before this, and tensor cores or copies after the next barrier.
__device__ __forceinline__ void copies_see_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_sync(int name) { asm volatile("bar.sync %0, 128;" ::"r"(name) : "memory"); }

// ---- copies ----

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void warm(const TensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void fetch_for_both(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}
__device__ __forceinline__ void fetch_runs_for_both(u32 to, const TensorMap* map, int k, int run, int block,
                                                    u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(run), "r"(block),
      "r"(barrier), "h"((unsigned short)3) : "memory");
}
// A thread's own copies of 16 bytes, in groups. It waits until at most LEFT groups are on their way.
__device__ __forceinline__ void copy_eight(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- sums ----

__device__ __forceinline__ void sums_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void sums_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void sums_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// A matrix in shared memory as the tensor cores want it described: rows of 128 bytes, swizzled.
__device__ __forceinline__ u64 matrix(u32 at, u32 leading_bytes) {
  return (1ull << 62) | ((1024ull >> 4) << 32) | ((u64)(leading_bytes >> 4) << 16) | ((at & 0x3FFFF) >> 4);
}

// 64 × 256 sums, each over 16 numbers.
template <int LEFT_TRANSPOSED, int TRANSPOSED> __device__ __forceinline__ void multiply(float (&sums)[128], u64 left, u64 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@NUMBERS 128@}, %128, %129, p, 1, 1, %131, %132;\n}\n"
               : @OPERANDS sums 128@ : "l"(left), "l"(right), "r"(add), "n"(LEFT_TRANSPOSED), "n"(TRANSPOSED));
}

// The same with numbers of one byte, each sum over 32 of them: as many bytes. Both sides must be [.., k].
enum Format { BF16, E4M3, E5M2_E4M3, E4M3_E5M2 };  // of left and right
#define MULTIPLY_FP8(FORMATS)                                                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n256k32.f32." FORMATS " {@NUMBERS 128@}, %128, %129, p, 1, 1;\n}\n"      \
               : @OPERANDS sums 128@ : "l"(left), "l"(right), "r"(add))
template <int FORMAT> __device__ __forceinline__ void multiply_fp8(float (&sums)[128], u64 left, u64 right, int add) {
  if constexpr (FORMAT == E4M3) MULTIPLY_FP8("e4m3.e4m3");
  else if constexpr (FORMAT == E5M2_E4M3) MULTIPLY_FP8("e5m2.e4m3");
  else MULTIPLY_FP8("e4m3.e5m2");
}

// ---- pairs of bf16 numbers ----

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 both;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}
__device__ __forceinline__ uint4 times(uint4 a, uint4 b) {
  return {times(a.x, b.x), times(a.y, b.y), times(a.z, b.z), times(a.w, b.w)};
}

// Four 8 × 8 matrices between registers and a strip: rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8.
__device__ __forceinline__ void lay(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
__device__ __forceinline__ uint4 take(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}

#define MAP const __grid_constant__ TensorMap
#define KERNEL extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
