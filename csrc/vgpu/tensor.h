// What the files of the tensor instructions share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vgpu/fragments.h"
#include "vgpu/warp.h"

namespace tw::vgpu {

// A decoded mma.sync; fits Instr::imm.
struct MmaShape {
  Element a, b;
  Accumulator accumulator;
  uint8_t rows, k;
  uint8_t d_registers, a_registers, b_registers;
};
static_assert(sizeof(MmaShape) == 8);

struct MmaName {
  int m, n, k;
};
MmaName take_mma_shape(Decode& d);                            // "m16n8k16"
std::vector<std::string> take_last(Decode& d, size_t count);  // the last modifiers, in order
Element element_named(Decode& d, const std::string& type);
Accumulator accumulator_named(Decode& d, const std::string& type, bool satfinite);
void check_mma_types(Decode& d, const MmaShape& s);

// Pushes a vector of `count` registers, or one register.
void push_registers(Decode& d, size_t operand, int count, int bits, bool destination);

// Instructions with several addresses keep each as three words of the pool.
constexpr int kAddressWords = 3;
void push_address(Decode& d, size_t operand, ptx::Space space);
uint64_t pool_address(const Warp& w, const uint32_t* words, ptx::Space space, int lane);
void pool_addresses(const Warp& w, const uint32_t* words, ptx::Space space, uint64_t* address);

// The mbarrier that an operand addresses: kept as lanes.h keeps an address, its space in op[6]. Takes `.b64`.
void take_barrier(Decode& d, size_t operand, int at);
void barrier_addresses(Warp& w, const Instr& in, int at, uint64_t* address, uint8_t** host);

}  // namespace tw::vgpu
