// The gated feed-forward's two matmuls with SwiGLU as epilogue.
//
// Forward:  fused[m, 2f] = x[m, k] · gate_up[2f, k]ᵀ, which is never written: product[m, f] = silu(gate) · up, and
//           saved_grad[m, 2f], the derivatives of the product with respect to gate and up.
// Backward: dy[m, f] = d_out[m, k] · down[k, f], which is never written: d_fused[m, 2f] = dy · saved_grad.
//
// saved_grad takes the memory of gates and ups, and the backward pass only has to multiply.

// Of two gates and two ups, which saved_grad replaces.
__device__ __forceinline__ u32 product_and_saved_grad(u32& gates, u32& ups) {
  float product[2], by_gate[2], by_up[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float gate = i ? high(gates) : low(gates), up = i ? high(ups) : low(ups), s = sigmoid(gate);
    by_up[i] = gate * s;
    by_gate[i] = up * s * (1 + gate * (1 - s));
    product[i] = by_up[i] * up;
  }
  gates = pack(by_gate[0], by_gate[1]);
  ups = pack(by_up[0], by_up[1]);
  return pack(product[0], product[1]);
}

struct GatedForward : GatedColumns {
  uint4 *saved_grad, *product;  // eight numbers each
  int row_eights;                // of the product; a row of saved_grad is twice as long
  struct Spot { int saved_grad, product; };  // of this lane's first eight numbers
  struct Inputs {};

  __device__ __forceinline__ Inputs inputs(Spot, int, int) const { return {}; }
  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32, row = tile.row + lane / 4, per_block = width / (COLUMNS / 2);
    const int block = tile.column / per_block, inside = tile.column % per_block * (COLUMNS / 16) + lane % 4;
    return {row * 2 * row_eights + block * 2 * (width / 8) + inside, row * row_eights + block * (width / 8) + inside};
  }
  __device__ __forceinline__ void work_out(const Inputs&, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 gate[2], up[2];
    handed.await();
    handed.read(gate, 0);
    handed.read(up, 1);
    handed.free();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int rows = warp * 16 + i * 8, eights = piece * (STRIP / 8);
      uint4 both;
      both.x = product_and_saved_grad(gate[i].x, up[i].x);
      both.y = product_and_saved_grad(gate[i].y, up[i].y);
      both.z = product_and_saved_grad(gate[i].z, up[i].z);
      both.w = product_and_saved_grad(gate[i].w, up[i].w);
      uint4* to = saved_grad + (spot.saved_grad + rows * 2 * row_eights + eights);
      to[0] = gate[i];
      to[width / 8] = up[i];
      product[spot.product + rows * row_eights + eights] = both;
    }
  }
};

struct GatedBackward : ByInputs {
  static constexpr int AHEAD = 3, INPUTS_BYTES = 2048;  // of gates and ups
  const TensorMap* saved_grad_map;
  const uint4* saved_grad;
  uint4* d_fused;
  int width, row_eights;
  typedef int Spot;  // of this lane's first eight gates

  __device__ __forceinline__ int gates_at(int column) const {
    const int per_block = width / COLUMNS;
    return column / per_block * 2 * width + column % per_block * COLUMNS;
  }
  // Inputs are read far enough ahead: brought into the cache before, they would only be moved once more.
  __device__ __forceinline__ void warm_up(int, int, int) const {}
  __device__ __forceinline__ Spot spot(Tile tile) const {
    const int lane = threadIdx.x % 32;
    return (tile.row + lane / 4) * 2 * row_eights + gates_at(tile.column) / 8 + lane % 4;
  }
  __device__ __forceinline__ Spot place(Spot spot, int piece, int warp) const {
    return spot + warp * 32 * row_eights + piece * (STRIP / 8);
  }
  // Where this lane's eight gates are, of one of two rows; its eight ups are 512 bytes from there.
  __device__ __forceinline__ static u32 lane_inputs(u32 inputs, int i) { return inputs + i * 1024 + threadIdx.x % 32 * 16; }
  __device__ __forceinline__ void copy_inputs(u32 to, Spot spot, int piece, int warp) const {
    const uint4* from = saved_grad + place(spot, piece, warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_eight(lane_inputs(to, i), from + i * 16 * row_eights);
      copy_eight(lane_inputs(to, i) + 512, from + i * 16 * row_eights + width / 8);
    }
  }
  __device__ __forceinline__ void work_out(u32 inputs, const Handed& handed, Spot spot, int piece, int warp) const {
    uint4 dy[2];
    handed.await();
    handed.read(dy, 0);
    handed.free();
    uint4* to = d_fused + place(spot, piece, warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i * 16 * row_eights] = times(dy[i], take(lane_inputs(inputs, i)));
      to[i * 16 * row_eights + width / 8] = times(dy[i], take(lane_inputs(inputs, i) + 512));
    }
  }
};

KERNEL swiglu_gemm_forward(MAP left, MAP gate_up, uint4* saved_grad, uint4* product, int row_pairs, int column_tiles, int steps,
                     int width, int row_eights) {
  const GatedForward finish = {{&gate_up, width}, saved_grad, product, row_eights};
  run_tiles(&left, finish, row_pairs, column_tiles, steps);
}

KERNEL swiglu_gemm_backward(MAP left, MAP down, MAP saved_grad_map, const uint4* saved_grad, uint4* d_fused, int row_pairs,
                      int column_tiles, int steps, int width, int row_eights) {
  const GatedBackward finish = {{&down}, &saved_grad_map, saved_grad, d_fused, width, row_eights};
  run_tiles(&left, finish, row_pairs, column_tiles, steps);
}
