// What causal attention with heads of 64 passes back to queries, keys and values.
//
// An item is 128 keys and values of one key-value head. A block of three warpgroups goes through all queries that see
// them, of all query heads that share them, in pieces of 64. Two warpgroups have 64 keys each. They compute scores and
// the gradients of weights as keys × queries: so both lie in registers as the products with gradients and queries want
// them, and the gradients of keys and values never leave registers before the item ends. The third warpgroup multiplies
// the gradients of scores with keys and adds what that gives the queries to sums in memory; one of its threads fetches.

constexpr int KEYS = 128, QUERIES = 64, HEAD = 64, STAGES = 4, SCORES = 2, PARTS = 2;
constexpr int KEYS_BYTES = KEYS * HEAD * 2, QUERIES_BYTES = QUERIES * HEAD * 2, STATS_BYTES = 2 * QUERIES * 4;
constexpr int SCORES_BYTES = KEYS * QUERIES * 2, PART_BYTES = QUERIES * HEAD * 4;
constexpr float LOG2_E = 1.4426950408889634f, ROOT = 0.125f, SCALE = ROOT * LOG2_E;  // one over the root of 64
constexpr float HIDDEN = -1e30f;

// Places in shared memory. Barriers say that a stage is FULL or EMPTY, that gradients of scores are LAID or FREED, and
// that keys and values have ARRIVED or were LEFT.
constexpr int KEY_AT = 0, VALUE_AT = KEY_AT + 2 * KEYS_BYTES, QUERY_AT = VALUE_AT + 2 * KEYS_BYTES;
constexpr int GRADIENT_AT = QUERY_AT + STAGES * QUERIES_BYTES, SCORES_AT = GRADIENT_AT + STAGES * QUERIES_BYTES;
constexpr int PART_AT = SCORES_AT + SCORES * SCORES_BYTES, STATS_AT = PART_AT + PARTS * PART_BYTES;
constexpr int BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES;
constexpr int FULL = BARRIERS_AT, EMPTY = FULL + 8 * STAGES, LAID = EMPTY + 8 * STAGES, FREED = LAID + 8 * SCORES;
constexpr int ARRIVED = FREED + 8 * SCORES, LEFT = ARRIVED + 16;

// 64 × 64 sums = left · right, each over 64 numbers; left in registers, right lies as [n, k].
__device__ __forceinline__ void multiply(float (&sums)[32], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix(right + k * 32, 16)), "r"(k));
}
// The same added, left in shared memory.
__device__ __forceinline__ void add_shared(float (&sums)[32], u32 left, u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, 1, 1, 1, 0, 0;\n"
                 : @OPERANDS sums 32@ : "l"(matrix(left + k * 32, 16)), "l"(matrix(right + k * 32, 16)));
}
// The first added, right lies as [k, n].
__device__ __forceinline__ void add_product(float (&sums)[32], const u32 (&left)[16], u32 right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : @OPERANDS sums 32@
                 : "r"(left[4 * k]), "r"(left[4 * k + 1]), "r"(left[4 * k + 2]), "r"(left[4 * k + 3]),
                   "l"(matrix(right + k * 2048, 8192)));
}
// 64 × 64 sums over 16 numbers each, which lie as [k, m] and [k, n].
__device__ __forceinline__ void multiply_turned(float (&sums)[32], u32 left, u32 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {@NUMBERS 32@}, %32, %33, p, 1, 1, 1, 1;\n}\n"
               : @OPERANDS sums 32@ : "l"(matrix(left, 8192)), "l"(matrix(right, 8192)), "r"(add));
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
__device__ __forceinline__ void put_four(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void fetch_run(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void add_run(float* to, u32 from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
               "cp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Before the copy engine touches what threads have written or read.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Shape { int tokens, heads, groups; };

// What a block works on: the items of its list, piece by piece.
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
  // Its number among all of [row, head, 64 queries].
  __device__ __forceinline__ long long piece() const {
    return (long long)(row * shape.heads + head) * (shape.tokens / QUERIES) + query;
  }
  // Of the fused projection, in eights.
  __device__ __forceinline__ int row_size() const { return (shape.heads + 2 * shape.groups) * (HEAD / 8); }
};

// How far a thread's numbers of 64 tokens and half a head are turned.
struct Angles {
  float2 cosines[8], sines[8];

  // Tables have 32 numbers a token.
  __device__ __forceinline__ Angles(const float* cosine, const float* sine, long long first) {
    const long long token = first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const long long at = token * (HEAD / 2) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const long long place = at + i % 2 * 8 * (HEAD / 2) + i / 2 * 8;
      // Nothing is turned where there are no tables.
      cosines[i] = cosine ? *(const float2*)(cosine + place) : make_float2(1, 1);
      sines[i] = cosine ? *(const float2*)(sine + place) : make_float2(0, 0);
    }
  }
  __device__ __forceinline__ void turn_back(float (&sums)[32]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = sums[2 * i], b = sums[2 * i + 1], x = sums[2 * i + 16], y = sums[2 * i + 17];
      sums[2 * i] = a * cosines[i].x + x * sines[i].x, sums[2 * i + 16] = x * cosines[i].x - a * sines[i].x;
      sums[2 * i + 1] = b * cosines[i].y + y * sines[i].y, sums[2 * i + 17] = y * cosines[i].y - b * sines[i].y;
    }
  }
};

