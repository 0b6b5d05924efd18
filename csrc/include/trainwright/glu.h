// Gated activations, element by element (act in trainwright/activation.h):
//   y = act(gate) * up;   dgate = dy * up * act'(gate),  dup = dy * act(gate)
// V is float, double or a vector of them.
#pragma once
#include "trainwright/activation.h"

TW_BEGIN

template<class Act, class V>
TW_HD V glu_value(V gate, V up) {
  return Act::value(gate) * up;
}

template<class V>
struct GluGradients {
  V gate, up;
};
template<class Act, class V>
TW_HD GluGradients<V> glu_gradients(V dy, V gate, V up) {
  const ValueSlope<V> act = Act::value_slope(gate);
  return {dy * up * act.slope, dy * act.value};
}

// Calls f(element type tag, activation tag), for the activations that have a gated form.
template<class F>
inline void with_glu_types(DType dtype, Activation activation, F&& f) {
  with_float_type(dtype, [&](auto tag) {
    if (activation == Activation::silu) f(tag, Silu{});
    if (activation == Activation::gelu) f(tag, Gelu{});
    if (activation == Activation::gelu_tanh) f(tag, GeluTanh{});
  });
}

TW_END
