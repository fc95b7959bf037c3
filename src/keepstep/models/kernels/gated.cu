// Products of the gated feed-forward with the activation inside them, for Hopper (sm_90a).
//
// FORWARD:  fused[m, 2f] = x[m, k] · gate_up[2f, k]ᵀ and product[m, f] = silu(gate) · up, in one kernel.
// BACKWARD: dy[m, f] = d_out[m, k] · down[k, f], never written: d_fused[m, 2f] from it and fused[m, 2f].
//
// A block of three warpgroups computes tiles of 128 × 256 sums: one fetches, two multiply 64 rows each. What a tile's sums
// become is worked out and written while the tensor cores are already at the next tile, a few columns at a time, so that
// they never wait for it. Two blocks, one above the other, share the weights that each fetches half of.

#if BACKWARD
#define NARROW "24"
#define WIDE "240"
#else
#define NARROW "40"
#define WIDE "232"
#endif
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4;
constexpr int LEFT_BYTES = ROWS * DEPTH * 2, RIGHT_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
constexpr int PIECE = 32;  // columns of the output worked out at once
constexpr int PIECE_BYTES = 64 * PIECE * 2;  // of one warpgroup
constexpr int PIECES = BACKWARD ? COLUMNS / PIECE : COLUMNS / 2 / PIECE;
constexpr int PIECE_WORDS = 64 / PIECES;  // registers that hold a piece: two bf16 numbers each
constexpr int DESK_BYTES = BACKWARD ? 4 * PIECE_BYTES : 3 * PIECE_BYTES;  // a warpgroup's room for pieces
#ifndef GROUP_PAIRS
#define GROUP_PAIRS 8
#endif
constexpr int GROUP = GROUP_PAIRS;  // pairs of row tiles that are worked on together: their rows and weights stay in the cache

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

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
      "@done bra.uni finished;\nbra.uni again;\nfinished:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch_for_both(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}
__device__ __forceinline__ void fetch_rows_for_both(u32 to, const TensorMap* map, int k, int run, int block, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(run), "r"(block),
      "r"(barrier), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ void put(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y),
               "r"(from) : "memory");
}
__device__ __forceinline__ void put_done() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void all_put_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void all_put() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void seen_by_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_sync(int group) { if (group) asm volatile("bar.sync 2, 128;" ::: "memory");
  else asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ void sums_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void sums_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void sums_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// 64 × 256 sums over 16 numbers each.
__device__ __forceinline__ void multiply(float (&sums)[128], u64 left, u64 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@SUMS@}, %128, %129, p, 1, 1, 0, %131;\n}\n"
               : @OPERANDS@ : "l"(left), "l"(right), "r"(add), "n"(BACKWARD));
}