// 64 × 64 sums, multiplied, to bf16 rows that lie `stride` eights apart; through 2 KiB of room for each warp.
__device__ __forceinline__ void write_rows(const float (&sums)[32], float factor, u32 room, uint4* to, int stride) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 mine = room + warp * 2048;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack(sums[8 * i + 2 * j] * factor, sums[8 * i + 2 * j + 1] * factor);
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

struct Task {
  const TensorMap *queries, *gradients, *keys, *values;
  const float *stats, *cosines, *sines;
  float* query_sums;
  uint4* fused;
  int table_rows;
};

// One thread's: queries and gradients, STAGES - 1 pieces ahead of the work, and keys and values with an item's first.
struct Supply {
  u32 base, pieces, items;
  Walk ahead;

  __device__ __forceinline__ void fetch_next(const Task& task) {
    if (ahead.over()) return;
    const Shape shape = ahead.shape;
    if (ahead.at_start()) {
      const u32 slot = items % 2, arrived = base + ARRIVED + 8 * slot;
      const int x = ahead.group * HEAD, y = ahead.row * shape.tokens + ahead.keys * KEYS;
      wait(base + LEFT + 8 * slot, items / 2 % 2 ^ 1);
      expect(arrived, 2 * KEYS_BYTES);
      fetch(base + KEY_AT + slot * KEYS_BYTES, task.keys, x, y, arrived);
      fetch(base + VALUE_AT + slot * KEYS_BYTES, task.values, x, y, arrived);
      ++items;
    }
    const u32 stage = pieces % STAGES, full = base + FULL + 8 * stage;
    const int x = ahead.head * HEAD, y = ahead.row * shape.tokens + ahead.query * QUERIES;
    wait(base + EMPTY + 8 * stage, pieces / STAGES % 2 ^ 1);
    expect(full, 2 * QUERIES_BYTES + STATS_BYTES);
    fetch(base + QUERY_AT + stage * QUERIES_BYTES, task.queries, x, y, full);
    fetch(base + GRADIENT_AT + stage * QUERIES_BYTES, task.gradients, x, y, full);
    fetch_run(base + STATS_AT + stage * STATS_BYTES, task.stats + ahead.piece() * 2 * QUERIES, STATS_BYTES, full);
    ++pieces;
    ahead.next();
  }
};

