// bf16 gemms for Hopper (sm_90a) with an epilogue: they work on a tile of sums before it is written.
//
// A block of three warpgroups computes tiles of 128 × 256 sums of left[m, k] · right. Two of them multiply, 64 rows each.
// Of the third, one warp fetches, and three make of the sums what is to be written: while the tensor cores are at the next
// tile, the multiplying warps hand the last one over through shared memory, 16 rows and a few columns at a time, and never
// wait for what becomes of it. Two blocks, one above the other, share the columns that each fetches half of.
//
// A plan (`Dense`; grouped_gemm.cu has more) says which tiles there are, and where left comes from. A `Finish` says where
// right comes from and what becomes of a tile:
//   PIECES        how many pieces of its columns a tile is handed over in
//   STRIPS        strips of 32 columns in a piece
//   TRANSPOSED    whether right is [k, n]; else [n, k]
//   GROUP         pairs of row tiles that are worked on together: their rows and columns stay in the cache
//   fetch_right   start one step's copies of right; called by one thread
//   warm_up       what will be read while the next tile is computed may be brought into the cache; called like fetch_right
//   lay_out       called by a multiplying warp: the words that hold a piece's sums, into strips
//   spot          called by another warp: where in memory a tile's results belong, worked out once a tile
//   AHEAD         units (16 rows of a piece) that inputs are read ahead; if more than one, through shared memory
//   inputs        what else the 16 rows of one warp need of a piece; copy_inputs copies it to shared memory
//   work_out      those 16 rows, from strips to where they belong

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4;
constexpr int LEFT_BYTES = ROWS * DEPTH * 2, RIGHT_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
constexpr int STRIP = 32, STRIP_BYTES = 16 * STRIP * 2;  // columns, and bytes with a warp's 16 rows of them
constexpr int HELPERS = 3;  // warps that work pieces out
constexpr int SLOTS = 2;    // pieces that a warp may be ahead of their being worked out
constexpr int BARRIERS_BYTES = 512;

// Offset of 8 numbers in a strip: swizzled, so that neither side's accesses have bank conflicts.
__device__ __forceinline__ u32 in_strip(u32 row, u32 chunk) { return row * (STRIP * 2) + ((chunk ^ row / 2 % 4) << 4); }

// Steps of fp8 numbers before their sums are added to those of earlier steps. The tensor cores keep about 14 bits of a sum
// and cut off the rest at each of its four additions a step: after 16 steps that is 0.4% of it, after 256 it would be 6%.
constexpr int STEPS_OF_FP8 = 16;

// Its first row and its number in its row of tiles. Where left's rows come in groups that each have a right of their own:
// its group, the first row of that right, and where the group's rows end. Where groups follow one another in what is
// summed over: `right` is where that begins, and `until` where it ends.
struct Tile { int row, column, group, right, end, until; };

// 16 rows of a piece on their way from a multiplying warp to one that works them out.
struct Handed {
  u32 strips, laid, freed, tag, use;

  // A barrier tells even from odd uses of its slot only, and another warp works out the use before: as long as that one was
  // not laid, the one before it looks like ours.
  __device__ __forceinline__ void await() const {
    const u32 parity = use / SLOTS % 2;
    do wait(laid, parity);
    while (word(tag) != use);
    wait(laid, parity);  // A tag that was read early comes before the arrival that makes the strips visible.
  }
  // This lane's eight numbers of two rows of a strip, eight rows apart.
  __device__ __forceinline__ void read(uint4 (&eights)[2], int strip) const {
    const u32 lane = threadIdx.x % 32, at = strips + strip * STRIP_BYTES;
    eights[0] = take(at + in_strip(lane / 4, lane % 4));
    eights[1] = take(at + in_strip(lane / 4 + 8, lane % 4));
  }
  // Called when all of it was read.
  __device__ __forceinline__ void free() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(freed);
  }
};

// Which tile a pair of blocks works on: row tiles in pairs, and tiles of 256 columns.
template <int GROUP> __device__ __forceinline__ Tile pair_tile(int number, int row_pairs, int column_tiles) {
  const int group = number / (GROUP * column_tiles), inside = number % (GROUP * column_tiles);
  const int first = group * GROUP, height = min(GROUP, row_pairs - first);
  return {(first + inside % height) * 2 * ROWS, inside / height};
}
__device__ __forceinline__ Tile tile_of_block(Tile pair, u32 rank) {
  pair.row += rank * ROWS;
  return pair;
}

