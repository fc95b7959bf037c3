// Heads of 128, after attention_backward.cu: the two warpgroups with keys compute the gradients of queries too.
//
// Each multiplies the gradients of scores of all 128 keys with half of the columns of the keys. While the tensor cores
// multiply, each computes: weights during the gradients of weights, gradients of scores during the gradients of values,
// the integers of queries' gradients during the gradients of keys. A third warpgroup has few registers and three threads
// that work: one issues the copies, two add the warpgroups' results to those in global memory.

constexpr int KEY_REGISTERS = 240;  // a thread of the two warpgroups that compute

// One thread's: what a warpgroup adds to the gradients of queries, WIDTH columns of each piece.
__device__ __forceinline__ void add_to_queries(u32 base, const Task& task, Walk walk, int own) {
  const u32 part = base + PART_AT + own * PART_BYTES;
#pragma unroll 1
  for (u32 use = 0; !walk.over(); walk.next(), ++use) {
    wait(base + READY + 8 * own, use % 2);
    add_run(task.query_sums + (walk.piece() * HEAD + own * WIDTH) * QUERIES, part, PART_BYTES);
    added_runs_are_read();
    arrive(base + TAKEN + 8 * own);
  }
  added_runs_are_done();
}

struct ComputeGroup : KeyGroup {
  float d_query[WIDTH / 2];

  __device__ __forceinline__ void begin_scores() {
    sums_begin();
#pragma unroll
    for (int h = 0; h < HALVES; ++h) multiply_shared(scores, keys + h * KEYS_HALF, query(use) + h * QUERIES_HALF, h);
    sums_commit();
  }
  __device__ __forceinline__ void begin_weight_gradients() {
    sums_begin();
    multiply_weight_gradients(use);
    sums_commit();
  }
  // In fp32 in place of the scores, and in bf16.
  __device__ __forceinline__ void make_weights() {
    // The first 64 queries see none of the second warpgroup's keys.
    if (step <= own) hide_behind((own - step) * 64);
    if constexpr (MASKED) hide_before_first_keys();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 top = take_pair(stats(use) + j * 32);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        scores[i] = power_of_two(fmaf(scores[i], SCALE, -top.x));
        scores[i + 1] = power_of_two(fmaf(scores[i + 1], SCALE, -top.y));
        weights[i / 2] = pack(scores[i], scores[i + 1]);
      }
    }
  }
  // For this warpgroup, and in shared memory for both.
  __device__ __forceinline__ void make_score_gradients() {
#pragma unroll
    for (int i = 0; i < 32; i += 2) d_scores[i / 2] = pack(scores[i] * d_weights[i], scores[i + 1] * d_weights[i + 1]);
    lay_score_gradients();
  }
  __device__ __forceinline__ void hand_over(float upper, float lower) {
    wait(base + TAKEN + 8 * own, use % 2 ^ 1);
    put_part(base + PART_AT + own * PART_BYTES, d_query, upper, lower);
    if (threadIdx.x % 32 == 0) arrive(base + READY + 8 * own);
  }

  __device__ __forceinline__ void take_item(const Task& task, const Walk& walk) {
    const int steps = walk.end - 2 * walk.keys, blocks = walk.shape.tokens / QUERIES;
    const float* scale = task.scales + walk.piece() * 2 * QUERIES + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const u32 columns = all_keys + own * KEYS_HALF;
#pragma unroll 1
    for (int left = steps * walk.queries(); left > 0; --left, ++use) {
      const float upper = scale[0], lower = scale[8];
      await_queries(use);
      prepare_weight_gradients(use);
      begin_scores();
      begin_weight_gradients();
      sums_wait<1>();
      settle(scores);
      make_weights();
      sums_begin();
      multiply_weights(d_value, weights, gradient(use));
      sums_commit();
      sums_wait<1>();
      settle(d_weights);
      make_score_gradients();
      // Also: the other warpgroup is done with the piece before, whose gradients of scores the next ones replace.
      groups_sync();
      sums_begin();
      // Its columns of what the piece adds to the gradients of its queries.
      multiply_transposed(d_query, laid_scores(), columns);
      sums_commit();
      multiply_weights(d_key, d_scores, query(use));
      sums_commit();
      sums_wait<1>();
      settle(d_query), settle(d_value);
      hand_over(upper, lower);
      sums_wait<0>();
      settle(d_key);
      release_queries(use);
      scale += 2 * QUERIES;
      if (++step == steps) step = 0, scale += (blocks - steps) * 2 * QUERIES;
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(MAP queries, MAP gradients, MAP keys, MAP values, const float* stats, const float* scales,
                       int* query_sums, uint4* fused, const float* cosines, const float* sines, const int* lists,
                       int list_length, const int* first_keys, const int* ends, int table_rows, int tokens, int heads,
                       int groups) {
  const u32 base = shared_memory();
  // The same for all of a warp, and known to be.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    init_barriers(base);
    barriers_are_ready();
  }
  __syncthreads();
  const Task task = {&queries, &gradients, &keys, &values, stats, scales,
                     cosines, sines, first_keys, query_sums, fused, table_rows};
  Walk walk = {lists + (long long)blockIdx.x * list_length, ends, {tokens, heads, groups}};
  walk.begin();
  // 168 registers a thread at the start: three warpgroups share 504.
  if (warpgroup == 0) {
    fewer_registers<504 - 2 * KEY_REGISTERS>();
    if (threadIdx.x == 0) fetch_all(base, task, walk);
    if (threadIdx.x == 32 || threadIdx.x == 64) add_to_queries(base, task, walk, threadIdx.x / 32 - 1);
  } else {
    more_registers<KEY_REGISTERS>();
    ComputeGroup group;
    group.base = base, group.own = warpgroup - 1, group.use = 0;
    keep_keys(group, task, walk);
  }
}