// What a piece gives its queries: gradients of scores times keys, added to what other keys gave them.
__device__ __forceinline__ void add_to_queries(u32 base, const Task& task, Walk walk) {
  Supply supply = {base, 0, 0, walk};
  const bool fetches = threadIdx.x == 0;
  for (int i = 0; i < STAGES - 1 && fetches; ++i) supply.fetch_next(task);
  __syncwarp();
  u32 items = 0;
  float sums[32];
  for (u32 use = 0; !walk.over(); walk.next(), ++use) {
    const u32 slot = use % SCORES, scores = base + SCORES_AT + slot * SCORES_BYTES;
    if (walk.at_start()) {
      wait(base + ARRIVED + 8 * (items % 2), items / 2 % 2);
      ++items;
    }
    const u32 keys = base + KEY_AT + (items - 1) % 2 * KEYS_BYTES;
    wait(base + LAID + 8 * slot, use / SCORES % 2);
    sums_begin();
    // The first 64 queries do not see the second 64 keys.
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_turned(sums, scores + k * 2048, keys + k * 2048, k);
    if (walk.query != 2 * walk.keys) {
#pragma unroll
      for (int k = 4; k < 8; ++k) multiply_turned(sums, scores + k * 2048, keys + k * 2048, 1);
    }
    sums_commit();
    sums_wait<0>();
    settle(sums);
    if (fetches) {
      arrive(base + FREED + 8 * slot);
      supply.fetch_next(task);
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PARTS - 1) : "memory");
    }
    __syncwarp();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    // In the order that threads have them: `attention_queries` knows it.
    const u32 part = base + PART_AT + use % PARTS * PART_BYTES;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      put_four(part + (j * 128 + threadIdx.x) * 16, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
    show_to_copies();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (fetches) add_run(task.query_sums + walk.piece() * QUERIES * HEAD, part, PART_BYTES);
    __syncwarp();
  }
  if (fetches) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// One of the two warpgroups that hold 64 keys each.
struct Keeper {
  u32 base, own;  // its number
  u32 key[16], weights[16], slopes[16];
  float scores[32], gains[32], by_key[32], by_value[32];
  u32 values, use, step;  // pieces so far; their number in their head

  // The two take turns at the tensor cores, so that one's products meet the other's exponentials.
  __device__ __forceinline__ void my_turn() const { asm volatile("bar.sync %0, 256;" ::"r"(2 + own) : "memory"); }
  __device__ __forceinline__ void your_turn() const { asm volatile("bar.arrive %0, 256;" ::"r"(3 - own) : "memory"); }
  __device__ __forceinline__ void release(u32 use) const {
    if (threadIdx.x % 128 == 0) arrive(base + EMPTY + 8 * (use % STAGES));
  }
  // Where this lane's row of 16 bytes of four 8 × 8 matrices lies, among 128 rows of 128 bytes.
  __device__ __forceinline__ u32 in_rows(int k) const {
    const u32 lane = threadIdx.x % 32, row = own * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
    return row * 128 + ((2 * k + lane / 16 ^ lane % 8) << 4);
  }
  __device__ __forceinline__ u32 stats(u32 use) const {
    return base + STATS_AT + use % STAGES * STATS_BYTES + threadIdx.x % 4 * 8;
  }

