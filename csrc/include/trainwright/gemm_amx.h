// bf16 products of trainwright/gemm.h with AMX: 32 x 32 results in four of the eight tile registers, two tiles of A and
// two of B, so that each tile that is loaded multiplies two others: 16 loads of 64 bytes for 16 cycles of a product, two
// of which a core can do in that time.
//
// A panel of B is that of gemm_bf16.h (pairs of k, 32 columns): its rows are those of two tiles. A panel of A holds, for
// 32 k at a time, its 32 rows of 16 pairs one after another: two tiles. Both are filled up with zeros to 32 k.
//
// Numerics: trainwright/amx.h. C takes one sum per 32 k, from 0 up: the order depends on K alone.
#pragma once
#include "trainwright/amx.h"
#include "trainwright/gemm_fma.h"

#ifdef TW_AMX

TW_BEGIN

template<class T>
struct AmxTile {
  static constexpr int MR = 32, NR = 32;
  static constexpr int64_t STEP = 2, UNIT = 16;
  using Session = typename T::Session;
  using MicroFn = FmaTile<float>::MicroFn;

  static MicroFn micro(int64_t rows) { return rows > 16 ? &multiply<true> : &multiply<false>; }
  static PackFn<float> pack_a(DType) { return &pack_rows; }
  static PackFn<float> pack_b(DType) { return &pack_pairs<NR>; }

  // dst[((panel * pitch + i) * 32 + 16 p) + j]: row p, pair i + j, for i a multiple of 16.
  static void pack_rows(float* dst, const void* source, int64_t stride, int64_t k_stride,
                        int64_t count, int64_t panels, int64_t depth, int64_t pitch) {
    const bf16* src = static_cast<const bf16*>(source);
    for (int64_t j = 0; j < panels; ++j, src += MR * stride, count -= MR)
      for (int64_t i = 0; i < pitch; i += UNIT, dst += MR * UNIT) {
        const int64_t left = depth - 2 * i, here = left < 2 * UNIT ? left : 2 * UNIT;
        const bf16* from = src + 2 * i * k_stride;
        if (k_stride == 1)
          copy_rows(dst, from, stride, count, here);
        else
          turn_rows(dst, from, stride, k_stride, count, here);
      }
  }

 private:
  static void copy_rows(float* dst, const bf16* src, int64_t stride, int64_t count, int64_t depth) {
    for (int64_t p = 0; p < MR; ++p, dst += UNIT) {
      const size_t bytes = p < count ? static_cast<size_t>(depth) * sizeof(bf16) : 0;
      if (bytes == 64) {
        memcpy(dst, src + p * stride, 64);
      } else {
        memset(dst, 0, 64);
        if (bytes) memcpy(dst, src + p * stride, bytes);
      }
    }
  }

  // 16 pairs of 32 rows come out of pack_pairs with the rows side by side.
  static void turn_rows(float* dst, const bf16* src, int64_t stride, int64_t k_stride,
                        int64_t count, int64_t depth) {
    constexpr int L = lanes<float>;
    alignas(64) float pairs[UNIT * MR];
    pack_pairs<MR>(pairs, src, stride, k_stride, count, 1, depth, UNIT);
    for (int p = 0; p < MR; p += L)
      for (int i = 0; i < UNIT; i += L) {
        vf r[L];
        for (int l = 0; l < L; ++l) r[l] = vload<float>(pairs + (i + l) * MR + p);
        transpose<L>(r);
        for (int l = 0; l < L; ++l) vstore<float>(dst + (p + l) * UNIT + i, r[l]);
      }
  }

  // TALL: 32 rows, else 16. Tiles 0 to 3 are the results, 4 and 5 of A, 6 and 7 of B.
  template<bool TALL>
  static void multiply(int64_t kc, const float* a, const float* b, float* tile, bool add) {
    constexpr int64_t ROW = NR * sizeof(float);  // bytes from row to row, of results and of B
    T t;
    if (add) {
      t.template load<0>(tile, ROW);
      t.template load<1>(tile + 16, ROW);
      if constexpr (TALL) t.template load<2>(tile + 16 * NR, ROW);
      if constexpr (TALL) t.template load<3>(tile + 16 * NR + 16, ROW);
    } else {
      t.template zero<0>();
      t.template zero<1>();
      if constexpr (TALL) t.template zero<2>();
      if constexpr (TALL) t.template zero<3>();
    }
    for (int64_t k = 0; k < kc; k += UNIT, a += MR * UNIT, b += NR * UNIT) {
      t.template load<4>(a, 64);
      t.template load<6>(b, ROW);
      t.template dot<0, 4, 6>();
      t.template load<7>(b + 16, ROW);
      t.template dot<1, 4, 7>();
      if constexpr (TALL) {
        t.template load<5>(a + 16 * UNIT, 64);
        t.template dot<2, 5, 6>();
        t.template dot<3, 5, 7>();
      }
    }
    t.template store<0>(tile, ROW);
    t.template store<1>(tile + 16, ROW);
    if constexpr (TALL) t.template store<2>(tile + 16 * NR, ROW);
    if constexpr (TALL) t.template store<3>(tile + 16 * NR + 16, ROW);
  }
};

TW_END
#endif
