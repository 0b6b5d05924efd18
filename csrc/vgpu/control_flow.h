// Where the sides of a divergent branch meet again.
#pragma once
#include <cstdint>
#include <vector>

namespace tw::vgpu {

// What control flow knows of an instruction.
struct Flow {
  enum class Kind : uint8_t { plain, branch, exit };
  Kind kind = Kind::plain;
  bool conditional = false;       // may also fall through
  std::vector<uint32_t> targets;  // of a branch
};

// For each instruction that is a branch: the index of the instruction at which its sides meet (its
// immediate post-dominator), or 0xffffffff. Lanes that exit never arrive anywhere, so paths that do nothing
// but exit do not count.
std::vector<uint32_t> join_points(const std::vector<Flow>& flow);

}  // namespace tw::vgpu
