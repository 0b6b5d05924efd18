// The parts of a split forward put together (trainwright/merge_attention.h): a warp has a row of out and adds its parts
// in their order, after their weights. 4 pieces (Dv + 1) bytes are read of a query and head, 2 Dv + 4 written.
#pragma once
#include "cuda/flash_attention.cuh"
#include "trainwright/merge_attention.h"

TW_BEGIN

constexpr int kMergeWarps = 4;

template<class T>
__global__ void __launch_bounds__(32 * kMergeWarps)
    flash_attention_merge_kernel(const __grid_constant__ AttentionForward a) {
  const AttentionShape& shape = a.shape;
  const int group = shape.H / shape.G, lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / 32;
  const int row = static_cast<int>(warp % a.split.rows), i = row / group;
  const int kv_head = static_cast<int>(warp / a.split.rows % shape.G);
  const int b = static_cast<int>(warp / a.split.rows / shape.G);
  if (b >= shape.B) return;
  const Sequence seq(shape, b);
  const Band band = seq.band(shape);
  if (i >= seq.Tq || !Pieces::split(band, group)) return;
  const Pieces of = Pieces::of(band);
  const int pieces = static_cast<int>(of.last - of.first), h = kv_head * group + row % group;
  const int64_t step = static_cast<int64_t>(shape.G) * a.split.rows;  // rows from part to part
  const int64_t first = a.split.row(shape.G, b, kv_head, seq.k_row, 0) + row;
  const float* lse = a.split.lse + first;

  LseSum<float> sum;
  for (int s = lane; s < pieces; s += 32) sum.add(lse[s * step]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const LseSum<float> other{exchange(sum.top, lanes), exchange(sum.total, lanes)};
    // In the order of the lanes, so that both have the same bits.
    LseSum<float> both = lane & lanes ? other : sum;
    both.add(lane & lanes ? sum : other);
    sum = both;
  }
  const float all = sum.lse();
  float share = 1.0f;
  if (a.terms.sinks) share = 1.0f / (1.0f + expf(a.terms.sinks[h] - all));
  if (lane == 0) a.lse[lse_of(shape, seq, b, h) + i] = all;

  T* to = const_cast<T*>(head_of<T>(a.out, shape, b, seq.q_row + i, h));
#pragma unroll 1
  for (int c = 4 * lane; c < shape.Dv; c += 4 * 32) {
    const float* part = a.split.out + first * a.split.width + c;
    float x[4] = {};
#pragma unroll 1
    for (int s = 0; s < pieces; ++s) {
      const float weight = sum.weight(lse[s * step]);
      const Pack<float, 4> y = load_pack<4>(part + s * step * a.split.width);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] += merged_part(y.v[k], lse[s * step], weight);
    }
    Pack<T, 4> y;
#pragma unroll
    for (int k = 0; k < 4; ++k) y.v[k] = store_as<T>(x[k] * share);
    if (a.wide) {
      store_pack(to + c, y);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (c + k < shape.Dv) to[c + k] = y.v[k];
    }
  }
}

template<class T>
void launch_attention_merge(const AttentionForward& a, cudaStream_t stream) {
  const int64_t rows = int64_t{a.shape.B} * a.shape.G * a.split.rows;
  flash_attention_merge_kernel<T>
      <<<static_cast<unsigned>(divide_up(rows, kMergeWarps)), 32 * kMergeWarps, 0, stream>>>(a);
}

TW_END
