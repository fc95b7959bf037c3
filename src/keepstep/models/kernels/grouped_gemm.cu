// The matmuls of experts: rows sorted by expert, each expert with weights of its own. One launch for all experts.
//
// Where an expert's rows end is read on the device, so the host never waits for it. A tile never holds rows of two experts:
// at the end of an expert it computes rows of the next one too, and does not write them.
//
// expert_gate_up    gate_up[m, 2f] = x[m, d] · gate_up weights[2f, d]ᵀ, and activation[m, f] = silu(gate) · up · weight
// expert_down       out[m, d] = activation · down[d, f]ᵀ
// expert_d_gate_up  dy[m, f] = d_out[m, d] · down, which is never written: the gradient of gate_up, the activation again,
//                   and the gradient of the weights, one sum for each 32 columns
// expert_dx         dx[m, d] = d_gate_up · gate_up weights
// expert_outer      leftᵀ · right over the rows of each expert: the gradients of weights
//
// With _fp8, two numbers of one byte are in place of each bf16 number, and both sides are [.., k], so expert_outer_fp8 has
// them transposed. A row of left has a scale, and so has each expert; sums are multiplied by both.

constexpr int PAIR_ROWS = 2 * ROWS;

// Left is [m, k], its rows sorted by group. Tiles are numbered group by group: call `pair` with rising numbers.
template <int NUMBERS> struct GroupedRows {
  static constexpr int LEFT_TRANSPOSED = 0, FORMAT = NUMBERS;
  typedef Steps Depth;
  const int* ends;  // where the rows of each group end
  int groups, right_rows, column_tiles, steps;
  int group, first_tile, start, end;  // the group that the last number was in

  __device__ __forceinline__ static GroupedRows make(const int* ends, int groups, int right_rows, int column_tiles,
                                                     int steps) {
    return {ends, groups, right_rows, column_tiles, steps, 0, 0, 0, ends[0]};
  }
  __device__ __forceinline__ int row_pairs() const { return (end - start + PAIR_ROWS - 1) / PAIR_ROWS; }
  // Called by whole warps.
  __device__ __forceinline__ int tiles() const {
    int pairs = 0;
    for (int i = threadIdx.x % 32; i < groups; i += 32)
      pairs += (ends[i] - (i ? ends[i - 1] : 0) + PAIR_ROWS - 1) / PAIR_ROWS;
    return __reduce_add_sync(~0u, pairs) * column_tiles;
  }
  template <int GROUP> __device__ __forceinline__ Tile pair(int number) {
    int here = row_pairs() * column_tiles;
    while (number - first_tile >= here && group + 1 < groups) {
      first_tile += here, start = end, end = ends[++group];
      here = row_pairs() * column_tiles;
    }
    if (number - first_tile >= here) return {};  // past the last tile
    const Tile inside = pair_tile<GROUP>(number - first_tile, row_pairs(), column_tiles);
    return {start + inside.row, inside.column, group, group * right_rows, end};
  }
  __device__ __forceinline__ Steps depth(int) const { return {steps}; }
  __device__ __forceinline__ void fetch_left(u32 to, const TensorMap* map, int step, Tile tile, u32 barrier) const {
    fetch(to, map, step * DEPTH, tile.row, barrier);
  }
};

// The rows of one group, in steps of 64. At least one step for each piece that the tile before is handed over in.
struct GroupedSteps {
  int count, rows;

  // The last step may fetch rows of the next group: zeros instead. Called by a whole warpgroup with its 64 columns of left.
  __device__ __forceinline__ void clear_rest(u32 left, int step) const {
    const int valid = rows - step * DEPTH, thread = threadIdx.x % 128;
    if (valid >= DEPTH) return;
#pragma unroll
    for (int row = thread / 8; row < DEPTH; row += 16)
      if (row >= valid) put_zeros(left + row * 128 + thread % 8 * 16);
    copies_see_stores();
    warpgroup_sync(threadIdx.x / 128);
  }
};

