// A GEMM with cp.async, ldmatrix and mma.sync, as a CUDA programmer would write it.
//   nvcc -ptx -arch=sm_80 tensor_sm80.cu -o tensor_sm80.ptx
#include <cuda_bf16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

namespace {

DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

DEVICE void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template<int N>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEVICE void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace

// c (M, N) = a (M, K) b (K, N), fp32 out. Blocks of 4 warps, tiles of 64 x 64 x 32 in three stages; a warp has 32 x 32. 16-byte
// chunks of a row are exchanged so that ldmatrix meets no bank conflict. K, N: multiples of 8.
extern "C" __global__ void __launch_bounds__(128)
    gemm_cp_async(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int M, int N, int K) {
  constexpr int kStages = 3, kTileA = 64 * 64, kTileB = 32 * 128;  // bytes
  __shared__ alignas(128) uint8_t memory[kStages * (kTileA + kTileB)];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
  const uint32_t base = shared_address(memory);
  const auto a_chunk = [&](int stage, int row, int chunk) {
    return base + stage * kTileA + row * 64 + ((chunk ^ (row / 2 % 4)) * 16);
  };
  const auto b_chunk = [&](int stage, int row, int chunk) {
    return base + kStages * kTileA + stage * kTileB + row * 128 + ((chunk ^ (row % 8)) * 16);
  };
  const auto load = [&](int tile) {
    const int stage = tile % kStages, k0 = tile * 32;
    for (int i = thread; i < 64 * 4; i += 128) {
      const int row = i / 4, chunk = i % 4;
      const bool inside = row0 + row < M && k0 + chunk * 8 < K;
      copy_async(a_chunk(stage, row, chunk),
                 inside ? a + int64_t(row0 + row) * K + k0 + chunk * 8 : a, inside ? 16 : 0);
    }
    for (int i = thread; i < 32 * 8; i += 128) {
      const int row = i / 8, chunk = i % 8;
      const bool inside = k0 + row < K && column0 + chunk * 8 < N;
      copy_async(b_chunk(stage, row, chunk),
                 inside ? b + int64_t(k0 + row) * N + column0 + chunk * 8 : b, inside ? 16 : 0);
    }
  };
  const int tiles = (K + 31) / 32;
  for (int t = 0; t < kStages - 1; ++t) {
    if (t < tiles) load(t);
    commit_copies();
  }
  float acc[2][4][4] = {};
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  for (int t = 0; t < tiles; ++t) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (t + kStages - 1 < tiles) load(t + kStages - 1);
    commit_copies();
    const int stage = t % kStages;
    for (int k = 0; k < 2; ++k) {
      uint32_t fa[2][4], fb[2][4];
      for (int i = 0; i < 2; ++i)
        load_matrices(fa[i], a_chunk(stage, warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
      for (int j = 0; j < 2; ++j)
        load_matrices_transposed(
            fb[j], b_chunk(stage, k * 16 + lane % 16, warp_column / 8 + j * 2 + lane / 16));
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
          multiply(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      for (int h = 0; h < 2; ++h) {
        const int row = row0 + warp_row + i * 16 + h * 8 + lane / 4;
        const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
        if (row < M && column < N)
          *reinterpret_cast<float2*>(c + int64_t(row) * N + column) =
              make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
      }
}
