// The projection to queries, keys and values, x[m, k] · weight[n, k]ᵀ, with rope applied to its heads of 64 or 128.
//
// A row's heads come group by group: a group's query heads, its key head, its value head. Channel i of a head is rotated
// together with channel i + HEAD / 2; values are not rotated. So that both are in one piece of a tile, runs of 32 rows of
// the weight are fetched in the order 0, HEAD / 2, 32, HEAD / 2 + 32: a piece's strips are the first and second channels
// of 32 pairs.

template <int HEAD> struct Rotated : ByOutputs {
  static constexpr int EIGHTS = HEAD / 8, PARTS = HEAD / 64;  // of a head: eights, and pieces that it is handed over in
  uint4 *query, *key, *value;    // eight numbers each
  const float4 *cosines, *sines;  // EIGHTS of them a row of the tables
  int table_rows, queries, groups;
  struct Spot { int row, head; };
  struct Inputs {};

  __device__ __forceinline__ void fetch_right(u32 to, int step, Tile tile, u32 rank, u32 barrier) const {
    const int head = (tile.column * 2 + rank) * (COLUMNS / 2) / HEAD;
    fetch_runs_for_both(to + rank * (RIGHT_BYTES / 2), right, step * DEPTH, 0, head, barrier);
  }
  __device__ __forceinline__ Inputs inputs(Spot, int, int) const { return {}; }
  __device__ __forceinline__ Spot spot(Tile tile) const {
    return {tile.row + (int)threadIdx.x % 32 / 4, tile.column * (COLUMNS / HEAD)};
  }
  __device__ __forceinline__ void work_out(const Inputs&, const Handed& handed, Spot spot, int piece, int warp) const {
    const int lane = threadIdx.x % 32, head = spot.head + piece / PARTS, group = head / (queries + 2);
    const int place = head - group * (queries + 2), eight = piece % PARTS * 4 + lane % 4;
    uint4 first[2], second[2];
    handed.await();
    handed.read(first, 0);
    handed.read(second, 1);
    handed.free();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = spot.row + warp * 16 + i * 8;
      if (place <= queries) rotate(first[i], second[i], row % table_rows * EIGHTS + eight * 2);
      uint4* to = place > queries    ? value + (row * groups + group) * EIGHTS
                  : place == queries ? key + (row * groups + group) * EIGHTS
                                     : query + (row * groups * queries + group * queries + place) * EIGHTS;
      to[eight] = first[i];
      to[eight + EIGHTS / 2] = second[i];
    }
  }
  __device__ __forceinline__ void rotate(uint4& first, uint4& second, int angle) const {
    const float4 c0 = cosines[angle], c1 = cosines[angle + 1], s0 = sines[angle], s1 = sines[angle + 1];
    rotate(first.x, second.x, c0.x, c0.y, s0.x, s0.y);
    rotate(first.y, second.y, c0.z, c0.w, s0.z, s0.w);
    rotate(first.z, second.z, c1.x, c1.y, s1.x, s1.y);
    rotate(first.w, second.w, c1.z, c1.w, s1.z, s1.w);
  }
  __device__ __forceinline__ static void rotate(u32& first, u32& second, float c0, float c1, float s0, float s1) {
    const float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
    first = pack(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1);
    second = pack(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1);
  }
};

#define QKV_ROPE_GEMM(HEAD)                                                                                                \
  KERNEL qkv_rope_gemm_##HEAD(MAP left, MAP weight, uint4* query, uint4* key, uint4* value, const float4* cosines,       \
                              const float4* sines, int row_pairs, int column_tiles, int steps, int table_rows,           \
                              int queries, int groups) {                                                                 \
    const Rotated<HEAD> finish = {{&weight}, query, key, value, cosines, sines, table_rows, queries, groups};            \
    run_tiles(&left, finish, row_pairs, column_tiles, steps);                                                            \
  }
QKV_ROPE_GEMM(64)
QKV_ROPE_GEMM(128)
