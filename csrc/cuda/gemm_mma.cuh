// Matrix products of 16-bit operands on the tensor cores of sm_80 and later (cuda/mma.cuh).
//
// A block of four warps computes a BM x BN tile of C, each warp a quarter of it. The tiles of A and B go through a ring of
// kStages steps of kDepth in shared memory: while one step is multiplied, cp.async fills the others. An operand of
// which k is contiguous lies there as rows of kDepth, one of which p is, as rows of BM or BN; ldmatrix reads either way
// without bank conflicts, transposing as it goes, so that no operand is ever copied for its layout. Operands that
// 16-byte copies cannot read (rows that begin anywhere, neither stride 1) are loaded element by element into the same
// tiles: right for any strides, far slower.
// The fragments of the next 16 k are on their way while those of the last are multiplied.
//
// 2 M N K FLOPs; a block reads 2 (BM + BN) bytes for each of its k. Bound: tensor cores. 128 x 128 tiles: 128 sums and 64
// registers of fragments a thread, two blocks on a multiprocessor with 48 KiB of shared memory each; 64 x 64 for
// products too small to give every multiprocessor one. Not yet timed on a GPU; counted on the virtual GPU
// (tests/vgpu/test_cuda_gemm.py).
#pragma once
#include "cuda/gemm.cuh"
#include "cuda/mma.cuh"

TW_BEGIN

constexpr int kGemmThreads = 128, kDepth = 32;

template<int BM, int BN>
struct GemmTiles {
  static constexpr int kWarpM = BM / 2, kWarpN = BN / 2;
  static constexpr int kStages = BM == 128 ? 3 : 4;
  static constexpr int kSide = BM * kDepth * 2, kStep = kSide + BN * kDepth * 2;  // bytes
  // Rows of sums in the epilogue: 8 floats longer, so that the eight rows that a warp writes at once lie apart.
  static constexpr int kPitch = kWarpN + 8;
  static constexpr int kShared = kStages * kStep;
  static_assert(4 * 16 * kPitch * 4 <= kShared);
};

// How the threads fill the tile of one side with P rows or columns of the operand; each has the same chunks of every
// kStep-th row.
template<int P, bool K_MAJOR>
struct SideCopy {
  using Rows = Tile<K_MAJOR ? kDepth : P>;
  static constexpr int kRows = K_MAJOR ? P : kDepth;
  static constexpr int kAcross = Rows::kXor, kStep = kGemmThreads / kAcross;
  static constexpr int kGroups = Rows::kPitch / 16 / kAcross;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const uint16_t* from;  // this thread's first element of the next step
  int row, chunk, offset;
  int count;  // of the operand's rows or columns, from the tile's first on

  __device__ __forceinline__ SideCopy(const GemmOperand& x, int64_t product, int first, int count,
                                      int k0)
      : row(threadIdx.x / kAcross),
        chunk(threadIdx.x % kAcross),
        offset(Rows::at(row, chunk)),
        count(count) {
    const int p = first + (K_MAJOR ? row : chunk * 8), k = k0 + (K_MAJOR ? chunk * 8 : row);
    from = static_cast<const uint16_t*>(x.data) + product * x.batch + p * x.stride + k * x.k_stride;
  }
  __device__ __forceinline__ static int bytes(int elements) { return 2 * min(max(elements, 0), 8); }

  // The next step, of which `left` k exist; the others, and what lies past `count`, become 0.
  __device__ __forceinline__ void start(uint32_t tile, const GemmOperand& x, int left) {
    if (x.wide)
      copy_chunks(tile + offset, x, left);
    else
      load_elements(tile + offset, x, left);
    from += kDepth * x.k_stride;
  }

