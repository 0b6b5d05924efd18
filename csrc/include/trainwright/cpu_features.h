// What the CPU has beyond the instruction sets that kernels are compiled for as a whole; csrc/module.cpp asks it.
#pragma once

namespace tw {
// Whether vdpbf16ps (AVX512-BF16) may be used: the CPU has it, the kernels of AVX-512 are in use, and
// TRAINWRIGHT_CPU_BF16 is not "fp32".
bool has_dot_bf16();
}  // namespace tw