// Left is [k, m] and right [k, n], and k are the rows of all groups: each group has sums of its own.
struct GroupedDepth {
  static constexpr int LEFT_TRANSPOSED = 1, FORMAT = BF16;
  typedef GroupedSteps Depth;
  const int* ends;
  int groups, row_pairs, column_tiles;

  __device__ __forceinline__ int tiles() const { return groups * row_pairs * column_tiles; }
  __device__ __forceinline__ int start(int group) const { return group ? ends[group - 1] : 0; }
  template <int GROUP> __device__ __forceinline__ Tile pair(int number) const {
    const int of_group = row_pairs * column_tiles, group = number / of_group;
    if (group >= groups) return {};  // past the last tile
    const Tile inside = pair_tile<GROUP>(number % of_group, row_pairs, column_tiles);
    return {inside.row, inside.column, group, start(group), row_pairs * PAIR_ROWS};
  }
  __device__ __forceinline__ GroupedSteps depth(int number) const {
    const int group = number / (row_pairs * column_tiles), rows = ends[group] - start(group);
    return {max(8, (rows + DEPTH - 1) / DEPTH), rows};
  }
  __device__ __forceinline__ void fetch_left(u32 to, const TensorMap* map, int step, Tile tile, u32 barrier) const {
    for (int i = 0; i < 2; ++i) fetch(to + i * (LEFT_BYTES / 2), map, tile.row + i * 64, tile.right + step * DEPTH, barrier);
  }
};

// The same in fp8: left is [m, k] and right [n, k]. The numbers of each group begin at a multiple of 128, and zeros follow
// them up to the next one.
template <int NUMBERS> struct GroupedRuns {
  static constexpr int LEFT_TRANSPOSED = 0, FORMAT = NUMBERS, STEP = 2 * DEPTH;
  typedef Steps Depth;
  const int *ends, *untils;  // where the numbers of each group end, without zeros and with them
  int groups, row_pairs, column_tiles;

  __device__ __forceinline__ int tiles() const { return groups * row_pairs * column_tiles; }
  // Of a group's numbers.
  __device__ __forceinline__ int steps(int group) const {
    return (ends[group] - (group ? ends[group - 1] : 0) + STEP - 1) / STEP;
  }
  template <int GROUP> __device__ __forceinline__ Tile pair(int number) const {
    const int of_group = row_pairs * column_tiles, group = number / of_group;
    if (group >= groups) return {};  // past the last tile
    const Tile inside = pair_tile<GROUP>(number % of_group, row_pairs, column_tiles);
    const int start = group ? untils[group - 1] / 2 : 0;
    return {inside.row, inside.column, group, start, row_pairs * PAIR_ROWS, start + steps(group) * DEPTH};
  }
  // At least one for each piece that the tile before is handed over in.
  __device__ __forceinline__ Steps depth(int number) const {
    return {max(4, steps(number / (row_pairs * column_tiles)))};
  }
  __device__ __forceinline__ void fetch_left(u32 to, const TensorMap* map, int step, Tile tile, u32 barrier) const {
    fetch(to, map, place(step, tile), tile.row, barrier);
  }
  // Past the last number of a group: past the last one of all, where there are zeros.
  __device__ __forceinline__ static int place(int step, Tile tile) {
    const int first = tile.right + step * DEPTH;
    return first < tile.until ? first : 1 << 30;
  }
};

// Right is [n, k], and k are the numbers of all groups.
struct ByRuns : ByOutputs {
  __device__ __forceinline__ void fetch_right(u32 to, int step, Tile tile, u32 rank, u32 barrier) const {
    const int first = tile.column * COLUMNS + rank * (COLUMNS / 2);
    fetch_for_both(to + rank * (RIGHT_BYTES / 2), right, GroupedRuns<E4M3>::place(step, tile), first, barrier);
  }
};

