// One block of gradients as int8 codes and one fp32 step, with error feedback:
//
//   v = scale * x + error;  step = max|v| / 127;  code = round(v / step);  error = v - code * step
//
// So what rounding takes from a gradient is added to the next one. A block with a NaN or an infinity
// has step NaN, so that all of it arrives as NaN, and leaves no error behind; one without anything as
// large as kSmallest has step 0 and keeps v as its error. Files that include this are built without
// fused multiply-add: all backends give the same bits.
#pragma once
#include "trainwright/types.h"

TW_BEGIN

inline constexpr int64_t kWireBlock = 64;   // elements per step: 6 % more bytes than the codes
inline constexpr float kSmallest = 1e-30f;  // below it 127 / max|v| is no use

// A row of n elements: the codes, padding to here, and the steps.
TW_HD int64_t wire_steps_begin(int64_t n) { return (n + 3) / 4 * 4; }
TW_HD int64_t wire_blocks(int64_t n) { return (n + kWireBlock - 1) / kWireBlock; }
TW_HD int64_t wire_row_bytes(int64_t n) { return wire_steps_begin(n) + 4 * wire_blocks(n); }

TW_HD float wire_value(float x, float scale, float error) { return x * scale + error; }

struct WireStep {
  float step, inverse;
  bool finite;
  TW_HD bool empty() const { return !(step > 0.0f); }  // all codes are 0
};
// From the largest of the bits of |v|, which are ordered like |v|, with NaN on top.
TW_HD WireStep wire_step(uint32_t peak_bits) {
  if (peak_bits >= 0x7f800000u) return {bits_float(0x7fc00000u), 0.0f, false};
  const float peak = bits_float(peak_bits);
  if (peak < kSmallest) return {0.0f, 0.0f, true};
  return {peak * (1.0f / 127.0f), 1.0f / peak * 127.0f, true};
}
// The code of a block that is not empty, as a float.
TW_HD float wire_code(float v, const WireStep& s) {
  constexpr float round =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  return (v * s.inverse + round) - round;
}
TW_HD float wire_error(float v, float code, const WireStep& s) { return v - code * s.step; }

TW_END
