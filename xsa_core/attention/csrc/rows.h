// Arithmetic on rows of D elements: sums in float32 (float64 for float64), half types widened on the way in
// and rounded on the way out.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>

namespace xsa {

using at::vec::Vectorized;

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename A>
inline A sum_lanes(const Vectorized<A>& x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vectorized<float>;
    return at::vec::vec_reduce_all<float>([](F& a, F& b) { return a + b; }, x);
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

// acc (=|+=) p (z + r u) + q g. The nesting keeps every intermediate within the range of y, g and the sum.
template <typename A>
inline void combine(A* acc, bool first, A p, const A* z, A r, const A* u, A q, const A* g, int64_t n) {
  using V = Vectorized<A>;
  const V pv(p), qv(q), rv(r);
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    V sum = pv * at::vec::fmadd(rv, V::loadu(u + i), V::loadu(z + i));
    sum = at::vec::fmadd(qv, V::loadu(g + i), sum);
    if (!first) sum = sum + V::loadu(acc + i);
    sum.store(acc + i);
  }
  for (; i < n; ++i) acc[i] = (first ? A(0) : acc[i]) + (p * (z[i] + r * u[i]) + q * g[i]);
}

// The direction of a value row: vh = row * inverse, 1/|v| = true_inverse; both 0 for one that counts as zero.
template <typename A>
struct Direction {
  const A* row;
  A inverse;
  A true_inverse;
};

// Bounds on the sum of squares within which it is exact enough, the largest entry surely normal in T, and
// products with an undivided row safe: with 1e-6 <= |v| <= 1e6 neither y.v nor (y.v) / |v|^2 leaves the range
// of float32 for entries of y between 1e-30 and 1e30. Rows outside are scaled first.
template <typename T>
struct Bounds {
  Acc<T> low, high;
  explicit Bounds(int64_t n) {
    using A = Acc<T>;
    const A tiny = static_cast<A>(std::numeric_limits<T>::min());
    low = std::max<A>(std::is_same_v<A, double> ? A(1e-200) : A(1e-12), static_cast<A>(n) * tiny * tiny);
    high = std::is_same_v<A, double> ? A(1e200) : A(1e12);
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
  if (std::isnan(squares)) return {row, squares, squares};  // stays visible; max() below would lose it
  A largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(row[i]));
  if (!(largest >= static_cast<A>(std::numeric_limits<T>::min()))) return {row, A(0), A(0)};
  for (int64_t i = 0; i < n; ++i) scratch[i] = row[i] / largest;
  const A inverse = A(1) / std::sqrt(dot<A>(scratch, scratch, n));
  return {scratch, inverse, inverse / largest};
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
      for (int i = 0; i < N; i += 2) {
        at::vec::convert_from_float<T>(x[i], x[i + 1]).store(row + i * F::size());
      }
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

}  // namespace xsa