// What sums of fp8 numbers are multiplied by. Both are read early and multiplied late: a warp waits for what it uses.
struct Scale {
  float of_row[2], of_group;
  __device__ __forceinline__ float at(int i) const { return of_row[i] * of_group; }
};
struct Scales {
  const float *of_rows, *of_groups;

  // Of two rows of a group, eight apart.
  __device__ __forceinline__ Scale read(int row, int end, int group) const {
    if (!of_rows) return {{1, 1}, of_groups[group]};
    return {{row < end ? of_rows[row] : 0, row + 8 < end ? of_rows[row + 8] : 0}, of_groups[group]};
  }
};
__device__ __forceinline__ u32 scaled(u32 both, float scale) { return pack(low(both) * scale, high(both) * scale); }
__device__ __forceinline__ uint4 scaled(uint4 eight, float scale) {
  return {scaled(eight.x, scale), scaled(eight.y, scale), scaled(eight.z, scale), scaled(eight.w, scale)};
}

// A tile is written as it is. Group i's first row is i · group_rows in `out`, or the tile's own where that is 0.
template <class Columns, bool FP8> struct Stored : Columns {
  uint4* out;  // eight numbers each
  int row_eights, group_rows;
  Scales scales;
  struct Spot { int place, row, end, group; };  // of this lane's first eight numbers
  struct Inputs { Scale scale; };

  __device__ __forceinline__ void warm_up(int, int, int) const {}
  __device__ __forceinline__ Inputs inputs(Spot spot, int, int warp) const {
    if (!FP8) return {};
    return {scales.read(spot.row + warp * 16, spot.end, spot.group)};
  }
  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32, row = tile.row + lane / 4;
    const int place = (tile.group * group_rows + row) * row_eights + tile.column * (COLUMNS / 8) + lane % 4;
    return {place, row, tile.end, tile.group};
  }
  __device__ __forceinline__ void work_out(const Inputs& in, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 sums[Columns::STRIPS][2];
    handed.await();
#pragma unroll
    for (int strip = 0; strip < Columns::STRIPS; ++strip) handed.read(sums[strip], strip);
    handed.free();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int below = warp * 16 + i * 8;
      if (spot.row + below >= spot.end) return;
#pragma unroll
      for (int strip = 0; strip < Columns::STRIPS; ++strip)
        out[spot.place + below * row_eights + (piece * Columns::STRIPS + strip) * (STRIP / 8)] =
            FP8 ? scaled(sums[strip][i], in.scale.at(i)) : sums[strip][i];
    }
  }
};

template <bool FP8> struct ExpertForward : GatedColumns {
  const float* weight;
  uint4 *gate_up, *activation;
  Scales scales;
  struct Spot { int row, end, column, group; };  // of this lane's first eight numbers; columns in eights
  struct Inputs { float weight[2]; Scale scale; };

  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32;
    return {tile.row + lane / 4, tile.end, tile.column * (COLUMNS / 16) + lane % 4, tile.group};
  }
  __device__ __forceinline__ Inputs inputs(Spot spot, int, int warp) const {
    Inputs in = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = spot.row + warp * 16 + i * 8;
      if (row < spot.end) in.weight[i] = weight[row];
    }
    if (FP8) in.scale = scales.read(spot.row + warp * 16, spot.end, spot.group);
    return in;
  }
  __device__ __forceinline__ void work_out(const Inputs& in, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 gate[2], up[2];
    handed.await();
    handed.read(gate, 0);
    handed.read(up, 1);
    handed.free();
    const int row_eights = width / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = spot.row + warp * 16 + i * 8, column = spot.column + piece * (STRIP / 8);
      if (row >= spot.end) return;
      if (FP8) gate[i] = scaled(gate[i], in.scale.at(i)), up[i] = scaled(up[i], in.scale.at(i));
      uint4* to = gate_up + row * 2 * row_eights + column;
      to[0] = gate[i];
      to[row_eights] = up[i];
      const float by = in.weight[i];
      activation[row * row_eights + column] = {product(gate[i].x, up[i].x, by), product(gate[i].y, up[i].y, by),
                                               product(gate[i].z, up[i].z, by), product(gate[i].w, up[i].w, by)};
    }
  }
  __device__ __forceinline__ static float product(float gate, float up, float by) { return gate * sigmoid(gate) * up * by; }
  __device__ __forceinline__ static u32 product(u32 gates, u32 ups, float by) {
    return pack(product(low(gates), low(ups), by), product(high(gates), high(ups), by));
  }
};

