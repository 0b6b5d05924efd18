// Gradients as int8 for the network, on CUDA (formulas and the layout of a row in trainwright/int8_wire.h).
//
// int8_encode  x -> a row of bytes: codes and one fp32 step per block of 64 elements; with error feedback, in one pass.
// int8_sum     out = scale * sum over rows, in their order, of code * step, in fp32.
//
// A warp has a span of eight blocks, whose steps are one sector: four turns of two blocks, 16 lanes and four elements a
// lane for each. The largest of a block is found by exchanges within its 16 lanes.
// Bytes per element: encode 4 (x) + 8 (error) + 17/16, sum 17/16 W + 4. Bound: memory bandwidth. fp32 accesses are 16
// bytes where pointers allow, one element otherwise. Counted on the virtual GPU (tests/vgpu/test_counts.py); not yet
// timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/int8_wire.h"

#include "cuda/binding.cuh"
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

TW_BEGIN
namespace {

constexpr int kWireThreads = 256, kTurns = 4, kLaneElements = 4;
constexpr int kTurn = 32 * kLaneElements, kSpan = kTurns * kTurn;  // elements
constexpr int kTurnBlocks = kTurn / kWireBlock, kSpanBlocks = kSpan / kWireBlock;

// The lane's elements of a turn: [begin, begin + count) of the row.
struct LanePlace {
  int64_t begin;
  int count;
  __device__ __forceinline__ LanePlace(int64_t span, int turn, int64_t n)
      : begin(span * kSpan + turn * kTurn + threadIdx.x % 32 * kLaneElements),
        count(static_cast<int>(min(max(n - begin, int64_t{0}), int64_t{kLaneElements}))) {}
};
__device__ __forceinline__ int64_t span_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * (kWireThreads / 32) + threadIdx.x / 32;
}

// The others are 0.
__device__ __forceinline__ void load_lane(const float* p, const LanePlace& at, bool wide,
                                          float (&x)[kLaneElements]) {
  if (wide && at.count == kLaneElements) return unpack(load_once<kLaneElements>(p + at.begin), x);
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) x[k] = k < at.count ? p[at.begin + k] : 0.0f;
}
__device__ __forceinline__ void store_lane(float* p, const LanePlace& at, bool wide,
                                           const float (&x)[kLaneElements]) {
  if (wide && at.count == kLaneElements) return store_pack(p + at.begin, pack_as<float>(x));
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k)
    if (k < at.count) p[at.begin + k] = x[k];
}

struct EncodeCall {
  const float* x;
  float* error;
  int8_t* codes;  // a multiple of 4, as all rows are
  float* steps;
  int64_t n;
  float scale;
  bool wide;  // x and error are multiples of 16
};

__global__ void __launch_bounds__(kWireThreads, 4)
    int8_encode_kernel(const __grid_constant__ EncodeCall c) {
  const int64_t span = span_of_warp();
  if (span * kSpan >= c.n) return;
  const int lane = threadIdx.x % 32;
  float v[kTurns][kLaneElements], error[kTurns][kLaneElements], own_step = 0.0f;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const LanePlace at(span, t, c.n);
    load_lane(c.x, at, c.wide, v[t]);
    load_lane(c.error, at, c.wide, error[t]);
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const LanePlace at(span, t, c.n);
    uint32_t peak = 0;
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      v[t][k] = wire_value(v[t][k], c.scale, error[t][k]);
      const uint32_t bits = float_bits(v[t][k]) & 0x7fffffffu;
      if (k < at.count) peak = max(peak, bits);
    }
#pragma unroll
    for (int other = 8; other > 0; other /= 2) peak = max(peak, exchange(peak, other));
    const WireStep s = wire_step(peak);
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float code = s.empty() ? 0.0f : wire_code(v[t][k], s);
      codes |= (static_cast<uint32_t>(static_cast<int32_t>(code)) & 0xffu) << 8 * k;
      error[t][k] = !s.finite ? 0.0f : s.empty() ? v[t][k] : wire_error(v[t][k], code, s);
    }
    store_lane(c.error, at, c.wide, error[t]);
    if (at.count == kLaneElements) {
      __stwb(reinterpret_cast<uint32_t*>(c.codes + at.begin), codes);
    } else {
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k)
        if (k < at.count) c.codes[at.begin + k] = static_cast<int8_t>(codes >> 8 * k);
    }
    // Lane i keeps the step of block i of the span.
    const float step = __shfl_sync(0xffffffffu, s.step, lane % kTurnBlocks * 16);
    if (lane / kTurnBlocks == t) own_step = step;
  }
  const int64_t block = span * kSpanBlocks + lane;
  if (lane < kSpanBlocks && block < wire_blocks(c.n)) c.steps[block] = own_step;
}

