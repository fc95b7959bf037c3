// Stands in for kernels/attention_instructions.cu, after emulated_hopper.h.

#define __global__
#define __launch_bounds__(...)
struct float2 { float x, y; };

inline int __shfl_sync(u32, int value, int lane) { return (int)gather(32, (u32)value)[lane]; }
inline int __float2int_rn(float x) { return (int)lrintf(x); }

// ---- matmuls of 64 rows; a thread has rows lane / 4 and 8 further of its warp's 16 ----

template <int N> static void add_columns(float (&sums)[N], const float (&rows)[2][16], u64 right, bool transposed) {
  float column[16];
  for (int i = 0; i < N / 2; ++i) {
    line(column, right, i / 2 * 8 + running->thread % 4 * 2 + i % 2, transposed, false);
    for (int h = 0; h < 2; ++h)
      for (int k = 0; k < 16; ++k) sums[i / 2 * 4 + h * 2 + i % 2] += rows[h][k] * column[k];
  }
}
// 16 columns of both rows, of which each lane of four has two pairs: those of the upper row, the lower, then 8 further.
static void gather_rows(float (&rows)[2][16], const u32* words) {
  const int quad = running->thread % 32 / 4 * 4;
  for (int half = 0; half < 2; ++half) {
    const u64* all = gather(32, (u64)words[2 * half + 1] << 32 | words[2 * half]);
    u64 four[4];
    memcpy(four, all + quad, sizeof four);
    for (int lane = 0; lane < 4; ++lane)
      for (int h = 0; h < 2; ++h) {
        const u32 both = (u32)(four[lane] >> 32 * h);
        rows[h][8 * half + 2 * lane] = low(both), rows[h][8 * half + 2 * lane + 1] = high(both);
      }
    __syncwarp();
  }
}
static void take_rows(float (&rows)[2][16], u64 left, bool transposed) {
  const int row = running->thread % 128 / 32 * 16 + running->thread % 32 / 4;
  for (int h = 0; h < 2; ++h) line(rows[h], left, row + 8 * h, transposed, false);
}
template <int N> inline void multiply_weights(float (&sums)[N], const u32 (&left)[16], u32 right) {
  float rows[2][16];
  for (int k = 0; k < 4; ++k) gather_rows(rows, left + 4 * k), add_columns(sums, rows, matrix(right + k * 2048, 8192), true);
}
inline void multiply(float (&sums)[32], const u32 (&left)[16], u32 right) {
  float rows[2][16];
  for (float& sum : sums) sum = 0;
  for (int k = 0; k < 4; ++k) gather_rows(rows, left + 4 * k), add_columns(sums, rows, matrix(right + k * 32, 16), false);
}
inline void multiply_shared(float (&sums)[32], u32 left, u32 right, int add) {
  float rows[2][16];
  for (float& sum : sums) sum = add ? sum : 0;
  for (int k = 0; k < 4; ++k)
    take_rows(rows, matrix(left + k * 32, 16), false), add_columns(sums, rows, matrix(right + k * 32, 16), false);
}
template <int N> inline void multiply_transposed(float (&sums)[N], u32 left, u32 right) {
  float rows[2][16];
  for (float& sum : sums) sum = 0;
  for (int k = 0; k < 8; ++k)
    take_rows(rows, matrix(left + k * 2048, 8192), true), add_columns(sums, rows, matrix(right + k * 2048, 8192), true);
}
template <int N> inline void settle(float (&)[N]) {}

// ---- shared memory and copies ----

inline void take_matrices(u32* words, u32 address) {
  const int lane = running->thread % 32;
  const u64* all = gather(32, address);
  u32 places[32];
  for (int i = 0; i < 32; ++i) places[i] = (u32)all[i];
  for (int j = 0; j < 4; ++j) words[j] = word(places[8 * j + lane / 4] + lane % 4 * 4);
  __syncwarp();
}
inline float2 take_pair(u32 address) { return {from_bits(word(address)), from_bits(word(address + 4))}; }
inline void put_four(u32 address, int a, int b, int c, int d) {
  const int four[] = {a, b, c, d};
  memcpy(at(address, running->block), four, 16);
}
inline void fetch_run(u32 to, const void* from, int bytes, u32 barrier) {
  if (to % 16 || (u64)from % 16) fail("a run that is not aligned, at", to);
  memcpy(at(to, running->block), from, bytes);
  Barrier& there = barrier_at(barrier, running->block);
  there.bytes -= bytes, settle(there);
}
inline void add_run(int* to, u32 from, int bytes) {
  for (int i = 0; i < bytes / 4; ++i) to[i] += (int)word(from + 4 * i);
}
inline void added_runs_are_read() {}
inline void added_runs_are_done() {}

// ---- threads that wait for one another under a name ----

static Turn& come(u32 name, int count) {
  Turn& here = turns[{running->block, name}];
  if (++here.arrived == count) here.arrived = 0, ++here.number, ++progress;
  return here;
}
static void come_and_wait(u32 name, int count) {
  const long before = turns[{running->block, name}].number;
  Turn& here = come(name, count);
  while (here.number == before) pause_();
}
inline void groups_sync() { come_and_wait(1, 256); }
inline void wait_for_turn(u32 name) { come_and_wait(name, 256); }
inline void give_turn(u32 name) { come(name, 256); }
inline void __syncthreads() { come_and_wait(0, THREADS); }
