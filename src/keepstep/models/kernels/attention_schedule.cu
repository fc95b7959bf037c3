// Which items of attention_backward each multiprocessor computes: in their order, each item goes to the multiprocessor
// that is free first. One warp; a lane has the multiprocessors that are equal to it modulo 32.
//
// costs: of each item; lists: [processors, items + 1], each list ends with -1.
extern "C" __global__ void __launch_bounds__(32)
    attention_schedule(const int* order, const int* costs, int* lists, int items, int processors) {
  constexpr int EACH = 8, MOST = 32 * EACH;
  const int lane = threadIdx.x;
  u32 free[EACH];  // when a multiprocessor is free, times MOST, plus its number: no two are equal
  int lengths[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k) free[k] = k * 32 + lane < processors ? k * 32 + lane : ~0u, lengths[k] = 0;
  for (int first = 0; first < items; first += 32) {
    const int mine = first + lane < items ? order[first + lane] : 0, price = costs[mine];
    const int count = min(32, items - first);
    for (int i = 0; i < count; ++i) {
      u32 soonest = free[0];
#pragma unroll
      for (int k = 1; k < EACH; ++k) soonest = min(soonest, free[k]);
      soonest = __reduce_min_sync(~0u, soonest);
      const int item = __shfl_sync(~0u, mine, i), cost = __shfl_sync(~0u, price, i);
#pragma unroll
      for (int k = 0; k < EACH; ++k)
        if (free[k] == soonest && soonest != ~0u) {
          lists[(long long)(k * 32 + lane) * (items + 1) + lengths[k]++] = item;
          free[k] += cost * MOST;
        }
    }
  }
#pragma unroll
  for (int k = 0; k < EACH; ++k)
    if (k * 32 + lane < processors) lists[(long long)(k * 32 + lane) * (items + 1) + lengths[k]] = -1;
}
