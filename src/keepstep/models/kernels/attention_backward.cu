// The backward pass of causal attention: gradients of queries, keys and values. What heads of 64 and of 128 share.
//
// An item is 128 keys and values of one key-value head. A thread block goes through all queries that see them, of all
// query heads that share them, in pieces of 64. Two warpgroups have 64 keys each. They compute scores and the gradients
// of softmax weights as keys × queries: both are then in registers in the layout that the matmuls with output gradients
// and queries need, and the gradients of keys and values stay in registers until the item ends. The gradients of scores
// of all 128 keys meet in shared memory: multiplied with the keys, they are what the piece adds to the gradients of its
// queries. attention_backward_64.cu and attention_backward_128.cu say who does that, and what runs at the same time.
// Threads of one more warpgroup issue the copies to shared memory and add results to those in global memory.
//
// Many thread blocks add to the gradients of one query, in no fixed order. They add integers: fixed-point numbers whose
// scale comes from a bound on the result, so that every order gives the same bits.
//
// In shared memory heads of 128 are two halves of 64 columns each. There is no room to prefetch their item's keys.
//
// MASKED is for packed documents and sliding windows: a query sees the keys from its first one on, which never
// decreases along a row. Pieces behind the last query that sees an item's keys are left out, and scores are masked only
// in pieces that hold a border of a document or a window.

constexpr bool MASKED = @MASKED@;
constexpr int HEAD = @HEAD@, HALVES = HEAD / 64;
constexpr int KEYS = 128, QUERIES = 64, STAGES = HEAD == 64 ? 4 : 3, SCORES = 2, PARTS = 2, SLOTS = HEAD == 64 ? 2 : 1;
constexpr int KEYS_BYTES = KEYS * HEAD * 2, QUERIES_BYTES = QUERIES * HEAD * 2;
constexpr int NUMBERS_BYTES = 2 * QUERIES * 4, FIRST_KEYS_BYTES = MASKED ? QUERIES * 4 : 0;
constexpr int STATS_BYTES = NUMBERS_BYTES + FIRST_KEYS_BYTES;  // of a piece: two numbers and a first key for each query
constexpr int KEYS_HALF = KEYS * 128, QUERIES_HALF = QUERIES * 128;  // bytes of one half of the columns
constexpr int WIDTH = 64;  // columns of queries' gradients that are computed at a time
constexpr int SCORES_BYTES = KEYS * QUERIES * 2, PART_BYTES = QUERIES * WIDTH * 4;
constexpr float LOG2_E = 1.4426950408889634f, ROOT = @ROOT@f, SCALE = ROOT * LOG2_E;
constexpr float HIDDEN = -1e30f;
constexpr float LARGEST_SUM = 1073741824.0f;  // half of what an int holds: rounding cannot make a sum wrap around

// Offsets in shared memory. Barriers say that a stage is FULL or EMPTY, that a part of the gradients of queries is
// READY or TAKEN, and that keys and values have ARRIVED or were LEFT. Heads of 64 have more behind these.
constexpr int KEY_AT = 0, VALUE_AT = KEY_AT + SLOTS * KEYS_BYTES, QUERY_AT = VALUE_AT + SLOTS * KEYS_BYTES;
constexpr int GRADIENT_AT = QUERY_AT + STAGES * QUERIES_BYTES, SCORES_AT = GRADIENT_AT + STAGES * QUERIES_BYTES;
constexpr int PART_AT = SCORES_AT + SCORES * SCORES_BYTES, STATS_AT = PART_AT + PARTS * PART_BYTES;
constexpr int BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES;
constexpr int FULL = BARRIERS_AT, EMPTY = FULL + 8 * STAGES, READY = EMPTY + 8 * STAGES, TAKEN = READY + 8 * PARTS;
constexpr int ARRIVED = TAKEN + 8 * PARTS, LEFT = ARRIVED + 8 * SLOTS;
constexpr int READERS = HEAD == 64 ? 12 : 8;  // warps that read an item's keys: heads of 64 have a warpgroup more

