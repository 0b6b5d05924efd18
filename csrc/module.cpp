// The Python module trainwright._C. It holds no function: importing it loads the library, whose
// static initialisers register the kernels with the torch dispatcher. It also answers for the whole
// library: threads, instruction set, build.
#include <Python.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/binding.h"
#include "cpu/kernel.h"
#include "trainwright/cpu_features.h"
#include "trainwright/parallel.h"
#include "trainwright/scratch.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifndef TW_BUILD_INFO
#define TW_BUILD_INFO ""
#endif

namespace tw {

void parallel_for_raw(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context) {
  torch_parallel_for(begin, end, grain, fn, context);
}

int64_t num_threads() {
  uint32_t n = 1;
  torch_get_num_threads(&n);
  return n;
}

namespace {

struct ScratchBlock {
  void* data = nullptr;
  size_t bytes = 0;
  ~ScratchBlock() { std::free(data); }
};

}  // namespace

void* scratch(Scratch slot, size_t bytes) {
  static thread_local ScratchBlock blocks[static_cast<int>(Scratch::count)];
  ScratchBlock& block = blocks[static_cast<int>(slot)];
  if (bytes > block.bytes) {
    const size_t huge = size_t{2} << 20, alignment = bytes >= huge ? huge : 64;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    std::free(block.data);
    block.data = nullptr;
    block.bytes = 0;
    block.data = std::aligned_alloc(alignment, bytes);
    STD_TORCH_CHECK(block.data, "trainwright: no memory for ", bytes, " bytes of scratch");
    block.bytes = bytes;
#if defined(__linux__)
    if (alignment == huge) madvise(block.data, bytes, MADV_HUGEPAGE);  // a hint: may be refused
#endif
  }
  return block.data;
}

namespace {

Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const Isa best = has_avx512 ? Isa::avx512 : has_avx2 ? Isa::avx2 : Isa::base;
  // A request for more than the CPU has is capped here; Python's info says so.
  const char* asked = std::getenv("TRAINWRIGHT_CPU_ISA");
  if (asked && !std::strcmp(asked, "base")) return Isa::base;
  if (asked && !std::strcmp(asked, "avx2") && best == Isa::avx512) return Isa::avx2;
  return best;
#else
  return Isa::base;
#endif
}

}  // namespace

void empty_cache() {
#if defined(__linux__)
  LargeBlocks::instance().drop_idle();
#endif
}

namespace {

enum class Bf16Products { fp32, dot, amx, emulated_amx };

#if defined(__x86_64__)
// The tile registers are 8 KiB that the kernel saves for a process only once it has asked for them.
bool may_use_amx() {
#if defined(__linux__)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, OSXSAVE = 1u << 27, TILE_STATE = 3u << 17;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE))
    return false;
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  const unsigned row_bytes = b & 0xffff, tiles = b >> 16, rows = c & 0xffff;
  if (row_bytes < 64 || tiles < 8 || rows < 16) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return (low & TILE_STATE) == TILE_STATE &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
#endif

// The best that the CPU has, or TRAINWRIGHT_CPU_BF16, capped.
Bf16Products detect_bf16_products() {
#if defined(__x86_64__)
  const char* variable = std::getenv("TRAINWRIGHT_CPU_BF16");
  const std::string asked = variable ? variable : "";
  if (asked == "fp32" || isa() == Isa::base) return Bf16Products::fp32;
  if (asked == "amx-emulated") return Bf16Products::emulated_amx;
  if (isa() != Isa::avx512 || !__builtin_cpu_supports("avx512bf16")) return Bf16Products::fp32;
  return asked != "avx512" && may_use_amx() ? Bf16Products::amx : Bf16Products::dot;
#else
  return Bf16Products::fp32;
#endif
}

Bf16Products bf16_products() {
  static const Bf16Products chosen = detect_bf16_products();
  return chosen;
}

}  // namespace

bool has_dot_bf16() {
  return bf16_products() == Bf16Products::dot || bf16_products() == Bf16Products::amx;
}
bool has_amx_bf16() { return bf16_products() == Bf16Products::amx; }
bool emulates_amx_bf16() { return bf16_products() == Bf16Products::emulated_amx; }

Isa isa() {
  static const Isa chosen = detect_isa();
  return chosen;
}

namespace {

std::string build_info() {
  const char* isas[] = {"base", "avx2", "avx512"};
  const char* products[] = {"fp32", "avx512", "amx", "amx-emulated"};
  return std::string("isa=") + isas[static_cast<int>(isa())] +
         " bf16=" + products[static_cast<int>(bf16_products())] + " " TW_BUILD_INFO;
}

}  // namespace

}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&tw::build_info));
  m.impl("empty_cache", TORCH_BOX(&tw::empty_cache));
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
