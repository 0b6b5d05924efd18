// Reads the fat binaries that nvcc puts into host objects: a header, then entries, each with the code
// for one architecture as PTX text or machine code.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tw::vgpu {

struct FatbinPtx {
  const char* text;
  size_t bytes;   // without the padding
  int arch;       // 80 for sm_80
  bool specific;  // sm_90a: for that architecture alone
};

// What __cudaRegisterFatBinary gets.
struct FatbinWrapper {
  uint32_t magic, version;
  const uint8_t* data;
  const void* unused;
};

// The PTX entries of a fat binary that can be read; `problem` says why there is none.
inline std::vector<FatbinPtx> read_fatbin(const void* wrapper, std::string& problem) {
  constexpr uint32_t kWrapperMagic = 0x466243b1, kMagic = 0xba55ed50;
  constexpr uint16_t kPtx = 1;
  constexpr uint64_t kCompressed = 0xa000, kSpecific = 0x100000;  // LZ4 or zstd; flags of an entry
  const auto* wrap = static_cast<const FatbinWrapper*>(wrapper);
  std::vector<FatbinPtx> found;
  const auto at = [](const uint8_t* p, auto value) {
    std::memcpy(&value, p, sizeof(value));
    return value;
  };
  if (wrap->magic != kWrapperMagic || at(wrap->data, uint32_t{}) != kMagic) {
    problem = "not a fat binary";
    return found;
  }
  const uint8_t* p = wrap->data + at(wrap->data + 6, uint16_t{});
  const uint8_t* end = p + at(wrap->data + 8, uint64_t{});
  bool compressed = false, machine_code = false;
  while (p < end) {
    const uint32_t header = at(p + 4, uint32_t{});
    const uint64_t size = at(p + 8, uint64_t{}), flags = at(p + 40, uint64_t{});
    const char* text = reinterpret_cast<const char*>(p + header);
    if (at(p, uint16_t{}) != kPtx)
      machine_code = true;
    else if (flags & kCompressed)
      compressed = true;
    else
      found.push_back({text, strnlen(text, size), static_cast<int>(at(p + 28, uint32_t{})),
                       (flags & kSpecific) != 0});
    p += header + size;
  }
  if (found.empty())
    problem = compressed     ? "its PTX is compressed (compile with --no-compress)"
              : machine_code ? "it holds machine code only (compile with code=compute_80)"
                             : "it is empty";
  return found;
}

// The entry that a device runs: of the architecture itself if it is specific, else the newest one
// that is not newer than the device.
inline const FatbinPtx* choose_ptx(const std::vector<FatbinPtx>& entries, int arch, bool specific) {
  const FatbinPtx* best = nullptr;
  for (const FatbinPtx& e : entries) {
    if (e.specific ? !(specific && e.arch == arch) : e.arch > arch) continue;
    if (!best || e.arch > best->arch || (e.arch == best->arch && e.specific)) best = &e;
  }
  return best;
}

}  // namespace tw::vgpu
