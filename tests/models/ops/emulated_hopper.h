// Stands in for kernels/hopper.cu on a CPU: the same functions for one cluster of two blocks after the other.
//
// Threads are fibers that take turns until each waits for another. Copies and matmuls happen where they are started, so
// this shows wrong indices, layouts, counts and deadlocks. Of races it shows what happens too early while a warpgroup
// rests: `rest_at_random` makes warpgroups rest until no other can go on, or for a while.
// Poisoned memory: what is read before it is written are NaNs.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define KERNEL static void
#define MAP const TensorMap
#define threadIdx (Index{running->thread})
#define blockIdx (Index{first_block + running->block})
#define gridDim (Index{grid})

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

struct TensorMap { const char* data; long rank, sizes[5], strides[5], box[5]; };  // strides in bytes
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x; };

// ---- threads ----

constexpr int BLOCKS = 2, SHARED_BYTES = 232448;  // THREADS of a block: the compiler is told
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; int block, thread; };
struct Barrier { int count, pending, bytes, phase; };
struct Gathering { int arrived = 0; long turn = 0; u64 in[128], out[128]; };
struct Turn { int arrived = 0; long number = 0; };

static Fiber fibers[BLOCKS * THREADS], *running;
static ucontext_t scheduler;
static int first_block, grid;
static long progress;
static char* shared[BLOCKS];
static std::map<u32, Barrier> barriers[BLOCKS];
static std::map<std::pair<int, int>, Gathering> gatherings;
static std::map<std::pair<int, u32>, Turn> turns;  // of threads that wait for one another under a name
static std::function<void()> body;
static u32 seed_of_rests;  // 0: none rests

[[noreturn]] static void fail(const char* why, u32 number) {
  fprintf(stderr, "block %d thread %d: %s %u\n", running->block, running->thread, why, number);
  abort();
}
static void pause_() { swapcontext(&running->context, &scheduler); }
static char* at(u32 address, int block) {
  if (address >= SHARED_BYTES) fail("no such shared memory:", address);
  return shared[block] + address;
}
// What each of the first `size` threads from a multiple of it brought, once all are there.
static const u64* gather(int size, u64 value) {
  Gathering& here = gatherings[{size, (running->block * THREADS + running->thread) / size}];
  const long turn = here.turn;
  here.in[running->thread % size] = value;
  if (++here.arrived == size) {
    memcpy(here.out, here.in, sizeof here.in);
    here.arrived = 0, ++here.turn, ++progress;
  }
  while (here.turn == turn) pause_();
  return here.out;
}
inline void __syncwarp() { gather(32, 0); }
inline int __reduce_add_sync(u32, int value) {
  const u64* all = gather(32, value);
  int total = 0;
  for (int i = 0; i < 32; ++i) total += (int)all[i];
  return total;
}
inline float __shfl_xor_sync(u32, float value, int other) {
  u32 bits;
  memcpy(&bits, &value, 4);
  bits = (u32)gather(32, bits)[(running->thread % 32) ^ other];
  memcpy(&value, &bits, 4);
  return value;
}
inline void warpgroup_sync(int) { gather(128, 0); }
inline void cluster_sync() {
  static int arrived;
  static long turn;
  const long mine = turn;
  if (++arrived == BLOCKS * THREADS) arrived = 0, ++turn, ++progress;
  while (turn == mine) pause_();
}
inline u32 cluster_rank() { return running->block; }
template <int> inline void fewer_registers() {}
template <int> inline void more_registers() {}

// ---- barriers ----

static Barrier& barrier_at(u32 address, int block) {
  auto found = barriers[block].find(address);
  if (found == barriers[block].end()) fail("no barrier at", address);
  return found->second;
}
static void settle(Barrier& barrier) {
  if (barrier.pending < 0) fail("too many arrivals:", barrier.count);
  if (!barrier.pending && !barrier.bytes) barrier.phase ^= 1, barrier.pending = barrier.count;
  ++progress;
}
inline void barrier_init(u32 barrier, int count) { barriers[running->block][barrier] = {count, count, 0, 0}; }
inline void barriers_are_ready() {}
inline void arrive_at(u32 barrier, u32 block) {
  Barrier& there = barrier_at(barrier, block);
  --there.pending, settle(there);
}
inline void arrive(u32 barrier) { arrive_at(barrier, running->block); }
inline void expect(u32 barrier, int bytes) {
  barrier_at(barrier, running->block).bytes += bytes;
  arrive(barrier);
}
inline void wait(u32 barrier, u32 parity) {
  while ((u32)barrier_at(barrier, running->block).phase == parity) pause_();
}

// ---- shared memory ----