struct ExpertBackward : ByInputs {
  const TensorMap* gate_up_map;
  const float* weight;
  const uint4* gate_up;
  uint4 *d_gate_up, *activation;
  float* d_weight;  // [f / 32, m]
  int rows, width;
  struct Spot { int row, end, column; };  // of this lane's first eight numbers; columns in eights
  struct Inputs { uint4 gate[2], up[2]; float weight[2]; };

  __device__ __forceinline__ void warm_up(int step, int row, int column) const {
    // Four boxes of gates and four of ups.
    if (step < 8) warm(gate_up_map, step / 4 * width + column * COLUMNS + step % 4 * 64, row);
  }
  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32;
    return {tile.row + lane / 4, tile.end, tile.column * (COLUMNS / 8) + lane % 4};
  }
  __device__ __forceinline__ Inputs inputs(Spot spot, int piece, int warp) const {
    Inputs in = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = spot.row + warp * 16 + i * 8;
      if (row >= spot.end) continue;
      const uint4* from = gate_up + row * 2 * (width / 8) + spot.column + piece * (STRIP / 8);
      in.gate[i] = from[0], in.up[i] = from[width / 8], in.weight[i] = weight[row];
    }
    return in;
  }
  __device__ __forceinline__ void work_out(Inputs in, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 dy[2];
    float s[8];
    sigmoids(s, in.gate[0]);
    handed.await();
    handed.read(dy, 0);
    handed.free();
    const int row_eights = width / 8, column = spot.column + piece * (STRIP / 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = spot.row + warp * 16 + i * 8;
      const float weight = in.weight[i];
      float total = 0;
      if (i) sigmoids(s, in.gate[i]);
      differentiate(dy[i].x, in.gate[i].x, in.up[i].x, s, weight, total);
      differentiate(dy[i].y, in.gate[i].y, in.up[i].y, s + 2, weight, total);
      differentiate(dy[i].z, in.gate[i].z, in.up[i].z, s + 4, weight, total);
      differentiate(dy[i].w, in.gate[i].w, in.up[i].w, s + 6, weight, total);
      // Four lanes have a row's 32 columns.
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (row >= spot.end) continue;
      uint4* to = d_gate_up + row * 2 * row_eights + column;
      to[0] = in.gate[i];
      to[row_eights] = in.up[i];
      activation[row * row_eights + column] = dy[i];
      if (threadIdx.x % 4 == 0) d_weight[(long long)(column / 4) * rows + row] = total;
    }
  }
  // All eight together: a warp has nothing else to do while it waits for one of them.
  __device__ __forceinline__ static void sigmoids(float* s, uint4 gates) {
    const u32 twos[] = {gates.x, gates.y, gates.z, gates.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = power_of_two((i % 2 ? high(twos[i / 2]) : low(twos[i / 2])) * -1.4426950408889634f);
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = inverse(1 + s[i]);
  }
  // Two gradients become activations, and gates and ups their gradients; what the weight's gradient gets is added to total.
  __device__ __forceinline__ static void differentiate(u32& dys, u32& gates, u32& ups, const float* sigmoids, float weight,
                                                       float& total) {
    float activations[2], d_gates[2], d_ups[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float dy = i ? high(dys) : low(dys), gate = i ? high(gates) : low(gates);
      const float up = i ? high(ups) : low(ups), s = sigmoids[i], silu = gate * s, product = silu * up, d = dy * weight;
      total += dy * product;
      activations[i] = product * weight;
      d_gates[i] = d * up * (s + silu * (1 - s));
      d_ups[i] = d * silu;
    }
    dys = pack(activations[0], activations[1]);
    gates = pack(d_gates[0], d_gates[1]);
    ups = pack(d_ups[0], d_ups[1]);
  }
};

