// Runs all blocks of a launch, several threads over the blocks.
#pragma once
#include <functional>
#include <memory>

#include "vgpu/block.h"

namespace tw::vgpu {

struct LaunchResult {
  uint64_t warp_instructions = 0;
  double seconds = 0;
};

// Checks the launch against the program and runs it. A block that only waits for others (a grid-wide spin) is set aside, and
// another one started. Throws LaunchError before anything runs, and the first Fault.
//   launch       without the module's and the parameters' memory, which are added here
//   threads      at least 1
//   interrupted  asked about twenty times a second; true stops the launch
LaunchResult run_grid(const Program& program, Launch& launch, unsigned threads,
                      const std::function<bool()>& interrupted);

}  // namespace tw::vgpu
