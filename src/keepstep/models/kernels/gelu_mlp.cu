// The plain feed-forward's two matmuls with GELU as epilogue.
//
// Forward:  wide[m, f] = x[m, k] · up[f, k]ᵀ + bias, which is never written: activation[m, f] = gelu(wide), and
//           saved_grad[m, f], the derivative of the activation with respect to wide.
// Backward: dy[m, f] = d_out[m, k] · down[k, f], which is never written: d_wide[m, f] = dy · saved_grad.
//
// saved_grad takes the memory of wide, and the backward pass only has to multiply.

// x · Φ(x), and its derivative Φ + x · Φ'. The tail of Φ is a polynomial times Φ' (Abramowitz and Stegun 7.1.26), right to
// 3e-7, and small tails keep their leading digits. So one exponential serves both.
__device__ __forceinline__ float gelu(float x, float& derivative) {
  const float bell = power_of_two(x * x * -0.72134752f);  // e^(-x²/2)
  const float t = inverse(1 + 0.23164189f * fabsf(x));
  const float series = 0.53070271f * t - 0.72657603f;
  const float tail = t * (0.12741480f + t * (-0.14224837f + t * (0.71070687f + t * series))) * bell;
  const float share = x < 0 ? tail : 1 - tail;
  derivative = share + x * bell * 0.39894228f;
  return x * share;
}
// The same with tanh in place of Φ: (1 + tanh(u)) / 2 is 1 / (1 + e^(-2u)).
__device__ __forceinline__ float gelu_by_tanh(float x, float& derivative) {
  const float square = x * x;
  const float share = inverse(1 + power_of_two(x * (-2.3022082f - 0.10294324f * square)));
  derivative = share + x * share * (1 - share) * (1.5957691f + 0.21406445f * square);
  return x * share;
}

struct ActivatedForward : ByOutputs {
  const uint4* bias;           // or null
  uint4 *activation, *saved_grad;  // eight numbers each
  int row_eights, by_tanh;
  struct Spot { int place, column; };  // of this lane's first eight numbers
  struct Inputs { uint4 bias[2]; };

  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32, column = tile.column * (COLUMNS / 8) + lane % 4;
    return {(tile.row + lane / 4) * row_eights + column, column};
  }
  __device__ __forceinline__ Inputs inputs(Spot spot, int piece, int) const {
    if (!bias) return {};
    const uint4* from = bias + spot.column + piece * (STRIPS * STRIP / 8);
    return {{from[0], from[STRIP / 8]}};
  }
  __device__ __forceinline__ void work_out(const Inputs& in, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 wide[STRIPS][2];
    handed.await();
    handed.read(wide[0], 0);
    handed.read(wide[1], 1);
    handed.free();
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int to = spot.place + (warp * 16 + i * 8) * row_eights + (piece * STRIPS + strip) * (STRIP / 8);
        uint4& eight = wide[strip][i];
        activation[to] = by_tanh ? activate<1>(eight, in.bias[strip]) : activate<0>(eight, in.bias[strip]);
        saved_grad[to] = eight;
      }
    }
  }
  // Of sums, which saved_grad replaces.
  template <int BY_TANH> __device__ __forceinline__ static uint4 activate(uint4& sums, uint4 bias) {
    return {activate<BY_TANH>(sums.x, bias.x), activate<BY_TANH>(sums.y, bias.y), activate<BY_TANH>(sums.z, bias.z),
            activate<BY_TANH>(sums.w, bias.w)};
  }
  template <int BY_TANH> __device__ __forceinline__ static u32 activate(u32& sums, u32 bias) {
    float value[2], derivative[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = i ? high(sums) + high(bias) : low(sums) + low(bias);
      value[i] = BY_TANH ? gelu_by_tanh(x, derivative[i]) : gelu(x, derivative[i]);
    }
    sums = pack(derivative[0], derivative[1]);
    return pack(value[0], value[1]);
  }
};

struct ActivatedBackward : ByInputs {
  const TensorMap* saved_grad_map;
  const uint4* saved_grad;
  uint4* d_wide;
  int row_eights;
  typedef int Spot;  // of this lane's first eight numbers
  struct Inputs { uint4 derivative[2]; };

  __device__ __forceinline__ void warm_up(int step, int row, int column) const {
    if (step < 4) warm(saved_grad_map, column * COLUMNS + step * 64, row);
  }
  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32;
    return (tile.row + lane / 4) * row_eights + tile.column * (COLUMNS / 8) + lane % 4;
  }
  __device__ __forceinline__ Spot place(Spot spot, int piece, int warp) const {
    return spot + warp * 16 * row_eights + piece * (STRIP / 8);
  }
  __device__ __forceinline__ Inputs inputs(Spot spot, int piece, int warp) const {
    const uint4* from = saved_grad + place(spot, piece, warp);
    return {{from[0], from[8 * row_eights]}};
  }
  __device__ __forceinline__ void work_out(const Inputs& in, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 dy[2];
    handed.await();
    handed.read(dy, 0);
    handed.free();
    uint4* to = d_wide + place(spot, piece, warp);
    to[0] = times(dy[0], in.derivative[0]);
    to[8 * row_eights] = times(dy[1], in.derivative[1]);
  }
};

KERNEL gelu_gemm_forward(MAP left, MAP up, const uint4* bias, uint4* activation, uint4* saved_grad, int row_pairs,
                         int column_tiles, int steps, int row_eights, int by_tanh) {
  const ActivatedForward finish = {{&up}, bias, activation, saved_grad, row_eights, by_tanh};
  run_tiles(&left, finish, row_pairs, column_tiles, steps);
}

KERNEL gelu_gemm_backward(MAP left, MAP down, MAP saved_grad_map, const uint4* saved_grad, uint4* d_wide, int row_pairs,
                          int column_tiles, int steps, int row_eights) {
  const ActivatedBackward finish = {{&down}, &saved_grad_map, saved_grad, d_wide, row_eights};
  run_tiles(&left, finish, row_pairs, column_tiles, steps);
}
