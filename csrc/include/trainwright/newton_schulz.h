// Newton-Schulz iteration: the nearest matrix with orthonormal rows or columns, roughly (Jordan et
// al., "Muon", 2024; coefficients of its quintic by the caller):
//   X = G / max(|G|_F, eps);  steps times:  A = X X^T,  X = (a I + b A + c A^2) X
// for G (M, N) with M <= N; a tall G takes A = X^T X and multiplies from the right, which is the
// same iteration on the transpose without one. With m = min(M, N) and n = max(M, N):
//
//   A = X X^T                 m^2 n FLOPs: symmetric, so only tiles of the lower triangle are made
//   P = a I + b A + c A^2     m^3, the same
//   X = P X                   2 m^2 n
//
// that is 15 m^2 n + 5 m^3 FLOPs in 5 steps, not 20 m^2 n + 10 m^3. Bound: the FMA units. All
// products are those of gemm.h, so a result does not depend on the number of threads.
#pragma once
#include "trainwright/gemm.h"

TW_BEGIN

// out = alpha * sums + beta * base + diagonal * I, symmetric (n, n): the lower half of each tile is
// written, and mirrored.
template<class S>
struct SymmetricStore : GemmStore<S> {
  S alpha, beta, diagonal;

  static void run_tile(const GemmStore<S>& store, const S* tile, int64_t tile_stride, int64_t row,
                       int64_t col, int64_t rows, int64_t cols) {
    const auto& s = static_cast<const SymmetricStore&>(store);
    S* out = static_cast<S*>(s.out);
    const S* base = static_cast<const S*>(s.residual);
    const int64_t n = s.N;
    alignas(64) S value[GemmStore<S>::LARGEST_TILE];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = row + i, below = r + 1 - col, count = below < cols ? below : cols;
      if (count <= 0) continue;
      for_lanes<S>(count, [&](int64_t j, auto k) {
        vec<S> z = s.alpha * vload<S>(tile + i * tile_stride + j, k);
        if (base) z += s.beta * vload<S>(base + r * n + col + j, k);
        vstore<S>(value + i * tile_stride + j, z, k);
      });
      if (below <= cols) value[i * tile_stride + below - 1] += s.diagonal;
      memcpy(out + r * n + col, value + i * tile_stride, static_cast<size_t>(count) * sizeof(S));
    }
    for (int64_t j = 0; j < cols; ++j) {  // column c = col + j, rows below it
      const int64_t c = col + j, first = c + 1 > row ? c + 1 - row : 0;
      for (int64_t i = first; i < rows; ++i) out[c * n + row + i] = value[i * tile_stride + j];
    }
  }

  SymmetricStore(S* to, int64_t n, S alpha, const S* base, S beta, S diagonal)
      : GemmStore<S>{&run_tile, to, nullptr, nullptr, base, n, n, n, sizeof(S)},
        alpha(alpha),
        beta(beta),
        diagonal(diagonal) {}
};

// One matrix G (M, N) of storage type T, any strides; sums and intermediate matrices are in S.
template<class S>
struct NewtonSchulz {
  int64_t M, N, steps;
  const double* coefficients;  // (steps, 3)
  double eps;
  DType out_dtype;

  int64_t small() const { return M < N ? M : N; }
  // X changes places at every step; one of the two is `out` if it holds S.
  bool out_holds_sums() const { return dtype_bytes(out_dtype) == sizeof(S); }
  // What run() needs for itself, a multiple of 64.
  int64_t work_bytes() const {
    const int64_t elements = 2 * small() * small() + (out_holds_sums() ? 1 : 2) * M * N;
    return (8 * M + elements * int64_t(sizeof(S)) + 63) / 64 * 64;
  }

  // out (M, N) dense; work aligned to 8 bytes.
  template<class T>
  void run(const T* g, int64_t row_stride, int64_t col_stride, void* out, void* work) const {
    const int64_t m = small();
    double* rows = static_cast<double*>(work);
    S *a = reinterpret_cast<S*>(rows + M), *p = a + m * m, *spare = p + m * m;
    S* place[2] = {spare, out_holds_sums() ? static_cast<S*>(out) : spare + M * N};
    // The result of the last step belongs in place[1].
    S* x = place[steps % 2 == 0];
    normalize(g, row_stride, col_stride, x, rows);
    for (int64_t step = 0; step < steps; ++step) {
      const double* c = coefficients + 3 * step;
      S* next = x == place[0] ? place[1] : place[0];
      const bool last = step + 1 == steps;
      iterate(x, a, p, c, last ? out : next, last ? out_dtype : dtype());
      x = next;
    }
    if (steps == 0 && !out_holds_sums()) narrow(x, out);
  }

 private:
  static DType dtype() { return sizeof(S) == 8 ? DType::f64 : DType::f32; }

  // Rows one by one, so that no sum depends on the threads; squares in double, so that none
  // overflows or vanishes.
  template<class T>
  void normalize(const T* g, int64_t row_stride, int64_t col_stride, S* x, double* rows) const {
    const int64_t grain = N < 16384 ? 16384 / N : 1;
    parallel_for(0, M, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* from = g + r * row_stride;
        S* to = x + r * N;
        if (col_stride == 1)
          for_lanes<S>(N, [&](int64_t i, auto k) { vstore<S>(to + i, vload<S>(from + i, k), k); });
        else
          for (int64_t i = 0; i < N; ++i) to[i] = load_as<S>(from[i * col_stride]);
        vec<double> sum{};
        for_lanes<double>(N, [&](int64_t i, auto k) {
          const vec<double> z = vload<double>(to + i, k);
          sum += z * z;
        });
        rows[r] = hsum<double>(sum);
      }
    });
    double total = 0.0;
    for (int64_t r = 0; r < M; ++r) total += rows[r];
    const double norm = sqrt(total), factor = 1.0 / (norm < eps ? eps : norm);
    parallel_for(0, M, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * N; i < end * N; ++i) x[i] = static_cast<S>(x[i] * factor);
    });
  }

  // out = (a I + b A + c A^2) X with A = X X^T, or the same on the other side.
  void iterate(const S* x, S* a, S* p, const double* c, void* out, DType out_type) const {
    const int64_t m = small(), n = M < N ? N : M;
    const bool wide = M <= N;
    const GemmOperand lines = {x, wide ? N : 1, wide ? 1 : N, dtype()};
    const SymmetricStore<S> gram(a, m, S(1), nullptr, S(0), S(0));
    Gemm<S>::run(m, m, n, lines, lines, gram, true);
    const GemmOperand symmetric = {a, m, 1, dtype()};
    const SymmetricStore<S> quintic(p, m, S(c[2]), a, S(c[1]), S(c[0]));
    Gemm<S>::run(m, m, m, symmetric, {a, 1, m, dtype()}, quintic, true);
    const GemmStore<S> plain{store_function<S>(out_type, Activation::none),
                             out,
                             nullptr,
                             nullptr,
                             nullptr,
                             N,
                             N,
                             0,
                             dtype_bytes(out_type)};
    if (wide)
      Gemm<S>::run(M, N, m, {p, m, 1, dtype()}, {x, 1, N, dtype()}, plain);
    else
      Gemm<S>::run(M, N, m, {x, N, 1, dtype()}, {p, 1, m, dtype()}, plain);
  }

  void narrow(const S* x, void* out) const {
    with_float_type(out_dtype, [&](auto tag) {
      auto* to = static_cast<decltype(tag)*>(out);
      for (int64_t i = 0; i < M * N; ++i) to[i] = store_as<decltype(tag)>(x[i]);
    });
  }
};

TW_END
