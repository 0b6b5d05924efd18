// Everything that can go wrong, as one exception type each for the three stages: text, decoding,
// execution. The Python face turns them into trainwright.vgpu.errors (same names).
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tw::vgpu {

// The text is not PTX.
struct SyntaxError : std::runtime_error {
  SyntaxError(int line, const std::string& what)
      : std::runtime_error("PTX line " + std::to_string(line) + ": " + what), line(line) {}
  int line;
};

// Valid or not, this PTX cannot be executed here. Raised before anything runs.
struct UnsupportedError : std::runtime_error {
  UnsupportedError(const std::string& kernel, int line, const std::string& what)
      : std::runtime_error((kernel.empty() ? "" : kernel + ": ") + "PTX line " +
                           std::to_string(line) + ": " + what),
        line(line) {}
  int line;
};

// The launch does not fit the kernel: unknown name, wrong arguments, impossible sizes.
struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The program did something wrong while it ran.
struct Fault : std::runtime_error {
  enum class Kind : uint8_t {
    memory,         // out of bounds, misaligned, wrong space        -> MemoryFault
    race,           // shared- or global-memory data race            -> RaceError
    uninitialised,  // read of shared memory nobody wrote         -> UninitialisedError
    asynchronous,   // data of an unfinished asynchronous operation touched -> AsyncError
    barrier,        // mismatched or divergent barrier               -> BarrierError
    deadlock,       // nobody can go on                              -> DeadlockError
    trap,           // trap, assert, device-side call that failed    -> TrapError
  };
  Fault(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}

  Kind kind;
  // Where. Filled by Warp::fault(); -1 / empty where it does not apply.
  std::string kernel;
  int ptx_line = -1;
  std::string instruction;  // its PTX text
  std::string source_file;
  int source_line = -1;
  int64_t block[3] = {-1, -1, -1};
  int warp = -1;
  int lane = -1;
  uint64_t address = 0;
  bool has_address = false;
};

}  // namespace tw::vgpu
