// Tile registers of AMX: eight matrices of 16 rows of 64 bytes, and the product of two of them,
//
//   C (16, 16) fp32 += A (16 rows, 16 pairs of bf16) B (16 pairs, 16 columns)
//
// where B's row i holds k = 2i and 2i + 1 of each column side by side. The sums over the even and the odd k
// run apart, k ascending, from 0; their sum is added to C. Rounding is to nearest even; subnormal operands
// count as 0 and subnormal results become 0.
//
//   Amx          the instructions: only where has_amx_bf16()
//   EmulatedAmx  the same results, bit for bit, from FMAs: for tests on a CPU without AMX
//
// Both are used alike:
//   typename T::Session session;   // this thread's tiles are configured while it lives
//   T t;
//   t.template load<6>(a, stride_bytes);  t.template zero<0>();  t.template dot<0, 6, 7>();
//   t.template store<0>(c, stride_bytes);
// The eight numbers are compile-time constants, as they are part of the instruction.
#pragma once
#include "trainwright/cpu_features.h"
#include "trainwright/vec.h"

#if defined(__x86_64__) && TW_VEC_BYTES >= 32
#define TW_AMX 1

TW_BEGIN

// Inline assembly: the compiler's intrinsics want the tile number as a literal, and would let the
// whole file use AMX. The compiler knows nothing of tiles, hence `volatile` throughout.
struct Amx {
  struct Session {
    Session() {
      struct alignas(64) Config {  // as ldtilecfg reads it
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      static const Config config;
      asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Session() { asm volatile("tilerelease"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };
  template<int T>
  TW_HD void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template<int T>
  TW_HD void load(const void* p, int64_t stride_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
  }
  template<int T>
  TW_HD void store(void* p, int64_t stride_bytes) const {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
  }
  template<int C, int A, int B>
  TW_HD void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

class EmulatedAmx {
 public:
  struct Session {};
  template<int T>
  void zero() {
    memset(tile_[T], 0, sizeof tile_[T]);
  }
  template<int T>
  void load(const void* p, int64_t stride_bytes) {
    for (int i = 0; i < 16; ++i)
      memcpy(tile_[T][i], static_cast<const char*>(p) + i * stride_bytes, 64);
  }
  template<int T>
  void store(void* p, int64_t stride_bytes) const {
    for (int i = 0; i < 16; ++i) memcpy(static_cast<char*>(p) + i * stride_bytes, tile_[T][i], 64);
  }
  template<int C, int A, int B>
  void dot() {
    // The mode of the thread, for the time of this product: all exceptions masked, to nearest even,
    // subnormal results to 0, subnormal operands 0.
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    multiply(tile_[C], tile_[A], tile_[B]);
    _mm_setcsr(before);
  }

 private:
  typedef float Tile[16][16];

  // Not inlined: no arithmetic may move across the change of mode.
  __attribute__((noinline)) static void multiply(Tile& c, const Tile& a, const Tile& b) {
    constexpr int L = lanes<float>;
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; n += L) {
        vf even{}, odd{};
        for (int k = 0; k < 16; ++k) {
          uint32_t x;
          memcpy(&x, &a[m][k], sizeof x);
          const vu y = (vu)vload<float>(&b[k][n]);
          even = fma(splat_bits(x << 16), (vf)(y << 16), even);
          odd = fma(splat_bits(x & 0xffff0000u), (vf)(y & 0xffff0000u), odd);
        }
        vstore<float>(&c[m][n], vload<float>(&c[m][n]) + (even + odd));
      }
  }
  static vf splat_bits(uint32_t x) { return (vf)(vu{} + x); }
  static vf fma(vf x, vf y, vf z) {
#if TW_VEC_BYTES == 64
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
    return (vf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#endif
  }

  alignas(64) Tile tile_[8];
};

TW_END
#endif