inline u32 shared_memory() { return 0; }
inline u32 word(u32 address) {
  u32 value;
  memcpy(&value, at(address, running->block), 4);
  return value;
}
inline void set_word(u32 address, u32 value) { memcpy(at(address, running->block), &value, 4); }
inline void put_zeros(u32 address) { memset(at(address, running->block), 0, 16); }
inline void copies_see_stores() {}
inline uint4 take(u32 address) {
  uint4 eight;
  memcpy(&eight, at(address, running->block), 16);
  return eight;
}
// Lane 8j + i has the place of row i of matrix j; lane l has row l / 4, columns l % 4 · 2 and the next.
inline void lay(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d}, lane = running->thread % 32;
  const u64* all = gather(32, address);
  u32 places[32];
  for (int i = 0; i < 32; ++i) places[i] = (u32)all[i];
  for (int j = 0; j < 4; ++j) memcpy(at(places[8 * j + lane / 4] + lane % 4 * 4, running->block), words + j, 4);
  __syncwarp();
}

// ---- copies ----

static u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }
static void copy(u32 to, const TensorMap* map, const int* from, u32 barrier, bool both) {
  long rows = 1;
  for (int i = 1; i < map->rank; ++i) rows *= map->box[i];
  if (map->box[0] != 64 || to % 1024) fail("a box that is not swizzled over 128 bytes, at", to);
  for (long row = 0; row < rows; ++row) {
    long rest = row, place = 0;
    bool inside = true;
    for (int i = 1; i < map->rank; ++i) {
      const long x = from[i] + rest % map->box[i];
      rest /= map->box[i], inside = inside && x >= 0 && x < map->sizes[i], place += x * map->strides[i];
    }
    for (int x = 0; x < 64; ++x) {
      u16 value = 0;
      if (inside && from[0] + x < map->sizes[0]) memcpy(&value, map->data + place + (from[0] + x) * 2, 2);
      for (int block = 0; block < BLOCKS; ++block)
        if (both || block == running->block) memcpy(at(swizzled(to + row * 128 + x * 2), block), &value, 2);
    }
  }
  for (int block = 0; block < BLOCKS; ++block) {
    if (!both && block != running->block) continue;
    Barrier& there = barrier_at(barrier, block);
    there.bytes -= rows * 128, settle(there);
  }
}
inline void fetch(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  const int from[] = {x, y};
  copy(to, map, from, barrier, false);
}
inline void fetch_for_both(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  const int from[] = {x, y};
  copy(to, map, from, barrier, true);
}
inline void fetch_runs_for_both(u32 to, const TensorMap* map, int k, int run, int block, u32 barrier) {
  const int from[] = {k, 0, 0, run, block};
  copy(to, map, from, barrier, true);
}
inline void warm(const TensorMap*, int, int) {}
// A thread's own copies arrive as late as they may: when it waits for them.
static std::map<std::pair<int, int>, std::deque<std::vector<std::pair<u32, const void*>>>> own_copies;
static std::deque<std::vector<std::pair<u32, const void*>>>& groups_of_thread() {
  auto& groups = own_copies[{running->block, running->thread}];
  if (groups.empty()) groups.emplace_back();
  return groups;
}
inline void copy_eight(u32 to, const void* from) { groups_of_thread().back().push_back({to, from}); }
inline void copies_commit() { groups_of_thread().emplace_back(); }
template <int LEFT> inline void copies_wait() {
  for (auto& groups = groups_of_thread(); groups.size() > LEFT + 1; groups.pop_front())
    for (auto [to, from] : groups.front()) memcpy(at(to, running->block), from, 16);
}

// ---- numbers ----

