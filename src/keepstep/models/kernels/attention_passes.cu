// The passes before and after attention_backward: numbers of each query, and the gradients of queries in bf16.

// The largest key element and the largest squared norm of a value of every key-value head, as bits of positive floats,
// which order like integers; a NaN is larger than all. limits: [row, group] of both, zero at the start. One thread block
// for 512 tokens of one head.
extern "C" __global__ void __launch_bounds__(256)
    attention_limits(const uint4* key, const uint4* value, u32* limits, int tokens, int groups) {
  constexpr int LANES = HEAD / 8;
  const int chunks = (tokens + 511) / 512, head = blockIdx.x / chunks, first = blockIdx.x % chunks * 512;
  const int row = head / groups, group = head % groups, lane = threadIdx.x % LANES;
  u32 largest_key = 0, largest_value = 0;
  for (int token = first + threadIdx.x / LANES; token < min(tokens, first + 512); token += 256 / LANES) {
    const long long at = (((long long)row * tokens + token) * groups + group) * LANES + lane;
    const uint4 x = key[at], y = value[at];
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      largest_key = max(largest_key, max(words[i] << 16 & 0x7FFFFFFFu, words[i] & 0x7FFF0000u));
    float sum = low(y.x) * low(y.x) + high(y.x) * high(y.x) + low(y.y) * low(y.y) + high(y.y) * high(y.y);
    sum += low(y.z) * low(y.z) + high(y.z) * high(y.z) + low(y.w) * low(y.w) + high(y.w) * high(y.w);
    for (int k = 1; k < LANES; k *= 2) sum += __shfl_xor_sync(~0u, sum, k);
    largest_value = max(largest_value, __float_as_uint(sum) & 0x7FFFFFFFu);
  }
  for (int k = 1; k < 32; k *= 2) {
    largest_key = max(largest_key, __shfl_xor_sync(~0u, largest_key, k));
    largest_value = max(largest_value, __shfl_xor_sync(~0u, largest_value, k));
  }
  if (threadIdx.x % 32 == 0) atomicMax(limits + 2 * head, largest_key), atomicMax(limits + 2 * head + 1, largest_value);
}

// For each query: the base-2 log-sum-exp of its scores, what its gradients of weights have in common (negative), and the
// scale of its gradient as integers with its inverse. A gradient of a query, before the factor ROOT, is a sum over keys of
// weight · (gradient of weight - mean) · key: at most |output gradient| · the largest |value| · the largest key element.
// One thread block for 16 tokens, all heads. stats, scales: [row, head, 64 queries] of 64 numbers, then 64 more.
extern "C" __global__ void __launch_bounds__(256)
    attention_stats(const uint4* attn_out, const uint4* gradient, const float* lse, const u32* limits, float* stats,
                    float* scales, int tokens, int heads, int groups) {
  constexpr int LANES = HEAD / 8;
  const int first = blockIdx.x * 16, row = first / tokens, lane = threadIdx.x % LANES;
  for (int i = threadIdx.x / LANES; i < 16 * heads; i += 256 / LANES) {
    const int head = i % heads, token = first % tokens + i / heads;
    const long long at = ((long long)(first + i / heads) * heads + head) * LANES + lane;
    const uint4 x = attn_out[at], y = gradient[at];
    float sum = low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y);
    sum += low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
    float norm = low(y.x) * low(y.x) + high(y.x) * high(y.x) + low(y.y) * low(y.y) + high(y.y) * high(y.y);
    norm += low(y.z) * low(y.z) + high(y.z) * high(y.z) + low(y.w) * low(y.w) + high(y.w) * high(y.w);
    for (int k = 1; k < LANES; k *= 2) {
      sum += __shfl_xor_sync(~0u, sum, k);
      norm += __shfl_xor_sync(~0u, norm, k);
    }
    if (lane) continue;
    const long long line = (long long)row * heads + head;
    const long long to = (line * (tokens / QUERIES) + token / QUERIES) * 2 * QUERIES + token % QUERIES;
    stats[to] = lse[line * tokens + token] * LOG2_E, stats[to + QUERIES] = -sum;
    const u32* limit = limits + 2 * (row * groups + head / (heads / groups));
    const float bound = sqrtf(norm) * sqrtf(__uint_as_float(limit[1])) * __uint_as_float(limit[0]);
    // Not finite: integers cannot say so, their scale does.
    scales[to] = bound > 0 && bound < 1e38f ? LARGEST_SUM / bound : 0.0f;
    scales[to + QUERIES] = bound < 1e38f ? bound / LARGEST_SUM : __uint_as_float(0x7FC00000u);
  }
}

// The gradients of 64 queries of all heads of a group from their integer sums, rope undone, into the gradient of the
// fused projection.
extern "C" __global__ void __launch_bounds__(128)
    attention_queries(const int4* query_sums, const float* scales, uint4* fused, const float* cosines, const float* sines,
                      int table_rows, int tokens, int heads, int groups) {
  __shared__ __align__(1024) char room[8192];
  const int blocks = tokens / QUERIES, group = blockIdx.x % groups, block = blockIdx.x / groups % blocks;
  const int row = blockIdx.x / groups / blocks, each = heads / groups, slots = (heads + 2 * groups) * (HEAD / 8);
  const long long token = (long long)row * tokens + block * QUERIES;
  const Rope rope(cosines, sines, table_rows == tokens ? block * QUERIES : token);
  uint4* to = fused + token * slots + group * (each + 2) * (HEAD / 8);
  for (int head = 0; head < each; ++head, to += HEAD / 8) {
    const long long piece = ((long long)row * heads + group * each + head) * blocks + block;
    const int4* from = query_sums + piece * (QUERIES * HEAD / 4);
    const float* inverse = scales + piece * 2 * QUERIES + QUERIES + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float upper = inverse[0] * ROOT, lower = inverse[8] * ROOT;
    float sums[HEAD / 2];
#pragma unroll
    for (int j = 0; j < HEAD / 8; ++j) {
      const int4 x = from[j * 128 + threadIdx.x];
      sums[4 * j] = x.x, sums[4 * j + 1] = x.y, sums[4 * j + 2] = x.z, sums[4 * j + 3] = x.w;
    }
    rope.undo(sums);
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      write_rows(sums + 32 * h, upper, lower, (u32)__cvta_generic_to_shared(room), to + h * 8, slots);
  }
}
