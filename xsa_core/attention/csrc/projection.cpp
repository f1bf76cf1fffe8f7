// Exclusion on the CPU: forward and adjoint, each in one pass over its tensors.
//
//   B batch   T tokens   H query heads   Hkv value heads   G = H / Hkv   D head size
//
//   forward    c = y.vh, z = y - s c vh                               with vh = v/|v|
//   adjoint    a = g.vh, dy = g - s a vh, ds = -c a,
//              dv = -s [a z + c g + (s - 2) c a vh] / |v| summed over the group, y = z + s c vh
//
// One unit of work is a token and a value head: its v row is read once for the G query heads that use it. Rows are dense in
// D and strided at will in B, T and H. Sums run in float32 (float64 for float64); the half types are widened to a float32
// row that stays in the first-level cache.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;
using at::vec::Vectorized;

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Elements a thread should get at least; below, waking it costs more than the work.
constexpr int64_t kGrainElements = 16384;

struct Strides {
  int64_t b, t, h;
  explicit Strides(const Tensor& x) : b(x.stride(0)), t(x.stride(1)), h(x.stride(2)) {}
  Strides() : b(0), t(0), h(0) {}
  int64_t at(int64_t ib, int64_t it, int64_t ih) const { return ib * b + it * t + ih * h; }
};

template <typename A>
inline A sum_lanes(const Vectorized<A>& x) {
  A lanes[Vectorized<A>::size()];
  x.store(lanes);
  for (int64_t half = Vectorized<A>::size() / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// The row as accumulation-type values: itself, or widened into `scratch`.
template <typename T>
inline const Acc<T>* widen(const T* row, Acc<T>* scratch, int64_t n) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return row;
  } else {
    using V = Vectorized<T>;
    using F = Vectorized<float>;
    int64_t i = 0;
    for (; i + V::size() <= n; i += V::size()) {
      auto [lo, hi] = at::vec::convert_to_float<T>(V::loadu(row + i));
      lo.store(scratch + i);
      hi.store(scratch + i + F::size());
    }
    for (; i < n; ++i) scratch[i] = static_cast<float>(row[i]);
    return scratch;
  }
}

template <typename T>
inline void narrow(const Acc<T>* values, T* row, int64_t n) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    if (values != row) std::copy_n(values, n, row);
  } else {
    using V = Vectorized<T>;
    using F = Vectorized<float>;
    int64_t i = 0;
    for (; i + V::size() <= n; i += V::size()) {
      at::vec::convert_from_float<T>(F::loadu(values + i), F::loadu(values + i + F::size())).store(row + i);
    }
    for (; i < n; ++i) row[i] = static_cast<T>(values[i]);
  }
}

template <typename A>
inline A dot(const A* a, const A* b, int64_t n) {
  using V = Vectorized<A>;
  V even(0), odd(0);
  int64_t i = 0;
  for (; i + 2 * V::size() <= n; i += 2 * V::size()) {
    even = at::vec::fmadd(V::loadu(a + i), V::loadu(b + i), even);
    odd = at::vec::fmadd(V::loadu(a + i + V::size()), V::loadu(b + i + V::size()), odd);
  }
  for (; i + V::size() <= n; i += V::size()) even = at::vec::fmadd(V::loadu(a + i), V::loadu(b + i), even);
  A total = sum_lanes(even + odd);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// out = x + k u
template <typename A>
inline void add_scaled(A* out, const A* x, A k, const A* u, int64_t n) {
  using V = Vectorized<A>;
  const V kv(k);
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    at::vec::fmadd(kv, V::loadu(u + i), V::loadu(x + i)).store(out + i);
  }
  for (; i < n; ++i) out[i] = x[i] + k * u[i];
}

// Writes x + k u straight into a row of T.
template <typename T>
inline void store_scaled(T* out, const Acc<T>* x, Acc<T> k, const Acc<T>* u, int64_t n) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    add_scaled(out, x, k, u, n);
  } else {
    using V = Vectorized<T>;
    using F = Vectorized<float>;
    const F kv(k);
    int64_t i = 0;
    for (; i + V::size() <= n; i += V::size()) {
      const F lo = at::vec::fmadd(kv, F::loadu(u + i), F::loadu(x + i));
      const F hi = at::vec::fmadd(kv, F::loadu(u + i + F::size()), F::loadu(x + i + F::size()));
      at::vec::convert_from_float<T>(lo, hi).store(out + i);
    }
    for (; i < n; ++i) out[i] = static_cast<T>(x[i] + k * u[i]);
  }
}