  // Scores, and the gradients of weights less what the softmax takes off all of a query's.
  __device__ __forceinline__ void begin_scores(u32 use) {
    const u32 stage = use % STAGES;
    wait(base + FULL + 8 * stage, use / STAGES % 2);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 off = take_pair(stats(use) + QUERIES * 4 + j * 32);
      gains[4 * j] = gains[4 * j + 2] = off.x, gains[4 * j + 1] = gains[4 * j + 3] = off.y;
    }
    multiply(scores, key, base + QUERY_AT + stage * QUERIES_BYTES);
    add_shared(gains, values, base + GRADIENT_AT + stage * QUERIES_BYTES);
  }
  // Weights and the gradients of scores; the latter also to the warpgroup that needs them turned.
  __device__ __forceinline__ void finish_scores() {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (step == own) {
      // Keys behind a query are hidden from it.
      const int first = warp * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + i % 2 < first + i / 2 % 2 * 8) scores[i] = HIDDEN;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 top = take_pair(stats(use) + j * 32);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        const float a = power_of_two(fmaf(scores[i], SCALE, -top.x));
        const float b = power_of_two(fmaf(scores[i + 1], SCALE, -top.y));
        weights[i / 2] = pack(a, b);
        slopes[i / 2] = pack(a * gains[i], b * gains[i + 1]);
      }
    }
    const u32 slot = use % SCORES, to = base + SCORES_AT + slot * SCORES_BYTES;
    wait(base + FREED + 8 * slot, use / SCORES % 2 ^ 1);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      lay(to + in_rows(k), slopes[4 * k], slopes[4 * k + 1], slopes[4 * k + 2], slopes[4 * k + 3]);
    show_to_copies();
    __syncwarp();
    if (lane == 0) arrive(base + LAID + 8 * slot);
  }
  __device__ __forceinline__ void begin_products() {
    add_product(by_value, weights, base + GRADIENT_AT + use % STAGES * QUERIES_BYTES);
    add_product(by_key, slopes, base + QUERY_AT + use % STAGES * QUERIES_BYTES);
  }
  // The first queries of every head do not see the second keys: their warpgroup only says that it is done with them.
  __device__ __forceinline__ bool is_hidden() const { return own == 1 && step == 0; }
  __device__ __forceinline__ void pass_hidden() {
    if (!is_hidden()) return;
    my_turn();
    your_turn();
    wait(base + FULL + 8 * (use % STAGES), use / STAGES % 2);
    release(use);
    wait(base + FREED + 8 * (use % SCORES), use / SCORES % 2 ^ 1);
    if (threadIdx.x % 32 == 0) arrive(base + LAID + 8 * (use % SCORES));
    ++step, ++use;
  }

  // All queries of all heads that see these keys. While one piece's products run, the next one's scores do.
  __device__ __forceinline__ void take_item(int steps, int heads) {
    step = 0;
    pass_hidden();
    my_turn();
    sums_begin();
    begin_scores(use);
    sums_commit();
    your_turn();
    sums_wait<0>();
    settle(scores), settle(gains);
#pragma unroll 1
    for (int left = (steps - own) * heads - 1; left > 0; --left) {
      finish_scores();
      my_turn();
      sums_begin();
      begin_products();
      const u32 before = use;
      ++use;
      if (++step == steps) step = 0;
      begin_scores(use + is_hidden());
      sums_commit();
      your_turn();
      pass_hidden();
      sums_wait<0>();
      settle(scores), settle(gains), settle(by_key), settle(by_value);
      release(before);
    }
    finish_scores();
    my_turn();
    sums_begin();
    begin_products();
    sums_commit();
    your_turn();
    sums_wait<0>();
    settle(by_key), settle(by_value);
    release(use);
    ++use;
  }
  // One row a token: the queries of a group, its key and its value, one group after another.
  __device__ __forceinline__ void write(const Task& task, const Walk& walk) {
    const int tokens = walk.shape.tokens, row_size = walk.row_size(), from = walk.keys * KEYS + own * 64;
    const long long token = (long long)walk.row * tokens + from;
    uint4* to = task.fused + token * row_size + (walk.group * (walk.queries() + 2) + walk.queries()) * (HEAD / 8);
    Angles(task.cosines, task.sines, task.table_rows == tokens ? from : token).turn_back(by_key);
    // Through the room of the values, which nobody reads any more.
    write_rows(by_key, ROOT, values, to, row_size);
    write_rows(by_value, 1, values, to + HEAD / 8, row_size);
    show_to_copies();
    __syncwarp();
  }
};

