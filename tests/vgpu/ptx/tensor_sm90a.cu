// TMA, mbarriers, wgmma, bulk copies and clusters, as a CUDA programmer would write them.
//   nvcc -ptx -arch=sm_90a tensor_sm90a.cu -o tensor_sm90a.ptx
#include <cuda_bf16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

extern __shared__ __align__(1024) uint8_t memory[];  // dynamic

struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

namespace {

DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

DEVICE void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// ---- mbarrier, TMA, wgmma

DEVICE void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_in_block(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
      "%1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
DEVICE void load_box(uint32_t to, const TensorMap* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
DEVICE void load_box_multicast(uint32_t to, const TensorMap* map, int x, int y, uint32_t barrier,
                               uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}
DEVICE void store_box(const TensorMap* map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// K-major, 128-byte swizzle: 8 rows of 128 bytes are 1024 bytes apart.
DEVICE uint64_t descriptor(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         (address & 0x3ffff) >> 4;
}
DEVICE void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, 1, 1, 1, 0, 0;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}

DEVICE uint32_t pack(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

}  // namespace

// c (M, N) = a (M, K) b^T, b (N, K); bf16 out. Warp-specialised: warpgroup 0 loads, warpgroups 1 and 2 multiply 64 rows each of a tile
// of 128 x 64, through kStages stages of K = 64. A stage is given back by a thread of each warp; with `Elected`, as CUTLASS
// does, by one of each warpgroup: a wgmma is of all its warps. In a cluster of two, the blocks have tiles below each other: each loads half
// of the b they share, into both.
template<int Cluster, bool Elected = false>
DEVICE void gemm_specialised(const TensorMap& map_a, const TensorMap& map_b, const TensorMap& map_c,
                             int K) {
  constexpr int kStages = 3, kBytesA = 128 * 128, kBytesB = 64 * 128;
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t rank = Cluster > 1 ? cluster_rank() : 0;
  const int row0 = blockIdx.y * 128, column0 = blockIdx.x * 64;
  const uint32_t base = shared_address(memory);
  const auto tile_a = [&](int s) { return base + s * (kBytesA + kBytesB); };
  const auto tile_b = [&](int s) { return tile_a(s) + kBytesA; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&full[s]), 1);
      barrier_init(shared_address(&empty[s]), (Elected ? 2 : 8) * Cluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (Cluster > 1)
    cluster_sync();
  else
    __syncthreads();
  const int tiles = (K + 63) / 64;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      for (int t = 0; t < tiles; ++t) {
        const int s = t % kStages;
        const uint32_t barrier = shared_address(&full[s]);
        barrier_wait(shared_address(&empty[s]), (t / kStages + 1) % 2);
        barrier_expect(barrier, kBytesA + kBytesB);
        load_box(tile_a(s), &map_a, t * 64, row0, barrier);
        if (Cluster == 1)
          load_box(tile_b(s), &map_b, t * 64, column0, barrier);
        else
          load_box_multicast(tile_b(s) + rank * (kBytesB / 2), &map_b, t * 64, column0 + rank * 32,
                             barrier, 3);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[32] = {};
    for (int t = 0; t < tiles; ++t) {
      const int s = t % kStages;
      barrier_wait(shared_address(&full[s]), t / kStages % 2);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const uint64_t a = descriptor(tile_a(s) + (warpgroup - 1) * 64 * 128),
                     b = descriptor(tile_b(s));
      for (int k = 0; k < 4; ++k) wgmma_64x64(acc, a + k * 2, b + k * 2);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane == 0 && (!Elected || warp == 0)) {
        if (Cluster == 1)
          barrier_arrive(shared_address(&empty[s]));
        else
          for (int r = 0; r < Cluster; ++r) barrier_arrive_in_block(shared_address(&empty[s]), r);
      }
    }
    // The tile of c, in the swizzle of its tensor map, where stage 0 of a was. All copies into it are over and read: in this
    // block's own stages after the last wait of both warpgroups.
    asm volatile("bar.sync 1, 256;" ::: "memory");
    const int row = (warpgroup - 1) * 64 + warp * 16 + lane / 4;
    for (int j = 0; j < 8; ++j)
      for (int h = 0; h < 2; ++h) {
        const int r = row + h * 8;
        uint8_t* at = memory + r * 128 + ((j ^ (r % 8)) * 16) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(at) = pack(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
      }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (threadIdx.x == 128) {
      store_box(&map_c, column0, row0, base);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  }
  if (Cluster > 1) cluster_sync();  // no block leaves while another still signals its barriers
}

extern "C" __global__ void __launch_bounds__(384)
    gemm_tma_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                   const __grid_constant__ TensorMap c, int K) {
  gemm_specialised<1>(a, b, c, K);
}
extern "C" __global__ void __launch_bounds__(384)
    gemm_tma_wgmma_elected(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                           const __grid_constant__ TensorMap c, int K) {
  gemm_specialised<1, true>(a, b, c, K);
}
extern "C" __global__ void __cluster_dims__(1, 2, 1) __launch_bounds__(384)
    gemm_tma_wgmma_cluster(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                           const __grid_constant__ TensorMap c, int K) {
  gemm_specialised<2>(a, b, c, K);
}

// Raw bytes of a box in shared memory, as TMA leaves them: out (bytes) for each block; rank 3, coordinates (x, y, z).
extern "C" __global__ void load_box_3d(const __grid_constant__ TensorMap map, uint8_t* out,
                                       int bytes, int x, int y, int z) {
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t at = shared_address(&barrier);
  if (threadIdx.x == 0) {
    barrier_init(at, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(at, bytes);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %3, %4}], [%5];" ::"r"(shared_address(memory)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(at)
        : "memory");
  }
  __syncthreads();
  barrier_wait(at, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = memory[i];
}

// The opposite: bytes to a box, added to what is there with `Add`.
template<bool Add>
DEVICE void store_3d(const TensorMap& map, const uint8_t* in, int bytes, int x, int y, int z) {
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) memory[i] = in[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    if (Add)
      asm volatile(
          "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, "
          "%3}], [%4];" ::"l"(&map),
          "r"(x), "r"(y), "r"(z), "r"(shared_address(memory))
          : "memory");
    else
      asm volatile(
          "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::
              "l"(&map),
          "r"(x), "r"(y), "r"(z), "r"(shared_address(memory))
          : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
extern "C" __global__ void store_box_3d(const __grid_constant__ TensorMap map, const uint8_t* in,
                                        int bytes, int x, int y, int z) {
  store_3d<false>(map, in, bytes, x, y, z);
}
extern "C" __global__ void add_box_3d(const __grid_constant__ TensorMap map, const uint8_t* in,
                                      int bytes, int x, int y, int z) {
  store_3d<true>(map, in, bytes, x, y, z);
}

// out[i] += 2 in[i], 1024 floats for each block, through bulk copies: in by mbarrier, out by a reduction.
extern "C" __global__ void bulk_axpy(const float* in, float* out) {
  __shared__ alignas(128) float values[1024];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t at = shared_address(&barrier);
  if (threadIdx.x == 0) {
    barrier_init(at, 1);
    barrier_expect(at, sizeof(values));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(values)),
        "l"(in + blockIdx.x * 1024), "r"(uint32_t(sizeof(values))), "r"(at)
        : "memory");
  }
  __syncthreads();
  barrier_wait(at, 0);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) values[i] *= 2;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     out + blockIdx.x * 1024),
                 "r"(shared_address(values)), "r"(uint32_t(sizeof(values)))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Producer warps copy with cp.async and let the copies arrive at an mbarrier; consumers sum. out[i] = sum over tiles of in.
extern "C" __global__ void copies_arrive(const float* in, float* out, int tiles) {
  __shared__ alignas(16) float ring[2][256];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0)
    for (int s = 0; s < 2; ++s) {
      barrier_init(shared_address(&full[s]), 64);
      barrier_init(shared_address(&empty[s]), 64);
    }
  __syncthreads();
  const int i = threadIdx.x % 64;
  if (threadIdx.x < 64) {
    for (int t = 0; t < tiles; ++t) {
      const int s = t % 2;
      barrier_wait(shared_address(&empty[s]), (t / 2 + 1) % 2);
      copy_async(shared_address(&ring[s][i * 4]), in + t * 256 + i * 4, 16);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[s]))
                   : "memory");
    }
  } else {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int t = 0; t < tiles; ++t) {
      const int s = t % 2;
      barrier_wait(shared_address(&full[s]), t / 2 % 2);
      const float4 v = reinterpret_cast<const float4*>(ring[s])[i];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      barrier_arrive(shared_address(&empty[s]));
    }
    reinterpret_cast<float4*>(out)[i] = sum;
  }
}