#define GATE_UP_KERNEL(NAME, FORMAT)                                                                                        \
  KERNEL NAME(MAP left, MAP right, const float* weight, uint4* gate_up, uint4* activation, const float* row_scale,         \
              const float* group_scale, const int* ends, int groups, int column_tiles, int steps, int width) {             \
    const ExpertForward<FORMAT != BF16> finish = {{&right, width}, weight, gate_up, activation, {row_scale, group_scale}}; \
    run_tiles(&left, finish, GroupedRows<FORMAT>::make(ends, groups, 0, column_tiles, steps));                             \
  }
GATE_UP_KERNEL(expert_gate_up, BF16)
GATE_UP_KERNEL(expert_gate_up_fp8, E4M3)

// `right_rows` of right are a group's.
#define STORED_KERNEL(NAME, COLUMNS_AS, FORMAT)                                                                            \
  KERNEL NAME(MAP left, MAP right, uint4* out, const float* row_scale, const float* group_scale, const int* ends,          \
              int groups, int column_tiles, int steps, int right_rows) {                                                   \
    const Stored<COLUMNS_AS, FORMAT != BF16> finish = {                                                                    \
        {&right}, out, column_tiles * (COLUMNS / 8), 0, {row_scale, group_scale}};                                         \
    run_tiles(&left, finish, GroupedRows<FORMAT>::make(ends, groups, right_rows, column_tiles, steps));                    \
  }
STORED_KERNEL(expert_down, ByOutputs, BF16)
STORED_KERNEL(expert_dx, ByInputs, BF16)
STORED_KERNEL(expert_matmul_fp8, ByOutputs, E4M3)
STORED_KERNEL(expert_dx_fp8, ByOutputs, E5M2_E4M3)

KERNEL expert_d_gate_up(MAP left, MAP right, MAP gate_up_map, const float* weight, const uint4* gate_up, uint4* d_gate_up,
                        uint4* activation, float* d_weight, const int* ends, int groups, int column_tiles, int steps,
                        int right_rows, int rows) {
  const ExpertBackward finish = {{&right},   &gate_up_map, weight, gate_up, d_gate_up,
                                 activation, d_weight,     rows,   column_tiles * COLUMNS};
  run_tiles(&left, finish, GroupedRows<BF16>::make(ends, groups, right_rows, column_tiles, steps));
}

KERNEL expert_outer(MAP left, MAP right, uint4* out, const int* ends, int groups, int row_pairs, int column_tiles) {
  const Stored<ByInputs, false> finish = {{&right}, out, column_tiles * (COLUMNS / 8), row_pairs * PAIR_ROWS, {}};
  run_tiles(&left, finish, GroupedDepth{ends, groups, row_pairs, column_tiles});
}

#define OUTER_FP8_KERNEL(NAME, FORMAT)                                                                                     \
  KERNEL NAME(MAP left, MAP right, uint4* out, const float* group_scale, const int* ends, const int* untils, int groups,   \
              int row_pairs, int column_tiles) {                                                                           \
    const Stored<ByRuns, true> finish = {                                                                                  \
        {{&right}}, out, column_tiles * (COLUMNS / 8), row_pairs * PAIR_ROWS, {nullptr, group_scale}};                     \
    run_tiles(&left, finish, GroupedRuns<FORMAT>{ends, untils, groups, row_pairs, column_tiles});                          \
  }
OUTER_FP8_KERNEL(expert_outer_fp8_left_e5m2, E5M2_E4M3)
OUTER_FP8_KERNEL(expert_outer_fp8_right_e5m2, E4M3_E5M2)