// acc (=|+=) p z + q g + r u
template <typename A>
inline void combine(A* acc, bool first, A p, const A* z, A q, const A* g, A r, const A* u, int64_t n) {
  using V = Vectorized<A>;
  const V pv(p), qv(q), rv(r);
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    V sum = rv * V::loadu(u + i);
    sum = at::vec::fmadd(qv, V::loadu(g + i), sum);
    sum = at::vec::fmadd(pv, V::loadu(z + i), sum);
    if (!first) sum = sum + V::loadu(acc + i);
    sum.store(acc + i);
  }
  for (; i < n; ++i) acc[i] = (first ? A(0) : acc[i]) + (p * z[i] + q * g[i] + r * u[i]);
}

// The direction of a value row: vh = row * inverse, 1/|v| = true_inverse; both 0 for a vector that counts as zero.
template <typename A>
struct Direction {
  const A* row;
  A inverse;
  A true_inverse;
};

template <typename T>
inline Direction<Acc<T>> direction(const T* v, Acc<T>* scratch, int64_t n) {
  using A = Acc<T>;
  const A tiny = static_cast<A>(std::numeric_limits<T>::min());
  // Inside these bounds the sum of squares is exact enough and the largest entry is surely a normal number of T.
  const A low = std::max<A>(std::is_same_v<A, double> ? A(1e-280) : A(1e-30), static_cast<A>(n) * tiny * tiny);
  const A high = std::is_same_v<A, double> ? A(1e280) : A(1e30);
  const A* row = widen<T>(v, scratch, n);
  const A squares = dot(row, row, n);
  if (squares >= low && squares <= high) {
    const A inverse = A(1) / std::sqrt(squares);
    return {row, inverse, inverse};
  }
  A largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(row[i]));
  if (!(largest >= tiny)) return {row, A(0), A(0)};
  for (int64_t i = 0; i < n; ++i) scratch[i] = row[i] / largest;
  const A inverse = A(1) / std::sqrt(dot<A>(scratch, scratch, n));
  return {scratch, inverse, inverse / largest};
}

template <typename A>
struct StrengthView {
  const A* data = nullptr;
  Strides strides;
  A factor;
  StrengthView(double number, const std::optional<Tensor>& tensor) : factor(static_cast<A>(number)) {
    if (tensor.has_value()) {
      data = tensor->const_data_ptr<A>();
      strides = Strides(*tensor);
    }
  }
  A at(int64_t b, int64_t t, int64_t h) const { return data ? data[strides.at(b, t, h)] : factor; }
};

void check(const Tensor& y, const Tensor& v, const std::optional<Tensor>& strength) {
  TORCH_CHECK(y.dim() == 4 && v.dim() == 4 && y.size(0) == v.size(0) && y.size(1) == v.size(1) && y.size(3) == v.size(3),
              "expected y (B, T, H, D) and v (B, T, Hkv, D), got ", y.sizes(), " and ", v.sizes());
  TORCH_CHECK(v.size(2) > 0 && y.size(2) % v.size(2) == 0, "the value heads must divide the heads");
  TORCH_CHECK(y.scalar_type() == v.scalar_type(), "y and v must have one dtype");
  TORCH_CHECK(y.size(3) == 1 || (y.stride(3) == 1 && v.stride(3) == 1), "rows must be dense in the last axis");
  const auto acc = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(!strength.has_value() || strength->scalar_type() == acc, "strength must be in the accumulation type");
}

at::TensorOptions accumulation(const Tensor& y) {
  return y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Runs body(b, t, hkv) for every token and value head.
template <typename F>
void for_each_value_row(const Tensor& v, int64_t elements_per_row, const F& body) {
  const int64_t B = v.size(0), T = v.size(1), heads = v.size(2);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_row));
  at::parallel_for(0, B * T * heads, grain, [&](int64_t begin, int64_t end) { body(begin, end, T, heads); });
}

template <typename T>
void forward_rows(const Tensor& y, const Tensor& v, Tensor& z, Tensor& c, double number,
                  const std::optional<Tensor>& strength) {
  using A = Acc<T>;
  const int64_t D = y.size(3), H = y.size(2), G = H / v.size(2);
  const T* const y0 = y.const_data_ptr<T>();
  const T* const v0 = v.const_data_ptr<T>();
  T* const z0 = z.mutable_data_ptr<T>();
  A* const c0 = c.mutable_data_ptr<A>();
  const Strides ys(y), vs(v), zs(z);
  const StrengthView<A> s(number, strength);
  for_each_value_row(v, G * D, [&](int64_t begin, int64_t end, int64_t tokens, int64_t heads) {
    std::vector<A> scratch(2 * D);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t hv = i % heads, t = (i / heads) % tokens, b = i / (heads * tokens);
      const auto dir = direction<T>(v0 + vs.at(b, t, hv), scratch.data(), D);
      for (int64_t h = hv * G; h < (hv + 1) * G; ++h) {
        const A* row = widen<T>(y0 + ys.at(b, t, h), scratch.data() + D, D);
        const A along = dot(row, dir.row, D) * dir.inverse;
        c0[(b * tokens + t) * H + h] = along;
        store_scaled<T>(z0 + zs.at(b, t, h), row, -s.at(b, t, h) * along * dir.inverse, dir.row, D);
      }
    }
  });
}

