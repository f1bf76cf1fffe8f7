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
  if constexpr (std::is_same_v<A, float>) {
    return at::vec::vec_reduce_all<float>([](Vectorized<float>& a, Vectorized<float>& b) { return a + b; }, x);
  } else {
    A lanes[Vectorized<A>::size()];
    x.store(lanes);
    for (int64_t half = Vectorized<A>::size() / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
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

// Bounds on the sum of squares within which it is exact enough and the largest entry is surely a normal number of T.
template <typename T>
struct Bounds {
  Acc<T> low, high;
  explicit Bounds(int64_t n) {
    using A = Acc<T>;
    const A tiny = static_cast<A>(std::numeric_limits<T>::min());
    low = std::max<A>(std::is_same_v<A, double> ? A(1e-280) : A(1e-30), static_cast<A>(n) * tiny * tiny);
    high = std::is_same_v<A, double> ? A(1e280) : A(1e30);
  }
  bool hold(Acc<T> squares) const { return squares >= low && squares <= high; }
};

template <typename T>
inline Direction<Acc<T>> direction(const T* v, Acc<T>* scratch, const Bounds<T>& bounds, int64_t n) {
  using A = Acc<T>;
  const A* row = widen<T>(v, scratch, n);
  const A squares = dot(row, row, n);
  if (bounds.hold(squares)) {
    const A inverse = A(1) / std::sqrt(squares);
    return {row, inverse, inverse};
  }
  A largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(row[i]));
  if (!(largest >= static_cast<A>(std::numeric_limits<T>::min()))) return {row, A(0), A(0)};
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

// A row of N vectors held in registers, for the common head sizes.
template <typename T, int N>
struct Held {
  using F = Vectorized<float>;
  F x[N];
  inline void load(const T* row) {
    if constexpr (std::is_same_v<T, float>) {
      for (int i = 0; i < N; ++i) x[i] = F::loadu(row + i * F::size());
    } else {
      for (int i = 0; i < N; i += 2) {
        std::tie(x[i], x[i + 1]) = at::vec::convert_to_float<T>(Vectorized<T>::loadu(row + i * F::size()));
      }
    }
  }
  inline void store(T* row) const {
    if constexpr (std::is_same_v<T, float>) {
      for (int i = 0; i < N; ++i) x[i].store(row + i * F::size());
    } else {
      for (int i = 0; i < N; i += 2) at::vec::convert_from_float<T>(x[i], x[i + 1]).store(row + i * F::size());
    }
  }
  inline float dot(const Held& other) const {
    F even = x[0] * other.x[0], odd = x[1] * other.x[1];
    for (int i = 2; i < N; i += 2) {
      even = at::vec::fmadd(x[i], other.x[i], even);
      odd = at::vec::fmadd(x[i + 1], other.x[i + 1], odd);
    }
    return sum_lanes<float>(even + odd);
  }
  // this + k u
  inline Held plus(float k, const Held& u) const {
    Held out;
    const F kv(k);
    for (int i = 0; i < N; ++i) out.x[i] = at::vec::fmadd(kv, u.x[i], x[i]);
    return out;
  }
};

struct Shape {
  int64_t B, T, heads, G, D;
  Shape(const Tensor& y, const Tensor& v)
      : B(y.size(0)), T(y.size(1)), heads(v.size(2)), G(y.size(2) / v.size(2)), D(y.size(3)) {}
};

// Calls row(b, t, hkv, index) for every token and value head, index counting them.
template <typename F>
void for_each_value_row(const Shape& shape, int64_t tensors, int64_t scratch_rows, const F& row) {
  const int64_t work = std::max<int64_t>(1, tensors * shape.G * shape.D);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / work);
  at::parallel_for(0, shape.B * shape.T * shape.heads, grain, [&](int64_t begin, int64_t end) {
    auto body = row(scratch_rows * shape.D);
    int64_t hv = begin % shape.heads, t = begin / shape.heads % shape.T, b = begin / (shape.heads * shape.T);
    for (int64_t i = begin; i < end; ++i) {
      body(b, t, hv, i);
      if (++hv < shape.heads) continue;
      hv = 0;
      if (++t < shape.T) continue;
      t = 0;
      ++b;
    }
  });
}

template <typename T>
struct Forward {
  using A = Acc<T>;
  Shape shape;
  const T *y, *v;
  T* z;
  A* c;
  Strides ys, vs, zs;
  StrengthView<A> strength;
  Bounds<T> bounds;

  Forward(const Tensor& y_, const Tensor& v_, Tensor& z_, Tensor& c_, double number, const std::optional<Tensor>& s)
      : shape(y_, v_), y(y_.const_data_ptr<T>()), v(v_.const_data_ptr<T>()), z(z_.mutable_data_ptr<T>()),
        c(c_.mutable_data_ptr<A>()), ys(y_), vs(v_), zs(z_), strength(number, s), bounds(shape.D) {}

  void row(int64_t b, int64_t t, int64_t hv, int64_t i, A* scratch) const {
    const int64_t D = shape.D;
    const auto dir = direction<T>(v + vs.at(b, t, hv), scratch, bounds, D);
    for (int64_t j = 0; j < shape.G; ++j) {
      const int64_t h = hv * shape.G + j;
      const A* from = widen<T>(y + ys.at(b, t, h), scratch + D, D);
      const A along = dot(from, dir.row, D) * dir.inverse;
      c[i * shape.G + j] = along;
      store_scaled<T>(z + zs.at(b, t, h), from, -strength.at(b, t, h) * along * dir.inverse, dir.row, D);
    }
  }

  // False where the norm needs the careful path.
  template <int N>
  bool held_row(int64_t b, int64_t t, int64_t hv, int64_t i) const {
    Held<T, N> u, from;
    u.load(v + vs.at(b, t, hv));
    const float squares = u.dot(u);
    if (!bounds.hold(squares)) return false;
    const float inverse = 1.0f / std::sqrt(squares);
    for (int64_t j = 0; j < shape.G; ++j) {
      const int64_t h = hv * shape.G + j;
      from.load(y + ys.at(b, t, h));
      const float along = from.dot(u) * inverse;
      c[i * shape.G + j] = along;
      from.plus(-strength.at(b, t, h) * along * inverse, u).store(z + zs.at(b, t, h));
    }
    return true;
  }
  static constexpr int64_t kTensors = 1, kScratchRows = 2;
};

template <typename T>
struct Backward {
  using A = Acc<T>;
  Shape shape;
  const T *g, *z, *v;
  const A* c;
  T *dy, *dv, *y;
  A* ds;
  Strides gs, zs, vs;
  StrengthView<A> strength;
  Bounds<T> bounds;

  Backward(const Tensor& g_, const Tensor& z_, const Tensor& v_, const Tensor& c_, double number,
           const std::optional<Tensor>& s, Tensor& dy_, Tensor& dv_, Tensor& ds_, Tensor& y_)
      : shape(g_, v_), g(g_.const_data_ptr<T>()), z(z_.const_data_ptr<T>()), v(v_.const_data_ptr<T>()),
        c(c_.const_data_ptr<A>()), dy(dy_.mutable_data_ptr<T>()), dv(dv_.mutable_data_ptr<T>()),
        y(y_.numel() ? y_.mutable_data_ptr<T>() : nullptr), ds(ds_.numel() ? ds_.mutable_data_ptr<A>() : nullptr),
        gs(g_), zs(z_), vs(v_), strength(number, s), bounds(shape.D) {}

  void row(int64_t b, int64_t t, int64_t hv, int64_t i, A* scratch) const {
    const int64_t D = shape.D;
    A* const sum = scratch + 3 * D;
    const auto dir = direction<T>(v + vs.at(b, t, hv), scratch, bounds, D);
    for (int64_t j = 0; j < shape.G; ++j) {
      const int64_t h = hv * shape.G + j, flat = i * shape.G + j;
      const A* grow = widen<T>(g + gs.at(b, t, h), scratch + D, D);
      const A* zrow = widen<T>(z + zs.at(b, t, h), scratch + 2 * D, D);
      const A a = dot(grow, dir.row, D) * dir.inverse;
      const A s = strength.at(b, t, h), k = -s * dir.true_inverse;
      store_scaled<T>(dy + flat * D, grow, -s * a * dir.inverse, dir.row, D);
      if (y) store_scaled<T>(y + flat * D, zrow, s * c[flat] * dir.inverse, dir.row, D);
      if (ds) ds[flat] = -c[flat] * a;
      const A along = k * (s - 2) * c[flat] * a * dir.inverse;
      combine<A>(sum, j == 0, k * a, zrow, k * c[flat], grow, along, dir.row, D);
    }
    narrow<T>(sum, dv + i * D, D);
  }

  template <int N>
  bool held_row(int64_t b, int64_t t, int64_t hv, int64_t i) const {
    using F = Vectorized<float>;
    constexpr int64_t D = N * F::size();
    Held<T, N> u, grow, zrow, sum;
    u.load(v + vs.at(b, t, hv));
    const float squares = u.dot(u);
    if (!bounds.hold(squares)) return false;
    const float inverse = 1.0f / std::sqrt(squares);
    for (int k = 0; k < N; ++k) sum.x[k] = F(0);
    for (int64_t j = 0; j < shape.G; ++j) {
      const int64_t h = hv * shape.G + j, flat = i * shape.G + j;
      grow.load(g + gs.at(b, t, h));
      zrow.load(z + zs.at(b, t, h));
      const float a = grow.dot(u) * inverse;
      const float s = strength.at(b, t, h), k = -s * inverse;
      grow.plus(k * a, u).store(dy + flat * D);
      if (y) zrow.plus(-k * c[flat], u).store(y + flat * D);
      if (ds) ds[flat] = -c[flat] * a;
      sum = sum.plus(k * a, zrow).plus(k * c[flat], grow).plus(k * (s - 2) * c[flat] * a * inverse, u);
    }
    sum.store(dv + i * D);
    return true;
  }
  static constexpr int64_t kTensors = 2, kScratchRows = 4;
};

template <int N, typename K>
void run_rows(const K& kernel) {
  using A = typename K::A;
  for_each_value_row(kernel.shape, K::kTensors, K::kScratchRows, [&](int64_t scratch_size) {
    return [&kernel, scratch = std::vector<A>(scratch_size)](int64_t b, int64_t t, int64_t hv, int64_t i) mutable {
      if constexpr (N > 0) {
        if (kernel.template held_row<N>(b, t, hv, i)) return;
      }
      kernel.row(b, t, hv, i, scratch.data());
    };
  });
}

// The common head sizes run in registers, others through rows in the first-level cache.
template <typename T, typename K>
void run(const K& kernel) {
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int W = static_cast<int>(Vectorized<float>::size());
    if (kernel.shape.D == 32) return run_rows<32 / W>(kernel);
    if (kernel.shape.D == 64) return run_rows<64 / W>(kernel);
    if (kernel.shape.D == 128) return run_rows<128 / W>(kernel);
  }
  run_rows<0>(kernel);
}

Tensor exclude_(Tensor& y, const Tensor& v, double factor, const std::optional<Tensor>& strength) {
  check(y, v, strength);
  Tensor c = at::empty({y.size(0), y.size(1), y.size(2)}, accumulation(y));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "xsa::exclude_", [&] {
    run<scalar_t>(Forward<scalar_t>(y, v, y, c, factor, strength));
  });
  return c;
}

std::tuple<Tensor, Tensor> exclude(const Tensor& y, const Tensor& v, double factor,
                                   const std::optional<Tensor>& strength) {
  check(y, v, strength);
  Tensor c = at::empty({y.size(0), y.size(1), y.size(2)}, accumulation(y));
  Tensor z = at::empty(y.sizes(), y.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "xsa::exclude", [&] {
    run<scalar_t>(Forward<scalar_t>(y, v, z, c, factor, strength));
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
    run<scalar_t>(Backward<scalar_t>(g, z, v, c, factor, strength, dy, dv, ds, y));
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
