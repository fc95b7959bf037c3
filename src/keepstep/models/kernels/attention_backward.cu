// Causal attention backward for heads of 64.
//
// A block of three warpgroups works on 128 keys and values of one key-value head, and goes through all queries behind
// them, of all query heads that share it, 64 at a time. Two warpgroups have 64 keys each: they compute scores and the
// gradients of weights as keys × queries, so that both are what the products with queries and with the gradient of
// the output want from registers, and the gradients of keys and values never leave those. The third warpgroup multiplies the
// gradients of scores with keys, and adds the gradients of queries up in memory; one thread of it fetches.

constexpr int KEYS = 128, QUERIES = 64, HEAD = 64, STAGES = 4, SCORES = 2, PARTS = 2;
constexpr int KEYS_BYTES = KEYS * HEAD * 2, QUERIES_BYTES = QUERIES * HEAD * 2, STATS_BYTES = 2 * QUERIES * 4;
constexpr int SCORES_BYTES = KEYS * QUERIES * 2, PART_BYTES = QUERIES * HEAD * 4;
constexpr float ROOT = 0.125f, SCALE = ROOT * 1.4426950408889634f;  // scores are divided by the root of 64; then for 2^x

// Places in shared memory.
constexpr int KEY_AT = 0, VALUE_AT = KEY_AT + 2 * KEYS_BYTES, QUERY_AT = VALUE_AT + 2 * KEYS_BYTES;
constexpr int OUT_AT = QUERY_AT + STAGES * QUERIES_BYTES, SCORES_AT = OUT_AT + STAGES * QUERIES_BYTES;
constexpr int PART_AT = SCORES_AT + SCORES * SCORES_BYTES, STATS_AT = PART_AT + PARTS * PART_BYTES;
constexpr int BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES;
constexpr int FULL = BARRIERS_AT, EMPTY = FULL + 8 * STAGES, LAID = EMPTY + 8 * STAGES, FREED = LAID + 8 * SCORES;
constexpr int ARRIVED = FREED + 8 * SCORES;