__device__ __forceinline__ void keep_keys(u32 base, const Task& task, Walk walk, int own) {
  Keeper keeper;
  keeper.base = base, keeper.own = own, keeper.use = 0;
  if (own == 1) keeper.your_turn();
  for (u32 items = 0; !walk.over(); ++walk.item, ++items, walk.open()) {
    const u32 slot = items % 2;
    wait(base + ARRIVED + 8 * slot, items / 2 % 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) take_matrices(keeper.key + 4 * k, base + KEY_AT + slot * KEYS_BYTES + keeper.in_rows(k));
    keeper.values = base + VALUE_AT + slot * KEYS_BYTES + own * (KEYS_BYTES / 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) keeper.by_key[i] = keeper.by_value[i] = 0;
    keeper.take_item(walk.shape.tokens / QUERIES - 2 * walk.keys, walk.queries());
    keeper.write(task, walk);
    if (threadIdx.x % 32 == 0) arrive(base + LEFT + 8 * slot);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(MAP queries, MAP gradients, MAP keys, MAP values, const float* stats, float* query_sums,
                       uint4* fused, const float* cosines, const float* sines, const int* lists, int list_length,
                       int table_rows, int tokens, int heads, int groups) {
  extern __shared__ __align__(1024) char room[];
  const u32 base = (u32)__cvta_generic_to_shared(room);
  // The same for all of a warp, and known to be.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 2);
    for (int i = 0; i < SCORES; ++i) barrier_init(base + LAID + 8 * i, 8), barrier_init(base + FREED + 8 * i, 1);
    for (int i = 0; i < 2; ++i) barrier_init(base + ARRIVED + 8 * i, 1), barrier_init(base + LEFT + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Task task = {&queries, &gradients, &keys, &values, stats, cosines, sines, query_sums, fused, table_rows};
  Walk walk = {lists + blockIdx.x * list_length, {tokens, heads, groups}};
  walk.begin();
  // 168 registers a thread at the start.
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    add_to_queries(base, task, walk);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    keep_keys(base, task, walk, warpgroup - 1);
  }
}

// What the softmax takes off: for each query the logarithm of its sum, and what its gradients of weights have in common.
// One block for 16 tokens, all heads. stats: [row, head, 64 queries] of 64 logarithms (base 2), then 64 negative sums.
extern "C" __global__ void __launch_bounds__(256)
    attention_stats(const uint4* mixed, const uint4* gradient, const float* normalisers, float* stats, int tokens,
                    int heads) {
  const int first = blockIdx.x * 16, row = first / tokens, lane = threadIdx.x % 8;
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

// The gradients of 64 queries of all heads of a group from their sums, turned back, into the gradient of the projection.
extern "C" __global__ void __launch_bounds__(128)
    attention_queries(const float4* query_sums, uint4* fused, const float* cosines, const float* sines, int table_rows,
                      int tokens, int heads, int groups) {
  __shared__ __align__(1024) char room[8192];
  const int blocks = tokens / QUERIES, group = blockIdx.x % groups, block = blockIdx.x / groups % blocks;
  const int row = blockIdx.x / groups / blocks, each = heads / groups, slots = (heads + 2 * groups) * (HEAD / 8);
  const long long token = (long long)row * tokens + block * QUERIES;
  const Angles angles(cosines, sines, table_rows == tokens ? block * QUERIES : token);
  const float4* from = query_sums + (((long long)row * heads + group * each) * blocks + block) * (QUERIES * HEAD / 4);
  uint4* to = fused + token * slots + group * (each + 2) * (HEAD / 8);
  for (int head = 0; head < each; ++head) {
    float sums[32];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 x = from[j * 128 + threadIdx.x];
      sums[4 * j] = x.x, sums[4 * j + 1] = x.y, sums[4 * j + 2] = x.z, sums[4 * j + 3] = x.w;
    }
    angles.turn_back(sums);
    write_rows(sums, ROOT, (u32)__cvta_generic_to_shared(room), to, slots);
    from += (long long)blocks * (QUERIES * HEAD / 4), to += HEAD / 8;
  }
}