// What every tile is summed over: the same number of steps.
struct Steps {
  int count;
  __device__ __forceinline__ void clear_rest(u32, int) const {}
};

// Left is [m, k], and all of it is multiplied by one right.
struct Dense {
  static constexpr int LEFT_TRANSPOSED = 0, FORMAT = BF16;
  typedef Steps Depth;
  int row_pairs, column_tiles, steps;

  __device__ __forceinline__ int tiles() const { return row_pairs * column_tiles; }
  template <int GROUP> __device__ __forceinline__ Tile pair(int number) {
    return pair_tile<GROUP>(number, row_pairs, column_tiles);
  }
  __device__ __forceinline__ Steps depth(int) const { return {steps}; }
  __device__ __forceinline__ void fetch_left(u32 to, const TensorMap* map, int step, Tile tile, u32 barrier) const {
    fetch(to, map, step * DEPTH, tile.row, barrier);
  }
};

template <class Plan, class Finish>
__device__ __forceinline__ void run_tiles(const TensorMap* left_map, Finish finish, const Plan plan) {
  constexpr int PIECES = Finish::PIECES, PIECE_BYTES = Finish::STRIPS * STRIP_BYTES, WARPS = 8;
  const u32 base = shared_memory(), strips = base + STAGES * STAGE_BYTES, barriers = strips + WARPS * SLOTS * PIECE_BYTES;
  const u32 full = barriers, empty = full + 8 * STAGES, laid = empty + 8 * STAGES, freed = laid + 8 * WARPS * SLOTS;
  const u32 tags = freed + 8 * WARPS * SLOTS;  // the use that each slot holds
  const int warpgroup = threadIdx.x / 128;
  const u32 rank = cluster_rank();
  const int clusters = gridDim.x / 2, first = blockIdx.x / 2, tiles = plan.tiles();

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4);
    for (int i = 0; i < 2 * WARPS * SLOTS; ++i) barrier_init(laid + 8 * i, 1);
    for (int i = 0; i < WARPS * SLOTS; ++i) set_word(tags + 4 * i, ~0u);
    barriers_are_ready();
  }
  cluster_sync();

  // 168 registers a thread at the start; multiplying takes 128 for sums and 64 for those of the tile before.
  if (warpgroup == 0) {
    fewer_registers<88>();
    const int helper = (int)threadIdx.x / 32 - 1;
    if (threadIdx.x == 0) {
      int stage = 0;
      u32 phase = 1;  // of the barriers that say a stage is empty: it is, at first
      Plan mine = plan;
      for (int number = first; number < tiles; number += clusters) {
        const Tile tile = tile_of_block(mine.template pair<Finish::GROUP>(number), rank);
        const int steps = mine.depth(number).count;
        for (int step = 0; step < steps; ++step) {
          const u32 left = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
          wait(empty + 8 * stage, phase);
          expect(barrier, STAGE_BYTES);
          mine.fetch_left(left, left_map, step, tile, barrier);
          finish.fetch_right(left + LEFT_BYTES, step, tile, rank, barrier);
          finish.warm_up(step, tile.row, tile.column);
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
    } else if (helper >= 0) {
      // A unit is 16 rows of a piece: eight of them a piece, shared by three warps.
      struct Unit { int number, index; u32 pieces; typename Finish::Spot spot; };  // `pieces`: of the tiles before
      Plan mine = plan;
      auto spot_of = [&](int number) {
        return finish.spot(tile_of_block(mine.template pair<Finish::GROUP>(number), rank));
      };
      auto advance = [&](Unit& unit) {
        unit.index += HELPERS;
        if (unit.index < PIECES * WARPS) return;
        unit.index -= PIECES * WARPS, unit.number += clusters, unit.pieces += PIECES;
        unit.spot = spot_of(unit.number);
      };
      auto handed_as = [&](const Unit& unit) {
        const u32 use = unit.pieces + unit.index / WARPS, slot = unit.index % WARPS * SLOTS + use % SLOTS;
        return Handed{strips + slot * PIECE_BYTES, laid + 8 * slot, freed + 8 * slot, tags + 4 * slot, use};
      };
      Unit next = {first, helper, 0, spot_of(first)};
      if constexpr (Finish::AHEAD == 1) {
        typename Finish::Inputs ahead;
        if (next.number < tiles) ahead = finish.inputs(next.spot, next.index / WARPS, next.index % WARPS);
        while (next.number < tiles) {
          const typename Finish::Inputs inputs = ahead;
          const Unit unit = next;
          advance(next);
          if (next.number < tiles) ahead = finish.inputs(next.spot, next.index / WARPS, next.index % WARPS);
          finish.work_out(inputs, handed_as(unit), unit.spot, unit.index / WARPS, unit.index % WARPS);
        }
      } else {
        // Inputs are copied to shared memory: registers hold too few to be on their way at a time. Each lane reads what
        // it has copied itself. Two units are under way in the plan, so its tiles must not depend on those before.
        const u32 room = barriers + BARRIERS_BYTES + helper * Finish::AHEAD * Finish::INPUTS_BYTES;
        auto request = [&](u32 slot) {
          if (next.number < tiles)
            finish.copy_inputs(room + slot * Finish::INPUTS_BYTES, next.spot, next.index / WARPS, next.index % WARPS);
          copies_commit();
          advance(next);
        };
        Unit unit = next;
        for (u32 slot = 0; slot < Finish::AHEAD; ++slot) request(slot);
        for (u32 slot = 0; unit.number < tiles; advance(unit), slot = slot + 1 < Finish::AHEAD ? slot + 1 : 0) {
          copies_wait<Finish::AHEAD - 1>();
          const u32 inputs = room + slot * Finish::INPUTS_BYTES;
          finish.work_out(inputs, handed_as(unit), unit.spot, unit.index / WARPS, unit.index % WARPS);
          request(slot);
        }
      }
    }
  } else {
    more_registers<208>();
    const int group = warpgroup - 1, lane = threadIdx.x % 32;
    const u32 my_slots = (threadIdx.x / 32 - 4) * SLOTS;
    // This lane's row of 16 bytes in a strip, for four 8 × 8 matrices; the next 16 columns are 32 bytes from there, by xor.
    const u32 mine = in_strip(lane % 16, lane / 16);
    float sums[128];
    u32 words[64], phase = 0, pieces = 0;
    int stage = 0;

    auto add_step = [&](const typename Plan::Depth& depth, int step, int add) {
      wait(full + 8 * stage, phase);
      const u32 at = base + stage * STAGE_BYTES, left = at + group * (LEFT_BYTES / 2), right = at + LEFT_BYTES;
      depth.clear_rest(left, step);
      sums_begin();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; ++k) {
        const u64 rows = Plan::LEFT_TRANSPOSED ? matrix(left + k * 2048, 8192) : matrix(left + k * 32, 16);
        const u64 columns = Finish::TRANSPOSED ? matrix(right + k * 2048, 8192) : matrix(right + k * 32, 16);
        if constexpr (Plan::FORMAT != BF16) multiply_fp8<Plan::FORMAT>(sums, rows, columns, add | k);
        else multiply<Plan::LEFT_TRANSPOSED, Finish::TRANSPOSED>(sums, rows, columns, add | k);
      }
      sums_commit();
    };
    auto release_stage_before = [&]() {
      const int before = stage ? stage - 1 : STAGES - 1;
      if (threadIdx.x % 128 < 2) arrive_at(empty + 8 * before, threadIdx.x % 128);
    };
    auto advance = [&]() {
      if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    auto hand_over = [&](const u32* piece_words) {
      const u32 slot = my_slots + pieces % SLOTS;
      wait(freed + 8 * slot, pieces / SLOTS % 2 ^ 1);
      finish.lay_out(strips + slot * PIECE_BYTES + mine, piece_words);
      __syncwarp();
      if (lane == 0) set_word(tags + 4 * slot, pieces), arrive(laid + 8 * slot);
      ++pieces;
    };

    for (int number = first; number < tiles; number += clusters) {
      int done = 0;
      const typename Plan::Depth depth = plan.depth(number);
      // What the tile before left in `words` is handed over before other sums are put there.
      const int together = Plan::FORMAT == BF16 ? depth.count : min(depth.count, STEPS_OF_FP8);
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        add_step(depth, done, done);
        if (number != first) hand_over(words + piece * (64 / PIECES));
        sums_wait<1>();
        if (done) release_stage_before();
        advance();
        ++done;
        const int until = piece + 1 == PIECES ? together : (piece + 1) * (together / PIECES);
#pragma unroll 1
        for (; done < until; ++done) {
          add_step(depth, done, done);
          sums_wait<1>();
          release_stage_before();
          advance();
        }
      }
      sums_wait<0>();
      release_stage_before();
#pragma unroll
      for (int i = 0; i < 64; ++i) words[i] = pack(sums[2 * i], sums[2 * i + 1]);
      if constexpr (Plan::FORMAT != BF16) {
#pragma unroll 1
        while (done < depth.count) {
          const int until = min(depth.count, done + STEPS_OF_FP8);
#pragma unroll 1
          for (int add = 0; done < until; ++done, add = 1) {
            add_step(depth, done, add);
            sums_wait<1>();
            if (add) release_stage_before();
            advance();
          }
          sums_wait<0>();
          release_stage_before();
#pragma unroll
          for (int i = 0; i < 64; ++i) words[i] = pack(low(words[i]) + sums[2 * i], high(words[i]) + sums[2 * i + 1]);
        }
      }
    }
    if (first < tiles) {
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) hand_over(words + piece * (64 / PIECES));
    }
  }
  cluster_sync();
}

