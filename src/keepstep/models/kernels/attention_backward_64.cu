// Heads of 64, after attention_backward.cu: a warpgroup of its own computes the gradients of queries.
//
// A score costs half as much multiplication as with heads of 128, and its exponential and conversions the same: the two
// warpgroups with keys have no time for the integers of queries' gradients. They alternate on the tensor cores, so that
// one's matmuls run during the other's exponentials, and while one piece's matmuls run, so do the next one's scores.
// They lay the gradients of scores in shared memory, where a third warpgroup multiplies them with keys. A fourth has two
// threads that work: one issues the copies, one adds the third's results to those in global memory.

constexpr int KEY_REGISTERS = 208, QUERY_REGISTERS = 72, COPY_REGISTERS = 24;  // a thread; 128 at the start
static_assert(2 * KEY_REGISTERS + QUERY_REGISTERS + COPY_REGISTERS == 512);
// Barriers, behind the others: gradients of scores are LAID or FREED.
constexpr int LAID = LEFT + 8 * SLOTS, FREED = LAID + 8 * SCORES;

// One thread's: what the third warpgroup adds to the gradients of queries.
__device__ __forceinline__ void add_to_queries(u32 base, const Task& task, Walk walk) {
#pragma unroll 1
  for (u32 use = 0; !walk.over(); walk.next(), ++use) {
    wait(base + READY + 8 * (use % PARTS), use / PARTS % 2);
    add_run(task.query_sums + walk.piece() * HEAD * QUERIES, base + PART_AT + use % PARTS * PART_BYTES, PART_BYTES);
    added_runs_are_read();
    arrive(base + TAKEN + 8 * (use % PARTS));
  }
  added_runs_are_done();
}

// The third warpgroup's: gradients of scores times keys.
__device__ __forceinline__ void compute_query_gradients(u32 base, const Task& task, Walk walk) {
  u32 items = 0;
  float sums[WIDTH / 2];
  const u32 thread = threadIdx.x % 128;
  const float* scales = task.scales + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (u32 use = 0; !walk.over(); walk.next(), ++use) {
    const u32 slot = use % SCORES, part = use % PARTS;
    const float* scale = scales + walk.piece() * 2 * QUERIES;
    const float upper = scale[0], lower = scale[8];
    if (walk.at_start()) {
      wait(base + ARRIVED + 8 * (items % SLOTS), items / SLOTS % 2);
      ++items;
    }
    wait(base + LAID + 8 * slot, use / SCORES % 2);
    sums_begin();
    multiply_transposed(sums, base + SCORES_AT + slot * SCORES_BYTES, base + KEY_AT + (items - 1) % SLOTS * KEYS_BYTES);
    sums_commit();
    wait(base + TAKEN + 8 * part, use / PARTS % 2 ^ 1);
    sums_wait<0>();
    settle(sums);
    if (thread == 0) arrive(base + FREED + 8 * slot);
    // The warpgroups with keys leave an item up to two pieces before this one is done with it.
    if (thread % 32 == 0 && walk.at_end()) arrive(base + LEFT + 8 * ((items - 1) % SLOTS));
    put_part(base + PART_AT + part * PART_BYTES, sums, upper, lower);
    if (thread % 32 == 0) arrive(base + READY + 8 * part);
  }
}

struct AlternatingGroup : KeyGroup {
  u32 key[16];

  __device__ __forceinline__ void my_turn() const { wait_for_turn(2 + own); }
  __device__ __forceinline__ void your_turn() const { give_turn(3 - own); }