 private:
  __device__ __forceinline__ void copy_chunks(uint32_t to, const GemmOperand& x, int left) const {
    const uint16_t* p = from;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const bool in = row + r < (K_MAJOR ? count : left);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int c = (chunk + g * kAcross) * 8;
        copy_async(to + r * Rows::kPitch + g * kAcross * 16, p + g * kAcross * 8,
                   in ? bytes((K_MAJOR ? left : count) - c) : 0);
      }
      p += kStep * (K_MAJOR ? x.stride : x.k_stride);
    }
  }
  __device__ __forceinline__ void load_elements(uint32_t to, const GemmOperand& x, int left) const {
    const int64_t down = K_MAJOR ? x.stride : x.k_stride, next = K_MAJOR ? x.k_stride : x.stride;
#pragma unroll 1
    for (int r = 0; r < kRows; r += kStep)
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const int c = (chunk + g * kAcross) * 8;
        const int n = row + r < (K_MAJOR ? count : left) ? (K_MAJOR ? left : count) - c : 0;
        const uint16_t* p = from + r * down + g * kAcross * 8 * next;
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = 2 * i < n ? p[2 * i * next] : 0;
          const uint32_t high = 2 * i + 1 < n ? p[(2 * i + 1) * next] : 0;
          w[i] = low | high << 16;
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + r * Rows::kPitch +
                                                                      g * kAcross * 16),
                     "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                     : "memory");
      }
  }
};

// Where a warp finds its part of a side, whose fragments are rows of A (LEFT) or columns of B.
template<int P, bool K_MAJOR, bool LEFT>
struct SideFragments {
  static constexpr int kCount = P / 32;  // of 16 rows or columns
  using At = Lanes<K_MAJOR ? kDepth : P>;
  At at;

  __device__ __forceinline__ explicit SideFragments(int warp) : at(place(warp)) {}
  // A fragment of B is one of A with its blocks in the other order; transposing exchanges the orders.
  __device__ __forceinline__ static At place(int warp) {
    const int lane = threadIdx.x % 32, first = warp * (P / 2);
    const bool down = LEFT == K_MAJOR;
    const int row = down ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
    const int chunk = down ? lane >> 4 : lane >> 3 & 1;
    return K_MAJOR ? At(first + row, chunk) : At(row, first / 8 + chunk);
  }
  // The fragments of k 16 i to 16 i + 15.
  __device__ __forceinline__ void load(uint32_t (&x)[kCount][4], uint32_t tile, int i) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if constexpr (K_MAJOR)
        load_matrices(x[n], at.of(tile, 16 * n, i));
      else
        load_transposed(x[n], at.of(tile, 16 * i, n));
  }
};

// To shared memory. The compiler would take some of these stores apart, which brings lanes into the same bank.
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared_address(to)), "f"(x), "f"(y)
               : "memory");
}

template<class T, int BM, int BN, bool A_K, bool B_K>
__global__ void __launch_bounds__(kGemmThreads, BM == 128 ? 2 : 4)
    gemm_mma_kernel(const __grid_constant__ GemmCall g) {
  extern __shared__ __align__(128) char memory[];
  using Tiles = GemmTiles<BM, BN>;
  constexpr int MT = Tiles::kWarpM / 16, NT = Tiles::kWarpN / 16, kStages = Tiles::kStages;
  GemmPlace at;
  if (!find_place<BM, BN>(g, at)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(memory);

  SideCopy<BM, A_K> copy_a(g.a, at.a, at.row, at.row_end - at.row, at.k0);
  SideCopy<BN, B_K> copy_b(g.b, at.b, at.col, g.N - at.col, at.k0);
  int left = at.k1 - at.k0;  // of k, not yet asked for
  const int steps = (left + kDepth - 1) / kDepth;
  const auto fetch = [&](int stage) {
    if (left > 0) {
      copy_a.start(ring + stage * Tiles::kStep, g.a, left);
      copy_b.start(ring + stage * Tiles::kStep + Tiles::kSide, g.b, left);
      left -= kDepth;
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);
  wait_copies<kStages - 2>();
  __syncthreads();

  const SideFragments<BM, A_K, true> left_side(warp % 2);
  const SideFragments<BN, B_K, false> right_side(warp / 2);
  uint32_t a[2][MT][4], b[2][NT][4];
  const auto load = [&](int to, int stage, int i) {
    left_side.load(a[to], ring + stage * Tiles::kStep, i);
    right_side.load(b[to], ring + stage * Tiles::kStep + Tiles::kSide, i);
  };
  float acc[MT][2 * NT][4];
  clear(acc);
  const auto multiply_all = [&](int from) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        multiply<T>(acc[m][2 * n], a[from][m], b[from][n][0], b[from][n][1]);
        multiply<T>(acc[m][2 * n + 1], a[from][m], b[from][n][2], b[from][n][3]);
      }
  };
  static_assert(kDepth == 32);
  if (steps > 0) load(0, 0, 0);
  int stage = 0, free = kStages - 1;  // free: the stage that the step before has left
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    load(1, stage, 1);
    fetch(free);
    multiply_all(0);
    free = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    wait_copies<kStages - 2>();
    __syncthreads();
    if (step + 1 < steps) load(0, stage, 0);
    multiply_all(1);
  }

  // Sixteen rows of sums at a time go through shared memory, which no step uses any more, so that a lane has four
  // columns next to each other.
  constexpr int across = Tiles::kWarpN / 4;
  float* mine = reinterpret_cast<float*>(memory) + warp * 16 * Tiles::kPitch;
  const int row0 = at.row + warp % 2 * Tiles::kWarpM;
  const int col = at.col + warp / 2 * Tiles::kWarpN + lane % across * 4;