constexpr u64 SWIZZLED = (1ull << 62) | ((1024ull >> 4) << 32);
__device__ __forceinline__ u64 matrix(u32 at, u32 leading) { return SWIZZLED | ((u64)(leading >> 4) << 16) | ((at & 0x3FFFF) >> 4); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}
__device__ __forceinline__ void lay(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
__device__ __forceinline__ void take(u32 at, u32 (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}

// Which tile a pair of blocks works on: row tiles in pairs, and tiles of 256 columns.
struct Place { int row, column; };
__device__ __forceinline__ Place place_of(int number, int row_pairs, int column_tiles) {
  int group = number / (GROUP * column_tiles), inside = number % (GROUP * column_tiles);
  int first = group * GROUP, height = min(GROUP, row_pairs - first);
  return {first + inside % height, inside / height};
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
    gated(const __grid_constant__ TensorMap left_map, const __grid_constant__ TensorMap right_map,
          const __grid_constant__ TensorMap fused_map, const __grid_constant__ TensorMap out_map, int row_pairs,
          int column_tiles, int steps, int width) {
  extern __shared__ __align__(1024) char room[];
  const u32 base = address(room);
  const u32 desks = base + STAGES * STAGE_BYTES, barriers = desks + 2 * DESK_BYTES;
  const u32 full = barriers, empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
  const int warpgroup = threadIdx.x / 128;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int clusters = gridDim.x / 2, first = blockIdx.x / 2, tiles = row_pairs * column_tiles;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4);
    for (int i = 0; i < 4; ++i) barrier_init(ready + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " NARROW ";");
    if (threadIdx.x == 0) {
      int stage = 0;
      u32 turn = 1;  // of an empty barrier: the first wait must pass at once
      for (int number = first; number < tiles; number += clusters) {
        Place place = place_of(number, row_pairs, column_tiles);
        const int row = (place.row * 2 + rank) * ROWS;
        const int per_block = BACKWARD ? width / COLUMNS : width / (COLUMNS / 2);
        const int block = place.column / per_block, run = place.column % per_block * (COLUMNS / 2 / 8) + rank * 8;
        for (int step = 0; step < steps; ++step) {
          wait(empty + 8 * stage, turn);
          const u32 left = base + stage * STAGE_BYTES, right = left + LEFT_BYTES, barrier = full + 8 * stage;
          expect(barrier, STAGE_BYTES);
          fetch(left, &left_map, step * DEPTH, row, barrier);
          if (BACKWARD) {
            for (int i = rank * 2; i < rank * 2 + 2; ++i)
              fetch_for_both(right + i * 8192, &right_map, place.column * COLUMNS + i * 64, step * DEPTH, barrier);
          } else {
            fetch_rows_for_both(right + rank * (RIGHT_BYTES / 2), &right_map, step * DEPTH, run, block, barrier);
          }
          if (++stage == STAGES) stage = 0, turn ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " WIDE ";");
    const int group = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool speaks = threadIdx.x % 128 == 0;
    const u32 desk = desks + group * DESK_BYTES, my_ready = ready + 16 * group;
    // Where this lane's row of 16 bytes lies in a piece, for four 8 × 8 matrices: two chunks, two halves of 16 rows.
    const int lane_row = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
    const u32 lane_at = lane_row * (PIECE * 2), lane_turn = lane_row / 2 % 4, lane_chunk = lane / 16;
    const u32 mine = lane_at + ((lane_chunk ^ lane_turn) << 4);  // and 32 bytes from there, in the swizzle's order

    float sums[128];
    u32 words[64];
    int stage = 0;
    u32 turn = 0, ready_turn = 0;
    int past_row = 0, past_column = 0;
    bool has_past = false;

#if BACKWARD
    // Gates and ups of a piece of a tile, on their way into one of two places.
    auto send_for = [&](int row, int column, int piece) {
      const u32 to = desk + (piece & 1) * 2 * PIECE_BYTES, barrier = my_ready + 8 * (piece & 1);
      expect(barrier, 2 * PIECE_BYTES);
      fetch(to, &fused_map, column + piece * PIECE, row, barrier);
      fetch(to + PIECE_BYTES, &fused_map, column + width + piece * PIECE, row, barrier);
    };
    auto work_out = [&](int piece) {
      const u32 gates = desk + (piece & 1) * 2 * PIECE_BYTES, ups = gates + PIECE_BYTES;
      wait(my_ready + 8 * (piece & 1), ready_turn >> (piece & 1) & 1);
      ready_turn ^= 1u << (piece & 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = mine ^ (half * 32);
        u32 gate[4], up[4];
        take(gates + at, gate);
        take(ups + at, up);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 dy = words[half * 4 + i];
          float d_gate[2], d_up[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float d = e ? high(dy) : low(dy), g = e ? high(gate[i]) : low(gate[i]), u = e ? high(up[i]) : low(up[i]);
            const float s = sigmoid(g);
            d_gate[e] = d * u * s * (1 + g * (1 - s));
            d_up[e] = d * g * s;
          }
          gate[i] = pack(d_gate[0], d_gate[1]);
          up[i] = pack(d_up[0], d_up[1]);
        }
        lay(gates + at, gate[0], gate[1], gate[2], gate[3]);
        lay(ups + at, up[0], up[1], up[2], up[3]);
      }
      seen_by_copies();
      warpgroup_sync(group);
      if (speaks) {
        put(&out_map, past_column + piece * PIECE, past_row, gates);
        put(&out_map, past_column + width + piece * PIECE, past_row, ups);
        put_done();
      }
    };
#else
    auto work_out = [&](int piece) {
      const u32 gates = desk, ups = desk + PIECE_BYTES, products = desk + 2 * PIECE_BYTES;
      if (speaks) all_put_read();
      warpgroup_sync(group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = mine ^ (half * 32);
        const u32* w = words + half * 8;
        lay(gates + at, w[0], w[1], w[4], w[5]);
        lay(ups + at, w[2], w[3], w[6], w[7]);
        u32 product[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 gate = w[i / 2 * 4 + i % 2], up = w[i / 2 * 4 + 2 + i % 2];
          const float g0 = low(gate), g1 = high(gate);
          product[i] = pack(g0 * sigmoid(g0) * low(up), g1 * sigmoid(g1) * high(up));
        }
        lay(products + at, product[0], product[1], product[2], product[3]);
      }
      seen_by_copies();
      warpgroup_sync(group);
      if (speaks) {
        const int block = past_column / (2 * width), inside = past_column - block * 2 * width;
        put(&fused_map, past_column + piece * PIECE, past_row, gates);
        put(&fused_map, past_column + width + piece * PIECE, past_row, ups);
        put(&out_map, block * width + inside + piece * PIECE, past_row, products);
        put_done();
      }
    };
#endif
    auto next_words = [&]() {
#pragma unroll
      for (int i = 0; i < 64 - PIECE_WORDS; ++i) words[i] = words[i + PIECE_WORDS];
    };
    auto step_sums = [&](int add) {
      wait(full + 8 * stage, turn);
      const u32 left = base + stage * STAGE_BYTES + group * (LEFT_BYTES / 2), right = base + stage * STAGE_BYTES + LEFT_BYTES;
      sums_begin();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; ++k)
        multiply(sums, matrix(left + k * 32, 16), BACKWARD ? matrix(right + k * 2048, 8192) : matrix(right + k * 32, 16), add | k);
      sums_commit();
    };
    auto release = [&](int which) {
      if (threadIdx.x % 128 < 2) arrive_at(empty + 8 * which, threadIdx.x % 128);
    };
    auto advance = [&]() {
      if (++stage == STAGES) stage = 0, turn ^= 1;
    };
    auto before = [&]() { return stage ? stage - 1 : STAGES - 1; };

    for (int number = first; number < tiles; number += clusters) {
      Place place = place_of(number, row_pairs, column_tiles);
      const int row = (place.row * 2 + rank) * ROWS + group * 64;
      const int tile_width = BACKWARD ? COLUMNS : COLUMNS / 2, per_block = width / tile_width;
      const int column = place.column / per_block * 2 * width + place.column % per_block * tile_width;
      const int per_piece = steps / PIECES;
      int done = 0;
      for (int piece = 0; piece < PIECES; ++piece) {
        step_sums(done);
        if (has_past) {
          work_out(piece);
          next_words();
        }
        sums_wait<1>();
        if (done) release(before());
        advance();
        ++done;
        const int until = piece + 1 == PIECES ? steps : (piece + 1) * per_piece;
#if BACKWARD
        bool sent = false;
#endif
        for (; done < until; ++done) {
          step_sums(done);
#if BACKWARD
          if (!sent) {
            sent = true;
            if (speaks) {
              all_put_read();
              if (piece + 2 < PIECES) {
                if (has_past) send_for(past_row, past_column, piece + 2);
              } else {
                send_for(row, column, piece + 2 - PIECES);
              }
            }
          }
#endif
          sums_wait<1>();
          release(before());
          advance();
        }
      }
      sums_wait<0>();
      release(before());
#pragma unroll
      for (int i = 0; i < 64; ++i) words[i] = pack(sums[2 * i], sums[2 * i + 1]);
      past_row = row;
      past_column = column;
      has_past = true;
    }
    if (has_past) {
      for (int piece = 0; piece < PIECES; ++piece) {
        work_out(piece);
        next_words();
#if BACKWARD
        if (speaks && piece + 2 < PIECES) {
          all_put_read();
          send_for(past_row, past_column, piece + 2);
        }
#endif
      }
    }
    if (speaks) all_put();
  }
  cluster_sync();
}
