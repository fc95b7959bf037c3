// Instructions that attention_backward_64.cu and attention_backward_128.cu use besides those of hopper.cu.

// Which half of `matrix` depends on the place: the next 16 numbers of k are a small sum away.
__device__ __forceinline__ u32 place(u32 at, u32 leading_bytes) { return (at >> 4) + (leading_bytes << 12); }
__device__ __forceinline__ u64 matrix_at(u32 place) { return matrix(0, 0) | place; }

// 64 × 64 sums = left · right, each over 64 numbers; left in registers, right as [n, k].
__device__ __forceinline__ void multiply(float (&sums)[32], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix_at(place(right, 16) + k * 2)), "r"(k));
}
// The same, left in shared memory; added to what the sums were, or not.
__device__ __forceinline__ void multiply_shared(float (&sums)[32], u32 left, u32 right, int add) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : @OPERANDS sums 32@ : "l"(matrix_at(place(left, 16) + k * 2)), "l"(matrix_at(place(right, 16) + k * 2)), "r"(k | add));
}
// 64 × 64 or 64 × 128 sums over 64 numbers are added; left in registers, right as [k, n] in halves of 64 columns.
__device__ __forceinline__ void multiply_weights(float (&sums)[32], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix_at(place(right, 8192) + k * 128)));
}
__device__ __forceinline__ void multiply_weights(float (&sums)[64], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {@NUMBERS 64@}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
                 : @OPERANDS sums 64@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix_at(place(right, 8192) + k * 128)));
}
// 64 × 64 sums over 128 numbers each, from [k, m] and [k, n].
__device__ __forceinline__ void multiply_transposed(float (&sums)[32], u32 left, u32 right) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, p, 1, 1, 1, 1;\n}\n"
                 : @OPERANDS sums 32@
                 : "l"(matrix_at(place(left, 8192) + k * 128)), "l"(matrix_at(place(right, 8192) + k * 128)), "r"(k));
}
// Keeps the compiler from reading sums before they were waited for.
template <int N> __device__ __forceinline__ void settle(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ __forceinline__ void take_matrices(u32* words, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ float2 take_pair(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void put_four(u32 at, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void fetch_run(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void add_run(int* to, u32 from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;\n"
               "cp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Their memory may be written again.
__device__ __forceinline__ void added_runs_are_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void added_runs_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The two warpgroups with keys wait for one another.
__device__ __forceinline__ void groups_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// The two alternate: one waits for its name, the other gives it.
__device__ __forceinline__ void wait_for_turn(u32 name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ __forceinline__ void give_turn(u32 name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }
