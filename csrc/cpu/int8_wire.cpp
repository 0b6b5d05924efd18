// Gradients as int8 for the network, on the CPU.
//
// int8_encode  x -> a row of bytes: n codes, padding to 4, one fp32 step per block of 64 elements;
//              with error feedback, in one pass (trainwright/int8_wire.h).
// int8_sum     out = scale * sum over rows, in their order, of code * step, in fp32.
//
// build: no fused multiply-add
//
// Bytes per element: encode 4 (x) + 8 (error) + 1, sum W + 4. Bound: memory bandwidth.
#include "cpu/kernel.h"
#include "trainwright/int8_wire.h"

namespace tw {

struct Int8EncodeArgs {
  const float* x;
  float* error;
  int8_t* codes;
  float* steps;
  int64_t n;
  float scale;
};
struct Int8SumArgs {
  const int8_t* const* codes;  // (W)
  const float* const* steps;   // (W)
  float* out;
  int64_t n, W;
  float scale;
};

}  // namespace tw

TW_DECLARE_KERNEL(int8_encode, Int8EncodeArgs)
TW_DECLARE_KERNEL(int8_sum, Int8SumArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

constexpr int64_t kGrain = 256;  // blocks: 16384 elements

// n <= kWireBlock elements. Returns the step.
float encode_block(const float* x, float scale, float* error, int8_t* codes, int64_t n) {
  float v[kWireBlock];
  uint32_t peak = 0;
  for (int64_t i = 0; i < n; ++i) v[i] = wire_value(x[i], scale, error[i]);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_bits(v[i]) & 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  const WireStep s = wire_step(peak);
  if (s.empty()) {
    memset(codes, 0, static_cast<size_t>(n));
    if (s.finite)
      memcpy(error, v, static_cast<size_t>(n) * sizeof(float));
    else
      memset(error, 0, static_cast<size_t>(n) * sizeof(float));
    return s.step;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float code = wire_code(v[i], s);
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(code));
    error[i] = wire_error(v[i], code, s);
  }
  return s.step;
}

}  // namespace

void int8_encode(const Int8EncodeArgs& a) {
  parallel_for(0, wire_blocks(a.n), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t at = b * kWireBlock, n = a.n - at < kWireBlock ? a.n - at : kWireBlock;
      a.steps[b] = encode_block(a.x + at, a.scale, a.error + at, a.codes + at, n);
    }
  });
}

void int8_sum(const Int8SumArgs& a) {
  parallel_for(0, wire_blocks(a.n), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t at = b * kWireBlock, n = a.n - at < kWireBlock ? a.n - at : kWireBlock;
      float sum[kWireBlock];
      for (int64_t i = 0; i < n; ++i)
        sum[i] = static_cast<float>(a.codes[0][at + i]) * a.steps[0][b];
      for (int64_t w = 1; w < a.W; ++w) {
        const float step = a.steps[w][b];
        const int8_t* codes = a.codes[w] + at;
        for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(codes[i]) * step;
      }
      for (int64_t i = 0; i < n; ++i) a.out[at + i] = sum[i] * a.scale;
    }
  });
}

TW_END

#else  // ---- torch bindings

#include <vector>

namespace tw {
namespace {

void check_row(const Tensor& row, int64_t n) {
  TW_CHECK_CONTIGUOUS(row);
  const int64_t bytes = wire_row_bytes(n);
  STD_TORCH_CHECK(row.scalar_type() == ScalarType::Byte && row.numel() == bytes, "a row of ", bytes,
                  " bytes expected for ", n, " elements, got ", row.numel());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data(row)) % 4 == 0,
                  "a row must begin at a multiple of 4 bytes");
}

void check_values(const Tensor& x, int64_t n) {
  TW_CHECK_CONTIGUOUS(x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.numel() == n, n,
                  " fp32 values expected");
}

void int8_encode_cpu(Tensor row, Tensor error, Tensor x, double scale) {
  const int64_t n = x.numel();
  check_values(x, n);
  check_values(error, n);
  check_row(row, n);
  auto* codes = static_cast<int8_t*>(mutable_data(row));
  int8_encode({static_cast<const float*>(data(x)), static_cast<float*>(mutable_data(error)), codes,
               reinterpret_cast<float*>(codes + wire_steps_begin(n)), n,
               static_cast<float>(scale)});
}

void int8_sum_cpu(Tensor out, std::vector<Tensor> rows, double scale) {
  const int64_t n = out.numel();
  check_values(out, n);
  STD_TORCH_CHECK(!rows.empty(), "at least one row expected");
  std::vector<const int8_t*> codes;
  std::vector<const float*> steps;
  for (const Tensor& row : rows) {
    check_row(row, n);
    codes.push_back(static_cast<const int8_t*>(data(row)));
    steps.push_back(reinterpret_cast<const float*>(codes.back() + wire_steps_begin(n)));
  }
  int8_sum({codes.data(), steps.data(), static_cast<float*>(mutable_data(out)), n,
            static_cast<int64_t>(rows.size()), static_cast<float>(scale)});
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("int8_encode_", TORCH_BOX(&tw::int8_encode_cpu));
  m.impl("int8_sum_", TORCH_BOX(&tw::int8_sum_cpu));
}

#endif
