// Exclusion on the CPU: forward and adjoint, each in one pass over its tensors.
//
//   B batch   T tokens   H query heads   Hkv value heads   G = H / Hkv   D head size
//
//   forward    c = y.vh, z = y - s c vh                               with vh = v/|v|
//   adjoint    a = g.vh, dy = g - s a vh, ds = -c a,
//              dv = -s [a (z + (s - 2) c vh) + c g] / |v| summed over the group, y = z + s c vh
//
// One unit of work is a token and a value head: its v row is read once for the G query heads that use it.
// Rows are dense in D and strided at will in B, T and H.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "rows.h"

namespace xsa {
namespace {

using at::Tensor;

// Elements a thread should get at least; below, waking it costs more than the work.
constexpr int64_t kGrainElements = 16384;

struct Strides {
  int64_t b, t, h;
  explicit Strides(const Tensor& x) : b(x.stride(0)), t(x.stride(1)), h(x.stride(2)) {}
  Strides() : b(0), t(0), h(0) {}
  int64_t at(int64_t ib, int64_t it, int64_t ih) const { return ib * b + it * t + ih * h; }
};

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
  const bool agree = y.dim() == 4 && v.dim() == 4 && y.size(0) == v.size(0) && y.size(1) == v.size(1);
  TORCH_CHECK(agree && y.size(3) == v.size(3),
              "expected y (B, T, H, D) and v (B, T, Hkv, D), got ", y.sizes(), " and ", v.sizes());
  TORCH_CHECK(v.size(2) > 0 && y.size(2) % v.size(2) == 0, "the value heads must divide the heads");
  TORCH_CHECK(y.scalar_type() == v.scalar_type(), "y and v must have one dtype");
  const bool dense = y.numel() == 0 || y.size(3) == 1 || (y.stride(3) == 1 && v.stride(3) == 1);
  TORCH_CHECK(dense, "rows must be dense in the last axis");
  const auto acc = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const bool typed = !strength.has_value() || strength->scalar_type() == acc;
  TORCH_CHECK(typed, "strength must be in the accumulation type");
}

at::TensorOptions accumulation(const Tensor& y) {
  return y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

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

  Forward(const Tensor& y_, const Tensor& v_, Tensor& z_, Tensor& c_, double number,
          const std::optional<Tensor>& s)
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
        y(y_.numel() ? y_.mutable_data_ptr<T>() : nullptr),
        ds(ds_.numel() ? ds_.mutable_data_ptr<A>() : nullptr),
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
      combine<A>(sum, j == 0, k * a, zrow, (s - 2) * c[flat] * dir.inverse, dir.row, k * c[flat], grow, D);
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
      const auto mirrored = zrow.plus((s - 2) * c[flat] * inverse, u);
      sum = sum.plus(k * a, mirrored).plus(k * c[flat], grow);
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
    std::vector<A> scratch(scratch_size);
    return [&kernel, scratch = std::move(scratch)](int64_t b, int64_t t, int64_t hv, int64_t i) mutable {
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

std::tuple<Tensor, Tensor, Tensor, Tensor> exclude_backward(
    const Tensor& g, const Tensor& z, const Tensor& v, const Tensor& c, double factor,
    const std::optional<Tensor>& strength, bool restore) {
  check(g, v, strength);
  check(z, v, strength);
  const bool scalars = c.is_contiguous() && c.numel() == g.size(0) * g.size(1) * g.size(2);
  TORCH_CHECK(scalars, "c must be a dense (B, T, H)");
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

// The schemas are declared in projection_ops.py, where the other implementations register too.
TORCH_LIBRARY_IMPL(xsa, CPU, m) {
  m.impl("exclude_", &exclude_);
  m.impl("exclude", &exclude);
  m.impl("exclude_backward", &exclude_backward);
}

}  // namespace xsa
