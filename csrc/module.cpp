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

std::string build_info() {
  const char* names[] = {"base", "avx2", "avx512"};
  return std::string("isa=") + names[static_cast<int>(isa())] + " " TW_BUILD_INFO;
}

}  // namespace

void empty_cache() {
#if defined(__linux__)
  LargeBlocks::instance().drop_idle();
#endif
}

bool has_dot_bf16() {
#if defined(__x86_64__)
  static const bool has = [] {
    const char* asked = std::getenv("TRAINWRIGHT_CPU_BF16");
    const bool off = asked && !std::strcmp(asked, "fp32");
    return isa() == Isa::avx512 && __builtin_cpu_supports("avx512bf16") && !off;
  }();
  return has;
#else
  return false;
#endif
}

Isa isa() {
  static const Isa chosen = detect_isa();
  return chosen;
}

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