template <typename T>
void backward_rows(const Tensor& g, const Tensor& z, const Tensor& v, const Tensor& c, double number,
                   const std::optional<Tensor>& strength, Tensor& dy, Tensor& dv, Tensor& ds, Tensor& y) {
  using A = Acc<T>;
  const int64_t D = g.size(3), H = g.size(2), G = H / v.size(2);
  const T *const g0 = g.const_data_ptr<T>(), *const z0 = z.const_data_ptr<T>(), *const v0 = v.const_data_ptr<T>();
  const A* const c0 = c.const_data_ptr<A>();
  T *const dy0 = dy.mutable_data_ptr<T>(), *const dv0 = dv.mutable_data_ptr<T>();
  T* const y0 = y.numel() ? y.mutable_data_ptr<T>() : nullptr;
  A* const ds0 = ds.numel() ? ds.mutable_data_ptr<A>() : nullptr;
  const Strides gs(g), zs(z), vs(v);
  const StrengthView<A> s(number, strength);
  for_each_value_row(v, 2 * G * D, [&](int64_t begin, int64_t end, int64_t tokens, int64_t heads) {
    std::vector<A> scratch(4 * D);
    A* const sum = scratch.data() + 3 * D;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t hv = i % heads, t = (i / heads) % tokens, b = i / (heads * tokens);
      const auto dir = direction<T>(v0 + vs.at(b, t, hv), scratch.data(), D);
      for (int64_t h = hv * G; h < (hv + 1) * G; ++h) {
        const int64_t flat = (b * tokens + t) * H + h;
        const A* grow = widen<T>(g0 + gs.at(b, t, h), scratch.data() + D, D);
        const A* zrow = widen<T>(z0 + zs.at(b, t, h), scratch.data() + 2 * D, D);
        const A a = dot(grow, dir.row, D) * dir.inverse;
        const A ch = c0[flat], sh = s.at(b, t, h);
        store_scaled<T>(dy0 + flat * D, grow, -sh * a * dir.inverse, dir.row, D);
        if (y0) store_scaled<T>(y0 + flat * D, zrow, sh * ch * dir.inverse, dir.row, D);
        if (ds0) ds0[flat] = -ch * a;
        const A k = -sh * dir.true_inverse;
        combine<A>(sum, h == hv * G, k * a, zrow, k * ch, grow, k * (sh - 2) * ch * a * dir.inverse, dir.row, D);
      }
      narrow<T>(sum, dv0 + i * D, D);
    }
  });
}

Tensor exclude_(Tensor& y, const Tensor& v, double factor, const std::optional<Tensor>& strength) {
  check(y, v, strength);
  Tensor c = at::empty({y.size(0), y.size(1), y.size(2)}, accumulation(y));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "xsa::exclude_", [&] {
    forward_rows<scalar_t>(y, v, y, c, factor, strength);
  });
  return c;
}

std::tuple<Tensor, Tensor> exclude(const Tensor& y, const Tensor& v, double factor,
                                   const std::optional<Tensor>& strength) {
  check(y, v, strength);
  Tensor c = at::empty({y.size(0), y.size(1), y.size(2)}, accumulation(y));
  Tensor z = at::empty(y.sizes(), y.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "xsa::exclude", [&] {
    forward_rows<scalar_t>(y, v, z, c, factor, strength);
  });
  return {z, c};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> exclude_backward(const Tensor& g, const Tensor& z, const Tensor& v,
                                                            const Tensor& c, double factor,
                                                            const std::optional<Tensor>& strength, bool restore) {
  check(g, v, strength);
  check(z, v, strength);
  TORCH_CHECK(c.is_contiguous() && c.numel() == g.size(0) * g.size(1) * g.size(2), "c must be a dense (B, T, H)");
  Tensor dy = at::empty(g.sizes(), g.options());
  Tensor dv = at::empty(v.sizes(), v.options());
  Tensor ds = strength.has_value() ? at::empty_like(c) : at::empty({0}, c.options());
  Tensor y = restore ? at::empty(z.sizes(), z.options()) : at::empty({0}, z.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, g.scalar_type(), "xsa::exclude_backward", [&] {
    backward_rows<scalar_t>(g, z, v, c, factor, strength, dy, dv, ds, y);
  });
  return {dy, dv, ds, y};
}

}  // namespace

// The schemas are declared in xsa_core/attention/projection_ops.py, where the other implementations register too.
TORCH_LIBRARY_IMPL(xsa, CPU, m) {
  m.impl("exclude_", &exclude_);
  m.impl("exclude", &exclude);
  m.impl("exclude_backward", &exclude_backward);
}