struct Shape { int tokens, heads, groups; };

// What a block works on: the items of its list, piece by piece.
struct Walk {
  const int *list, *ends;
  Shape shape;
  int item, row, group, keys, head, query, end;

  __device__ __forceinline__ void begin() { item = 0, open(); }
  __device__ __forceinline__ bool over() const { return keys < 0; }
  __device__ __forceinline__ int queries() const { return shape.heads / shape.groups; }
  __device__ __forceinline__ void open() {
    const int code = list[item];
    keys = code < 0 ? -1 : code % (shape.tokens / KEYS);
    const int shared = code / (shape.tokens / KEYS);
    row = shared / shape.groups, group = shared % shape.groups;
    head = group * queries(), query = 2 * keys, end = shape.tokens / QUERIES;
    if (MASKED && keys >= 0) end = ends[row * (shape.tokens / KEYS) + keys];
  }
  __device__ __forceinline__ bool at_start() const { return query == 2 * keys && head == group * queries(); }
  __device__ __forceinline__ bool at_end() const { return query == end - 1 && head == (group + 1) * queries() - 1; }
  __device__ __forceinline__ void next() {
    if (++query < end) return;
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

// Undo rope: rotate a thread's part of 64 tokens back, channel i with channel i + HEAD / 2.
struct Rope {
  const float *cosines, *sines;  // HEAD / 2 numbers a token; null for models without rope

  __device__ __forceinline__ Rope(const float* cosine, const float* sine, long long first) {
    const long long token = first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const long long at = token * (HEAD / 2) + threadIdx.x % 4 * 2;
    cosines = cosine ? cosine + at : nullptr, sines = sine + at;
  }
  __device__ __forceinline__ void rotate(float& a, float& b, float& x, float& y, int i) const {
    const int place = i % 2 * 8 * (HEAD / 2) + i / 2 * 8;
    const float2 c = *(const float2*)(cosines + place), s = *(const float2*)(sines + place);
    const float p = a, q = b;
    a = p * c.x + x * s.x, x = x * c.x - p * s.x;
    b = q * c.y + y * s.y, y = y * c.y - q * s.y;
  }
  __device__ __forceinline__ void undo(float (&sums)[HEAD / 2]) const {
    if (!cosines) return;
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i)
      rotate(sums[2 * i], sums[2 * i + 1], sums[2 * i + HEAD / 4], sums[2 * i + HEAD / 4 + 1], i);
  }
};

// 64 × 64 sums, multiplied by a factor for a thread's upper and its lower row, to bf16 rows that are `stride` eights
// apart; through 2 KiB of shared memory for each warp.
__device__ __forceinline__ void write_rows(const float* sums, float upper, float lower, u32 room, uint4* to,
                                           int stride) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 mine = room + warp * 2048;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float factor = j % 2 ? lower : upper;
      words[j] = pack(sums[8 * i + 2 * j] * factor, sums[8 * i + 2 * j + 1] * factor);
    }
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
  const float *stats, *scales, *cosines, *sines;
  const int* first_keys;
  int* query_sums;
  uint4* fused;
  int table_rows;
};