  __device__ __forceinline__ void prepare_scores(u32 use) {
    await_queries(use);
    prepare_weight_gradients(use);
  }
  // Scores, and the gradients of weights minus what the softmax subtracts from all of a query's.
  __device__ __forceinline__ void begin_scores(u32 use) {
    multiply(scores, key, query(use));
    multiply_weight_gradients(use);
  }
  // Weights and the gradients of scores; the latter also go to the warpgroup that needs them transposed.
  __device__ __forceinline__ void finish_scores() {
    if (step == own) hide_behind(0);
    if constexpr (MASKED) hide_before_first_keys();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 top = take_pair(stats(use) + j * 32);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        const float a = power_of_two(fmaf(scores[i], SCALE, -top.x));
        const float b = power_of_two(fmaf(scores[i + 1], SCALE, -top.y));
        weights[i / 2] = pack(a, b);
        d_scores[i / 2] = pack(a * d_weights[i], b * d_weights[i + 1]);
      }
    }
    wait(base + FREED + 8 * (use % SCORES), use / SCORES % 2 ^ 1);
    lay_score_gradients();
    say_laid();
  }
  __device__ __forceinline__ void say_laid() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(base + LAID + 8 * (use % SCORES));
  }
  __device__ __forceinline__ void begin_matmuls(u32 use) {
    multiply_weights(d_value, weights, gradient(use));
    multiply_weights(d_key, d_scores, query(use));
  }
  // The first queries of every head do not see the second keys: their gradients of scores are zeros.
  __device__ __forceinline__ bool is_hidden() const { return own == 1 && step == 0; }
  __device__ __forceinline__ void pass_hidden() {
    if (!is_hidden()) return;
    // Before the turn, which all warps wait for: none still waits for these queries when they are released.
    await_queries(use);
    my_turn(), your_turn();
    release_queries(use);
    wait(base + FREED + 8 * (use % SCORES), use / SCORES % 2 ^ 1);
#pragma unroll
    for (int k = 0; k < 4; ++k) lay(laid_scores() + in_rows(k), 0, 0, 0, 0);
    copies_see_stores();
    say_laid();
    ++step, ++use;
  }

  __device__ __forceinline__ void take_item(const Task&, const Walk& walk) {
    const int steps = walk.end - 2 * walk.keys;
#pragma unroll
    for (int k = 0; k < 4; ++k) take_matrices(key + 4 * k, all_keys + in_rows(k));
    pass_hidden();
    prepare_scores(use);
    my_turn();
    sums_begin();
    begin_scores(use);
    sums_commit();
    your_turn();
    sums_wait<0>();
    settle(scores), settle(d_weights);
#pragma unroll 1
    for (int left = (steps - own) * walk.queries() - 1; left > 0; --left) {
      finish_scores();
      const u32 before = use++;
      if (++step == steps) step = 0;
      prepare_scores(use + is_hidden());
      my_turn();
      sums_begin();
      begin_matmuls(before);
      begin_scores(use + is_hidden());
      sums_commit();
      your_turn();
      pass_hidden();
      sums_wait<0>();
      settle(scores), settle(d_weights), settle(d_key), settle(d_value);
      release_queries(before);
    }
    finish_scores();
    my_turn();
    sums_begin();
    begin_matmuls(use);
    sums_commit();
    your_turn();
    sums_wait<0>();
    settle(d_key), settle(d_value);
    release_queries(use);
    ++use;
  }
};

extern "C" __global__ void __launch_bounds__(512, 1)
    attention_backward(MAP queries, MAP gradients, MAP keys, MAP values, const float* stats, const float* scales,
                       int* query_sums, uint4* fused, const float* cosines, const float* sines, const int* lists,
                       int list_length, const int* first_keys, const int* ends, int table_rows, int tokens, int heads,
                       int groups) {
  const u32 base = shared_memory();
  // The same for all of a warp, and known to be.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    init_barriers(base);
    for (int i = 0; i < SCORES; ++i) barrier_init(base + LAID + 8 * i, 8), barrier_init(base + FREED + 8 * i, 1);
    barriers_are_ready();
  }
  __syncthreads();
  const Task task = {&queries, &gradients, &keys, &values, stats, scales,
                     cosines, sines, first_keys, query_sums, fused, table_rows};
  Walk walk = {lists + (long long)blockIdx.x * list_length, ends, {tokens, heads, groups}};
  walk.begin();
  if (warpgroup == 0) {
    fewer_registers<COPY_REGISTERS>();
    if (threadIdx.x == 0) fetch_all(base, task, walk);
    if (threadIdx.x == 32) add_to_queries(base, task, walk);
  } else if (warpgroup == 1) {
    fewer_registers<QUERY_REGISTERS>();
    compute_query_gradients(base, task, walk);
  } else {
    more_registers<KEY_REGISTERS>();
    AlternatingGroup group;
    group.base = base, group.own = warpgroup - 2, group.use = 0;
    if (group.own == 1) group.your_turn();
    keep_keys(group, task, walk);
  }
}