// sums[64, 64] (+)= left[64, 16·4] · right, left in registers, right [n, k]
__device__ __forceinline__ void multiply(float (&sums)[32], const u32 (&left)[16], u32 right, int add) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix(right + k * 32, 16)), "r"(add | k));
}
// The same with both in shared memory, and always added.
__device__ __forceinline__ void add_shared(float (&sums)[32], u32 left, u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, 1, 1, 1, 0, 0;\n"
                 : @OPERANDS sums 32@ : "l"(matrix(left + k * 32, 16)), "l"(matrix(right + k * 32, 16)));
}
// The first with right [k, n], always added.
__device__ __forceinline__ void add_product(float (&sums)[32], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix(right + k * 2048, 8192)));
}
// sums[64, 64] (+)= left[16, 64]ᵀ · right[16, 64], both in shared memory
__device__ __forceinline__ void multiply_turned(float (&sums)[32], u32 left, u32 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, p, 1, 1, 1, 1;\n}\n"
               : @OPERANDS sums 32@ : "l"(matrix(left, 8192)), "l"(matrix(right, 8192)), "r"(add));
}
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
__device__ __forceinline__ void put_four(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void fetch_run(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Shape { int tokens, heads, groups; };

// What a block works on, one piece of 64 queries after the other: all that its list names.
struct Walk {
  const int* list;
  Shape shape;
  int item, row, group, keys, head, query;

  __device__ __forceinline__ void begin() { item = 0, open(); }
  __device__ __forceinline__ bool over() const { return keys < 0; }
  __device__ __forceinline__ int queries() const { return shape.heads / shape.groups; }
  __device__ __forceinline__ void open() {
    const int code = list[item];
    keys = code < 0 ? -1 : code % (shape.tokens / KEYS);
    const int shared = code / (shape.tokens / KEYS);
    row = shared / shape.groups, group = shared % shape.groups;
    head = group * queries(), query = 2 * keys;
  }
  __device__ __forceinline__ bool at_start() const { return query == 2 * keys && head == group * queries(); }
  __device__ __forceinline__ void next() {
    if (++query < shape.tokens / QUERIES) return;
    query = 2 * keys;
    if (++head < (group + 1) * queries()) return;
    ++item, open();
  }
};

// 64 × 64 sums as bf16 rows of 128 bytes each, `stride` apart; turned back by their positions where there are tables.
struct Rows {
  u32 room;  // 16 rows a warp
  __device__ __forceinline__ void write(float (&sums)[32], uint4* to, int stride, float scale, const float* cosines, const float* sines) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 mine = room + warp * 2048;
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] *= scale;
    if (cosines) {
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const int at = (warp * 16 + lane / 4 + i / 2 % 2 * 8) * (HEAD / 2) + i / 4 * 8 + lane % 4 * 2;
        const float2 c = *(const float2*)(cosines + at), s = *(const float2*)(sines + at);
        const float a = sums[i], b = sums[i + 1], x = sums[i + 16], y = sums[i + 17];
        sums[i] = a * c.x + x * s.x, sums[i + 16] = x * c.x - a * s.x;
        sums[i + 1] = b * c.y + y * s.y, sums[i + 17] = y * c.y - b * s.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
      lay(mine + lane % 16 * 128 + ((2 * i + lane / 16 ^ lane % 8) << 4), words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      to[(long long)(warp * 16 + row) * stride + lane % 8] = take(mine + row * 128 + ((lane % 8 ^ row % 8) << 4));
    }
    __syncwarp();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(MAP queries, MAP outs, MAP keys, MAP values, const float* stats, float* query_sums, uint4* fused,
                const float* cosines, const float* sines, const int* lists, int list_length, int table_rows, int tokens,
                int heads, int groups) {
  extern __shared__ __align__(1024) char room[];
  const u32 base = (u32)__cvta_generic_to_shared(room);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Walk walk = {lists + blockIdx.x * list_length, {tokens, heads, groups}};

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 2);
    for (int i = 0; i < SCORES; ++i) barrier_init(base + LAID + 8 * i, 8), barrier_init(base + FREED + 8 * i, 1);
    for (int i = 0; i < 2; ++i) barrier_init(base + ARRIVED + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  walk.begin();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    Walk ahead = walk;
    u32 fetched = 0, items_ahead = 0, use = 0, items = 0;
    auto fetch_next = [&]() {
      if (threadIdx.x || ahead.over()) return;
      const u32 stage = fetched % STAGES, full = base + FULL + 8 * stage;
      const int y = ahead.row * tokens + ahead.query * QUERIES, x = ahead.head * HEAD;
      if (ahead.at_start()) {
        const u32 slot = items_ahead++ % 2, arrived = base + ARRIVED + 8 * slot;
        const int from = ahead.row * tokens + ahead.keys * KEYS;
        expect(arrived, 2 * KEYS_BYTES);
        fetch(base + KEY_AT + slot * KEYS_BYTES, &keys, ahead.group * HEAD, from, arrived);
        fetch(base + VALUE_AT + slot * KEYS_BYTES, &values, ahead.group * HEAD, from, arrived);
      }
      wait(base + EMPTY + 8 * stage, fetched / STAGES % 2 ^ 1);
      expect(full, 2 * QUERIES_BYTES + STATS_BYTES);
      fetch(base + QUERY_AT + stage * QUERIES_BYTES, &queries, x, y, full);
      fetch(base + OUT_AT + stage * QUERIES_BYTES, &outs, x, y, full);
      const int tile = (ahead.row * heads + ahead.head) * (tokens / QUERIES) + ahead.query;
      fetch_run(base + STATS_AT + stage * STATS_BYTES, stats + (long long)tile * 2 * QUERIES, STATS_BYTES, full);
      ++fetched;
      ahead.next();
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch_next();
    __syncwarp();
    float part[32];
    for (; !walk.over(); walk.next(), ++use) {
      const u32 slot = use % SCORES, scores = base + SCORES_AT + slot * SCORES_BYTES;
      if (walk.at_start()) {
        wait(base + ARRIVED + 8 * (items % 2), items / 2 % 2);
        ++items;
      }
      const u32 key_at = base + KEY_AT + (items - 1) % 2 * KEYS_BYTES;
      wait(base + LAID + 8 * slot, use / SCORES % 2);
      sums_begin();
      // Of the first 64 queries the second 64 keys see none.
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_turned(part, scores + k * 2048, key_at + k * 2048, k);
      if (walk.query != 2 * walk.keys) {
#pragma unroll
        for (int k = 4; k < 8; ++k) multiply_turned(part, scores + k * 2048, key_at + k * 2048, 1);
      }
      sums_commit();
      fetch_next();
      __syncwarp();
      sums_wait<0>();
      settle(part);
      if (threadIdx.x == 0) {
        arrive(base + FREED + 8 * slot);
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PARTS - 1) : "memory");
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
      const u32 part_at = base + PART_AT + use % PARTS * PART_BYTES;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        put_four(part_at + (j * 128 + threadIdx.x) * 16, part[4 * j], part[4 * j + 1], part[4 * j + 2], part[4 * j + 3]);
      show_to_copies();
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (threadIdx.x == 0) {
        const int tile = (walk.row * heads + walk.head) * (tokens / QUERIES) + walk.query;
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                         query_sums + (long long)tile * QUERIES * HEAD), "r"(part_at), "r"(PART_BYTES) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      __syncwarp();
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
  const int own = warpgroup - 1;
  const u32 in_rows = lane % 16 * 128 + (own * 64 + warp * 16) * 128, chunk = lane / 16, turn = lane % 8;
  u32 key[16], weights[16], slopes[16], value_at;
  float scores[32], gains[32], by_key[32], by_value[32];
  u32 use = 0, items = 0;

  auto release = [&](u32 use) {
    if (threadIdx.x % 128 == 0) arrive(base + EMPTY + 8 * (use % STAGES));
  };
  // Scores, and the gradients of weights less what the softmax takes off every query's.
  auto begin_scores = [&](u32 use) {
    const u32 stage = use % STAGES, stats_at = base + STATS_AT + stage * STATS_BYTES + lane % 4 * 8;
    wait(base + FULL + 8 * stage, use / STAGES % 2);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 off = take_pair(stats_at + QUERIES * 4 + j * 32);
      gains[4 * j] = off.x, gains[4 * j + 1] = off.y, gains[4 * j + 2] = off.x, gains[4 * j + 3] = off.y;
    }
    multiply(scores, key, base + QUERY_AT + stage * QUERIES_BYTES, 0);
    add_shared(gains, value_at, base + OUT_AT + stage * QUERIES_BYTES);
  };

  while (!walk.over()) {
    const u32 slot = items % 2;
    wait(base + ARRIVED + 8 * slot, items / 2 % 2);
    ++items;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      take_matrices(key + 4 * k, base + KEY_AT + slot * KEYS_BYTES + in_rows + ((2 * k + chunk ^ turn) << 4));
    value_at = base + VALUE_AT + slot * KEYS_BYTES + own * 8192;
#pragma unroll
    for (int i = 0; i < 32; ++i) by_key[i] = by_value[i] = 0;
    const int steps = tokens / QUERIES - 2 * walk.keys, all = steps * walk.queries() - own * walk.queries();
    int step = 0;  // in its head
    // What a warpgroup's keys do not see it leaves out: the second one the first queries of every head.
    auto pass_hidden = [&]() {
      if (own == 1 && step == 0) {
        wait(base + FULL + 8 * (use % STAGES), use / STAGES % 2);
        release(use);
        wait(base + FREED + 8 * (use % SCORES), use / SCORES % 2 ^ 1);
        if (lane == 0) arrive(base + LAID + 8 * (use % SCORES));
        ++step, ++use;
      }
    };
    auto finish_scores = [&]() {
      const u32 laid_slot = use % SCORES, stage = use % STAGES;
      const u32 stats_at = base + STATS_AT + stage * STATS_BYTES + lane % 4 * 8;
      if (step == own) {
        // Keys behind a query are hidden from it.
        const int first = warp * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (i / 4 * 8 + i % 2 < first + i / 2 % 2 * 8) scores[i] = -1e30f;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 top = take_pair(stats_at + j * 32);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = 4 * j + 2 * r;
          const float a = power_of_two(fmaf(scores[i], SCALE, -top.x)), b = power_of_two(fmaf(scores[i + 1], SCALE, -top.y));
          weights[i / 2] = pack(a, b);
          slopes[i / 2] = pack(a * gains[i], b * gains[i + 1]);
        }
      }
      wait(base + FREED + 8 * laid_slot, use / SCORES % 2 ^ 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        lay(base + SCORES_AT + laid_slot * SCORES_BYTES + in_rows + ((2 * k + chunk ^ turn) << 4), slopes[4 * k],
            slopes[4 * k + 1], slopes[4 * k + 2], slopes[4 * k + 3]);
      show_to_copies();
      __syncwarp();
      if (lane == 0) arrive(base + LAID + 8 * laid_slot);
    };
    auto begin_products = [&]() {
      add_product(by_value, weights, base + OUT_AT + use % STAGES * QUERIES_BYTES);
      add_product(by_key, slopes, base + QUERY_AT + use % STAGES * QUERIES_BYTES);
    };

    pass_hidden();
    sums_begin();
    begin_scores(use);
    sums_commit();
    sums_wait<0>();
    settle(scores), settle(gains);
#pragma unroll 1
    for (int left = all - 1; left > 0; --left) {
      finish_scores();
      sums_begin();
      begin_products();
      const u32 before = use;
      ++use;
      if (++step == steps) step = 0;
      pass_hidden();
      begin_scores(use);
      sums_commit();
      sums_wait<0>();
      settle(scores), settle(gains), settle(by_key), settle(by_value);
      release(before);
    }
    finish_scores();
    sums_begin();
    begin_products();
    sums_commit();
    sums_wait<0>();
    settle(by_key), settle(by_value);
    release(use);
    ++use;
    // One row a token: the queries of a group, its key and its value, one group after another.
    const int slots = (heads + 2 * groups) * (HEAD / 8), from = walk.keys * KEYS + own * 64;
    const long long token = (long long)walk.row * tokens + from;
    uint4* to = fused + token * slots + (walk.group * (walk.queries() + 2) + walk.queries()) * (HEAD / 8);
    const long long at = table_rows == tokens ? from : token;
    // The room of these values: nobody reads them any more.
    const Rows out = {value_at};
    out.write(by_key, to, slots, ROOT, cosines ? cosines + at * (HEAD / 2) : nullptr, sines + at * (HEAD / 2));
    out.write(by_value, to + HEAD / 8, slots, 1.0f, nullptr, nullptr);
    show_to_copies();
    ++walk.item, walk.open();
  }
}

// What the softmax takes off: for each query the logarithm of its sum, and what its gradients of weights have in common.
// One block for 16 tokens, all heads. stats: [row, head, 64 queries] of 64 logarithms (base 2), then 64 negative sums.
extern "C" __global__ void __launch_bounds__(256)
    attention_stats(const uint4* mixed, const uint4* gradient, const float* normalisers, float* stats, int tokens, int heads) {
  const int first = blockIdx.x * 16, row = first / tokens, lane = threadIdx.x % 8;
  const float LOG2_E = 1.4426950408889634f;
  for (int i = threadIdx.x / 8; i < 16 * heads; i += 32) {
    const int head = i % heads, token = first % tokens + i / heads;
    const long long at = ((long long)(first + i / heads) * heads + head) * 8 + lane;
    const uint4 x = mixed[at], y = gradient[at];
    float sum = low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y);
    sum += low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
    for (int k = 1; k < 8; k *= 2) sum += __shfl_xor_sync(~0u, sum, k);
    const long long line = (long long)row * heads + head;
    float* to = stats + (line * (tokens / QUERIES) + token / QUERIES) * 2 * QUERIES + token % QUERIES;
    if (lane == 0) to[0] = normalisers[line * tokens + token] * LOG2_E, to[QUERIES] = -sum;
  }
}

// The gradients of 64 queries of a head from their sums, turned back, into the gradient of the fused projection.
extern "C" __global__ void __launch_bounds__(128)
    attention_queries(const float4* query_sums, uint4* fused, const float* cosines, const float* sines, int table_rows, int tokens,
                   int heads, int groups) {
  __shared__ __align__(1024) char room[8192];
  const int tile = blockIdx.x, blocks = tokens / QUERIES, head = tile % heads, block = tile / heads % blocks, row = tile / heads / blocks;
  const float4* from = query_sums + (((long long)row * heads + head) * blocks + block) * (QUERIES * HEAD / 4);
  float sums[32];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = from[j * 128 + threadIdx.x];
    sums[4 * j] = x.x, sums[4 * j + 1] = x.y, sums[4 * j + 2] = x.z, sums[4 * j + 3] = x.w;
  }
  const int each = heads / groups, slots = (heads + 2 * groups) * (HEAD / 8);
  const long long token = (long long)row * tokens + block * QUERIES, at = table_rows == tokens ? block * QUERIES : token;
  uint4* to = fused + token * slots + (head / each * (each + 2) + head % each) * (HEAD / 8);
  const Rows out = {(u32)__cvta_generic_to_shared(room)};
  out.write(sums, to, slots, ROOT, cosines ? cosines + at * (HEAD / 2) : nullptr, sines + at * (HEAD / 2));
}
