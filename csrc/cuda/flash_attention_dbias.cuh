// Gradient of the bias: ds of every pair, summed over what the bias is broadcast over, in a fixed order.
//
// A block of threads owns 64 queries and 32 keys of one of the bias's batches and heads, computes ds of each of the
// calls' batches and heads that share it, one after the other, and adds them in registers; over queries or keys, where
// the bias has one for all, it walks too. Nothing of the size of the scores is written that is not the result.
// FLOPs: 4 Tq Tk D per head. Only run for a bias with a gradient; no pipeline.
#pragma once
#include "cuda/flash_attention_terms.cuh"

TW_BEGIN

template<int HD>
struct BiasTiles {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps, kKeys = 32;
  static constexpr int kRowBytes = kRows * Tile<HD>::kPitch, kKeyBytes = kKeys * Tile<HD>::kPitch;
  static constexpr int kSumBytes = kWarps * kKeys * 4;
  static constexpr int kShared = 2 * kRowBytes + 2 * kKeyBytes + kSumBytes;
};

template<class T, int HD>
__global__ void __launch_bounds__(BiasTiles<HD>::kThreads, 2)
    flash_attention_dbias_kernel(const __grid_constant__ BiasGradient s) {
  using Tiles = BiasTiles<HD>;
  constexpr int N = Tiles::kKeys;
  extern __shared__ __align__(128) char memory[];
  const AttentionBackward& a = s.a;
  const AttentionShape& shape = a.shape;
  // Of the bias's gradient: batch, head, block of queries, block of keys.
  const int64_t block = blockIdx.x;
  const int key_block = static_cast<int>(block % s.key_blocks);
  const int query_block = static_cast<int>(block / s.key_blocks % s.query_blocks);
  const int bias_head = static_cast<int>(block / s.key_blocks / s.query_blocks % s.size[1]);
  const int bias_batch = static_cast<int>(block / s.key_blocks / s.query_blocks / s.size[1]);
  const bool one_query = s.size[2] == 1, one_key = s.size[3] == 1;
  const int b0 = s.size[0] == 1 ? 0 : bias_batch, b1 = s.size[0] == 1 ? shape.B : bias_batch + 1;
  const int h0 = s.size[1] == 1 ? 0 : bias_head, h1 = s.size[1] == 1 ? shape.H : bias_head + 1;
  const int i_begin = one_query ? 0 : query_block * Tiles::kRows;
  const int i_end = one_query ? shape.Tq : min(i_begin + Tiles::kRows, shape.Tq);
  const int j_begin = one_key ? 0 : key_block * N;
  const int j_end = one_key ? shape.Tk : min(j_begin + N, shape.Tk);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;

  const uint32_t q_tile = shared_address(memory), dout_tile = q_tile + Tiles::kRowBytes;
  const uint32_t k_tile = dout_tile + Tiles::kRowBytes, v_tile = k_tile + Tiles::kKeyBytes;
  float* sums = reinterpret_cast<float*>(memory + Tiles::kShared - Tiles::kSumBytes);
  const TileCopy<HD, Tiles::kRows, Tiles::kThreads> copy_rows;
  const TileCopy<HD, N, Tiles::kThreads> copy_keys;
  const auto fetch = [&](const auto& copy, uint32_t tile, const HeadRows& x, int b, int first,
                         int head, int rows, int width) {
    const T* from = head_of<T>(x, shape, b, first, head);
    copy.start(tile, copy.part(from, x.row), x.row, rows - first, width);
  };
  const Lanes<HD> down = Lanes<HD>::down(), across = Lanes<HD>::across();
  const int warp_bytes = warp * 16 * Tile<HD>::kPitch;

  float total[1][N / 8][4];
  clear(total);
#pragma unroll 1
  for (int b = b0; b < b1; ++b) {
    const Sequence seq(shape, b);
    const Band band = seq.band(shape);
#pragma unroll 1
    for (int h = h0; h < h1; ++h) {
      const int kv_head = h / (shape.H / shape.G);
      const float* stats = a.stats + stats_of(a, seq, b, h);
#pragma unroll 1
      for (int i0 = i_begin; i0 < i_end; i0 += Tiles::kRows) {
        const int64_t seen_begin = band.begin(i0), last = min(i0 + Tiles::kRows, shape.Tq) - 1;
        const int64_t seen_end = band.end(last);
#pragma unroll 1
        for (int j0 = j_begin; j0 < j_end; j0 += N) {
          if (j0 >= seen_end || j0 + N <= seen_begin) continue;
          __syncthreads();  // the tiles are done with
          fetch(copy_rows, q_tile, a.q, b, i0, h, shape.Tq, shape.D);
          fetch(copy_rows, dout_tile, a.dout, b, i0, h, shape.Tq, shape.Dv);
          fetch(copy_keys, k_tile, a.k, b, j0, kv_head, shape.Tk, shape.D);
          fetch(copy_keys, v_tile, a.v, b, j0, kv_head, shape.Tk, shape.Dv);
          commit_copies();
          wait_copies<0>();
          __syncthreads();
          float x[1][N / 8][4], y[1][N / 8][4];
          clear(x);
          clear(y);
          product_of_rows<T, HD, 1, N>(x, q_tile + warp_bytes, down, k_tile, across);
          product_of_rows<T, HD, 1, N>(y, dout_tile + warp_bytes, down, v_tile, across);
          const Pairs<false, 1, N> pairs{a.terms, shape.Tq,           shape.Tk,  b,
                                         h,       i0 + 16 * warp + g, j0 + 2 * t};
          pairs.score(x, [](int, int, int, float) {});
          const uint32_t dropped = a.terms.seed ? pairs.dropped() : 0;
          pairs.for_each([&](int m, int j, int r) {
            const int i = pairs.query(m, j, r), key = pairs.key(m, j, r);
            if (i >= shape.Tq || !band.sees(i, key) || x[m][j][r] == -INFINITY) return;
            const float p = exp2_fast((x[m][j][r] - stats[i]) * kLog2e);
            const bool drop = dropped >> (j * 4 + r) & 1;
            const float dp = drop ? 0.0f : y[m][j][r] * a.terms.keep;
            total[m][j][r] += p * (dp - stats[a.stats_delta + i]);
          });
        }
      }
    }
  }

  // Rows 16 warp + g and 8 further on; columns 8 j + 2 t and the next.
  float* out =
      s.out + (static_cast<int64_t>(bias_batch) * s.size[1] + bias_head) * s.size[2] * s.size[3];
  if (one_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) sum += total[0][j][2 * half] + total[0][j][2 * half + 1];
      sum += exchange(sum, 1);
      sum += exchange(sum, 2);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) total[0][j][2 * half] = total[0][j][2 * half + 1] = 0.0f;
      total[0][0][2 * half] = sum;  // in each lane of the row; column 0 is that of lanes with t = 0
    }
  }
  if (one_query) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = total[0][j][e] + total[0][j][2 + e];
        sum += exchange(sum, 4);
        sum += exchange(sum, 8);
        sum += exchange(sum, 16);
        if (g == 0) sums[warp * N + 8 * j + 2 * t + e] = sum;
      }
    __syncthreads();
    const int columns = one_key ? 1 : j_end - j_begin;
    for (int c = threadIdx.x; c < columns; c += Tiles::kThreads) {
      float sum = 0.0f;
      for (int w = 0; w < Tiles::kWarps; ++w) sum += sums[w * N + c];
      out[j_begin + c] = sum;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = i_begin + 16 * warp + g + r / 2 * 8, c = 8 * j + 2 * t + r % 2;
      if (i < i_end && c < (one_key ? 1 : j_end - j_begin))
        out[static_cast<int64_t>(i) * s.size[3] + (one_key ? 0 : j_begin + c)] = total[0][j][r];
    }
}

template<class T, int HD>
void launch_attention_bias_gradient(BiasGradient s, cudaStream_t stream) {
  using Tiles = BiasTiles<HD>;
  s.query_blocks = s.size[2] == 1 ? 1 : static_cast<int>(divide_up(s.size[2], Tiles::kRows));
  s.key_blocks = s.size[3] == 1 ? 1 : static_cast<int>(divide_up(s.size[3], Tiles::kKeys));
  const auto kernel = flash_attention_dbias_kernel<T, HD>;
  allow_shared(kernel, Tiles::kShared);
  const int64_t blocks = int64_t{s.query_blocks} * s.key_blocks * s.size[0] * s.size[1];
  kernel<<<static_cast<unsigned>(blocks), Tiles::kThreads, Tiles::kShared, stream>>>(s);
}

TW_END
