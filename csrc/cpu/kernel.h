// How a CPU op file is put together. csrc/cpu/<op>.cpp is compiled once per instruction set with
// TW_CPU_ISA = base, avx2 or avx512 (kernels only, no torch header), and once without it (torch
// bindings only):
//
//   #include "cpu/kernel.h"
//   #include "trainwright/<op>.h"
//   namespace tw { struct FooArgs { const void* x; int64_t n; DType dtype; }; }
//   TW_DECLARE_KERNEL(foo, FooArgs)
//   #ifdef TW_CPU_ISA
//   void tw::TW_ISA::foo(const FooArgs& a) { ... }
//   #else
//   ... tensors in, checks, outputs, tw::foo({...}), STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m)
//   #endif
//
// tw::foo(args) calls the variant that isa() chose when the library was loaded.
#pragma once
#include "trainwright/config.h"
#include "trainwright/types.h"

namespace tw {
enum class Isa { base, avx2, avx512 };
Isa isa();  // csrc/module.cpp: what the CPU has, or TRAINWRIGHT_CPU_ISA
}  // namespace tw

#ifdef TW_CPU_ISA
#include "trainwright/parallel.h"
#include "trainwright/vec.h"
#define TW_DECLARE_KERNEL(name, Args) \
  namespace tw {                      \
  inline namespace TW_ISA {           \
  void name(const Args& a);           \
  }                                   \
  }
#else
#include "cpu/binding.h"
#if defined(__x86_64__)
#define TW_DECLARE_KERNEL(name, Args) \
  namespace tw {                      \
  namespace base {                    \
  void name(const Args& a);           \
  }                                   \
  namespace avx2 {                    \
  void name(const Args& a);           \
  }                                   \
  namespace avx512 {                  \
  void name(const Args& a);           \
  }                                   \
  inline void name(const Args& a) {   \
    if (isa() == Isa::avx512)         \
      avx512::name(a);                \
    else if (isa() == Isa::avx2)      \
      avx2::name(a);                  \
    else                              \
      base::name(a);                  \
  }                                   \
  }
#else
#define TW_DECLARE_KERNEL(name, Args)                \
  namespace tw {                                     \
  namespace base {                                   \
  void name(const Args& a);                          \
  }                                                  \
  inline void name(const Args& a) { base::name(a); } \
  }
#endif
#endif
