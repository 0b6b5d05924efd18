// The state of a kernel's decoding. For decode.cpp, which decodes the kernel, and decode_operands.cpp, which
// serves one instruction; what instruction files use is Decode in program.h.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "vgpu/control_flow.h"
#include "vgpu/program.h"

namespace tw::vgpu {

// Of a register of the warp.
inline uint32_t lane_bytes(int bits) {
  return bits == 1 ? 4 : static_cast<uint32_t>(bits) / 8 * 32;
}

struct Decoder {
  Decoder(std::shared_ptr<const ptx::Module> module, const ptx::Kernel& kernel,
          std::shared_ptr<ModuleMemory> memory);
  std::unique_ptr<Program> run();

  uint32_t allocate(int bits) {
    const uint32_t size = lane_bytes(bits), align = std::min<uint32_t>(size, 64);
    top = (top + align - 1) / align * align;
    const uint32_t at = top;
    top += size;
    return at;
  }
  uint32_t register_offset(uint32_t index) {
    uint32_t& at = offsets[index];
    if (at == kNone) at = allocate(ptx::bits_of(kernel.registers[index].type));
    return at;
  }
  uint32_t special(const ptx::Instruction& in, const std::string& name, int bits);
  uint32_t constant(uint64_t value, int bits);
  // A variable's address, as a constant; a parameter's, as a special register, or its offset if it has 32 bits.
  uint32_t symbol(const ptx::Instruction& in, const ptx::Operand& o, int bits);
  uint32_t parameter_address(int64_t offset);
  const SharedVariable* shared(std::string_view name) const;
  const ptx::Parameter* parameter(std::string_view name) const;
  void lay_out_variables();
  void decode_instruction(size_t index);
  void find_kept_uses();

  const ptx::Kernel& kernel;
  std::unique_ptr<Program> program;
  uint32_t top = 0;
  std::vector<uint32_t> offsets;                         // of ptx registers
  std::map<std::pair<uint64_t, int>, size_t> constants;  // -> Program::constants
  std::map<std::pair<Special, int64_t>, size_t> specials;
  std::map<std::string, uint32_t, std::less<>> locals;
  std::vector<Flow> flow;
  std::map<int, uint32_t> sinks;
  std::set<uint32_t> kept;  // ptx registers named by Decode::keep
};

}  // namespace tw::vgpu