#pragma unroll 1
  for (int m = 0; m < MT; ++m) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MT; ++i)  // registers have no index
      if (i == m)
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            store_pair(mine + (lane / 4 + 8 * half) * Tiles::kPitch + 8 * n + lane % 4 * 2,
                       acc[i][n][2 * half], acc[i][n][2 * half + 1]);
    __syncwarp();
#pragma unroll 1
    for (int r = lane / across; r < 16; r += 32 / across) {
      const int row = row0 + 16 * m + r;
      if (row >= at.row_end || col >= g.N) continue;
      const float4 sums =
          *reinterpret_cast<const float4*>(mine + r * Tiles::kPitch + lane % across * 4);
      float x[4] = {sums.x, sums.y, sums.z, sums.w};
      finish_four(g.to, at.out, row, col, g.N, x);
    }
  }
}

// ---- launcher -----------------------------------------------------------------------------------

// Whether 16-byte copies can read an operand along k, or along p; `count` is how many p there are.
struct GemmLayout {
  bool k_major, wide;
};
inline GemmLayout gemm_layout(const GemmOperand& x, int64_t count, const GemmCall& g) {
  const auto whole = [](int64_t stride, int64_t size) { return size <= 1 || stride % 8 == 0; };
  const bool begins = aligned16(x.data) && whole(x.batch, std::max(g.batches, g.E));
  const bool along_k = x.k_stride == 1 || g.K == 1, along_p = x.stride == 1 || count == 1;
  // Groups along k begin at any k.
  if (along_k && begins && whole(x.stride, count) && g.groups != Groups::depth) return {true, true};
  if (along_p && begins && whole(x.k_stride, g.K)) return {false, true};
  return {along_k || !along_p, false};
}

template<class T, int BM, int BN>
void launch_gemm_tiles(GemmCall g, GemmLayout a, GemmLayout b, cudaStream_t stream) {
  using Tiles = GemmTiles<BM, BN>;
  g.tiles_m = static_cast<int>(divide_up(g.M, BM)) + (g.groups == Groups::rows ? g.E : 0);
  g.tiles_n = static_cast<int>(divide_up(g.N, BN));
  with_bool(a.k_major, [&](auto a_k) {
    with_bool(b.k_major, [&](auto b_k) {
      const auto kernel = gemm_mma_kernel<T, BM, BN, decltype(a_k)::value, decltype(b_k)::value>;
      allow_shared(kernel, Tiles::kShared);
      const int64_t blocks = int64_t{g.tiles_m} * g.tiles_n * g.batches * g.splits;
      kernel<<<static_cast<unsigned>(blocks), kGemmThreads, Tiles::kShared, stream>>>(g);
    });
  });
}

template<class T>
void launch_gemm_mma(GemmCall g, cudaStream_t stream) {
  const GemmLayout a = gemm_layout(g.a, g.M, g), b = gemm_layout(g.b, g.N, g);
  g.a.wide = a.wide;
  g.b.wide = b.wide;
  const int64_t tiles = divide_up(g.M, 128) * divide_up(g.N, 128) * g.batches * g.splits;
  if (tiles >= multiprocessors())
    launch_gemm_tiles<T, 128, 128>(g, a, b, stream);
  else
    launch_gemm_tiles<T, 64, 64>(g, a, b, stream);
}

TW_END
