// Newton-Schulz iteration of a batch of matrices on the CPU (method in trainwright/newton_schulz.h).
//
// Large matrices are done one after another by all threads, small ones by one thread each. Either
// way a matrix has the same bits, alone or in a batch, since those of a product do not depend on
// the threads.
#include <algorithm>

#include "cpu/kernel.h"

namespace tw {

struct NewtonSchulzArgs {
  const void* x;  // (B, M, N), any strides
  void* out;      // (B, M, N) dense
  void* work;     // workers * work_bytes; see the query below
  int64_t B, M, N;
  int64_t batch_stride, row_stride, col_stride;
  int64_t steps;
  const double* coefficients;  // (steps, 3)
  double eps;
  DType dtype;  // of x and out
  int64_t workers;
  int64_t* work_bytes;  // if not null: only set this to what each worker needs
};

}  // namespace tw

TW_DECLARE_KERNEL(newton_schulz, NewtonSchulzArgs)

#ifdef TW_CPU_ISA

#include "trainwright/newton_schulz.h"

TW_BEGIN

void newton_schulz(const NewtonSchulzArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using S = acc_t<T>;
    const NewtonSchulz<S> method{a.M, a.N, a.steps, a.coefficients, a.eps, a.dtype};
    const int64_t bytes = method.work_bytes();
    if (a.work_bytes) {
      *a.work_bytes = bytes;
      return;
    }
    auto one = [&](int64_t i, int64_t worker) {
      method.run(static_cast<const T*>(a.x) + i * a.batch_stride, a.row_stride, a.col_stride,
                 static_cast<T*>(a.out) + i * a.M * a.N,
                 static_cast<char*>(a.work) + worker * bytes);
    };
    if (a.workers == 1) {
      for (int64_t i = 0; i < a.B; ++i) one(i, 0);
      return;
    }
    int64_t next = 0;
    parallel_for(0, a.workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker)
        for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < a.B;) one(i, worker);
    });
  });
}

TW_END

#else  // ---- torch bindings

#include "trainwright/parallel.h"

namespace tw {
namespace {

// Up to this size (its products are too short to share) each thread takes whole matrices.
constexpr int64_t kSmall = 256 * 256;

// x (B, M, N), any strides; coefficients: three for each step.
Tensor newton_schulz_cpu(Tensor x, std::vector<double> coefficients, double eps) {
  STD_TORCH_CHECK(x.dim() == 3, "newton_schulz: x: expected (B, M, N)");
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, "newton_schulz: three coefficients per step");
  NewtonSchulzArgs a{};
  a.B = x.size(0), a.M = x.size(1), a.N = x.size(2);
  Tensor out = empty({a.B, a.M, a.N}, x);
  if (a.B == 0 || a.M == 0 || a.N == 0) return out;
  a.batch_stride = x.stride(0), a.row_stride = x.stride(1), a.col_stride = x.stride(2);
  a.x = data(x), a.out = mutable_data(out), a.dtype = dtype_of(x);
  a.steps = static_cast<int64_t>(coefficients.size() / 3);
  a.coefficients = coefficients.data(), a.eps = eps;
  a.workers = a.M * a.N <= kSmall ? std::min(a.B, num_threads()) : 1;
  int64_t bytes = 0;
  NewtonSchulzArgs query = a;
  query.work_bytes = &bytes;
  newton_schulz(query);
  Tensor work = empty({a.workers * bytes / 8}, x, ScalarType::Double);
  a.work = mutable_data(work);
  newton_schulz(a);
  return out;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("newton_schulz_fwd", TORCH_BOX(&tw::newton_schulz_cpu));
}

#endif
