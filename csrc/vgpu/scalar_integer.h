// What the integer files share.
#pragma once
#include <string>
#include <type_traits>

#include "vgpu/program.h"

namespace tw::vgpu {

// f(T{}) with the C++ type of an integer type (b: unsigned).
template<class F>
void with_integer(Decode& d, ptx::Type type, F f) {
  switch (type) {
    case ptx::Type::s16:
      f(int16_t{});
      break;
    case ptx::Type::u16:
    case ptx::Type::b16:
      f(uint16_t{});
      break;
    case ptx::Type::s32:
      f(int32_t{});
      break;
    case ptx::Type::u32:
    case ptx::Type::b32:
      f(uint32_t{});
      break;
    case ptx::Type::s64:
      f(int64_t{});
      break;
    case ptx::Type::u64:
    case ptx::Type::b64:
      f(uint64_t{});
      break;
    default:
      d.fail("." + std::string(ptx::name_of(type)) + " is not supported here");
  }
}
// Destination and `n` sources, all of `bits`.
inline void take_operands(Decode& d, size_t n, int bits) {
  d.expect_operands(n + 1, n + 1);
  d.out.op[0] = d.destination(0, bits);
  for (size_t i = 1; i <= n; ++i) d.out.op[i] = d.source(i, bits);
}

}  // namespace tw::vgpu