template <class Finish>
__device__ __forceinline__ void run_tiles(const TensorMap* left_map, Finish finish, int row_pairs, int column_tiles,
                                          int steps) {
  run_tiles(left_map, finish, Dense{row_pairs, column_tiles, steps});
}

// ---- what finishes have in common ----

// Right is [n, k], and its columns are handed over as they come, 64 at a time.
struct ByOutputs {
  static constexpr int PIECES = 4, STRIPS = 2, TRANSPOSED = 0, GROUP = 8, AHEAD = 1;
  const TensorMap* right;

  __device__ __forceinline__ void fetch_right(u32 to, int step, Tile tile, u32 rank, u32 barrier) const {
    const int first = tile.right + tile.column * COLUMNS + rank * (COLUMNS / 2);
    fetch_for_both(to + rank * (RIGHT_BYTES / 2), right, step * DEPTH, first, barrier);
  }
  __device__ __forceinline__ void warm_up(int, int, int) const {}
  __device__ __forceinline__ void lay_out(u32 at, const u32* words) const {
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      const u32* w = words + strip * 8;
      lay(at + strip * STRIP_BYTES, w[0], w[1], w[2], w[3]);
      lay((at ^ 32) + strip * STRIP_BYTES, w[4], w[5], w[6], w[7]);
    }
  }
};