// One thread's: queries and gradients as soon as there is room, and keys and values with an item's first.
__device__ __forceinline__ void fetch_all(u32 base, const Task& task, Walk walk) {
  u32 items = 0;
#pragma unroll 1
  for (u32 pieces = 0; !walk.over(); walk.next(), ++pieces) {
    const int token = walk.row * walk.shape.tokens;
    const u32 stage = pieces % STAGES, full = base + FULL + 8 * stage;
    const int x = walk.head * HEAD, y = token + walk.query * QUERIES;
    wait(base + EMPTY + 8 * stage, pieces / STAGES % 2 ^ 1);
    expect(full, 2 * QUERIES_BYTES + STATS_BYTES);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      fetch(base + QUERY_AT + stage * QUERIES_BYTES + h * QUERIES_HALF, task.queries, x + h * 64, y, full);
      fetch(base + GRADIENT_AT + stage * QUERIES_BYTES + h * QUERIES_HALF, task.gradients, x + h * 64, y, full);
    }
    const u32 stats = base + STATS_AT + stage * STATS_BYTES;
    fetch_run(stats, task.stats + walk.piece() * 2 * QUERIES, NUMBERS_BYTES, full);
    if constexpr (MASKED) fetch_run(stats + NUMBERS_BYTES, task.first_keys + y, FIRST_KEYS_BYTES, full);
    if (!walk.at_start()) continue;
    const u32 slot = items % SLOTS, arrived = base + ARRIVED + 8 * slot;
    wait(base + LEFT + 8 * slot, items / SLOTS % 2 ^ 1);
    expect(arrived, 2 * KEYS_BYTES);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int column = walk.group * HEAD + h * 64, row = token + walk.keys * KEYS;
      fetch(base + KEY_AT + slot * KEYS_BYTES + h * KEYS_HALF, task.keys, column, row, arrived);
      fetch(base + VALUE_AT + slot * KEYS_BYTES + h * KEYS_HALF, task.values, column, row, arrived);
    }
    ++items;
  }
}

// 64 × WIDTH sums as integers, with a scale for a thread's upper and its lower row, in the order of attention_queries.
__device__ __forceinline__ void put_part(u32 part, const float (&sums)[WIDTH / 2], float upper, float lower) {
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j)
    put_four(part + (j * 128 + threadIdx.x % 128) * 16, __float2int_rn(sums[4 * j] * upper),
             __float2int_rn(sums[4 * j + 1] * upper), __float2int_rn(sums[4 * j + 2] * lower),
             __float2int_rn(sums[4 * j + 3] * lower));
  copies_see_stores();
  __syncwarp();
}

// One of the two warpgroups that have 64 keys each.
struct KeyGroup {
  u32 base, own;  // its number
  u32 weights[16], d_scores[16];
  float scores[32], d_weights[32], d_key[HEAD / 2], d_value[HEAD / 2];
  u32 all_keys, keys, values;  // addresses: of all keys of the item, of its own keys and its values
  u32 use, step;               // pieces so far; their number in their head
  int first;                   // its first key's number in the row

