// Macros that let one header compile with g++ (once per instruction set) and with nvcc.
//
// TW_HD              marks a function that runs on host and device.
// TW_BEGIN / TW_END  open and close namespace `tw` with an inline namespace named after the
//                    instruction set that the file is compiled for (tw::avx2, tw::avx512, tw::base,
//                    tw::dev). Without it the linker could merge an AVX-512 copy of an inline
//                    function with the baseline one, and an old CPU would crash.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define TW_HD __host__ __device__ __forceinline__
#else
#define TW_HD inline __attribute__((always_inline))
#endif

#if defined(__CUDACC__)
#define TW_ISA dev
#elif defined(TW_CPU_ISA)
#define TW_ISA TW_CPU_ISA
#else
#define TW_ISA host
#endif

#define TW_BEGIN \
  namespace tw { \
  inline namespace TW_ISA {
#define TW_END \
  }            \
  }

#define TW_RESTRICT __restrict__