// Right is [k, n], and its columns are handed over as they come, 32 at a time.
struct ByInputs {
  static constexpr int PIECES = 8, STRIPS = 1, TRANSPOSED = 1, GROUP = 8, AHEAD = 1;
  const TensorMap* right;

  __device__ __forceinline__ void fetch_right(u32 to, int step, Tile tile, u32 rank, u32 barrier) const {
    for (int i = rank * 2; i < rank * 2 + 2; ++i)
      fetch_for_both(to + i * (RIGHT_BYTES / 4), right, tile.column * COLUMNS + i * 64, tile.right + step * DEPTH, barrier);
  }
  __device__ __forceinline__ void lay_out(u32 at, const u32* words) const {
    lay(at, words[0], words[1], words[2], words[3]);
    lay(at ^ 32, words[4], words[5], words[6], words[7]);
  }
};

// Runs of eight gates and their eight ups alternate among the columns: a thread's sums hold both factors of each product.
struct GatedColumns {
  static constexpr int PIECES = 4, STRIPS = 2, TRANSPOSED = 0, GROUP = 8, AHEAD = 1;
  const TensorMap* gate_up;
  int width;  // gates, and as many ups, make a block

  __device__ __forceinline__ void fetch_right(u32 to, int step, Tile tile, u32 rank, u32 barrier) const {
    const int per_block = width / (COLUMNS / 2), block = tile.group + tile.column / per_block;
    const int run = tile.column % per_block * (COLUMNS / 16) + rank * (COLUMNS / 32);
    fetch_runs_for_both(to + rank * (RIGHT_BYTES / 2), gate_up, step * DEPTH, run, block, barrier);
  }
  __device__ __forceinline__ void warm_up(int, int, int) const {}
  __device__ __forceinline__ void lay_out(u32 at, const u32* words) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32* w = words + half * 8;
      lay(at ^ (half * 32), w[0], w[1], w[4], w[5]);
      lay((at ^ (half * 32)) + STRIP_BYTES, w[2], w[3], w[6], w[7]);
    }
  }
};

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + power_of_two(x * -1.4426950408889634f)); }