  // Address of this lane's 16-byte row of four 8 × 8 matrices, among 128 rows of 128 bytes.
  __device__ __forceinline__ u32 in_rows(int k) const {
    const u32 lane = threadIdx.x % 32, row = own * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
    return row * 128 + ((2 * k + lane / 16 ^ lane % 8) << 4);
  }
  __device__ __forceinline__ u32 query(u32 use) const { return base + QUERY_AT + use % STAGES * QUERIES_BYTES; }
  __device__ __forceinline__ u32 gradient(u32 use) const { return base + GRADIENT_AT + use % STAGES * QUERIES_BYTES; }
  __device__ __forceinline__ u32 laid_scores() const { return base + SCORES_AT + use % SCORES * SCORES_BYTES; }
  __device__ __forceinline__ u32 stats(u32 use) const {
    return base + STATS_AT + use % STAGES * STATS_BYTES + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ void await_queries(u32 use) const {
    wait(base + FULL + 8 * (use % STAGES), use / STAGES % 2);
  }
  __device__ __forceinline__ void release_queries(u32 use) const {
    if (threadIdx.x % 128 == 0) arrive(base + EMPTY + 8 * (use % STAGES));
  }

  // What the softmax subtracts from all gradients of a query's weights. Before the matmuls that run meanwhile: a
  // register that is written after the first of them makes the compiler wait for all of them.
  __device__ __forceinline__ void prepare_weight_gradients(u32 use) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 off = take_pair(stats(use) + QUERIES * 4 + j * 32);
      d_weights[4 * j] = d_weights[4 * j + 2] = off.x, d_weights[4 * j + 1] = d_weights[4 * j + 3] = off.y;
    }
    settle(d_weights);
  }
  // Added to what was prepared.
  __device__ __forceinline__ void multiply_weight_gradients(u32 use) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      multiply_shared(d_weights, values + h * KEYS_HALF, gradient(use) + h * QUERIES_HALF, 1);
  }
  // A query does not see the keys behind it: the piece begins `more` queries before this warpgroup's keys.
  __device__ __forceinline__ void hide_behind(int more) {
    const int lane = threadIdx.x % 32, hidden = threadIdx.x / 32 % 4 * 16 + lane / 4 - lane % 4 * 2 + more;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + i % 2 < hidden + i / 2 % 2 * 8) scores[i] = HIDDEN;
  }
  // A query does not see the keys before its first one. The last query's is the largest of the piece.
  __device__ __forceinline__ void hide_before_first_keys() {
    const u32 first_keys = stats(use) + NUMBERS_BYTES;
    if ((int)word(first_keys - threadIdx.x % 4 * 8 + (QUERIES - 1) * 4) <= first) return;
    const int key = first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int visible = word(first_keys + i / 2 * 32 + i % 2 * 4), upper = i / 2 * 4 + i % 2;
      if (visible > key) scores[upper] = HIDDEN;
      if (visible > key + 8) scores[upper + 2] = HIDDEN;
    }
  }
  __device__ __forceinline__ void lay_score_gradients() const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      lay(laid_scores() + in_rows(k), d_scores[4 * k], d_scores[4 * k + 1], d_scores[4 * k + 2], d_scores[4 * k + 3]);
    copies_see_stores();
  }
  // One row a token: the queries of a group, its key and its value, one group after another.
  __device__ __forceinline__ void write(const Task& task, const Walk& walk) {
    const int tokens = walk.shape.tokens, row_size = walk.row_size(), from = walk.keys * KEYS + own * 64;
    const long long token = (long long)walk.row * tokens + from;
    uint4* to = task.fused + token * row_size + (walk.group * (walk.queries() + 2) + walk.queries()) * (HEAD / 8);
    Rope(task.cosines, task.sines, task.table_rows == tokens ? from : token).undo(d_key);
    // Through the memory of the values, which is not read any more.
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      write_rows(d_key + 32 * h, ROOT, ROOT, values, to + h * 8, row_size);
      write_rows(d_value + 32 * h, 1, 1, values, to + HEAD / 8 + h * 8, row_size);
    }
    copies_see_stores();
    __syncwarp();
  }
};

// `Group` is a KeyGroup that can take an item: all queries of all heads that see its keys.
template <class Group> __device__ __forceinline__ void keep_keys(Group& group, const Task& task, const Walk& start) {
  const u32 base = group.base, own = group.own;
#pragma unroll 1
  for (int item = 0;; ++item) {
    // Read again from the list where it is needed: registers are what these warpgroups lack.
    Walk walk = start;
    walk.item = item, walk.open();
    if (walk.over()) return;
    const u32 slot = item % SLOTS;
    wait(base + ARRIVED + 8 * slot, item / SLOTS % 2);
    group.all_keys = base + KEY_AT + slot * KEYS_BYTES, group.keys = group.all_keys + own * QUERIES_HALF;
    group.values = base + VALUE_AT + slot * KEYS_BYTES + own * QUERIES_HALF;
#pragma unroll
    for (int i = 0; i < HEAD / 2; ++i) group.d_key[i] = group.d_value[i] = 0;
    group.first = walk.keys * KEYS + own * 64, group.step = 0;
    group.take_item(task, walk);
    walk = start;
    walk.item = item, walk.open();
    group.write(task, walk);
    if (threadIdx.x % 32 == 0) arrive(base + LEFT + 8 * slot);
  }
}

// One thread's.
__device__ __forceinline__ void init_barriers(u32 base) {
  for (int i = 0; i < STAGES; ++i) barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 2);
  for (int i = 0; i < PARTS; ++i) barrier_init(base + READY + 8 * i, 4), barrier_init(base + TAKEN + 8 * i, 1);
  for (int i = 0; i < SLOTS; ++i) barrier_init(base + ARRIVED + 8 * i, 1), barrier_init(base + LEFT + 8 * i, READERS);
}
