// The loops over a run of elements that Adam and AdamW share.
#pragma once
#include "cpu/optimizer.h"

#ifdef TW_CPU_ISA
#include <utility>

#include "trainwright/adamw.h"

TW_BEGIN
namespace {

// for_operands (trainwright/vec.h) of a body in stages: last(i, k, third(i, k, second(i, k, first(i, k)))).
// In whole registers a turn runs every stage, the later ones on earlier elements. So a chain of long
// operations is spread over turns, and none of it waits for long: a processor that renames into 192
// registers has room for only two turns of 80.
template<class A, class... P, class First, class Second, class Third, class Last>
TW_HD void for_operands_in_stages(int64_t size, First&& first, Second&& second, Third&& third,
                                  Last&& last) {
  int64_t done = 0;
  const auto whole = [&](auto k, int64_t width) {
    const int64_t end = done + (size - done) / width * width;
    if (done == end) return;
    decltype(first(done, k)) a;
    decltype(second(done, k, a)) b;
    decltype(third(done, k, b)) c;
    const int64_t begin = done;
    for (; done < end + 3 * width; done += width) {
      const int64_t i = done - 3 * width, j = i + width, l = j + width;
      if (i >= begin) last(i, k, c);
      if (j >= begin && j < end) c = third(j, k, b);
      if (l >= begin && l < end) b = second(l, k, a);
      if (done < end) a = first(done, k);
    }
    done = end;
  };
  if constexpr (sizeof(A) == 4 && (in_pairs<P> && ...)) whole(Pairs{}, 2 * lanes<A>);
  if constexpr (!(only_in_pairs<P> || ...)) {
    whole(Full{}, lanes<A>);
    if (done < size) {
      const int64_t k = size - done;
      last(done, k, third(done, k, second(done, k, first(done, k))));
    }
  }
}

// A Rule's updates. It has adamw(scalars), those of AdamW, and gradient(p, grad, scalars), which is finished.
// Loops capture everything by value: what a store may reach would be loaded again after it.
template<class Rule>
struct AdamLoops {
  static constexpr bool kTwoLoops = true;

  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int flags, int64_t n, P p, G g, const States& states) {
    flags & 1 ? whole<true, A>(s, n, p, g, states) : whole<false, A>(s, n, p, g, states);
  }
  template<class A, class S, class P, class G, class States>
  static void moments(const S& s, int flags, int64_t n, P p, G g, const States& states) {
    const auto loop = [&](auto amsgrad) {
      for_operands<A, P, G, decltype(state<0>(states))>(
          n, [front = first<amsgrad, A>(s, p, g, states)](int64_t i, auto k) { front(i, k); });
    };
    flags & 1 ? loop(std::true_type{}) : loop(std::false_type{});
  }
  // The parameters, from moments that are stored.
  template<class A, class S, class P, class States>
  static void parameters(const S& scalars, int flags, int64_t n, P p, const States& states) {
    const auto loop = [&](auto amsgrad) {
      const auto body = [=, s = Rule::adamw(scalars), sm = state<0>(states), sv = state<1>(states),
                         sh = state<2>(states)](int64_t i, auto k) {
        auto m = vload<A>(sm + i, k), v = vload<A>(sv + i, k), x = vload<A>(p + i, k);
        if constexpr (amsgrad) v = vload<A>(sh + i, k);
        each(
            [=](auto& x, auto& m, auto& v) {
              x = adamw_parameter<vec<A>>(x, adamw_quotient<vec<A>>(m, vsqrt(v), s), s);
            },
            x, m, v);
        vstore<A>(p + i, x, k);
      };
      for_operands<A, P, decltype(state<0>(states))>(n, body);
    };
    flags & 1 ? loop(std::true_type{}) : loop(std::false_type{});
  }

 private:
  // Updates the moments of elements i ... and returns m and what the root is drawn of.
  template<bool kAmsgrad, class A, class S, class P, class G, class States>
  static auto first(const S& scalars, P p, G g, const States& states) {
    return [=, all = scalars, s = Rule::adamw(scalars), sm = state<0>(states),
            sv = state<1>(states), sh = state<2>(states)](int64_t i, auto k) {
      auto m = vload<A>(sm + i, k), v = vload<A>(sv + i, k);
      auto grad = vload<A>(g + i, k), x = vload<A>(p + i, k), h = v;
      if constexpr (kAmsgrad) h = vload<A>(sh + i, k);
      each(
          [=](auto& grad, auto& x, auto& m, auto& v, auto& h) {
            adamw_moments<vec<A>>(Rule::gradient(x, grad, all), m, v, s);
            h = kAmsgrad ? vmax<A>(h, v) : v;
          },
          grad, x, m, v, h);
      if constexpr (kAmsgrad) vstore<A>(sh + i, h, k);
      vstore<A>(sm + i, m, k);
      vstore<A>(sv + i, v, k);
      return std::pair(m, h);
    };
  }
  template<bool kAmsgrad, class A, class S, class P, class G, class States>
  static void whole(const S& scalars, int64_t n, P p, G g, const States& states) {
    const auto root = [](int64_t, auto, auto carried) {
      auto [m, h] = carried;
      each([](auto& h) { h = vsqrt(h); }, h);
      return std::pair(m, h);
    };
    const auto quotient = [=, s = Rule::adamw(scalars)](int64_t, auto, auto carried) {
      auto [m, root] = carried;
      each([=](auto& m, auto& root) { m = adamw_quotient<vec<A>>(m, root, s); }, m, root);
      return m;
    };
    const auto last = [=, s = Rule::adamw(scalars)](int64_t i, auto k, auto quotient) {
      auto x = vload<A>(p + i, k);
      each([=](auto& x, auto& q) { x = adamw_parameter<vec<A>>(x, q, s); }, x, quotient);
      vstore<A>(p + i, x, k);
    };
    for_operands_in_stages<A, P, G, decltype(state<0>(states))>(
        n, first<kAmsgrad, A>(scalars, p, g, states), root, quotient, last);
  }
};

}  // namespace
TW_END
#endif