struct WireRows {
  static constexpr int kMost = 1024;
  const int8_t* codes[kMost];
  int count;
};

__global__ void __launch_bounds__(kWireThreads, 4)
    int8_sum_kernel(const __grid_constant__ WireRows rows, float* out, int64_t n, float scale,
                    bool wide) {
  const int64_t span = span_of_warp();
  if (span * kSpan >= n) return;
  const int lane = threadIdx.x % 32;
  const int64_t block = span * kSpanBlocks + lane;
  const bool has_step = lane < kSpanBlocks && block < wire_blocks(n);
  float sum[kTurns][kLaneElements];
#pragma unroll 1
  for (int w = 0; w < rows.count; ++w) {
    const int8_t* codes = rows.codes[w];
    const auto* steps = reinterpret_cast<const float*>(codes + wire_steps_begin(n));
    const float own_step = has_step ? __ldcs(steps + block) : 0.0f;
    uint32_t four[kTurns];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const LanePlace at(span, t, n);
      // What lies past the last code up to a multiple of 4 is part of the row.
      four[t] = at.count ? __ldcs(reinterpret_cast<const uint32_t*>(codes + at.begin)) : 0;
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const float step = __shfl_sync(0xffffffffu, own_step, t * kTurnBlocks + lane / 16);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const auto code = static_cast<int8_t>(four[t] >> 8 * k);
        const float value = static_cast<float>(code) * step;
        sum[t][k] = w == 0 ? value : sum[t][k] + value;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) sum[t][k] *= scale;
    store_lane(out, LanePlace(span, t, n), wide, sum[t]);
  }
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

unsigned wire_grid(int64_t n) {
  return static_cast<unsigned>(divide_up(n, kWireThreads / 32 * kSpan));
}
void launch_int8_encode(EncodeCall c, cudaStream_t stream) {
  c.wide = aligned16(c.x, c.error);
  int8_encode_kernel<<<wire_grid(c.n), kWireThreads, 0, stream>>>(c);
}
void launch_int8_sum(const WireRows& rows, float* out, int64_t n, float scale,
                     cudaStream_t stream) {
  int8_sum_kernel<<<wire_grid(n), kWireThreads, 0, stream>>>(rows, out, n, scale, aligned16(out));
}

}  // namespace
TW_END

// ---- torch bindings -----------------------------------------------------------------------------

namespace tw {
namespace {

int8_t* codes_of(const Tensor& row, int64_t n) {
  TW_CHECK_CONTIGUOUS(row);
  STD_TORCH_CHECK(row.scalar_type() == ScalarType::Byte && row.numel() == wire_row_bytes(n),
                  "a row of ", wire_row_bytes(n), " bytes expected for ", n, " elements, got ",
                  row.numel());
  auto* codes = static_cast<int8_t*>(device_data(row));
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(codes) % 4 == 0,
                  "a row must begin at a multiple of 4 bytes");
  return codes;
}

float* values_of(const Tensor& x, int64_t n) {
  TW_CHECK_CONTIGUOUS(x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.numel() == n, n,
                  " fp32 values expected");
  return static_cast<float*>(device_data(x));
}

void int8_encode_cuda(Tensor row, Tensor error, Tensor x, double scale) {
  const OnDevice here(x);
  const int64_t n = x.numel();
  int8_t* codes = codes_of(row, n);
  const EncodeCall call = {values_of(x, n),
                           values_of(error, n),
                           codes,
                           reinterpret_cast<float*>(codes + wire_steps_begin(n)),
                           n,
                           static_cast<float>(scale),
                           false};
  if (n == 0) return;
  launch_int8_encode(call, stream_of(x));
  check_launch("int8_encode_kernel");
}

void int8_sum_cuda(Tensor out, std::vector<Tensor> rows, double scale) {
  STD_TORCH_CHECK(!rows.empty(), "at least one row expected");
  STD_TORCH_CHECK(rows.size() <= WireRows::kMost, "int8_sum: W must be at most ", WireRows::kMost,
                  ", got ", rows.size());
  const OnDevice here(out);
  const int64_t n = out.numel();
  WireRows list;
  list.count = 0;
  for (const Tensor& row : rows) list.codes[list.count++] = codes_of(row, n);
  float* to = values_of(out, n);
  if (n == 0) return;
  launch_int8_sum(list, to, n, static_cast<float>(scale), stream_of(out));
  check_launch("int8_sum_kernel");
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("int8_encode_", TORCH_BOX(&tw::int8_encode_cuda));
  m.impl("int8_sum_", TORCH_BOX(&tw::int8_sum_cuda));
}