// Clusters of four: each block sends its number to every other with st.async and reads its right neighbour's memory.
// out (blocks, 8): what came from blocks 0..3, the neighbour's value, the own rank and that of a mapped address.
extern "C" __global__ void __cluster_dims__(4, 1, 1) exchange(const int* in, int* out) {
  __shared__ int inbox[4], own;
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t rank = cluster_rank(), at = shared_address(&barrier);
  if (threadIdx.x == 0) {
    own = in[blockIdx.x];
    barrier_init(at, 1);
    barrier_expect(at, 16);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  if (threadIdx.x < 4) {
    uint32_t to, signal;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(to)
                 : "r"(shared_address(&inbox[rank])), "r"(threadIdx.x));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(at), "r"(threadIdx.x));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(to),
        "r"(own * 10), "r"(signal)
        : "memory");
  }
  barrier_wait(at, 0);
  int* row = out + blockIdx.x * 8;
  if (threadIdx.x < 4) row[threadIdx.x] = inbox[threadIdx.x];
  if (threadIdx.x == 0) {
    uint32_t neighbour, owner;
    int value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(neighbour)
                 : "r"(shared_address(&own)), "r"((rank + 1) % 4));
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(neighbour));
    asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(neighbour));
    row[4] = value;
    row[5] = rank;
    row[6] = owner;
  }
  cluster_sync();
}
