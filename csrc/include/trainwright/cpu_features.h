// What the CPU has beyond the instruction sets that kernels are compiled for as a whole, for products of
// bf16. TRAINWRIGHT_CPU_BF16 = fp32, avx512 or amx caps it; amx-emulated is for tests. csrc/module.cpp asks the CPU.
#pragma once

namespace tw {
// vdpbf16ps (AVX512-BF16) may be used, the kernels of AVX-512 being in use.
bool has_dot_bf16();
// tdpbf16ps (AMX) may be used: the CPU and the operating system have it, and the process was granted its registers.
bool has_amx_bf16();
// AMX is asked for in software: the same packing, blocking and results.
bool emulates_amx_bf16();
}  // namespace tw
