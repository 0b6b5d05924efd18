// One block of gradients as int8 codes and one fp32 step, with error feedback:
//
//   v = scale * x + error;  step = max|v| / 127;  code = round(v / step);  error = v - code * step
//
// So what rounding takes from a gradient is added to the next one. A block with a NaN or an infinity
// has step NaN, so that all of it arrives as NaN, and leaves no error behind; one without anything as
// large as kSmallest has step 0 and keeps v as its error.
#pragma once
#include <cmath>
#include <cstring>

#include "trainwright/types.h"

TW_BEGIN

inline constexpr int64_t kWireBlock = 64;   // elements per step: 6 % more bytes than the codes
inline constexpr float kSmallest = 1e-30f;  // below it 127 / max|v| is no use

// n <= kWireBlock elements. Returns the step.
inline float encode_block(const float* x, float scale, float* error, int8_t* codes, int64_t n) {
  float v[kWireBlock];
  uint32_t peak_bits = 0;  // of floats without sign, which compare as their bits do
  for (int64_t i = 0; i < n; ++i) v[i] = x[i] * scale + error[i];
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, v + i, sizeof(bits));
    bits &= 0x7fffffffu;
    peak_bits = bits > peak_bits ? bits : peak_bits;
  }
  if (peak_bits >= 0x7f800000u) {
    std::memset(codes, 0, static_cast<size_t>(n));
    std::memset(error, 0, static_cast<size_t>(n) * sizeof(float));
    return NAN;
  }
  float peak;
  std::memcpy(&peak, &peak_bits, sizeof(peak));
  if (peak < kSmallest) {
    std::memset(codes, 0, static_cast<size_t>(n));
    std::memcpy(error, v, static_cast<size_t>(n) * sizeof(float));
    return 0.0f;
  }
  const float step = peak * (1.0f / 127.0f), inverse = 1.0f / peak * 127.0f;
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  for (int64_t i = 0; i < n; ++i) {
    const float code = (v[i] * inverse + kRound) - kRound;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(code));
    error[i] = v[i] - code * step;
  }
  return step;
}

TW_END