static float from_bits(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static u32 to_bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float decode_e4m3(u8 bits) {
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  const float value = (bits & 127) == 127 ? NAN : exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
  return bits & 128 ? -value : value;
}
// The upper byte of a number of two bytes.
static float decode_e5m2(u8 bits) {
  const int exponent = bits >> 2 & 31, digits = bits & 3;
  const float value = exponent == 31 ? (digits ? NAN : INFINITY) : exponent ? ldexpf(4 + digits, exponent - 17) : ldexpf(digits, -16);
  return bits & 128 ? -value : value;
}
static float from_fp8(u8 bits, bool is_e5m2) {
  static const std::vector<float> all = [] {
    std::vector<float> numbers;
    for (int i = 0; i < 512; ++i) numbers.push_back(i < 256 ? decode_e4m3(i) : decode_e5m2(i - 256));
    return numbers;
  }();
  return all[is_e5m2 * 256 + bits];
}
inline u32 pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float low(u32 both) { return from_bits(both << 16); }
inline float high(u32 both) { return from_bits(both & 0xFFFF0000u); }
inline u32 times(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
inline uint4 times(uint4 a, uint4 b) { return {times(a.x, b.x), times(a.y, b.y), times(a.z, b.z), times(a.w, b.w)}; }
inline float power_of_two(float x) { return exp2f(x); }
inline float inverse(float x) { return 1 / x; }

// ---- sums ----

inline void sums_begin() {}
inline void sums_commit() {}
template <int> inline void sums_wait() { warpgroup_sync(0); }
inline u64 matrix(u32 address, u32 leading_bytes) { return (u64)leading_bytes << 32 | address; }
// 32 bytes of row or column i: 16 numbers over k, or 32 of one byte.
static void line(float* numbers, u64 matrix, int i, bool transposed, bool fp8, bool is_e5m2 = false) {
  const u32 start = (u32)matrix, leading = matrix >> 32;
  for (int k = 0; k < (fp8 ? 32 : 16); ++k) {
    const u32 inside = transposed ? i / 64 * leading + k / 8 * 1024 + k % 8 * 128 + i % 64 * 2
                                  : i / 8 * 1024 + i % 8 * 128 + k * (fp8 ? 1 : 2);
    const char* here = at(swizzled(start + inside), running->block);
    u16 two;
    memcpy(&two, here, fp8 ? 1 : 2);
    numbers[k] = fp8 ? from_fp8(*here, is_e5m2) : from_bits((u32)two << 16);
  }
}
static void add_product(float (&sums)[128], u64 left, u64 right, int add, bool left_t, bool right_t, bool fp8,
                        bool left_e5m2 = false, bool right_e5m2 = false) {
  const int warp = running->thread % 128 / 32, lane = running->thread % 32;
  float rows[2][32], column[32];
  for (int h = 0; h < 2; ++h) line(rows[h], left, warp * 16 + lane / 4 + 8 * h, left_t, fp8, left_e5m2);
  for (int i = 0; i < 64; ++i) {
    line(column, right, i / 2 * 8 + lane % 4 * 2 + i % 2, right_t, fp8, right_e5m2);
    for (int h = 0; h < 2; ++h) {
      float& sum = sums[i / 2 * 4 + h * 2 + i % 2];
      if (!add) sum = 0;
      for (int k = 0; k < (fp8 ? 32 : 16); ++k) sum += rows[h][k] * column[k];
    }
  }
}
template <int LEFT_TRANSPOSED, int TRANSPOSED> inline void multiply(float (&sums)[128], u64 left, u64 right, int add) {
  add_product(sums, left, right, add, LEFT_TRANSPOSED, TRANSPOSED, false);
}
enum Format { BF16, E4M3, E5M2_E4M3, E4M3_E5M2 };
template <int FORMAT> inline void multiply_fp8(float (&sums)[128], u64 left, u64 right, int add) {
  add_product(sums, left, right, add, false, false, true, FORMAT == E5M2_E4M3, FORMAT == E4M3_E5M2);
}

// ---- launches ----

static void enter() {
  body();
  running->done = true, ++progress;
  pause_();
}
static int run_cluster() {
  for (int block = 0; block < BLOCKS; ++block) {
    if (!shared[block]) shared[block] = (char*)aligned_alloc(1024, SHARED_BYTES);
    memset(shared[block], 0xff, SHARED_BYTES), barriers[block].clear();
  }
  gatherings.clear(), turns.clear(), own_copies.clear();
  for (int i = 0; i < BLOCKS * THREADS; ++i) {
    Fiber& fiber = fibers[i];
    fiber.stack.resize(1 << 16), fiber.done = false, fiber.block = i / THREADS, fiber.thread = i % THREADS;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
  }
  std::mt19937 random(1 + seed_of_rests);
  u32 resting = 0;  // a bit for each warpgroup
  for (int left = 1, idle = 0, passes = 0; left; ) {
    const long before = progress;
    const int from = random() % (BLOCKS * THREADS);
    left = 0;
    for (int i = 0; i < BLOCKS * THREADS; ++i) {
      const int chosen = (from + i) % (BLOCKS * THREADS);
      running = &fibers[chosen];
      if (!running->done && !(resting >> chosen / 128 & 1)) swapcontext(&scheduler, &running->context);
      left += !running->done;
    }
    idle = progress == before && !resting ? idle + 1 : 0;
    if (idle > 9) return 1;  // All wait for one another.
    if (!seed_of_rests) continue;
    if (resting && progress == before) resting = 0, passes = random() % 100;
    else if (--passes < 0) resting = random() & random(), passes = random() % 1000;
  }
  return 0;
}
static int launch(int blocks, std::function<void()> kernel) {
  body = kernel, grid = blocks;
  // Backwards: a row that a tile must not write is then not written again by the tile that it belongs to.
  for (first_block = blocks - BLOCKS; first_block >= 0; first_block -= BLOCKS)
    if (run_cluster()) return 1;
  return 0;
}
template <class... Types, size_t... Is>
static void call_(void (*kernel)(Types...), void** arguments, std::index_sequence<Is...>) {
  kernel(*(std::remove_const_t<Types>*)arguments[Is]...);
}
template <class... Types> static void call(void (*kernel)(Types...), void** arguments) {
  call_(kernel, arguments, std::index_sequence_for<Types...>());
}
